"""One training step of each precision against the same step in float64 on the CPU: loss, every gradient.

Initial weights and samples are functions of the seed, so both sides have the same. Three further steps
compare losses, which see the optimizer, clipping and the loss scale of the device. Of a mixture the narrow
formats choose other experts where two are almost equal: there the products of experts are compared alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from bench.equality import Reference
from torch import Tensor

from gpu.child import Case
from gpu.facts import compiler_problem
from gpu.shapes import Change
from mlm.data.config import DataConfig
from mlm.data.sampler import Loader, MicroBatch
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig, ScheduleConfig
from mlm.optim.precision import DTYPES
from mlm.parallel.config import ParallelConfig
from mlm.parallel.expert.experts import grouped_linear
from mlm.parallel.matmul import Runs
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.runs.corpora import train_dataset
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from mlm.verify.verdict import FLOOR, TOLERANCES

STEPS = 4
DROPOUT = 0.1
SAMPLES, MICRO_BATCH = 16, 8
EXPERTS_BOUND = 2**-7
"""Of a product of bf16 inputs, rounded to bf16 once, as a fraction of the largest."""
LATER = 10
"""Bound of later losses, in units of the first's: weights have moved by then."""
PRECISIONS = ("fp64", "fp32", "tf32", "bf16", "fp16", "fp8")
KINDS = {"gpt2": PRECISIONS, "bert": PRECISIONS, "llama": PRECISIONS[:-1], "mixtral": PRECISIONS[:2]}
"""Precisions of each family; a mixtral is a llama with experts."""
SWITCHES: dict[str, dict[str, Change]] = {
    "gpt2": {
        "fuse_accumulation=true": lambda config: replace(config, fuse_accumulation=True),
        "compile=true cuda_graphs=true": lambda config: replace(config, compile=True, cuda_graphs=True),
    },
    "bert": {"attention=flash": lambda config: replace(config, attention="flash")},
}
"""Settings that are off until a GPU has shown them: two micro-batches a step, some samples padded."""
NARROW_FLOOR = 1e-2
"""FLOOR of `mlm parity` for tf32 and half precision. Gradients of a BERT's sentence order are sums that
cancel to 2e-3 of the model's largest, so that they hold a fifth of rounding."""


def model_of(kind: str, *, quick: bool) -> ModelConfig:
    options: dict[str, Any] = {"num_kv_heads": 1 if quick else 2} if kind in ("llama", "mixtral") else {}
    if kind == "mixtral":
        options |= {"num_experts": 4, "experts_per_token": 2}
    if kind == "deepseek":  # latent attention, groups of experts, one that all tokens go through
        options = {
            "head_dim": 16,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "rope_head_dim": 8,
            "v_head_dim": 16,
        }
        options |= {"num_experts": 8, "experts_per_token": 3, "expert_ffn_size": 32, "shared_experts": 1}
        options |= {"router_scores": "sigmoid", "router_groups": 4, "router_top_groups": 2, "balance": "bias"}
    return ModelConfig(
        kind="llama" if options else kind,
        options=options,
        activation="silu" if options else "gelu_tanh",
        token_types=2 if kind == "bert" else 0,
        num_layers=2 if quick else 4,
        hidden_size=32 if quick else 256,
        num_heads=2 if quick else 4,
        max_positions=16 if quick else 128,
        vocab_size=64 if quick else 1000,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def config_of(kind: str, precision: str, *, quick: bool) -> PretrainConfig:
    model = model_of(kind, quick=quick)
    return PretrainConfig(
        name="agree",
        out="",
        model=model,
        parallel=ParallelConfig(),
        compile=False,
        schedule=ScheduleConfig(decay="constant", warmup_steps=0),
        precision=PrecisionConfig(
            dtype=precision if precision in DTYPES else "fp32",  # type: ignore[arg-type]
            initial_loss_scale=2.0**14,
        ),
        data=DataConfig(kind="synthetic", seq_length=model.max_positions),
        train=TrainConfig(global_batch_size=SAMPLES, micro_batch_size=MICRO_BATCH, steps=STEPS),
    )


def batches_of(config: PretrainConfig, *, pin_memory: bool = False) -> list[list[MicroBatch]]:
    samples = train_dataset(config, STEPS * SAMPLES)
    with Loader(
        samples,
        consumed_samples=0,
        global_batch_size=SAMPLES,
        micro_batch_size=MICRO_BATCH,
        rank=0,
        size=1,
        pin_memory=pin_memory,
    ) as loader:
        return list(loader)


def train(config: PretrainConfig, device: str) -> tuple[Reference, list[float]]:
    index = 0 if device == "cuda" else None
    trainer: Trainer[MicroBatch] = Trainer(config, ParallelContext(device=torch.device(device, index)))
    losses, first = [], None
    for batches in batches_of(config):
        parts = trainer.compute_gradients(batches)
        if first is None:
            scale = trainer.scaler.scale
            gradients = {
                shard.name: (shard.without_padding(grad) / scale).detach().double().cpu()
                for shard in trainer.shards
                if (grad := shard.parameter.grad) is not None
            }
            first = Reference(float(parts[: trainer.objective.num_losses].sum()), gradients)
        losses.append(trainer.mean_loss(trainer.clip_and_update(parts)))
    assert first is not None
    return first, losses


def run(case: Case) -> None:
    if case.is_cuda:
        torch.cuda.set_device(0)
    for kind, precisions in KINDS.items():
        expected = train(config_of(kind, "fp64", quick=case.quick), "cpu")
        for precision in precisions if case.is_cuda else [p for p in precisions if p in ("fp32", "bf16")]:
            compare(case, kind, precision, *expected)
        for words, change in SWITCHES.get(kind, {}).items():
            if "compile" in words and (not case.is_cuda or compiler_problem()):
                continue  # compiling for a CPU takes minutes
            compare(case, kind, "bf16", *expected, words=words, change=change)
    masks(case)
    muon(case)
    experts(case)


def masks(case: Case) -> None:
    """Training as it is by default: with dropout, whose masks are the same everywhere, and compiled."""
    expected = train(with_dropout(config_of("gpt2", "fp64", quick=case.quick)), "cpu")
    for compiled in (False, True) if case.is_cuda and not compiler_problem() else (False,):
        compare(
            case,
            "gpt2",
            "bf16",
            *expected,
            words=f"model.hidden_dropout={DROPOUT} compile={str(compiled).lower()}",
            change=lambda config, compiled=compiled: replace(with_dropout(config), compile=compiled),
        )


def muon(case: Case) -> None:
    """The update of matrices, whose iterations are in bf16 on a GPU unless told otherwise."""

    def by_muon(config: PretrainConfig, dtype: str) -> PretrainConfig:
        settings = replace(config.optimizer.muon, dtype=dtype)  # type: ignore[arg-type]
        return replace(config, optimizer=replace(config.optimizer, kind="muon", muon=settings))

    expected = train(by_muon(config_of("gpt2", "fp64", quick=case.quick), "auto"), "cpu")
    for precision, dtype in (("fp32", "fp32"), ("bf16", "auto")):
        compare(
            case,
            "gpt2",
            precision,
            *expected,
            words=f"optimizer=muon optimizer.muon.dtype={dtype}",
            change=partial(by_muon, dtype=dtype),
        )


def experts(case: Case) -> None:
    """Products of experts in bf16, one kernel for all of them on a GPU: output and both gradients."""
    generator = torch.Generator().manual_seed(1)
    counts = [37, 0, 1, 218]  # unequal, none, one
    rows, weights, dy = (
        torch.randn(size, generator=generator).bfloat16()
        for size in ((sum(counts), 256), (len(counts), 512, 256), (sum(counts), 512))
    )
    parts = []
    for device, dtype in (("cpu", torch.float64), (case.device, torch.bfloat16)):
        leaves = [leaf.to(device, dtype).requires_grad_() for leaf in (rows, weights)]
        y = grouped_linear(*leaves, Runs(counts))
        y.backward(dy.to(device, dtype))
        parts.append([part.detach().double().cpu() for part in (y, *(leaf.grad for leaf in leaves))])
    for name, expected, found in zip(("output", "input gradient", "weight gradient"), *parts, strict=True):
        by = float((found - expected).abs().max() / expected.abs().max())
        case.row("products of experts in bf16", of=name, **{"differs by": by, "allowed": EXPERTS_BOUND})
        if not by <= EXPERTS_BOUND:
            case.problem(f"products of experts, {name}: differs by {by:.1e}, allowed {EXPERTS_BOUND:.0e}")


def with_dropout(config: PretrainConfig) -> PretrainConfig:
    """The same run with dropout of hidden states; attention's kernels draw masks of their own."""
    return replace(config, model=replace(config.model, hidden_dropout=DROPOUT))


def compare(
    case: Case,
    kind: str,
    precision: str,
    reference: Reference,
    expected_losses: Sequence[float],
    *,
    words: str = "",
    change: Change = lambda config: config,
) -> None:
    """One precision: a row, and a problem where it differs by more than its bounds.

    `change` makes other settings, which `words` name.
    """
    name = " ".join(filter(None, (kind, precision, words)))
    try:
        found, losses = train(change(config_of(kind, precision, quick=case.quick)), case.device)
    except (RuntimeError, UserError) as error:
        case.problem(f"{name}: {type(error).__name__}: {str(error).splitlines()[0]}")
        return
    bounds, differences = TOLERANCES[precision], differences_of(found.gradients, reference.gradients)
    floor = FLOOR if precision in ("fp64", "fp32") else NARROW_FLOOR
    least = floor * max(largest for _, largest, _ in differences)
    by, worst = max((off / max(largest, least), name) for name, largest, off in differences)
    first = abs(found.loss - reference.loss)
    later = max(abs(a - b) for a, b in zip(losses, expected_losses, strict=True))
    case.row(
        "against float64 on the CPU",
        model=kind,
        precision=precision,
        settings=words,
        loss=found.loss,
        **{
            "loss differs by": first,
            "allowed": bounds.loss,
            "worst gradient by": by,
            "of": worst,
            "allowed there": bounds.gradient,
            "later losses by": later,
        },
    )
    if not (first <= bounds.loss and by <= bounds.gradient and later <= LATER * bounds.loss):
        case.problem(
            f"{name}: the loss differs by {first:.1e} (allowed {bounds.loss:.0e}), the gradient of {worst} "
            f"by {by:.1e} ({bounds.gradient:.0e}), later losses by {later:.1e} ({LATER * bounds.loss:.0e})"
        )


def differences_of(
    found: Mapping[str, Tensor], reference: Mapping[str, Tensor]
) -> list[tuple[str, float, float]]:
    """Of each gradient: its name, its largest element, the largest difference (infinite without it)."""
    out = []
    for name, expected in reference.items():
        gradient = found.get(name, torch.full_like(expected, torch.inf))
        off = (gradient - expected).abs().nan_to_num(nan=torch.inf)
        out.append((name, float(expected.abs().amax()), float(off.amax())))
    return out
