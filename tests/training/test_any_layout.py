"""Any layout loads what any layout saved: every ordered pair of six, each element and counter bit for bit.

Weights and moments are functions of name and place in the global tensor, so that a row or column that ends up
elsewhere shows. The vocabulary is GPT-2's, whose padding depends on tp; six layers make stages of one and of
two where four or five ranks share them.
"""

from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from mlm.checkpoint.native.format import read_manifest
from mlm.data.config import DataConfig
from mlm.optim.adamw import MOMENTS, applied_steps, ensure_state, moment
from mlm.optim.config import EmaConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.random import derive_seed
from mlm.parallel.sharding import ParameterShard
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from tests.models.tiny import tiny
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.saving import save

VOCAB, HIDDEN, LAYERS, POSITIONS = 50257, 8, 6, 8
LAYOUTS = {
    "one": ParallelConfig(),
    "tp8-sp": ParallelConfig(tp=8, sequence_parallel=True),
    "pp2-vp3": ParallelConfig(pp=2, vp=3),
    "pp5-zb": ParallelConfig(pp=5, pipeline="zb_h1"),
    "dp3-zero3": ParallelConfig(dp=3, zero=3),
    "tp2-pp2-dp2-sp-zero2": ParallelConfig(tp=2, pp=2, dp=2, sequence_parallel=True, zero=2),
}
PADDED = {1: 50304, 2: 50432, 8: 51200}
"""Rows of the table by tp: 50,257 rounded up to 128 * tp (arXiv:1909.08053, section 3)."""
COUNTERS = {"step": 17, "consumed": 4321, "applied": 15.0, "scale": 1024.0, "clean_steps": 7, "skipped": 2}
LEFT = 7.0
"""Value of weights and moments before loading, which padding keeps."""


def spec_of(parallel: ParallelConfig) -> PretrainConfig:
    return PretrainConfig(
        name="any-layout",
        out="unused",
        seed=3,
        model=tiny(
            num_layers=LAYERS, hidden_size=HIDDEN, num_heads=8, max_positions=POSITIONS, vocab_size=VOCAB
        ),
        parallel=parallel,
        ema=EmaConfig(decay=0.9),
        precision=PrecisionConfig(dtype="fp16"),  # for a loss scale that is a counter too
        data=DataConfig(kind="synthetic", seq_length=POSITIONS),
        train=TrainConfig(global_batch_size=12, micro_batch_size=1),
    )


def sizes(parallel: ParallelConfig) -> dict[str, int]:
    return {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp or 1}


def known(name: str, shape: tuple[int, ...]) -> Tensor:
    """The whole tensor of a checkpoint name: its elements count on from a number of the name's own."""
    count = torch.Size(shape).numel()
    first = derive_seed(name) % ((1 << 24) - count)  # whole numbers below 2^24 are exact in float32
    return torch.arange(first, first + count, dtype=torch.float32).view(shape)


def part_of(name: str, shard: ParameterShard, ctx: ParallelContext, padding: float) -> Tensor:
    """Return this rank's part of the known tensor of a checkpoint name: split over tp, then over dp.

    The table is padded first. The cut is torch.chunk's, not that of the code under test.
    """
    x = known(name, shard.global_shape)
    if VOCAB in x.shape:
        rows = PADDED[ctx.tp.size] - VOCAB
        x = torch.cat([x, torch.full((rows, HIDDEN), padding)])
    if shard.tp_dim is not None:
        x = x.chunk(ctx.tp.size, shard.tp_dim)[ctx.tp.rank]
    if shard.dp_slice is not None:
        parts = x.chunk(ctx.dp.size, 0)
        x = parts[ctx.dp.rank] if ctx.dp.rank < len(parts) else x[:0]
    return x


def held(trainer: Trainer) -> list[tuple[str, ParameterShard, Tensor]]:
    """Every tensor of a rank's state with its checkpoint name, padding included."""
    average = trainer.average
    return [
        entry
        for s in trainer.shards
        for entry in [
            (f"model.{s.name}", s, s.parameter.detach()),
            *((f"optimizer.{m}.{s.name}", s, moment(trainer.optimizer, s, m)) for m in MOMENTS),
            (f"optimizer.ema.{s.name}", s, average.values[s.parameter]),
        ]
    ]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A checkpoint of the known state, written at each layout."""
    root = tmp_path_factory.mktemp("any-layout")
    return {
        name: run_on_ranks(save_known, root / name, spec_of(parallel), **sizes(parallel))[0]
        for name, parallel in LAYOUTS.items()
    }


def save_known(ctx: ParallelContext, out: Path, spec: PretrainConfig) -> Path:
    trainer = Trainer(spec, ctx)
    ensure_state(trainer.optimizer, COUNTERS["applied"])
    for name, shard, x in held(trainer):
        x.copy_(part_of(name, shard, ctx, padding=float("nan")))  # padding must not be stored
    trainer.step, trainer.consumed_samples = int(COUNTERS["step"]), int(COUNTERS["consumed"])
    trainer.scaler.load_state({key: COUNTERS[key] for key in ("scale", "clean_steps", "skipped")})
    return save(trainer, out)


@pytest.mark.parametrize("to", slow_but({0}, LAYOUTS))
def test_a_layout_loads_what_every_other_saved(saved: dict[str, Path], to: str) -> None:
    """Into ranks whose state is 7.0 throughout: every true element is the known one, padding untouched."""
    others = {name: path for name, path in saved.items() if name != to}
    parallel = LAYOUTS[to]
    for rank, problems in enumerate(run_on_ranks(load_each, others, spec_of(parallel), **sizes(parallel))):
        assert problems == [], f"rank {rank}"


def load_each(ctx: ParallelContext, paths: dict[str, Path], spec: PretrainConfig) -> list[str]:
    trainer = Trainer(spec, ctx)
    expected = [part_of(name, shard, ctx, padding=LEFT) for name, shard, _ in held(trainer)]
    return [
        f"from {name}: {problem}"
        for name, path in paths.items()
        for problem in loaded(trainer, path, expected)
    ]


def loaded(trainer: Trainer, path: Path, expected: list[Tensor]) -> list[str]:
    """Return the errors of this rank's state after loading a checkpoint of the known one."""
    for _, _, x in held(trainer):
        x.fill_(LEFT)
    trainer.step = trainer.consumed_samples = 0
    ensure_state(trainer.optimizer, 0.0)
    load(trainer, path)
    scaler = trainer.scaler.state()
    problems = [
        f"{name} {list(x.shape)}"
        for (name, _, x), part in zip(held(trainer), expected, strict=True)
        if not torch.equal(x, part)
    ]
    applied = applied_steps(trainer.optimizer)
    counters = {"step": trainer.step, "consumed": trainer.consumed_samples, "applied": applied, **scaler}
    return problems + ([] if counters == COUNTERS else [f"counters {counters}"])


@pytest.mark.parametrize("layout", LAYOUTS)
def test_files_hold_each_element_once_as_the_safetensors_library_reads_them(
    saved: dict[str, Path], layout: str
) -> None:
    """Put together from the manifest's offsets: no hole, nothing twice, and the known numbers."""
    tensors = read_manifest(saved[layout]).tensors
    whole = {name: torch.full(entry.shape, float("nan")) for name, entry in tensors.items()}
    stored = 0
    for file in sorted(saved[layout].glob("*.safetensors")):
        with safe_open(file, framework="pt") as f:
            for name in f.keys():  # noqa: SIM118 (not a mapping)
                (region,) = (c.region for c in tensors[name].chunks if c.file == file.name)
                piece = f.get_tensor(name)
                whole[name][tuple(slice(o, o + n) for o, n in zip(*region, strict=True))] = piece
                stored += piece.numel()
    h = HIDDEN
    parameters = (VOCAB + POSITIONS) * h + LAYERS * (12 * h * h + 13 * h) + 2 * h
    assert stored == 4 * parameters
    assert all(torch.equal(x, known(name, tuple(x.shape))) for name, x in whole.items())
