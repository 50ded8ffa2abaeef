"""A run is the same at every layout and micro-batch size: losses, weights, scores and outputs, in float64."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from mlm.finetune.config import FinetuneConfig
from mlm.finetune.task_type import Output
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from tests.finetune.runs import KINDS, finetuning, losses, read, records, run_and_look, weights
from tests.ranks import run_on_ranks
from tests.slow import slow_but

LAYOUTS = {
    "tp2": ParallelConfig(tp=2),
    "tp2-sp": ParallelConfig(tp=2, sequence_parallel=True),
    "pp2": ParallelConfig(pp=2),
    "pp2-vp2": ParallelConfig(pp=2, vp=2),
    "dp3-zero3": ParallelConfig(dp=3, zero=3),
    "recompute": ParallelConfig(recompute="full"),
    "tp2-pp2-sp": ParallelConfig(tp=2, pp=2, sequence_parallel=True),
    "pp2-dp2-zero2": ParallelConfig(pp=2, dp=2, zero=2),
    "dp2-ep2": ParallelConfig(dp=2, ep=2),
}
SOME = {
    ("classification", "gpt2"): ("tp2-sp", "pp2"),
    ("regression", "bert"): ("dp3-zero3",),
    ("choice", "bert"): ("tp2-pp2-sp", "dp3-zero3"),
    ("span", "bert"): ("tp2-sp", "pp2-dp2-zero2"),
    ("classification", "roberta"): ("tp2-sp", "pp2"),
    ("choice", "roberta"): ("tp2-pp2-sp",),
    ("span", "roberta"): ("pp2-dp2-zero2",),
    ("span", "gpt2"): ("tp2-pp2-sp",),
    ("classification", "llama"): ("tp2-sp", "pp2"),
    ("choice", "llama"): ("tp2",),
}
"""A few for the other types and models; classification by BERT has all but that of experts."""
CASES = [
    *(("classification", "bert", layout) for layout in LAYOUTS if "ep" not in layout),
    *((kind, model, layout) for (kind, model), layouts in SOME.items() for layout in layouts),
    ("classification", "experts", "dp2-ep2"),
]


Alone = Callable[[str, str], tuple[FinetuneConfig, list[Output]]]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    """Settings and outputs of runs of one process, each done once."""

    @cache
    def run(kind: str, model: str) -> tuple[FinetuneConfig, list[Output]]:
        config = finetuning(folder, kind, ckpt=str(folder / model), out=str(folder / f"{kind}-{model}"))
        return config, run_and_look(ParallelContext(), config)

    return run


def check_same(one: Path, other: Path, outputs: list[Output], others: list[Output]) -> None:
    """Two runs, but for rounding."""
    np.testing.assert_allclose(losses(one), losses(other), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        weights(one / "checkpoints"), weights(other / "checkpoints"), rtol=0, atol=1e-7
    )
    assert read(one / "result.json")["scores"] == read(other / "result.json")["scores"]
    for mine, theirs in zip(outputs, others, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "model", "layout"),
    slow_but({6, CASES.index(("span", "gpt2", "tp2-pp2-sp")), len(CASES) - 1}, CASES),
)
def test_a_run_is_the_same_at_every_layout(
    alone: Alone, tmp_path: Path, kind: str, model: str, layout: str
) -> None:
    parallel = LAYOUTS[layout]
    config, want = alone(kind, model)
    split = replace(config, parallel=parallel, out=str(tmp_path / "out"))
    sizes = {"tp": parallel.tp, "pp": parallel.pp, "dp": parallel.dp or 1, "ep": parallel.ep}
    for outputs in run_on_ranks(run_and_look, split, **sizes):
        check_same(Path(config.out), tmp_path / "out", want, outputs)


def test_loads_of_experts_rest_in_finetuning(alone: Alone) -> None:
    """Padding would count: no loads are counted, so none are reported as even or idle."""
    config, _ = alone("classification", "experts")
    steps = records(Path(config.out), "step")
    assert steps
    assert not any("imbalance" in step for step in steps)


@pytest.mark.parametrize(("kind", "size"), slow_but({3}, [*((kind, 1) for kind in KINDS), ("span", 100)]))
def test_a_run_is_the_same_at_every_micro_batch_size(
    alone: Alone, tmp_path: Path, kind: str, size: int
) -> None:
    config, want = alone(kind, "bert")
    train = replace(config.train, micro_batch_size=size)
    outputs = run_and_look(ParallelContext(), replace(config, train=train, out=str(tmp_path / "out")))
    check_same(Path(config.out), tmp_path / "out", want, outputs)
