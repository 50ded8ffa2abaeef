"""Muon against torch.optim.Muon on whole matrices, and at each layout against one process."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mlm.convert.huggingface.families import layer_names
from mlm.models.config import LoraConfig
from mlm.models.lora import add_adapters
from mlm.optim import muon
from mlm.optim.adamw import apply, build_optimizer, moment
from mlm.optim.config import MuonConfig, OptimizerConfig, PrecisionConfig
from mlm.optim.matrices import map_stacks
from mlm.optim.muon import MOMENTUM, orthogonalise
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.sharding import parameter_shards
from mlm.plan.dry_run_rank import dry_run
from mlm.runs.checks import check_pretrain
from mlm.runs.config import PretrainConfig
from mlm.training.trainer import Trainer, build_model
from tests.models.tiny import tiny
from tests.ranks import run_on_ranks
from tests.slow import slow_but
from tests.training.test_layout_state import sizes, two_steps_more
from tests.training.test_trainer import SEQ, VOCAB, config, steps_of

LLAMA = {"num_kv_heads": 2, "qk_norm": True}
EXPERTS = {"num_experts": 4, "expert_ffn_size": 12, "shared_experts": 1, "balance": "bias"}


def spec_of(
    parallel: ParallelConfig | None = None, *, family: str = "gpt2", cautious: bool = False, **muon: Any
) -> PretrainConfig:
    """A tiny run in float64 with Muon; the gate and the up projection of a llama in four blocks."""
    spec = config()
    model = replace(spec.model, num_layers=2)
    if family != "gpt2":
        options = LLAMA if family == "llama" else LLAMA | EXPERTS
        model = tiny("llama", ffn_hidden_size=24, max_positions=SEQ, vocab_size=VOCAB, options=options)
    optimizer = replace(spec.optimizer, kind="muon", weight_decay=0.1, muon=MuonConfig(**muon))
    optimizer = replace(optimizer, cautious_decay=cautious)
    return replace(spec, model=model, optimizer=optimizer, parallel=parallel or ParallelConfig())


def weights_after(
    ctx: ParallelContext, spec: PretrainConfig, count: int = 5
) -> dict[str, tuple[Any, Tensor]]:
    """This rank's weights after some steps, with their regions of the whole."""
    trainer = Trainer(spec, ctx)
    steps_of(trainer, count)
    found = {}
    for s in trainer.shards:
        x = s.without_padding(s.parameter.detach())
        found[s.name] = (tuple(slice(o, o + n) for o, n in zip(s.offset, x.shape, strict=True)), x.clone())
    return found


FAMILIES: dict[str, dict[str, Any]] = {
    "gpt2": {},
    "llama": {"family": "llama", "cautious": True},
    "heads": {"family": "llama", "per_head": True},
    "experts": {"family": "experts"},
}
SHARDED = ParallelConfig(dp=4, ep=2, zero=3)
WHOLE_EXPERTS = ParallelConfig(tp=2, dp=2, ep=2, expert_tp=1, sequence_parallel=True, zero=2)
LAYOUTS = [
    ("gpt2", ParallelConfig(tp=2, pp=2, sequence_parallel=True)),
    ("gpt2", ParallelConfig(dp=3, zero=3)),
    ("gpt2", ParallelConfig(cp=2, dp=2, zero=2)),
    ("llama", ParallelConfig(tp=4, cp=2)),
    ("heads", ParallelConfig(tp=2, dp=2)),
    ("experts", SHARDED),
    ("experts", WHOLE_EXPERTS),
]


def trained(family: str, parallel: ParallelConfig | None = None, *, batch: int) -> PretrainConfig:
    spec = spec_of(parallel, **FAMILIES[family])
    return replace(spec, train=replace(spec.train, global_batch_size=batch))


@cache
def alone(family: str, batch: int) -> dict[str, tuple[Any, Tensor]]:
    return weights_after(shape_context(), trained(family, batch=batch))


@pytest.mark.parametrize(("family", "parallel"), slow_but({6}, LAYOUTS), ids=str)
def test_five_steps_give_the_weights_of_one_process(family: str, parallel: ParallelConfig) -> None:
    """float64, to 1e-10: with tp=4 two ranks hold each head of keys, with dp=3 rows of blocks of heads."""
    batch = 6 if parallel.dp == 3 else 8
    spec, whole, seen = trained(family, parallel, batch=batch), alone(family, batch), set()
    for rank in run_on_ranks(weights_after, spec, **sizes(parallel)):
        for name, (region, x) in rank.items():
            torch.testing.assert_close(x, whole[name][1][region], rtol=0, atol=1e-10)
            seen.add(name)
    assert seen == whole.keys()


def rows_apart(name: str, count: int, *, per_head: bool = False) -> list[Tensor]:
    """Rows of each matrix in a weight: heads of width 4; four blocks of six gates and as many of `up`."""
    rows = torch.arange(count)
    fused = {"qkv": (3, 4), "kv": (2, 4), "query": (1, 4), "up": (2, 6)}
    if "llama" not in name:
        fused.pop("up")
    parts, width = next((x for key, x in fused.items() if f".{key}." in name), (1, count))
    if per_head and width == 4:
        return list(rows.view(-1, width))
    return [block.flatten() for block in rows.view(-1, parts, width).unbind(1)]


CASES = [("gpt2", "match_rms_adamw", False), ("llama", "original", False), ("llama", "original", True)]


@pytest.mark.parametrize(("family", "scale", "per_head"), CASES)
def test_steps_are_those_of_torch_on_separate_matrices(family: str, scale: Any, per_head: bool) -> None:
    """PyTorch's iterations are in bfloat16: queries, keys, values, gates and the rest as weights apart."""
    spec = spec_of(family=family, scale=scale, dtype="bf16", per_head=per_head)
    model = build_model(
        replace(spec, precision=replace(spec.precision, dtype="fp32")),
        shape_context(),
        None,
        torch.device("cpu"),
        one_shape=True,
    )
    shards = list(parameter_shards(model.chunks[0], Axis("tp")))
    optimizer = build_optimizer(shards, spec.optimizer)
    matrices = [s for s in shards if s.name.startswith("layers.") and s.parameter.dim() == 2]
    parts = [
        (s.parameter, rows, nn.Parameter(s.parameter.detach()[rows].clone()))
        for s in matrices
        for rows in rows_apart(f"{family} {s.name}", len(s.parameter), per_head=per_head)
    ]
    options = {"lr": spec.optimizer.lr, "weight_decay": 0.1, "adjust_lr_fn": scale}
    theirs = torch.optim.Muon([x for _, _, x in parts], **options)
    torch.manual_seed(0)
    for _ in range(3):
        for s in shards:
            s.parameter.grad = torch.randn_like(s.parameter)
        for p, rows, x in parts:
            x.grad = p.grad[rows] if p.grad is not None else None
        optimizer.step()
        theirs.step()
    for p, rows, x in parts:
        torch.testing.assert_close(p[rows], x, rtol=0, atol=1e-6)
    assert len(parts) > len(matrices)


def test_adapters_of_fused_weights_are_those_of_separate_ones() -> None:
    """As of peft's `k_proj` and `v_proj`: by torch.optim.Muon, in bfloat16 both."""
    spec = spec_of(family="llama", dtype="bf16")
    model = build_model(
        replace(spec, precision=PrecisionConfig()), shape_context(), None, torch.device("cpu"), one_shape=True
    ).chunks[0]
    add_adapters(model, LoraConfig(rank=3), layer_names(spec.model))
    kv = model.layers["0"].attention.kv.lora  # rows of B: two heads of keys and values of width 4
    torch.manual_seed(1)
    for x in (kv.a, kv.b):  # no run has begun that gives them values
        nn.init.normal_(x)
    a, b = [kv.a.detach().chunk(2), kv.b.detach().unflatten(0, (2, 2, 4)).unbind(1)]
    apart = [nn.Parameter(x.flatten(0, -2).clone()) for x in (*a, *b)]
    theirs = torch.optim.Muon(apart, lr=spec.optimizer.lr, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    torch.manual_seed(0)
    kv.a.grad, kv.b.grad = torch.randn_like(kv.a), torch.randn_like(kv.b)
    split = *kv.a.grad.chunk(2), *kv.b.grad.unflatten(0, (2, 2, 4)).unbind(1)
    for x, grad in zip(apart, split, strict=True):
        x.grad = grad.reshape(x.shape).clone()
    build_optimizer(list(parameter_shards(model, Axis("tp"))), spec.optimizer).step()
    theirs.step()
    for x, mine in zip(apart, (*kv.a.chunk(2), *kv.b.unflatten(0, (2, 2, 4)).unbind(1)), strict=True):
        torch.testing.assert_close(mine.reshape(x.shape), x, rtol=0, atol=1e-6)


def test_cautious_decay_is_of_elements_that_the_update_moves_towards_zero() -> None:
    """A step without decay gives the update u: x - u - lr decay [u x >= 0] x, of fused matrices too."""
    spec = spec_of(family="llama")
    initial, moved, found = (
        build_model(spec, shape_context(), None, torch.device("cpu"), one_shape=True).chunks[0]
        for _ in range(3)
    )
    for model, decay in ((moved, 0.0), (found, 0.1)):
        torch.manual_seed(0)
        shards = [s for s in parameter_shards(model, Axis("tp")) if s.parameter.dim() > 1]
        for shard in shards:
            shard.parameter.grad = torch.randn_like(shard.parameter)
        settings = replace(spec.optimizer, weight_decay=decay, cautious_decay=True)
        build_optimizer(shards, settings).step()
    for x, y, z in zip(initial.parameters(), moved.parameters(), found.parameters(), strict=True):
        if x.dim() > 1:
            decays = (x - y) * x >= 0
            assert 0.3 < decays.double().mean() < 0.8  # padded rows are 0, which decays
            torch.testing.assert_close(z, y - spec.optimizer.lr * 0.1 * decays * x, rtol=0, atol=1e-10)


@pytest.mark.parametrize("shape", [(18, 18), (40, 17), (17, 40)])
def test_strips_of_symmetric_products_are_the_whole_ones(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int]
) -> None:
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    whole = orthogonalise(x, MuonConfig())
    monkeypatch.setattr(muon, "STRIP", 4)
    torch.testing.assert_close(orthogonalise(x, MuonConfig()), whole, rtol=0, atol=1e-12)


def test_iterations_make_a_matrix_nearly_orthogonal_and_keep_its_bases() -> None:
    """Singular values 0.68 to 1.14 (Jordan et al. 2024), singular vectors those of the matrix."""
    torch.manual_seed(0)
    x = torch.randn(24, 16, dtype=torch.float64)
    u, s, vt = torch.linalg.svd(x, full_matrices=False)
    found = u.t() @ orthogonalise(x, MuonConfig()) @ vt.t()
    assert found.diagonal().min() > 0.65
    assert found.diagonal().max() < 1.2
    assert (found - found.diagonal().diag()).abs().max() < 1e-12
    assert s.max() / s.min() > 3


def owned(ctx: ParallelContext, spec: PretrainConfig) -> int:
    optimizer: Any = Trainer(spec, ctx).optimizer
    return sum(len(bucket.over_tp.owned) for bucket in optimizer.buckets)


@pytest.mark.parametrize("parallel", [SHARDED, WHOLE_EXPERTS], ids=str)
def test_each_matrix_of_experts_is_orthogonalised_once(parallel: ParallelConfig) -> None:
    """Of a layer: 7 matrices, a router, and 3 of each of 4 experts; ranks have about as many."""
    each = run_on_ranks(owned, spec_of(parallel, family="experts"), **sizes(parallel))
    assert sum(each) == owned(shape_context(), spec_of(family="experts")) == 2 * (7 + 1 + 3 * 4)
    assert max(each) - min(each) <= 4


def test_matrices_in_several_threads_are_those_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits of a step's weights; and further threads begin with as many as before."""
    threads, weights = torch.get_num_threads(), []
    monkeypatch.setattr(muon, "STRIP", 4)  # strips, the last of them short
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            torch.manual_seed(0)
            module = nn.Module()
            module.layers = nn.ParameterList(nn.Parameter(torch.randn(18, n)) for n in (18, 40, 12))
            for p in module.layers:
                p.grad = torch.randn_like(p)
            build_optimizer(list(parameter_shards(module, Axis("tp"))), spec_of().optimizer).step()
            weights.append(list(module.layers))
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


@pytest.mark.parametrize(("masks", "cautious"), [(False, False), (True, False), (True, True)])
def test_a_step_scales_gradients_and_skips_overflows(masks: bool, cautious: bool) -> None:
    """float32, bits: halved before or by a factor; then an overflow changes neither weights nor momentum.

    So does the host that does not look at the overflow, which a GPU's does not.
    """
    found = []
    for before, factor in ((0.5, 1.0), (1.0, 0.5)):
        torch.manual_seed(0)
        model = nn.Module()
        model.layers = nn.ParameterList([nn.Parameter(torch.randn(8, 6))])
        model.token = nn.Parameter(torch.randn(5, 4))
        shards = list(parameter_shards(model, Axis("tp")))
        (matrix,) = (s for s in shards if s.name == "layers.0")
        optimizer: Any = build_optimizer(
            shards, OptimizerConfig(kind="muon", lr=0.1, cautious_decay=cautious)
        )
        optimizer.masks_overflows = masks
        states = []
        for overflow in (0.0, 1.0):
            for p in model.parameters():
                p.grad = torch.randn_like(p) * before
                p.grad[0, 0] *= torch.inf if overflow else 1.0
            apply(optimizer, shards, torch.tensor(factor), torch.tensor(overflow))
            tensors = [*model.parameters(), moment(optimizer, matrix, MOMENTUM)]
            states.append([x.detach().clone() for x in tensors])
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        found.append(states[0])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_matrices_of_one_shape_at_once_are_each_of_them() -> None:
    matrices = [torch.randn(shape).double() for shape in ((8, 6), (6, 8), (8, 6), (5, 5), (6, 8))]
    found = map_stacks(lambda x: orthogonalise(x, MuonConfig()), matrices)
    torch.testing.assert_close(found, [orthogonalise(x, MuonConfig()) for x in matrices])


@pytest.mark.parametrize("shape", [(3, 8, 6), (3, 6, 8)])
def test_a_stack_is_as_many_matrices(shape: tuple[int, int, int]) -> None:
    torch.manual_seed(0)
    settings = OptimizerConfig(kind="muon", lr=0.1, weight_decay=0.0)
    model, single = nn.Module(), [nn.Module() for _ in range(shape[0])]
    values, grads = torch.randn(2, *shape, dtype=torch.float64)
    for module, w, g in [(model, values, grads), *zip(single, values, grads, strict=True)]:
        module.layers = nn.ModuleDict({"0": nn.Module()})
        weight = module.layers["0"].weight = nn.Parameter(w.clone())
        weight.grad = g
        build_optimizer(list(parameter_shards(module, Axis("tp"))), settings).step()
    moved = torch.stack([x.layers["0"].weight for x in single])
    torch.testing.assert_close(model.layers["0"].weight, moved, rtol=0, atol=1e-12)
    assert (moved - values).abs().min() > 0


@pytest.mark.slow
def test_momentum_moves_through_layouts(tmp_path: Path) -> None:
    """Two steps at each layout in turn, a checkpoint between: the losses of one process."""
    layouts = [ParallelConfig(tp=2, dp=2, zero=3), ParallelConfig(pp=2), ParallelConfig(dp=2, zero=2)]
    losses = []
    for parallel in [*layouts, ParallelConfig()]:
        losses += run_on_ranks(two_steps_more, tmp_path, spec_of(parallel), **sizes(parallel))[0]
    assert losses == pytest.approx(steps_of(Trainer(spec_of(), shape_context()), len(losses)), abs=1e-10)


@pytest.mark.slow
def test_dry_run_counts_the_parts_and_results_that_travel() -> None:
    """Of bytes that a rank receives: over dp results alone where replicas hold all, over tp both ways."""
    sent = {}
    for parallel in (ParallelConfig(tp=2), ParallelConfig(dp=2), ParallelConfig(dp=2, zero=2)):
        spec = spec_of(parallel)
        counts = dry_run(replace(spec, precision=replace(spec.precision, dtype="fp32")), 0).counts
        found = {m: n for m, n in counts.messages.items() if m.operation == "all-to-all"}
        (axis,) = {m.axis for m in found}
        sent[axis, parallel.zero] = sum(found.values())
    assert sent == {("tp", 0): 2, ("dp", 0): 1, ("dp", 2): 2}


@pytest.mark.parametrize(
    ("typed", "problem"),
    [
        ({"muon": MuonConfig(matrices="blocks.*")}, "optimizer.muon.matrices=blocks.*: no matrix of"),
        ({"groups": ("*.bia lr=1",)}, "optimizer.groups: *.bia: no parameter of model.kind=gpt2"),
        ({"groups": ("*.bias lr=-1",)}, "optimizer.groups: '*.bias lr=-1' is not a pattern with settings"),
    ],
)
def test_patterns_that_name_nothing_are_errors(typed: dict[str, Any], problem: str) -> None:
    spec = spec_of()
    spec = replace(spec, optimizer=replace(spec.optimizer, **typed))
    (found,) = [str(p) for p in check_pretrain(spec, world_size=1, local_devices=None)]
    assert problem in found
