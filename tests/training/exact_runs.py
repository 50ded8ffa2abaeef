"""Runs of exact=8, by words, and the digest of their weights and moments at a layout."""

import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import combinations, product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Loader
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.family import family_of
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.state import load, owned_shards
from mlm.training.trainer import Trainer
from tests.ranks import run_on_ranks
from tests.training.saving import save
from tests.training.test_expert_adapters import started

VOCAB = 250
"""It is padded, at each tp to the same rows."""
Shards = dict[str, tuple[tuple[int, ...], tuple[int, ...], Tensor]]
"""A rank's tensors by name: offset and shape in the full one."""
Layout = dict[str, Any]
MIXTURE = {"num_experts": 8, "experts_per_token": 2, "expert_ffn_size": 128}
LLAMAS: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"qk_norm": True},
    "gemma2": {"window": 100, "window_layers": "sf", "attention_softcap": 20.0},
    "gemma3": {
        **{"window": 100, "window_layers": "sf", "window_rope_theta": 1e3},
        **{"qk_norm": True, "zero_centered_norms": True},
    },
    "mixtral": {**MIXTURE, "balance": "global_batch", "balance_coefficient": 0.1},
    "deepseek": {
        **{**MIXTURE, "router_scores": "sigmoid", "router_groups": 4, "router_top_groups": 2},
        **{"balance": "bias", "balance_rate": 0.1, "shared_experts": 1, "dense_layers": 1},
    },
    "qwen2_moe": {
        **{**MIXTURE, "qk_norm": True, "shared_experts": 1, "shared_gate": True, "balance": "sequence"},
        **{"z_loss": 0.1, "capacity_factor": 1.0, "router_logit_bias": True},
    },
}
"""Options of those of kind llama."""
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "bert": {"activation": "gelu", "token_types": 2},
    "roberta": {"activation": "gelu", "token_types": 1, "options": {"position_offset": 2}},
    **{
        name: {"kind": "llama", "activation": "silu", "options": {"num_kv_heads": 8, **options}}
        for name, options in LLAMAS.items()
    },
}


def spec_of(
    run: str, *, parts: int = 8, layers: int = 2, batch: int | None = None, length: int = 32, **parallel: Any
) -> PretrainConfig:
    """A run of 8 heads, so that tp may be 8: a model, a dtype, and words of what it has besides.

    A long one has 512 tokens, four parts of 128 or two with dropout; with experts 256, which are two.
    """
    model, dtype, *words = run.split()
    if "long" in words:
        length = max(length, 256 if "num_experts" in LLAMAS.get(model, {}) else 512)
    micro_batches, micro_batch = 4 if "long" in words else 8, 2 if "pairs" in words else 1
    if model == "qwen2_moe":  # gates of single tokens take whole vectors
        micro_batch = 4 if "long" in words else 8
    dropout = 0.1 if "dropout" in words else 0.0
    return PretrainConfig(
        name="test",
        out="unused",
        seed=3,
        exact=parts,  # type: ignore[arg-type]
        model=ModelConfig(
            num_layers=layers,
            hidden_size=128,
            num_heads=8,
            max_positions=length,
            vocab_size=VOCAB,
            vocab_multiple=4,
            hidden_dropout=dropout,
            attention_dropout=dropout,
            norm="post" if "post" in words else "pre",
            **{"kind": model, **FAMILIES[model]},
        ),
        lora=LoraConfig(rank=4 if "lora" in words else 0, dropout=dropout),
        parallel=ParallelConfig(**parallel),
        optimizer=OptimizerConfig(lr=1e-2, kind="muon" if "muon" in words else "adamw"),
        schedule=ScheduleConfig(warmup_steps=2, min_lr=1e-4),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        data=DataConfig(kind="synthetic", seq_length=length),
        train=TrainConfig(
            steps=20, global_batch_size=batch or micro_batches * micro_batch, micro_batch_size=micro_batch
        ),
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


def digest(ranks: Sequence[Shards]) -> str:
    tensors: dict[str, Tensor] = {}
    for shards in ranks:
        for name, (offset, shape, x) in shards.items():
            full = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=x.dtype))
            full[tuple(slice(first, first + n) for first, n in zip(offset, x.shape, strict=True))] = x
    h = hashlib.sha256()
    for name, x in sorted(tensors.items()):
        h.update(name.encode() + x.numpy().tobytes())
    return h.hexdigest()


def ranks_of(layout: Layout) -> dict[str, int]:
    return {key: layout[key] for key in ("tp", "pp", "dp", "cp", "ep", "expert_tp") if key in layout}


def result(spec: PretrainConfig, steps: int = 3, layout: Layout | None = None) -> tuple[str, list[float]]:
    """Digest and losses of a run at a layout."""
    spec = replace(spec, parallel=replace(spec.parallel, **(layout or {})))
    ranks = run_on_ranks(train, spec, steps, **ranks_of(layout or {}))
    return digest([shards for _, shards in ranks]), ranks[0][0]


def move(ctx: ParallelContext, spec: PretrainConfig, before: Path | None, out: Path) -> tuple[Path, Shards]:
    """Continue a run by a step, and save it."""
    trainer = started(ctx, spec)
    if before is not None:
        load(trainer, before)
    advance(trainer, 1)
    return save(trainer, out), shards_of(trainer)


RUNS = [
    *("gpt2 fp32", "gpt2 bf16 dropout", "gpt2 fp64 muon pairs", "gpt2 fp16", "gpt2 bf16 lora dropout"),
    *("llama fp32 muon", "llama bf16", "llama fp64 lora"),
    *("bert fp32 post dropout pairs", "bert bf16 muon", "bert fp64 lora post", "roberta bf16 post"),
]
"""Runs that have one digest each; all models in half precision, float32 or float64 with either optimizer."""
KEYS = ("tp", "sequence_parallel", "pp", "vp", "pipeline", "dp", "zero", "recompute")
USUAL = dict(zip(KEYS, (1, False, 1, 1, "1f1b", 1, 0, "none"), strict=True))
Case = tuple[str, Layout]


def tries(run: str, layout: Layout) -> set[Any]:
    """What a run at a layout tries: pairs of axes with its model, axes with itself, and pairs of values."""
    used = [key for key, value in layout.items() if value != USUAL.get(key, 1)]
    model = run.split()[0]
    return {
        *((model, *sorted(axes)) for axes in combinations(used, 2)),
        *((run, axis) for axis in used),
        *((key, layout[key]) for key in used),
        *combinations(sorted(layout.items()), 2),
    }


def covering(candidates: Sequence[Case]) -> list[Case]:
    """Some of the candidates, which try all that any does: each the most new, for the ranks that it takes."""
    tried = [tries(*candidate) for candidate in candidates]
    ranks = [math.prod(layout.get(axis, 1) for axis in ("tp", "pp", "dp")) for _, layout in candidates]
    missing, chosen = set().union(*tried), list[Case]()
    while missing:
        best = max(range(len(tried)), key=lambda n: len(tried[n] & missing) / math.sqrt(ranks[n]))
        missing -= tried[best]
        chosen.append(candidates[best])
    return chosen


def can_train(case: tuple[Any, ...]) -> bool:
    """True for values of KEYS on two to eight ranks, which set nothing that they have no use for."""
    tp, sequence_parallel, pp, vp, pipeline, dp, zero, _ = case
    is_plain = vp == 1 and pipeline == "1f1b"
    is_piped = vp == 1 or pipeline == "1f1b"
    is_used = sequence_parallel <= (tp > 1) and (zero == 0 or (dp > 1 and (zero == 2 or pp == 1)))
    return 2 <= tp * pp * dp <= 8 and is_used and (is_piped if pp > 1 else is_plain)


LAYOUTS = [
    dict(zip(KEYS, case, strict=True))
    for case in product(
        *((1, 2, 4), (False, True), (1, 2), (1, 2), ("1f1b", "gpipe", "zb_h1"), (1, 2, 4)),
        *((0, 2, 3), ("none", "selective", "full")),
    )
    if can_train(case)
]
CASES: list[Case] = [
    *covering([(run, layout) for run in RUNS for layout in LAYOUTS]),
    *((run, {"tp": 8, "sequence_parallel": True}) for run in (RUNS[2], RUNS[8])),
    *((run, {"dp": 8, "zero": 3}) for run in (RUNS[5], RUNS[11])),
]
MIXTURES = ["mixtral fp32", "deepseek bf16", "qwen2_moe fp32", "mixtral bf16"]
MIXTURE_LAYOUTS: list[Layout] = [
    {"dp": 2, "ep": 2},
    {"tp": 2, "dp": 2, "ep": 2, "sequence_parallel": True},
    {"dp": 4, "ep": 2, "zero": 3},
    {"tp": 2, "dp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True},
    {"tp": 8},
    {"tp": 4, "sequence_parallel": True},
    {"dp": 8, "ep": 4},
    {"dp": 4, "ep": 4},
    {"pp": 2, "dp": 2, "ep": 2},
    {"pp": 2, "dp": 2, "ep": 2, "pipeline": "zb_h1"},
    {"tp": 2, "ep": 2, "expert_tp": 1, "sequence_parallel": True},
    {"dp": 4, "ep": 2, "zero": 2},
    {"dp": 2, "ep": 2, "recompute": "full"},
    {"tp": 2, "dp": 2, "zero": 3},
    {"tp": 2, "pp": 2, "dp": 2, "ep": 2, "recompute": "selective"},
]
MIXTURE_CASES = covering(
    [
        *((run, {"tp": 4, "sequence_parallel": True}) for run in ("qwen3 fp32", "gemma3 fp32")),
        *(("qwen3 bf16", a) for a in ({"tp": 8}, {"tp": 2, "dp": 2, "pp": 2}, {"dp": 4, "zero": 3})),
        *(
            (MIXTURES[(i + shift) % 4], layout)
            for i, layout in enumerate(MIXTURE_LAYOUTS)
            for shift in (0, 1)
        ),
    ]
)
LONG_LAYOUTS: list[Layout] = [
    {"cp": 4},
    {"cp": 2, "dp": 2, "zero": 3},
    {"cp": 4, "dp": 2, "zero": 2},
    {"cp": 2, "pp": 2, "pipeline": "zb_h1"},
    {"cp": 2, "pp": 2, "dp": 2, "recompute": "full"},
    {"cp": 2, "tp": 2, "pp": 2, "recompute": "selective", "sequence_parallel": True},
    {"cp": 4, "tp": 2},
    {"cp": 1, "tp": 4, "sequence_parallel": True},
]
LONG_MIXTURE_LAYOUTS: list[Layout] = [
    {"cp": 2, "ep": 2},
    {"cp": 2, "dp": 2, "ep": 4},
    {"cp": 2, "tp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True},
    {"cp": 2, "dp": 2, "ep": 2, "zero": 3},
    {"cp": 2, "pp": 2, "ep": 2, "pipeline": "zb_h1"},
    {"cp": 2, "tp": 2, "ep": 2, "sequence_parallel": True, "recompute": "full"},
    {"cp": 2, "dp": 4, "ep": 4, "zero": 2},
    {"cp": 2, "pp": 2, "dp": 2, "ep": 2, "recompute": "selective"},
]
LONG_CASES: list[Case] = [
    (f"{runs[i % len(runs)]} long", layout)
    for runs, layouts in (
        (["gpt2 fp32", "gpt2 bf16 dropout"], LONG_LAYOUTS),
        (
            [
                *("gemma3 bf16", "gemma2 fp32", "llama bf16"),
                *("gemma3 fp32", "gemma2 bf16 dropout", "llama fp32 dropout"),
            ],
            LONG_LAYOUTS,
        ),
        (MIXTURES, LONG_MIXTURE_LAYOUTS),
    )
    for i, layout in enumerate(layouts)
]
OTHER_CASES: list[Case] = [
    *((f"mixtral {dtype}", {"pp": 2, "vp": 2, "dp": 2, "ep": 2}) for dtype in ("fp32", "fp64")),
    *((f"llama {dtype} long", {"cp": 2, "pp": 2, "vp": 2}) for dtype in ("bf16", "fp64")),
    *(
        (f"llama bf16 long {word}", {"cp": 2, "tp": 2, "sequence_parallel": True})
        for word in ("muon", "lora")
    ),
    ("mixtral fp32 muon", {"tp": 2, "dp": 2, "ep": 2, "zero": 2}),
]
