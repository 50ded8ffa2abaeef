"""exact=8: one digest of weights and moments at every layout, on real ranks."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Loader, SyntheticDataset
from mlm.models.config import ModelConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel import exact, exact_gradients
from mlm.parallel.collectives import all_reduce
from mlm.parallel.config import ParallelConfig
from mlm.parallel.exact_gradients import leaf_order, tree_of_leaves
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.state import load, owned_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.ranks import run_on_ranks
from tests.slow import slow, thinned
from tests.training.saving import save

VOCAB, SEQ = 250, 32
"""The vocabulary is padded, at each tp to the same rows."""
Shards = dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]]
"""A rank's tensors by name: offset and shape in the full one."""


def spec_of(
    kind: str = "gpt2",
    dtype: str = "fp32",
    *,
    parts: int = 8,
    dropout: float = 0.0,
    batch: int = 8,
    micro_batch: int = 1,
    **parallel: Any,
) -> PretrainConfig:
    """A run of two layers; 8 heads, so that tp may be 8."""
    llama: dict[str, Any] = {"activation": "silu", "options": {"num_kv_heads": 8}} if kind == "llama" else {}
    return PretrainConfig(
        name="test",
        out="unused",
        seed=3,
        exact=parts,  # type: ignore[arg-type]
        model=ModelConfig(
            kind=kind,
            num_layers=2,
            hidden_size=128,
            num_heads=8,
            max_positions=SEQ,
            vocab_size=VOCAB,
            vocab_multiple=4,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            **llama,
        ),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-2),
        schedule=ScheduleConfig(warmup_steps=2, min_lr=1e-4),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        data=DataConfig(kind="synthetic", seq_length=SEQ),
        train=TrainConfig(steps=20, global_batch_size=batch, micro_batch_size=micro_batch),
    )


def advance(trainer: Trainer, steps: int) -> list[float]:
    """Losses of the next steps."""
    train, ctx = trainer.config.train, trainer.ctx
    with Loader(
        SyntheticDataset(VOCAB, trainer.config.data.seq_length, 1000, 3),
        consumed_samples=trainer.consumed_samples,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
    ) as loader:
        return [trainer.mean_loss(trainer.train_step(next(loader))) for _ in range(steps)]


def shards_of(trainer: Trainer) -> Shards:
    shards = owned_shards(trainer).items()
    return {name: (s.offset, tuple(s.global_shape), s.tensor.clone()) for name, s in shards}


def train(ctx: ParallelContext, spec: PretrainConfig, steps: int) -> tuple[list[float], Shards]:
    trainer = Trainer(spec, ctx)
    return advance(trainer, steps), shards_of(trainer)


def full_tensors(ranks: Sequence[Shards]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for shards in ranks:
        for name, (offset, shape, x) in shards.items():
            full = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=x.dtype))
            full[tuple(slice(first, first + n) for first, n in zip(offset, x.shape, strict=True))] = x
    return tensors


def digest(ranks: Sequence[Shards]) -> str:
    h = hashlib.sha256()
    for name, x in sorted(full_tensors(ranks).items()):
        h.update(name.encode() + x.numpy().tobytes())
    return h.hexdigest()


def result(spec: PretrainConfig, steps: int = 3, **layout: int) -> tuple[str, list[float]]:
    """Digest and losses of a run at a layout."""
    ranks = run_on_ranks(train, spec, steps, **layout)
    return digest([shards for _, shards in ranks]), ranks[0][0]


ONE: dict[Any, tuple[str, list[float]]] = {}
"""Results of one process, by the run."""


def one_process(*key: Any) -> tuple[str, list[float]]:
    if key not in ONE:
        kind, dtype, dropout = key
        ONE[key] = result(spec_of(kind, dtype, dropout=dropout))
    return ONE[key]


LAYOUTS = [
    {"tp": 2},
    {"tp": 2, "pp": 2, "dp": 2, "sequence_parallel": True},
    {"dp": 4, "zero": 3},
    {"tp": 8},
    {"tp": 4},
    {"tp": 4, "sequence_parallel": True},
    {"pp": 2},
    {"pp": 2, "pipeline": "zb_h1"},
    {"pp": 2, "pipeline": "gpipe", "tp": 2},
    {"dp": 2},
    {"dp": 8},
    {"dp": 2, "zero": 2},
    {"dp": 2, "zero": 3, "tp": 2, "sequence_parallel": True},
    {"dp": 2, "zero": 2, "pp": 2, "pipeline": "zb_h1"},
    {"tp": 2, "recompute": "full"},
    {"dp": 2, "pp": 2, "recompute": "selective"},
]
RUNS = [("gpt2", "fp32", 0.0), ("llama", "bf16", 0.0), ("gpt2", "bf16", 0.1), ("llama", "fp64", 0.0)]
CASES = [(*run, layout) for layout in LAYOUTS for run in RUNS]
CASES.append(("gpt2", "fp16", 0.0, {"tp": 2, "dp": 2}))


@pytest.mark.parametrize(("kind", "dtype", "dropout", "layout"), thinned(CASES, 13))
def test_digest_is_that_of_one_process(kind: str, dtype: str, dropout: float, layout: dict[str, Any]) -> None:
    ranks = {key: layout[key] for key in ("tp", "pp", "dp") if key in layout}
    assert result(spec_of(kind, dtype, dropout=dropout, **layout), **ranks) == one_process(
        kind, dtype, dropout
    )


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_exact_run_computes_what_the_usual_one_does(kind: str) -> None:
    """float64: losses of three steps to 1e-12, the usual path being compared with one process elsewhere."""
    usual = result(spec_of(kind, "fp64", parts=0))[1]
    assert result(spec_of(kind, "fp64"))[1] == pytest.approx(usual, rel=1e-12)


@pytest.mark.parametrize("dp", [2, slow(4)])
def test_micro_batches_that_are_no_power_of_two_have_one_order(dp: int) -> None:
    """12 micro-batches: leaves of three, of which dp ranks hold whole ones."""
    spec = spec_of(batch=12)
    if "12" not in ONE:
        ONE["12"] = result(spec, 2)
    assert result(spec, 2, dp=dp) == ONE["12"]


def move(ctx: ParallelContext, spec: PretrainConfig, before: Path | None, out: Path) -> tuple[Path, Shards]:
    """Continue a run by a step, and save it."""
    trainer = Trainer(spec, ctx)
    if before is not None:
        load(trainer, before)
    advance(trainer, 1)
    return save(trainer, out), shards_of(trainer)


@pytest.mark.slow
def test_run_moved_through_six_layouts_ends_with_the_digest_of_one_that_stayed(tmp_path: Path) -> None:
    path, ranks = None, list[Any]()
    for number, layout in enumerate([LAYOUTS[i] for i in (0, 6, 2, 5, 11, 8)]):
        sizes = {key: layout[key] for key in ("tp", "pp", "dp") if key in layout}
        ranks = run_on_ranks(move, spec_of(**layout), path, tmp_path / str(number), **sizes)
        path = ranks[0][0]
    assert digest([shards for _, shards in ranks]) == result(spec_of(), 6)[0]


def chain(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total.add_(term)
    return total


def ring(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    return all_reduce(x, axis)


def other_order(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    return exact.sum_over_ranks(x, axis, nearest_first=not nearest_first)


def train_sabotaged(ctx: ParallelContext, spec: PretrainConfig, change: str) -> tuple[list[float], Shards]:
    """Train with one sum in another order."""
    with pytest.MonkeyPatch.context() as patch:
        if change == "chain":
            patch.setattr(exact, "tree_sum", chain)
        elif change == "ring":
            patch.setattr(exact, "sum_over_ranks", ring)
        elif change == "levels of dp":
            patch.setattr(exact_gradients, "sum_over_ranks", other_order)
        elif change == "order of micro-batches":
            patch.setattr("mlm.training.trainer.leaf_order", lambda count, dp: (list(range(count)), 1))
        return train(ctx, spec, 2)


@pytest.mark.parametrize(
    ("change", "layout"),
    [
        ("chain", {"tp": 2}),
        ("ring", {"tp": 4}),
        ("levels of dp", {"dp": 4}),
        ("order of micro-batches", {"dp": 2}),
    ],
)
def test_sum_in_another_order_shows(change: str, layout: dict[str, int]) -> None:
    """A chain is another sum of any tree; the others are those of one process, but for their order."""
    spec = spec_of()
    ranks = run_on_ranks(train_sabotaged, spec, change, **layout)
    assert digest([shards for _, shards in ranks]) != result(spec, 2)[0]


def nested(terms: Sequence[Tensor]) -> Tensor:
    """((a + b) + (c + d)) + …, by its definition."""
    half = len(terms) // 2
    return terms[0].clone() if len(terms) == 1 else nested(terms[:half]) + nested(terms[half:])


def check_sums(ctx: ParallelContext) -> None:
    tp = replace(ctx.tp, exact_parts=8)
    generator = torch.Generator().manual_seed(0)
    terms = torch.randn(8, 16, 3, generator=generator).unbind()
    own = terms[tp.rank * 8 // tp.size : (tp.rank + 1) * 8 // tp.size]
    expected = nested(terms)
    subtree = exact.tree_sum([x.clone() for x in own])
    assert torch.equal(exact.sum_over_ranks(subtree.clone(), tp), expected)
    assert torch.equal(exact.scatter_over_ranks(subtree, tp), expected.chunk(tp.size)[tp.rank])
    rows = torch.randn(16, 2, 5, generator=generator)
    total = nested(rows.flatten(0, 1).unbind())
    region = exact.Region(tp, sequence_parallel=True)
    assert torch.equal(region.sum_rows(rows.chunk(tp.size)[tp.rank], torch.float32), total)
    assert torch.equal(exact.Region(tp, False).sum_rows(rows, torch.float32), total)


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_sums_over_ranks_are_the_nested_sum(tp: int) -> None:
    run_on_ranks(check_sums, tp=tp)


@pytest.mark.parametrize("dp", [1, 2, 4, 8])
def test_micro_batches_are_summed_as_a_nested_sum(dp: int) -> None:
    """16 micro-batches in leaves of two, j and j + 8: ((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))."""
    x = torch.randn(16, generator=torch.Generator().manual_seed(1)).unbind()
    order, leaf = leaf_order(16 // dp, Axis("dp", size=dp, exact_parts=8))
    ranks = [tree_of_leaves([x[i * dp + rank].clone() for i in order], leaf) for rank in range(dp)]
    while len(ranks) > 1:  # the levels of `sum_over_ranks` from the farthest on
        half = len(ranks) // 2
        ranks = [a + b for a, b in zip(ranks[:half], ranks[half:], strict=True)]
    assert torch.equal(ranks[0], nested([x[j] + x[j + 8] for j in (0, 4, 2, 6, 1, 5, 3, 7)]))


def test_module_without_an_order_is_rejected() -> None:
    spec = spec_of("llama")
    model = replace(spec.model, options={"num_kv_heads": 8, "qk_norm": True, "qk_norm_whole": True})
    with pytest.raises(UserError, match="query_norm is a AllHeadsNorm"):
        Trainer(replace(spec, model=model), ParallelContext())
