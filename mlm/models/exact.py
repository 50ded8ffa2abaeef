"""Forms of a model's modules whose sums have one order at every layout (mlm/parallel/exact.py).

A module without a form here is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.models.attention import SelfAttention
from mlm.models.backbone import LearnedTable, Transformer
from mlm.models.heads import GatherOutputs, MaskedTokenHead, PlainLinear, VocabularyBias
from mlm.models.llama.attention import GroupedQueryAttention, HeadNorm
from mlm.models.llama.gated import GatedMLP
from mlm.models.llama.mixture import MixtureOfExperts
from mlm.models.llama.model import LlamaLayer
from mlm.models.norms import LayerNorm, RMSNorm
from mlm.models.rotary import Rotary
from mlm.models.transformer import MLP, TransformerLayer
from mlm.parallel.collectives import gather_rows
from mlm.parallel.compute_state import ComputeState
from mlm.parallel.exact import ExactRegion, Products, WithGradient
from mlm.parallel.exact_loss import ExactLoss
from mlm.parallel.expert.experts import Experts
from mlm.parallel.expert.router import Router, Routing
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.low_rank import LowRankAdapter
from mlm.parallel.matmul import GroupedRows
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.util.errors import UserError

multiply: Callable[..., Any] = Products.apply
with_gradient: Callable[..., Any] = WithGradient.apply


def _spread(vector: Tensor, x: Tensor, sum_rows: Callable[[Tensor, torch.dtype], Tensor]) -> Tensor:
    """Expand a vector to the rows of `x`, in its dtype: [F] -> […, F]; `sum_rows` reduces its gradient."""
    y = vector.detach().to(x.dtype).expand(x.shape)
    return with_gradient(vector, y, lambda dy: sum_rows(dy, vector.dtype))  # type: ignore[no-any-return]


def _rows_of(
    table: nn.Parameter, rows: Tensor, axes: Sequence[Axis], take: Callable[[Tensor], None] | None = None
) -> Tensor:
    """Rows of a table, [S, B] int64 -> [S, B, H]; its gradient adds the rows of all ranks of `axes` in order.

    For a table tied to the output layer a pipeline adds the two terms of the gradient last, and so does every
    layout here: `take` receives this term.
    """
    size, dtype = len(table), table.dtype

    def gradient(dy: Tensor) -> Tensor | None:
        numbers, dy = rows, dy.to(dtype)
        for axis in axes:  # each rank adds all ranks' rows, which are fewer than the table's
            numbers, dy = gather_rows(numbers, axis), gather_rows(dy, axis)
        dw = torch.ops.aten.embedding_dense_backward(dy, numbers, size, -1, False)
        return dw if take is None else take(dw)

    return with_gradient(table, F.embedding(rows, table.detach()), gradient)  # type: ignore[no-any-return]


def _column(layer: ColumnParallelLinear, region: ExactRegion, x: Tensor) -> tuple[Tensor, ...]:
    y: tuple[Tensor, ...] = multiply(layer.weight, layer.bias, region, False, x)
    return y if layer.lora is None else layer.lora(x, y)


def _row(layer: RowParallelLinear, region: ExactRegion, parts: Sequence[Tensor]) -> Any:
    y = multiply(layer.weight, None, region, True, *parts)
    y = y if layer.bias is None else y + _spread(layer.bias, y, region.unsplit.sum_rows)
    return y if layer.lora is None else layer.lora(parts, y)


def _unsplit(layer: PlainLinear, region: ExactRegion, x: Tensor) -> Any:
    return multiply(layer.weight, layer.bias, region.unsplit, False, x)[0]


def _adapter(adapter: LowRankAdapter, region: ExactRegion, x: Any, y: Any) -> Any:
    """Add the adapter's products to its layer's: by column y is in parts, by row x."""
    count, n = len(adapter.rows.adapted), region.terms
    if adapter.dropout and adapter.stream is not None:
        x = adapter.drop(x if adapter.by_column else torch.cat(x, -1), adapter.stream)
        x = x if adapter.by_column else x.chunk(n, -1)
    if not adapter.by_column:
        z = multiply(adapter.a, None, region, True, *x)
        return y + multiply(adapter.b, None, region.unsplit, True, z * adapter.scale)
    z = multiply(adapter.a, None, region.unsplit, True, x) * adapter.scale  # [S, B, p r]
    # B of all rows of the layer, [O/t, p r]: 0 for parts without an adapter, and for z of the other parts
    blocks, rank = adapter.b.unflatten(0, (-1, count, adapter.size)).unbind(1), adapter.b.shape[1]
    padded = [F.pad(b, (i * rank, (count - 1 - i) * rank)).movedim(-1, 0) for i, b in enumerate(blocks)]
    changes = multiply(adapter.rows.place(padded).t(), None, region, False, z)
    return [part + change for part, change in zip(y, changes, strict=True)]


def _table(table: LearnedTable, region: ExactRegion, rows: range | Tensor) -> Any:
    if isinstance(rows, range):
        rows = torch.arange(rows.start, rows.stop).unsqueeze(1)
    axes = [region.tp] if region.sequence_parallel else []  # ranks read different rows
    return _rows_of(table.weight, rows + table.offset, axes)


def _look_up(table: VocabParallelEmbedding, region: ExactRegion, tokens: Tensor) -> Tensor:
    rows = tokens - table.first
    is_foreign = (rows < 0) | (rows >= table.weight.shape[0])
    y = _rows_of(table.weight, rows.masked_fill(is_foreign, 0), [region.cp], table.add_lookup)
    # a sum of one number and zeros is exact in any order; on one rank -0 becomes 0, too
    return table.reduce_output(y.masked_fill(is_foreign.unsqueeze(-1), 0.0) + 0.0)


def _loss(table: VocabParallelEmbedding, region: ExactRegion, *inputs: Tensor | None) -> Any:
    return ExactLoss.apply(table, region, table.weight, *inputs)  # type: ignore[no-untyped-call]


def _norm(norm: LayerNorm | RMSNorm, region: ExactRegion, x: Tensor) -> Tensor:
    assert norm.eps is not None
    wide, size = x.to(torch.promote_types(x.dtype, torch.float32)), x.shape[-1:]
    weight: Any = 1 + norm.weight if norm.zero_centered else norm.weight
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    # kernels compute each row alone
    y: Tensor = (F.layer_norm if isinstance(norm, LayerNorm) else F.rms_norm)(wide, size, eps=norm.eps)
    # all heads, which tp splits, share the weight of a head norm
    sum_rows = region.sum_heads if isinstance(norm, HeadNorm) else region.unsplit.sum_rows
    y = y * _spread(weight, y, sum_rows)
    return (y if bias is None else y.add_(_spread(bias, y, sum_rows))).to(x.dtype)


def _inner(mlp: MLP, region: ExactRegion, parts: Sequence[Tensor]) -> Any:
    return [type(mlp).inner(mlp, part) for part in parts]


def _project(attention: GroupedQueryAttention, region: ExactRegion, x: Tensor, rotary: Rotary | None) -> Any:
    q, kv = attention.query(x), attention.kv(x)
    if attention.query_norm is None:
        return [attention.join(*part, rotary) for part in zip(q, kv, strict=True)]
    return attention.parts(attention.join(torch.cat(q, -1), torch.cat(kv, -1), rotary), len(q))


def _attend(
    attention: SelfAttention,
    region: ExactRegion,
    parts: Sequence[Tensor],
    stream: Any,
    spans: Any,
    first: int,
) -> Any:
    heads = attention.out.weight.shape[1] // attention.head_dim // len(parts)
    attend = partial(type(attention).attend, attention, stream=stream, spans=spans)
    return [attend(part, first_head=first + i * heads) for i, part in enumerate(parts)]


def _enter(mixture: MixtureOfExperts, region: ExactRegion, x: Tensor, tp: Axis) -> Any:
    """All rows, on which all tp ranks compute the same without sums; with expert_tp=1 the rank's rows."""
    return GatherOutputs.apply(x, tp) if region.sequence_parallel else x  # type: ignore[no-untyped-call]


def _leave(mixture: MixtureOfExperts, region: ExactRegion, y: Tensor, tp: Axis) -> Any:
    """This rank's rows: [S, …] -> [S/t, …]."""
    rows = y.detach().chunk(tp.size)[tp.rank]
    return with_gradient(y, rows, partial(gather_rows, axis=tp)) if region.sequence_parallel else y


def _router(router: Router, region: ExactRegion, x: Tensor) -> Routing:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return router.route(multiply(router.weight, router.logit_bias, region.unsplit, False, wide)[0])


def _experts(experts: Experts, region: ExactRegion, x: Tensor, runs: GroupedRows) -> Tensor:
    """One product per expert and micro-batch, with rows in the order of their tokens.

    With ep the rows of several micro-batches arrive together, each from its source. The gradients of each
    source have a tree, and trees are added where dp would add them (exact_gradients.py).
    """
    tp, sources = experts.expert_axes.tp, runs.sources or [runs.counts]
    # the rows of a micro-batch come from all its cp ranks, with expert_tp=1 of tp too, in the order of tokens
    ranks = region.cp.size * region.tp.size // tp.size
    groups = [sources[i : i + ranks] for i in range(0, len(sources), ranks)]
    counts = [[sum(rows) for rows in zip(*group, strict=True)] for group in groups]

    def by_expert(name: str) -> Iterator[tuple[ExactRegion, Sequence[Tensor]]]:
        """Yield for each expert the region of a weight's products, and the weight for each source."""
        weight, copy = getattr(experts, name), getattr(experts.compute, f"{name}_copy")
        takes = [partial(experts.add_gradients[name], source) for source in range(len(groups))]
        weights = [with_gradient(weight, weight.detach(), take).unbind() for take in takes]
        for i, of_expert in enumerate(zip(*weights, strict=True)):
            state = ComputeState(weight_copy=None if copy is None else copy[i])
            yield ExactRegion(tp, False, compute=state, rows_vary=True), of_expert

    sizes = [rows for of_expert in zip(*counts, strict=True) for rows in of_expert]
    xs, ys = iter(x.split(sizes)), list[Tensor]()
    for (up, up_weights), (down, down_weights) in zip(by_expert("up"), by_expert("down"), strict=True):
        for up_weight, down_weight in zip(up_weights, down_weights, strict=True):
            inner = map(experts.inner, multiply(up_weight, None, up, False, next(xs)))
            ys.append(multiply(down_weight, None, down, True, *inner))
    return torch.cat(ys)


FORMS: dict[type[nn.Module], dict[str, Any]] = {
    ColumnParallelLinear: {"forward": _column},
    RowParallelLinear: {"forward": _row},
    PlainLinear: {"forward": _unsplit},
    LowRankAdapter: {"forward": _adapter},
    LearnedTable: {"forward": _table},
    VocabParallelEmbedding: {"forward": _look_up, "exact_loss": _loss},
    **{kind: {"forward": _norm} for kind in (LayerNorm, RMSNorm, HeadNorm)},
    **{kind: {"inner": _inner} for kind in (MLP, GatedMLP)},
    SelfAttention: {"attend": _attend},
    GroupedQueryAttention: {"project": _project, "attend": _attend},
    Router: {"forward": _router},
    Experts: {"forward": _experts},
    MixtureOfExperts: {"enter": _enter, "leave": _leave},
    **{kind: {} for kind in (TransformerLayer, LlamaLayer, MaskedTokenHead, VocabularyBias)},
    **{kind: {} for kind in (nn.ModuleDict, nn.Identity)},
}
"""Exact methods of each type of module, with module and region as first arguments; other methods have no sums
that depend on the layout. Model kinds are checked by COVERED of runs/checks.py."""


def exact_axes(ctx: ParallelContext, parts: tuple[int, int], leaves: int) -> ParallelContext:
    """Axes of a run whose sums over tp and cp have `parts` terms, and over micro-batches up to `leaves`.

    Raises UserError on a GPU, whose libraries are not verified.
    """
    if ctx.device.type == "cuda":
        raise UserError("exact: CPUs are covered, GPUs not yet; use dist.device=cpu or exact=0")
    # with 2^k threads kernels split tensors between whole SIMD vectors
    torch.set_num_threads(1 << (torch.get_num_threads().bit_length() - 1))
    axes = zip((ctx.tp, ctx.experts.tp, ctx.cp, ctx.dp), (parts[0], *parts, leaves), strict=True)
    tp, expert_tp, cp, dp = (replace(axis, exact_parts=terms) for axis, terms in axes)
    return replace(ctx, tp=tp, cp=cp, dp=dp, experts=replace(ctx.experts, tp=expert_tp))


def make_exact(model: Transformer) -> None:
    """Replace methods of a model's modules by exact forms. Raises UserError for a module without them."""
    region = ExactRegion(model.tp, model.sequence_parallel, model.cp)
    for name, module in model.named_modules():
        kind = type(module)
        if module is not model and kind not in FORMS:
            problem = f"{name} is a {kind.__name__}, whose sums have no order of their own"
            raise UserError(f"exact: {problem}; use exact=0")
        computes = replace(region, compute=getattr(module, "compute", region.compute))
        for method, form in FORMS.get(kind, {}).items():
            setattr(module, method, partial(form, module, computes))
