"""Hostile manifests, settings and model folders, in process: each ends in a line, none in anything else.

For every mutation of table.py: an exception of the UserError family, without control characters; less
than 1 GiB of address space taken; nothing run, and nothing written.
"""

import json
import resource
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
import torch

from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.shard_file import write_shard_file
from mlm.checkpoint.parameters import parameters
from mlm.cli.ckpt import inspect as ckpt_inspect
from mlm.cli.ckpt import verify as ckpt_verify
from mlm.cli.ckpt.settings import CkptInspectConfig, CkptVerifyConfig
from mlm.config.build import to_dict
from mlm.convert.huggingface.gpt2 import locations
from mlm.convert.locations import foreign_tensors
from mlm.data.config import DataConfig
from mlm.inference.trained import load_trained, open_for_layout
from mlm.models.config import ModelConfig
from mlm.optim.adamw import MOMENTS
from mlm.optim.config import PrecisionConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError, UserError, escape_controls
from tests.checkpoint.native.helpers import edit_manifest, save
from tests.hostile.table import COUNTERS, FOLDERS, MANIFESTS, SETTINGS
from tests.slow import thinned

MODEL = ModelConfig(
    num_layers=1,
    hidden_size=16,
    num_heads=2,
    max_positions=8,
    vocab_size=61,
    hidden_dropout=0,
    attention_dropout=0,
)
RUN = PretrainConfig(
    name="r",
    out="r",
    model=MODEL,
    data=DataConfig(kind="synthetic", seq_length=8),
    schedule=ScheduleConfig(warmup_steps=0),
)
ROOM = 1 << 30
RUNS_CODE = (
    "os.system",
    "os.exec",
    "os.posix_spawn",
    "subprocess.Popen",
    "pickle.find_class",
    "socket.connect",
)
watched: list[str] | None = None


def audit(event: str, arguments: tuple[object, ...]) -> None:
    """Note what runs code, and files opened for writing, while a case is watched."""
    if watched is None:
        return
    if event in RUNS_CODE:
        watched.append(f"{event} {arguments[:1]}")
    elif event == "open" and isinstance(arguments[1], str) and set(arguments[1]) & set("wax+"):
        watched.append(f"wrote {arguments[0]!r}")


sys.addaudithook(audit)


@contextmanager
def guarded() -> Iterator[list[str]]:
    """Within, at most ROOM more of address space; yields what runs code or writes."""
    global watched
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    watched = []
    resource.setrlimit(resource.RLIMIT_AS, (used + ROOM, hard))
    try:
        yield watched
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        watched = None


def check(read: Callable[[], object], capfd: pytest.CaptureFixture[str]) -> str:
    """The message of what a reader raises, after all that must hold did."""
    started = time.process_time()
    with guarded() as happened, pytest.raises(UserError) as caught:
        read()
    told = capfd.readouterr()
    assert happened == []
    assert not {c for c in told.out + told.err if c < " " or c == "\x7f"} - {"\n"}
    lines = caught.value.lines()
    assert lines
    assert all(line and line == escape_controls(line) for line in lines)
    assert not any("Traceback" in line for line in lines)
    assert max(map(len, lines)) < 2000
    assert time.process_time() - started < 5
    return str(caught.value)


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of step 2, as training writes it."""
    shapes = parameters(MODEL)
    tensors = {f"model.{name}": torch.full(each.shape, 0.01) for name, each in shapes.items()}
    for moment in MOMENTS:
        tensors |= {f"optimizer.{moment}.{name}": torch.zeros(each.shape) for name, each in shapes.items()}
    state = {
        "step": 2,
        "consumed_samples": 4,
        "applied_steps": 2.0,
        "scaler": {"scale": 1.0, "clean_steps": 0, "skipped": 0},
        "config": to_dict(RUN),
    }
    return save(tmp_path_factory.mktemp("sound"), 2, tensors, state=state)


@pytest.fixture
def mine(sound: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(sound, tmp_path / sound.name)


@pytest.fixture(scope="module")
def trainer() -> Trainer:
    """The run that resumes."""
    return Trainer(RUN, shape_context())


def build(path: Path) -> object:
    """The first steps of eval, generate and export."""
    source = open_for_layout(str(path), ParallelConfig())
    return load_trained(source, ParallelConfig(), PrecisionConfig(), shape_context())


def test_the_sound_ones_are_read(sound: Path, trainer: Trainer, folder: Path) -> None:
    """The unmutated checkpoint is sound, so the mutations cause the errors."""
    ckpt_inspect.run(CkptInspectConfig(ckpt=str(sound)))
    ckpt_verify.run(CkptVerifyConfig(ckpt=str(sound)))
    build(sound)
    load(trainer, sound)
    assert (trainer.step, trainer.consumed_samples) == (2, 4)
    open_for_layout(str(folder), ParallelConfig())


@pytest.mark.parametrize("case", thinned(MANIFESTS, 4))
def test_a_manifest_that_was_signed_again_is_no_manifest(
    mine: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    """By every command that reads one."""
    edit_manifest(mine, MANIFESTS[case])
    check(lambda: read_manifest(mine), capfd)
    check(lambda: ckpt_inspect.run(CkptInspectConfig(ckpt=str(mine))), capfd)
    check(lambda: ckpt_verify.run(CkptVerifyConfig(ckpt=str(mine))), capfd)
    check(lambda: build(mine), capfd)


@pytest.mark.parametrize("case", thinned(SETTINGS, 4))
def test_no_model_is_built_of_settings_that_are_not_of_the_tensors(
    mine: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    edit_manifest(mine, SETTINGS[case])
    check(lambda: build(mine), capfd)
    with guarded() as happened, suppress(CorruptFileError):  # it shows what the manifest says, if that agrees
        ckpt_inspect.run(CkptInspectConfig(ckpt=str(mine), tensors=True))
    assert happened == []
    assert "\x1b" not in capfd.readouterr().out


@pytest.mark.parametrize("case", thinned(COUNTERS, 3))
def test_no_run_resumes_with_counters_of_no_run(
    mine: Path, trainer: Trainer, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    edit_manifest(mine, COUNTERS[case])
    check(lambda: load(trainer, mine), capfd)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A GPT-2 as transformers saves it."""
    place = tmp_path_factory.mktemp("theirs") / "gpt2"
    place.mkdir()
    stored = foreign_tensors(locations(MODEL), parameters(MODEL))
    tensors = {name: torch.full(tensor.shape, 0.01) for name, tensor in stored.items()}
    write_shard_file(place / "model.safetensors", tensors, "x")
    settings = {"n_layer": 1, "n_head": 2, "n_embd": 16, "n_positions": 8, "vocab_size": 61}
    (place / "config.json").write_text(json.dumps({"model_type": "gpt2"} | settings))
    return place


@pytest.fixture
def folder(theirs: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return shutil.copytree(theirs, tmp_path / "gpt2")


@pytest.mark.parametrize("case", FOLDERS)
def test_a_model_folder_that_is_none_is_an_error(
    folder: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    FOLDERS[case](folder)
    before = sorted(path.name for path in folder.iterdir())
    check(lambda: build(folder), capfd)
    assert sorted(path.name for path in folder.iterdir()) == before
