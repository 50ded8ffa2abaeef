"""No pickle is read or written, nothing that is read is run, and what is read is bounded.

Pickles that leave a marker are put in the place of every file that a command reads. What test_format.py and
megatron/test_megatron.py hold of single files is not repeated here.
"""

import json
import pickle
import shutil
import string
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from mlm.checkpoint.native.folders import latest_checkpoint
from mlm.checkpoint.native.format import MANIFEST, decode_manifest, read_manifest
from mlm.cli import main
from mlm.corpus.train_tokenizer import train_bpe
from mlm.data.epochs import load_checked
from mlm.data.indexed import IndexedDataset
from mlm.data.receipt import read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.tracking.history import read_records
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import LOCK, single_writer
from tests.data.corpora import write_corpus
from tests.hostile.files import CASES, DIGEST, manifest_of, payloads, read_shard, signed
from tests.slow import thinned

SHARD = "rank-00000.safetensors"
PAYLOADS = sorted(payloads(Path("marker")))
TINY = """
    model=gpt2_tiny model.num_layers=1 model.hidden_size=16 model.num_heads=2 model.max_positions=8
    model.vocab_size=300 train.steps=2 train.global_batch_size=2 train.micro_batch_size=2
    train.validate_every=0 checkpoint.save_every=1 schedule=constant optimizer.lr=1e-3
""".split()  # noqa: SIM905


class TestBombs:
    """The payloads are what they claim to be: loaded carelessly, each leaves its marker."""

    @pytest.mark.parametrize("name", PAYLOADS)
    def test_payload_goes_off_where_pickle_is_loaded(self, tmp_path: Path, name: str) -> None:
        path, marker = tmp_path / "file", tmp_path / "marker"
        path.write_bytes(payloads(marker)[name])
        if name.startswith("torch"):
            torch.load(path, weights_only=False)
        elif name.startswith("numpy"):
            np.load(path, allow_pickle=True)
        else:
            pickle.loads(path.read_bytes())
        assert marker.is_dir()


READERS: dict[str, tuple[str, Callable[[Path], object], bool]] = {
    "manifest": ("step-00000001/manifest.json", lambda p: read_manifest(p.parent), True),
    "shard": ("step-00000001/rank-00000.safetensors", read_shard, True),
    "latest": ("latest", lambda p: latest_checkpoint(p.parent), False),
    "index": ("c.idx", lambda p: IndexedDataset(p.with_suffix("")), True),
    "tokens": ("c.bin", lambda p: IndexedDataset(p.with_suffix("")), True),
    "cached order": ("gpt.npy", load_checked, False),
    "receipt": ("corpus.json", lambda p: read_receipt(p.parent), True),
    "tokenizer": ("tokenizer.json", Tokenizer.load, True),
    "vocabulary": ("gpt2/vocab.json", lambda p: Tokenizer.load(p.parent), True),
    "merges": ("gpt2/merges.txt", lambda p: Tokenizer.load(p.parent), True),
    "metrics": ("metrics.jsonl", lambda p: list(read_records(p)), False),
    "lock": (f"locked/{LOCK}", lambda p: single_writer(p.parent).__enter__(), False),
}
"""Name → file, what reads it, whether it must be refused: else it is rebuilt, passed over or rewritten."""


@pytest.mark.parametrize("place", READERS)
def test_reader_runs_no_payload(tmp_path: Path, place: str) -> None:
    """Every payload in the place of every file; what must not be passed over is rejected in one line."""
    name, read, refused = READERS[place]
    marker, path = tmp_path / "marker", tmp_path / "files" / name
    path.parent.mkdir(parents=True)
    write_corpus(path.parent / "c", [[1, 2, 3]])
    (path.parent / "vocab.json").write_text('{"a": 0, "</s>": 1}')
    (path.parent / "merges.txt").write_text("")
    for payload, content in payloads(marker).items():
        path.write_bytes(content)
        with pytest.raises(UserError) if refused else nullcontext() as caught:
            read(path)
        assert not caught or len(str(caught.value).splitlines()) == 1
        assert not marker.exists(), f"{payload} was run"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A corpus, a tokenizer and a finished run, all small."""
    root = tmp_path_factory.mktemp("hostile")
    (root / "corpus").mkdir()
    write_corpus(root / "corpus" / "train", [list(range(60))] * 5)
    tokenizer = train_bpe(["one two three"] * 9, 300)
    tokenizer.save(root / "corpus")
    receipt = {"vocab_size": 300, "files": {"train.bin": {"bytes": 600}}, "splits": {}}
    (root / "corpus" / "corpus.json").write_text(json.dumps(receipt))
    assert main(["pretrain", *TINY, f"data.path={root / 'corpus'}", f"out={root / 'run'}"]) == 0
    return root


@pytest.fixture
def mine(folder: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(folder, tmp_path / "mine")


STEP = "run/checkpoints/step-00000002"
EVAL = f"eval loss ckpt=@/{STEP} path=@/corpus/train"
GENERATE = f"generate ckpt=@/{STEP} prompt=one max_new_tokens=1"
RESUME = "pretrain resume=@/run data.path=@/corpus train.steps=3"
COMMANDS = {
    "eval of a manifest": (f"{STEP}/manifest.json", EVAL, 1),
    "eval of a shard": (f"{STEP}/{SHARD}", EVAL, 1),
    "resuming by latest": ("run/checkpoints/latest", RESUME, 0),
    "resuming from a manifest": (f"{STEP}/manifest.json", RESUME, 0),
    "resuming from a shard": (f"{STEP}/{SHARD}", RESUME, 0),
    "resuming with metrics": ("run/metrics.jsonl", RESUME, 0),
    "resuming with a config": ("run/config.yaml", RESUME, 2),
    "training on tokens": ("corpus/train.bin", RESUME, 1),
    "training on an index": ("corpus/train.idx", RESUME, 1),
    "training by a receipt": ("corpus/corpus.json", RESUME, 2),
    "training with a tokenizer": ("corpus/tokenizer.json", RESUME, 2),
    "generating with a tokenizer": ("run/tokenizer.json", GENERATE, 1),
    "inspecting a manifest": (f"{STEP}/manifest.json", f"ckpt inspect @/{STEP}", 1),
    "verifying a shard": (f"{STEP}/{SHARD}", f"ckpt verify @/{STEP}", 1),
    "resharding a shard": (f"{STEP}/{SHARD}", f"reshard ckpt=@/{STEP} out=@/other", 1),
    "exporting a shard": (f"{STEP}/{SHARD}", f"export hf ckpt=@/{STEP} out=@/other verify=false", 1),
}
"""Name → file, command (@ is the folder), exit code: 0 where the run continues without the file."""


@pytest.mark.parametrize("case", thinned(COMMANDS, 4))
def test_command_runs_no_payload(mine: Path, capfd: pytest.CaptureFixture[str], case: str) -> None:
    name, command, code = COMMANDS[case]
    marker = mine / "marker"
    (mine / name).write_bytes(payloads(marker)["torch zip"])
    found = main(command.replace("@", str(mine)).split())
    err = capfd.readouterr().err
    assert found == code, err
    assert not marker.exists()
    assert "Traceback" not in err
    if code:
        assert Path(name).name.removesuffix(".bin").removesuffix(".idx") in err


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors"])
def test_huggingface_folder_of_pickles_is_rejected(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    marker, source = tmp_path / "marker", tmp_path / "theirs"
    source.mkdir()
    sizes = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 99}
    config = {"model_type": "gpt2", **sizes}
    (source / "config.json").write_text(json.dumps(config))
    (source / name).write_bytes(payloads(marker)["torch zip"])
    assert main(["import", "hf", f"source={source}", f"out={tmp_path / 'ours'}", "verify=false"]) in (1, 2)
    err = capfd.readouterr().err
    assert name in err
    assert "Traceback" not in err
    assert not marker.exists()
    if name == "pytorch_model.bin":
        assert "safetensors" in err  # the remedy


class TestPaths:
    """A manifest names plain files in its own directory only."""

    @given(st.text(string.printable + "\0é‥／", max_size=12).map(lambda name: f"{name}.safetensors"))
    @example("../a.safetensors")
    @example("/a.safetensors")
    @example(".a.safetensors")
    @example("a.safetensors\n")
    @example("a" * 300 + ".safetensors")
    @example("-a.safetensors")
    def test_name_that_is_read_stays_inside(self, name: str) -> None:
        body = manifest_of([0], [], []) | {"files": {name: {"bytes": 0, "digest": DIGEST, "blocks": []}}}
        try:
            manifest = decode_manifest(signed(body), Path("manifest.json"))
        except CorruptFileError:
            return
        (found,) = manifest.files
        place = Path("/root/step") / found
        assert place.resolve() == place
        assert place.parent == Path("/root/step")
        assert not found.startswith((".", "-"))
        assert found not in (MANIFEST, "latest")
        assert found.isascii()
        assert found.isprintable()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Results of the selected files made to fill memory or time, each read under limits."""
    params = [getattr(item, "callspec", None) for item in request.session.items]
    selected = [case for each in params if each and (case := each.params.get("case")) in CASES]
    command = [sys.executable, "-m", "tests.hostile.files", str(tmp_path_factory.mktemp("bounds"))]
    done = subprocess.run([*command, *selected], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


HARMLESS = {
    "chunks that tile in columns",
    "pipe named latest",
    "cached order of an enormous shape",
    "cached order with a header of brackets",
    "metrics of brackets",
}
"""Read, rebuilt or passed over."""


@pytest.mark.parametrize("case", thinned(CASES, 4))
def test_size_of_what_is_read_is_bounded(outcomes: dict[str, str], case: str) -> None:
    """Within 1 GiB and 20 s of processor, rejected in one line."""
    assert outcomes[case].startswith("read" if case in HARMLESS else "refused: "), outcomes[case]
