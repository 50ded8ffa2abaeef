"""`mlm reshard`: a checkpoint split for another layout; rejected, interrupted and killed."""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.checkpoint.native.format import Manifest, read_manifest
from mlm.cli import main
from mlm.cli.convert.reshard import preflight, run
from mlm.cli.convert.settings import ReshardConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError, UserError
from tests.checkpoint.native.helpers import edit_manifest
from tests.checkpoint.native.kill_saves import kill_at_operation
from tests.checkpoints_on_disk import flip
from tests.ranks import run_on_ranks
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process, one step in, with a tokenizer."""
    out = tmp_path_factory.mktemp("source")
    trained(shape_context(), out, spec())
    (out / "tokenizer.json").write_text('{"of": "the run"}')
    return out


class TestBytes:
    """The output is a function of the saved state and the target layout alone."""

    def test_are_the_same_by_way_of_another_layout(self, tmp_path: Path, source: Path) -> None:
        straight = to(source, tmp_path / "straight", 4, 2)
        between = to(to(source, tmp_path / "a", 2), tmp_path / "b", 2, 2)
        assert content(to(between, tmp_path / "way", 4, 2)) == content(straight)

    def test_of_weights_alone_are_the_same_wherever_the_moments_went(
        self, tmp_path: Path, source: Path
    ) -> None:
        straight = content(to(source, tmp_path / "straight", 4, weights_only=True))
        first = to(source, tmp_path / "a", 2, weights_only=True)
        last = to(source, tmp_path / "b", 2)
        assert content(to(first, tmp_path / "c", 4)) == straight
        assert content(to(last, tmp_path / "d", 4, weights_only=True)) == straight


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({}, {"tp": 2, "pp": 2}),
        slow({"num_layers": 6}, {"pp": 2, "vp": 3}),
        slow({"vocab_multiple": 128}, {"tp": 4}),  # three ranks hold padding alone
    ],
    ids=str,
)
def test_files_are_those_a_training_save_at_the_layout_writes(
    tmp_path: Path, model: dict[str, int], layout: dict[str, int]
) -> None:
    """The same files, tensors, pieces and bytes."""
    trained(shape_context(), tmp_path / "one", spec(**model))
    sizes = {key: n for key, n in layout.items() if key != "vp"}
    run_on_ranks(load_and_save, tmp_path / "one", tmp_path / "saved", spec(**model, **layout), **sizes)
    saved, ours = tmp_path / "saved" / "checkpoints" / STEP, to(tmp_path / "one", tmp_path / "ours", **layout)
    assert pieces(read_manifest(ours)) == pieces(read_manifest(saved))
    assert equal(stored(ours), stored(saved))
    for name, entry in read_manifest(saved).tensors.items():  # sums of other parts, so equal to rounding
        assert read_manifest(ours).tensors[name].norm == pytest.approx(entry.norm, rel=1e-6)


def load_and_save(ctx: ParallelContext, old: Path, new: Path, spec: PretrainConfig) -> None:
    trainer = Trainer(spec, ctx)
    load(trainer, old / "checkpoints" / STEP)
    save(trainer, new)


def pieces(manifest: Manifest) -> dict[str, object]:
    plain = {"dtype": None, "norm": None, "norm_before": None}
    return {name: asdict(replace(entry, **plain)) for name, entry in manifest.tensors.items()}  # type: ignore[arg-type]


class TestState:
    """Metadata of a resharded checkpoint."""

    def test_is_the_source_s_with_its_origin_and_layout(self, tmp_path: Path, source: Path) -> None:
        before = read_manifest(source / "checkpoints" / STEP)
        after = read_manifest(to(to(source, tmp_path / "a", 2), tmp_path / "b", 4, 5))
        origin = {"origin": before.save_id, "layout": {"tp": 4, "pp": 5, "vp": 1}}
        assert after.state == {**before.state, "reshard": origin}
        assert (tmp_path / "b/tokenizer.json").read_text() == '{"of": "the run"}'


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_leaves_no_unfinished_folder(
    number: signal.Signals,
    source: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Twice: the second comes while the folder is deleted."""

    def interrupted(*_: object) -> None:
        try:
            signal.raise_signal(number)
        finally:
            signal.raise_signal(number)

    monkeypatch.setattr("mlm.cli.convert.reshard.write_checkpoint", interrupted)
    before = signal.signal(number, signal.SIG_DFL)  # nohup ignores a hang-up
    try:
        with pytest.raises(SystemExit) as stopped:
            main(["reshard", str(source), f"out={tmp_path / 'out'}", "tp=2"])
    finally:
        signal.signal(number, before)
    assert stopped.value.code == 128 + number
    assert capfd.readouterr().err == f"mlm: {number.name}: stopped\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_memory_is_bounded_by_the_largest_tensor(tmp_path: Path) -> None:
    """120 MB in tensors of 4 MB: the peak grows by less than the largest tensor and 64 MB."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.convert.reshard_memory", str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["total"] > 115e6
    assert told["growth"] < told["largest"] + 64e6


LAYERS = 5  # uneven over two and three stages
STEP = "step-00000001"


def spec(vocab_multiple: int = 4, num_layers: int = LAYERS, **parallel: object) -> PretrainConfig:
    """61 tokens in rows of multiples: tp=4 holds 16, 16, 16 and 13 of them."""
    base = config(dtype="fp32")
    model = replace(base.model, num_layers=num_layers, vocab_multiple=vocab_multiple)
    return replace(base, model=model, parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]


def trained(ctx: ParallelContext, out: Path, spec: PretrainConfig) -> None:
    trainer = Trainer(spec, ctx)
    steps_of(trainer, 1)
    save(trainer, out)


def to(source: Path, out: Path, tp: int = 1, pp: int = 1, vp: int = 1, *, weights_only: bool = False) -> Path:
    """Reshard through the same checks as the command; the step-… directory."""
    asked = ReshardConfig(ckpt=str(source), out=str(out), tp=tp, pp=pp, vp=vp, weights_only=weights_only)
    if problems := preflight(asked):
        raise UserError("\n".join(problems))
    run(asked)
    return out / "checkpoints" / STEP


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def stored(directory: Path) -> dict[str, dict[str, Tensor]]:
    """By the safetensors library: file -> tensor name -> what is in it."""
    return {path.name: load_file(path) for path in directory.glob("*.safetensors")}


def equal(a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return {f: set(t) for f, t in a.items()} == {f: set(t) for f, t in b.items()} and all(
        torch.equal(x, b[file][name]) for file, tensors in a.items() for name, x in tensors.items()
    )


class TestRefusals:
    """One line, and nothing published."""

    @pytest.mark.parametrize("place", [9, -5], ids=["header", "tensor"])
    def test_flipped_byte_in_the_source(self, tmp_path: Path, place: int) -> None:
        trained(shape_context(), tmp_path / "run", spec())
        flip(tmp_path / "run" / "checkpoints" / STEP / "rank-00000.safetensors", place)
        with pytest.raises(CorruptFileError, match="damaged"):
            to(tmp_path / "run", tmp_path / "out", 2)
        assert not [path for path in (tmp_path / "out").rglob("*") if "step-" in path.name]

    def test_layout_that_the_model_cannot_have(self, tmp_path: Path, source: Path) -> None:
        with pytest.raises(UserError, match=r"tp=3 does not divide the checkpoint's num_heads=4; use tp=2"):
            to(source, tmp_path, 3)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda body: body["tensors"]["model.final_norm.weight"]["split"].update(stage=LAYERS),
            lambda body: body["state"].update(reshard={"layout": {"tp": 1, "pp": 1, "vp": 1}}),
        ],
        ids=["layer", "origin"],
    )
    def test_manifest_that_makes_no_sense(self, tmp_path: Path, edit: object) -> None:
        trained(shape_context(), tmp_path / "run", spec())
        edit_manifest(tmp_path / "run" / "checkpoints" / STEP, edit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="Restore it from a copy"):
            to(tmp_path / "run", tmp_path / "out", 2)

    def test_disk_too_small_before_a_byte_is_written(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=1000))
        with pytest.raises(UserError, match=r"out=.*needs 0\.\d+ GB, 0\.00 GB are free"):
            to(source, tmp_path / "out", 2)
        assert not list((tmp_path / "out").rglob("*.safetensors"))


def kill_at_each_operation(run: Path, folder: Path) -> None:
    """Reshard into folder/1, folder/2, …, each killed one change of a file later, until one is done."""
    number, killed = 0, True
    while killed:
        number += 1
        child = os.fork()
        if child == 0:
            kill_at_operation(number)
            to(run, folder / str(number), 1, 2)
            os._exit(0)
        killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_at_any_file_operation_leaves_nothing_or_the_whole(tmp_path: Path) -> None:
    small = replace(spec(), model=replace(spec().model, num_layers=2))
    trained(shape_context(), tmp_path / "run", small)
    straight = content(to(tmp_path / "run", tmp_path / "straight", 1, 2))
    # a new interpreter: a child of this one could wait for a lock that another thread held at the fork
    killer = multiprocessing.get_context("spawn").Process(
        target=kill_at_each_operation, args=(tmp_path / "run", tmp_path / "killed")
    )
    killer.start()
    killer.join()
    assert killer.exitcode == 0
    rounds = max(int(path.name) for path in (tmp_path / "killed").iterdir() if path.name.isdigit())
    assert rounds > 20
    for number in range(1, rounds + 1):
        out = tmp_path / "killed" / str(number)
        found = out / "checkpoints" / STEP if out.exists() else to(tmp_path / "run", out, 1, 2)
        assert content(found) == straight
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", STEP]
