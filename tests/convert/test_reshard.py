"""`mlm reshard`: a checkpoint cut anew for another layout."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from mlm.checkpoint.native.format import Manifest, read_manifest
from mlm.cli import main
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load, training_shards
from mlm.training.trainer import Trainer
from tests.convert.reshard_runs import (
    STEP,
    content,
    equal,
    make_source,
    spec,
    stored,
    to,
    trained,
)
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.saving import save

slow = partial(pytest.param, marks=pytest.mark.slow)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


class TestBytes:
    """The output is a function of the saved state and the target layout alone."""

    @pytest.mark.parametrize("target", [slow((4, 1)), (4, 2), slow((1, 3)), slow((4, 5))], ids=str)
    def test_are_the_same_by_way_of_another_layout(
        self, tmp_path: Path, source: Path, target: tuple[int, ...]
    ) -> None:
        straight = to(source, tmp_path / "straight", *target)
        between = to(to(source, tmp_path / "a", 2), tmp_path / "b", 2, 2)
        assert content(to(between, tmp_path / "way", *target)) == content(straight)

    def test_of_weights_alone_are_the_same_wherever_the_moments_went(
        self, tmp_path: Path, source: Path
    ) -> None:
        straight = content(to(source, tmp_path / "straight", 4, weights_only=True))
        first = to(source, tmp_path / "a", 2, weights_only=True)
        last = to(source, tmp_path / "b", 2)
        assert content(to(first, tmp_path / "c", 4)) == straight
        assert content(to(last, tmp_path / "d", 4, weights_only=True)) == straight

    def test_have_a_save_id_of_their_own_at_each_layout(self, tmp_path: Path, source: Path) -> None:
        ids = [read_manifest(to(source, tmp_path / str(tp), tp)).save_id for tp in (1, 2)]
        assert len({*ids, read_manifest(source / "checkpoints" / STEP).save_id}) == 3


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ({}, {"tp": 2, "pp": 2}),
        slow({}, {"tp": 4}),
        slow({}, {"pp": 3}),
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


@pytest.mark.parametrize(
    "layout",
    slow_but({1}, [{"dp": 2, "zero": 3}, {"tp": 2, "dp": 2, "zero": 2}, {"tp": 2, "pp": 2}]),
    ids=str,
)
def test_what_any_layout_saved_loads_into_one_process_bit_for_bit(
    tmp_path: Path, layout: dict[str, int]
) -> None:
    """Saved at a layout, cut for tp=2 pp=3, loaded whole: what loading the save itself gives."""
    sizes = {key: n for key, n in layout.items() if key != "zero"}
    run_on_ranks(trained, tmp_path / "saved", spec(**layout), **sizes)
    there = to(tmp_path / "saved", tmp_path / "there", 2, 3)
    direct, around = (whole_state(path) for path in (tmp_path / "saved" / "checkpoints" / STEP, there))
    assert direct.keys() == around.keys()
    assert all(torch.equal(direct[name], x) and x.any() for name, x in around.items())


def whole_state(path: Path) -> dict[str, Tensor]:
    trainer = Trainer(spec(), shape_context())
    load(trainer, path)
    return {name: shard.tensor.clone() for name, shard in training_shards(trainer, trainer.shards).items()}


class TestState:
    """Metadata of a resharded checkpoint."""

    def test_is_the_source_s_with_its_origin_and_layout(self, tmp_path: Path, source: Path) -> None:
        before = read_manifest(source / "checkpoints" / STEP)
        after = read_manifest(to(to(source, tmp_path / "a", 2), tmp_path / "b", 4, 5))
        origin = {"origin": before.save_id, "layout": {"tp": 4, "pp": 5, "vp": 1}}
        assert after.state == {**before.state, "reshard": origin}

    def test_without_the_optimizer_is_of_weights_alone(self, tmp_path: Path, source: Path) -> None:
        manifest = read_manifest(to(source, tmp_path, 2, weights_only=True))
        assert all(name.startswith("model.") for name in manifest.tensors)
        assert manifest.state["weights_only"] is True
        assert "scaler" not in manifest.state

    def test_tokenizer_comes_along(self, tmp_path: Path, source: Path) -> None:
        to(source, tmp_path)
        assert (tmp_path / "tokenizer.json").read_text() == '{"of": "the run"}'


def test_a_table_tells_what_became_of_it(
    tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["reshard", "--tp", "4", "--pp", "2", f"ckpt={source}", f"out={tmp_path}"]) == 0
    said = capsys.readouterr().out
    assert "tp=4 pp=2" in said
    assert str(tmp_path / "checkpoints" / STEP) in said


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
