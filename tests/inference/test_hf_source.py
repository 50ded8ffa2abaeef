"""`ckpt=` as a model of `transformers`: the same logits, read where it lies, and nothing written there."""

import json
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.format import canonical
from mlm.cli.entry import main
from mlm.convert.huggingface.folder import read_model
from mlm.convert.source import open_source
from mlm.data.files_present import hub_id
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import digest_bytes, digest_file
from mlm.verify.huggingface import our_outputs, reference_outputs
from tests.checkpoints_on_disk import write_run
from tests.convert.hf_models import MODEL, add_tokenizer, hub_cache, make_model
from tests.data.corpora import write_corpus
from tests.ranks import run_on_ranks


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_model(tmp_path / "model")
    add_tokenizer(tmp_path / "model")
    return tmp_path / "model"


def logits(ctx: ParallelContext, folder: Path) -> Tensor:
    return our_outputs(folder, ctx).get("logits", torch.empty(0))


def test_logits_of_ranks_equal_those_of_transformers(folder: Path) -> None:
    want = reference_outputs(read_model(folder))["logits"]
    got = run_on_ranks(logits, folder, tp=4)[-1]
    assert (got - want).abs().max() <= 1e-5 * want.abs().max()


def digest(ctx: ParallelContext, folder: Path) -> str:
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    return load_trained(open_source(str(folder)), layout, PrecisionConfig(), ctx).manifest.digest


def test_every_rank_has_the_digest_of_the_files(folder: Path) -> None:
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json")
    want = digest_bytes(canonical({name: digest_file(folder / name) for name in names}))
    assert run_on_ranks(digest, folder, tp=2) == [want, want]


def test_padding_rows_are_zero(folder: Path) -> None:
    """The vocabulary's padding must not hold what the memory held before."""
    trained = load_trained(open_source(str(folder)), ParallelConfig(), PrecisionConfig(), shape_context())
    assert not trained.model.chunks[0].token.weight[MODEL.vocab_size :].any()


def test_a_run_directory_with_a_config_json_is_still_ours(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    (run / "config.json").write_text("{}")
    with pytest.raises(CorruptFileError, match=r"step-00000003: .* the 24 stored"):  # ours, of two tensors
        open_source(str(run))


def test_the_tokenizer_is_the_models(folder: Path) -> None:
    assert open_source(str(folder)).load_tokenizer().digest == digest_file(folder / "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    with pytest.raises(UserError, match=r"tokenizer=null: .*give tokenizer="):
        open_source(str(folder)).load_tokenizer()


def test_eval_loss_scores_it_and_writes_nothing_beside_it(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = torch.randint(331, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    write_corpus(tmp_path / "test", [tokens])
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    before = sorted(path.name for path in folder.iterdir())
    words = [f"ckpt={folder}", f"path={tmp_path / 'test'}", "seq_length=48", "dist.threads_per_rank=1"]
    assert main(["eval", "loss", *words]) == 0
    said = json.loads((tmp_path / "work/model-eval-loss-test.json").read_text())
    assert said["checkpoint_digest"] == digest(shape_context(), folder)
    assert (said["tokens"], said["step"]) == (199, 0)
    assert sorted(path.name for path in folder.iterdir()) == before


@pytest.mark.parametrize(
    ("typed", "found"),
    [
        ("openai-community/gpt2", "openai-community/gpt2"),
        ("hub:gpt2", "gpt2"),
        ("hub:there/gpt2", "there/gpt2"),
        ("runs/shakespear", None),
        ("there/gpt2", None),  # the folder is there: a misspelled path below it
        ("../gpt2", None),
        ("hub:../gpt2", None),
    ],
)
def test_an_id_of_the_hub_is_distinguished_from_a_misspelled_path(
    typed: str, found: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("there").mkdir()
    assert hub_id(typed) == found


def test_a_model_of_the_hub_is_read_from_its_cache(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot, asked = hub_cache(folder), []

    def download(repository: str, **_: Any) -> str:
        asked.append(repository)
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    trained = load_trained(open_source("someone/tiny"), ParallelConfig(), PrecisionConfig(), shape_context())
    assert (set(asked), trained.path, trained.config.name) == ({"someone/tiny"}, snapshot, "tiny")
    assert trained.manifest.state["source"]["revision"] == snapshot.name
    assert trained.source.result_file("score.json") == Path("tiny-score.json")
