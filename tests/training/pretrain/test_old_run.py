"""A run that an older version wrote: it loads, resumes and reshards, and stays the run that it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.folders import latest_checkpoint
from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.verify import verify_checkpoint
from mlm.config.cli import main
from mlm.util.atomic import digest_bytes
from mlm.util.ownership import MARKER

OLD = Path(__file__).parent / "old_run"
STEP = "run/checkpoints/step-00000004"
AGAIN = ["pretrain", "--config-dir", "run", "--config-name", "config", "dist.peak_tflops=1"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run and its corpus, in the working folder."""
    shutil.copytree(OLD, tmp_path / "old")
    for name, kind in (("run", "run"), ("corpus", "corpus")):
        (tmp_path / "old" / name / MARKER).write_text(f'{{"format": "mlm-folder-1", "kind": "{kind}"}}')
    monkeypatch.chdir(tmp_path / "old")
    return tmp_path / "old"


def state_of(path: str | Path) -> Any:
    return read_manifest(Path(path)).state


def other_tokenizer(folder: Path) -> Path:
    """A copy of the corpus, by its receipt and tokenizer.json written with two words exchanged."""
    other = folder / "other"
    shutil.copytree(folder / "corpus", other)
    swap_two_words(other / "tokenizer.json")
    receipt = json.loads((other / "corpus.json").read_bytes())
    receipt["tokenizer"] = digest_bytes((other / "tokenizer.json").read_bytes())
    (other / "corpus.json").write_text(json.dumps(receipt))
    return other


def swap_two_words(tokenizer: Path) -> None:
    said = json.loads(tokenizer.read_bytes())
    vocab = said["model"]["vocab"]
    vocab["a"], vocab["e"] = vocab["e"], vocab["a"]
    tokenizer.write_text(json.dumps(said, ensure_ascii=False))


def test_an_old_checkpoint_is_whole(folder: Path) -> None:
    assert latest_checkpoint(folder / "run/checkpoints") == folder / STEP
    assert verify_checkpoint(folder / STEP).whole


def test_an_old_run_is_resumed_and_its_next_checkpoint_names_the_old_one(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*AGAIN, "train.steps=6", "optimizer.lr=5e-4"]) == 0
    said = capsys.readouterr().out
    assert "optimizer.lr 0.001 → 0.0005" in said
    assert "for a new run instead, set another out=" in said
    old, new = read_manifest(OLD / STEP), state_of("run/checkpoints/step-00000006")
    assert new["lineage"]["ancestors"][-1] == [4, old.save_id]
    changed = {change["key"]: change for change in new["lineage"]["changes"]}
    assert changed["optimizer.lr"] == {"step": 4, "key": "optimizer.lr", "from": 0.001, "to": 0.0005}
    assert new["tokenizer"]["digest"] == digest_bytes((folder / "run/tokenizer.json").read_bytes())


def test_an_old_checkpoint_is_resharded(folder: Path) -> None:
    assert main(["reshard", "--tp", "2", "run", "out=two"]) == 0
    assert verify_checkpoint(folder / "two/checkpoints/step-00000004").whole


@pytest.mark.parametrize(
    "typed", ["model.num_heads=4", "model.layer_norm_eps=1e-3", "model.activation=gelu", "seed=3"]
)
def test_another_function_or_order_is_an_error_that_leaves_the_run_as_it_was(
    folder: Path, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (folder / "run/config.yaml").read_bytes()
    assert main([*AGAIN, "train.steps=6", typed]) == 2
    said = capsys.readouterr().err
    assert f"{typed.split('=')[0]}=" in said
    assert "was trained with" in said
    assert (folder / "run/config.yaml").read_bytes() == before


def test_a_command_with_nothing_left_to_do_leaves_the_run_as_it_was(folder: Path) -> None:
    before = (folder / "run/config.yaml").read_bytes()
    assert main([*AGAIN, "optimizer.lr=5e-4"]) == 0
    assert (folder / "run/config.yaml").read_bytes() == before


def test_a_corpus_of_another_tokenizer_is_an_error(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    other = other_tokenizer(folder)
    before = (folder / "run/tokenizer.json").read_bytes()
    assert main([*AGAIN, "train.steps=6", f"data.path={other}"]) == 2
    assert "data.tokenizer=" in capsys.readouterr().err
    assert (folder / "run/tokenizer.json").read_bytes() == before


def test_a_loss_over_a_corpus_of_another_tokenizer_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["eval", "loss", "ckpt=run", f"path={other_tokenizer(folder) / 'train'}"]) == 2
    assert "was written with the tokenizer" in capsys.readouterr().err
    assert main(["eval", "loss", "ckpt=run", "path=corpus/train"]) == 0


def test_a_tokenizer_of_another_vocabulary_is_an_error(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["generate", "ckpt=run", "prompt=the", "max_new_tokens=1"]
    assert main([*words, f"tokenizer={other_tokenizer(folder)}"]) == 2
    assert "remove tokenizer=" in capsys.readouterr().err
    assert main([*words, "tokenizer=corpus"]) == 0


def test_tokens_that_are_not_those_of_the_receipt_are_damage(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = folder / "corpus/train.bin"
    tokens.write_bytes(bytes(len(tokens.read_bytes())))
    assert main([*AGAIN, "train.steps=6"]) == 1
    assert "train.bin: altered since it was written" in capsys.readouterr().err


def test_another_corpus_needs_data_change_and_is_recorded(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "text").mkdir()
    lines = [json.dumps({"text": f"brown dog {i}"}) for i in range(60)]
    (folder / "text/train.jsonl").write_text("\n".join(lines))
    built = ["input=text", "tokenizer=corpus/tokenizer.json", "out=more", "recipe=plain"]
    assert main(["data", "build", *built]) == 0
    words = [*AGAIN, "train.steps=6", "data.path=more"]
    capsys.readouterr()
    assert main(words) == 2
    assert "set data.change=true" in capsys.readouterr().err
    assert main([*words, "data.change=true"]) == 0
    assert len(state_of("run/checkpoints/step-00000006")["data"]["segments"]) == 2
    assert "change: true" not in (folder / "run/config.yaml").read_text()


def test_a_changed_word_in_the_tokenizer_is_found_wherever_it_is_read(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*AGAIN, "train.steps=5"]) == 0
    swap_two_words(folder / "run/tokenizer.json")
    for words in (
        ["generate", "ckpt=run", "prompt=the"],
        ["export", "hf", "run", "out=exported", "verify=false"],
        ["ckpt", "verify", "run"],
        ["reshard", "--tp", "2", "run", "out=two"],
    ):
        capsys.readouterr()
        assert main(words) == 1, words
        assert "damaged or replaced" in capsys.readouterr().err
    assert not (folder / "exported").exists()
