"""exact=8: one digest of weights and moments at every layout, on real ranks."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Loader
from mlm.models.bert import model as bert
from mlm.models.bert.model import MaskedTargets, masked_targets
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.family import family_of
from mlm.optim import adamw, muon
from mlm.optim.config import MuonConfig, OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel import exact, exact_gradients
from mlm.parallel.collectives import all_reduce
from mlm.parallel.config import ParallelConfig
from mlm.parallel.exact_gradients import leaf_order, tree_of_leaves
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training import trainer as trainer_module
from mlm.training.state import load, owned_shards
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.ranks import run_on_ranks
from tests.slow import slow, thinned
from tests.training.saving import save
from tests.training.test_expert_adapters import started

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
    optimizer: str = "adamw",
    norm: str = "pre",
    rank: int = 0,
    layers: int = 2,
    batch: int = 8,
    micro_batch: int = 1,
    **parallel: Any,
) -> PretrainConfig:
    """A run of 8 heads, so that tp may be 8. `rank` is that of adapters."""
    family: dict[str, Any] = {
        "llama": {"activation": "silu", "options": {"num_kv_heads": 8}},
        "bert": {"activation": "gelu", "token_types": 2, "norm": norm},
        "roberta": {"activation": "gelu", "token_types": 1, "norm": norm, "options": {"position_offset": 2}},
    }
    return PretrainConfig(
        name="test",
        out="unused",
        seed=3,
        exact=parts,  # type: ignore[arg-type]
        model=ModelConfig(
            kind=kind,
            num_layers=layers,
            hidden_size=128,
            num_heads=8,
            max_positions=SEQ,
            vocab_size=VOCAB,
            vocab_multiple=4,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            **family.get(kind, {}),
        ),
        lora=LoraConfig(rank=rank, dropout=dropout),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-2, kind=optimizer),
        schedule=ScheduleConfig(warmup_steps=2, min_lr=1e-4),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        data=DataConfig(kind="synthetic", seq_length=SEQ),
        train=TrainConfig(steps=20, global_batch_size=batch, micro_batch_size=micro_batch),
    )


def advance(trainer: Trainer, steps: int) -> list[float]:
    """Losses of the next steps."""
    train, ctx, config = trainer.config.train, trainer.ctx, trainer.config
    with Loader(
        family_of(config.model.kind).samples.synthetic(config.data, VOCAB, 1000, 3),
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
    trainer = started(ctx, spec)
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


RUNS: dict[str, dict[str, Any]] = {
    "gpt2 fp32": {},
    "gpt2 bf16 dropout": {"dtype": "bf16", "dropout": 0.1},
    "gpt2 fp64 muon": {"dtype": "fp64", "optimizer": "muon", "micro_batch": 2, "batch": 16},
    "gpt2 fp16": {"dtype": "fp16"},
    "gpt2 bf16 lora dropout": {"dtype": "bf16", "rank": 4, "dropout": 0.1},
    "llama fp32 muon": {"kind": "llama", "optimizer": "muon"},
    "llama bf16": {"kind": "llama", "dtype": "bf16"},
    "llama fp64 lora": {"kind": "llama", "dtype": "fp64", "rank": 4},
    "bert fp32 dropout": {"kind": "bert", "norm": "post", "dropout": 0.1, "micro_batch": 2, "batch": 16},
    "bert bf16 muon": {"kind": "bert", "dtype": "bf16", "optimizer": "muon"},
    "bert fp64 lora": {"kind": "bert", "dtype": "fp64", "rank": 4, "norm": "post"},
    "roberta bf16": {"kind": "roberta", "dtype": "bf16", "norm": "post"},
}
"""Runs that have one digest each; all models in half precision, float32 or float64 with either optimizer."""
FOUR = {"layers": 4}
"""So that vp may be 2."""
KEYS = ("tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero", "recompute")
AXES = ("tp", "pp", "dp")
Case = tuple[Any, ...]


def covering(candidates: Sequence[Case]) -> list[Case]:
    """Some of the candidates, which have every pair of values that any has.

    Each has the most new ones, for the ranks that it takes.
    """
    pairs = [set(combinations(enumerate(case), 2)) for case in candidates]
    ranks = [
        math.prod(dict(zip(KEYS, case[-len(KEYS) :], strict=True))[axis] for axis in AXES)
        for case in candidates
    ]
    missing, chosen = set().union(*pairs), list[Case]()
    while missing:
        best = max(range(len(pairs)), key=lambda n: len(pairs[n] & missing) / ranks[n] ** 0.5)
        missing -= pairs[best]
        chosen.append(candidates[best])
    return chosen


def can_train(case: Case) -> bool:
    """True for a layout of two to eight ranks, which sets nothing that it has no use for."""
    tp, sequence_parallel, pp, vp, pipeline, dp, zero, _ = case
    is_plain = vp == 1 and pipeline == "1f1b"
    is_piped = vp == 1 or pipeline == "1f1b"
    is_used = sequence_parallel <= (tp > 1) and (zero == 0 or (dp > 1 and (zero == 2 or pp == 1)))
    return 2 <= tp * pp * dp <= 8 and is_used and (is_piped if pp > 1 else is_plain)


LAYOUTS = covering(
    [
        case
        for case in product(
            *((1, 2, 4), (False, True), (1, 2), (1, 2), ("1f1b", "gpipe", "zb_h1"), (1, 2, 4)),
            *((0, 2, 3), ("none", "selective", "full")),
        )
        if can_train(case)
    ]
)
CASES = [
    (run, tuple(layout)) for run, *layout in covering([(run, *layout) for layout in LAYOUTS for run in RUNS])
]
"""Each pair of values of KEYS that goes together, and each of them with each run."""
OF_EIGHT = ((8, True, 1, 1, "1f1b", 1, 0, "none"), (1, False, 1, 1, "1f1b", 8, 3, "none"))
CASES += [(run, OF_EIGHT[n % 2]) for n, run in enumerate(RUNS) if n % 3]
ONE: dict[Any, tuple[str, list[float]]] = {}
"""Results of one process, by the run."""


def one_process(run: str) -> tuple[str, list[float]]:
    if run not in ONE:
        ONE[run] = result(spec_of(**RUNS[run], **FOUR), 5)
    return ONE[run]


def ranks_of(layout: Mapping[str, Any]) -> dict[str, int]:
    return {axis: layout[axis] for axis in AXES}


@pytest.mark.parametrize(("run", "case"), thinned(CASES, 13), ids=str)
def test_digest_is_that_of_one_process(run: str, case: Case) -> None:
    """Five steps: losses, weights and moments."""
    layout = dict(zip(KEYS, case, strict=True))
    assert result(spec_of(**RUNS[run], **FOUR, **layout), 5, **ranks_of(layout)) == one_process(run)


def test_runs_differ_and_layouts_are_many() -> None:
    assert len(CASES) >= 60
    assert {run for run, _ in CASES} == set(RUNS)


@pytest.mark.parametrize("run", ["gpt2 fp64 muon", "llama fp64 lora", "bert fp64 lora", "roberta fp64"])
def test_exact_run_computes_what_the_usual_one_does(run: str) -> None:
    """float64: losses of three steps to 1e-12, the usual path being compared with one process elsewhere."""
    words = RUNS.get(run, {"kind": "roberta", "dtype": "fp64"})
    usual = result(spec_of(**words, parts=0))[1]
    assert result(spec_of(**words))[1] == pytest.approx(usual, rel=1e-12)


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
    path, ranks, words = None, list[Any](), RUNS["bert bf16 muon"] | FOUR
    for number, case in enumerate(LAYOUTS[:6]):
        layout = dict(zip(KEYS, case, strict=True))
        ranks = run_on_ranks(
            move, spec_of(**words, **layout), path, tmp_path / str(number), **ranks_of(layout)
        )
        path = ranks[0][0]
    assert digest([shards for _, shards in ranks]) == result(spec_of(**words), 6)[0]


def chain(terms: Sequence[Tensor]) -> Tensor:
    total = terms[0]
    for term in terms[1:]:
        total = total.add_(term)
    return total


def ring(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    return all_reduce(x, axis)


def other_order(x: Tensor, axis: Axis, *, nearest_first: bool = True) -> Tensor:
    return exact.sum_over_ranks(x, axis, nearest_first=not nearest_first)


def add_rows_by_ring(region: exact.Region, terms: Sequence[Tensor]) -> Tensor:
    total = exact.tree_sum(terms)
    return all_reduce(total, region.tp) if region.sequence_parallel else total


def targets_by_rank(labels: Tensor, is_swapped: Tensor, *, parts: int, held: range) -> MaskedTargets:
    """Masked tokens padded to those of a rank of two."""
    rank = held.start * 2 // parts
    return masked_targets(labels, is_swapped, parts=2, held=range(rank, rank + 1))


def orthogonalise_transposed(x: Tensor, config: MuonConfig) -> Tensor:
    return muon.orthogonalise(x.mT.contiguous(), config).mT.contiguous()


SABOTAGES: dict[str, tuple[Any, str, Any]] = {
    "chain": (exact, "tree_sum", chain),
    "ring": (exact, "sum_over_ranks", ring),
    "levels of dp": (exact_gradients, "sum_over_ranks", other_order),
    "order of micro-batches": (trainer_module, "leaf_order", lambda count, dp: (list(range(count)), 1)),
    "rows in one part": (exact.Region, "split_rows", lambda region, x: (x,)),
    "ring of rows": (exact.Region, "add_rows", add_rows_by_ring),
    "masked tokens by rank": (bert, "masked_targets", targets_by_rank),
    "transposed matrices": (adamw, "orthogonalise", orthogonalise_transposed),
}
"""An object, the name of a function in it, and one that computes the same to rounding."""


def train_sabotaged(ctx: ParallelContext, spec: PretrainConfig, change: str) -> tuple[list[float], Shards]:
    """Train with one sum in another order."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(*SABOTAGES[change])
        return train(ctx, spec, 3)


@pytest.mark.parametrize(
    ("change", "run", "layout"),
    [
        ("chain", "gpt2 fp32", {"tp": 2}),
        ("ring", "gpt2 fp32", {"tp": 4}),
        ("levels of dp", "gpt2 fp32", {"dp": 4}),
        ("order of micro-batches", "gpt2 fp32", {"dp": 2}),
        ("chain", "llama fp64 lora", {"tp": 2}),
        ("transposed matrices", "llama fp32 muon", {"tp": 2}),
        ("rows in one part", "bert fp32 dropout", {"tp": 2, "sequence_parallel": True}),
        ("ring of rows", "bert fp32 dropout", {"tp": 4, "sequence_parallel": True}),
        ("masked tokens by rank", "bert fp32 dropout", {"tp": 2, "sequence_parallel": True}),
    ],
)
def test_sum_in_another_order_shows(change: str, run: str, layout: dict[str, int]) -> None:
    """Losses are those of one process to rounding, weights and moments are not its bits."""
    ranks = run_on_ranks(
        train_sabotaged,
        spec_of(**RUNS[run], **layout),
        change,
        **{key: layout[key] for key in ("tp", "dp") if key in layout},
    )
    one = spec_of(**RUNS[run])
    expected, losses = result(one, 3)
    assert ranks[0][0] == pytest.approx(losses, rel=1e-3)
    assert digest([shards for _, shards in ranks]) != expected


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
