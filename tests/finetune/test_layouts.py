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
from tests.finetune.runs import finetuning, losses, read, records, run_and_look, weights
from tests.ranks import run_on_ranks
from tests.slow import slow

SPLIT = ParallelConfig(tp=2, pp=2, sequence_parallel=True)
CASES = [
    ("classification", "bert", SPLIT),
    ("span", "gpt2", SPLIT),
    ("classification", "experts", ParallelConfig(dp=2, ep=2)),
    slow(("choice", "roberta", ParallelConfig(pp=2, dp=2, zero=2))),
    slow(("regression", "bert", ParallelConfig(dp=3, zero=3))),
    slow(("classification", "llama", ParallelConfig(pp=2, vp=2, recompute="full"))),
]
"""Each type of task and model at one layout; tests/parallel compares the layers at the others."""


Alone = Callable[[str, str], tuple[FinetuneConfig, list[Output]]]


@pytest.fixture(scope="module")
def alone(folder: Path) -> Alone:
    @cache
    def run(kind: str, model: str) -> tuple[FinetuneConfig, list[Output]]:
        config = finetuning(folder, kind, ckpt=str(folder / model), out=str(folder / f"{kind}-{model}"))
        return config, run_and_look(ParallelContext(), config)

    return run


def check_same(one: Path, other: Path, outputs: list[Output], others: list[Output]) -> None:
    np.testing.assert_allclose(losses(one), losses(other), rtol=0, atol=1e-9)
    torch.testing.assert_close(
        weights(one / "checkpoints"), weights(other / "checkpoints"), rtol=0, atol=1e-7
    )
    assert read(one / "result.json")["scores"] == read(other / "result.json")["scores"]
    for mine, theirs in zip(outputs, others, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0, atol=1e-5)


@pytest.mark.parametrize(("kind", "model", "parallel"), CASES)
def test_a_run_is_the_same_at_every_layout(
    alone: Alone, tmp_path: Path, kind: str, model: str, parallel: ParallelConfig
) -> None:
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


def test_a_run_is_the_same_at_every_micro_batch_size(alone: Alone, tmp_path: Path) -> None:
    config, want = alone("span", "gpt2")
    train = replace(config.train, micro_batch_size=1)
    outputs = run_and_look(ParallelContext(), replace(config, train=train, out=str(tmp_path / "out")))
    check_same(Path(config.out), tmp_path / "out", want, outputs)
