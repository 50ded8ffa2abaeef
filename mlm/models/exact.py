"""The modules of a model whose sums are made in one order at every layout (mlm/parallel/exact.py).

A module that has no form here is an error: no bits are promised that were not thought of.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mlm.models.attention import SelfAttention
from mlm.models.backbone import LearnedTable, Transformer
from mlm.models.bert.model import BERT
from mlm.models.documents import Spans
from mlm.models.gpt2.model import GPT2
from mlm.models.heads import GatherOutputs, MaskedTokenHead, PlainLinear, VocabularyBias
from mlm.models.llama.attention import GroupedQueryAttention, HeadNorm
from mlm.models.llama.gated import GatedMLP
from mlm.models.llama.mixture import MixtureOfExperts
from mlm.models.llama.model import Llama, LlamaLayer
from mlm.models.norms import LayerNorm, RMSNorm
from mlm.models.roberta.model import RoBERTa
from mlm.models.rotary import Rotary
from mlm.models.transformer import MLP, TransformerLayer
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.exact import (
    ColumnProducts,
    KeepRows,
    Lookup,
    Norm,
    Region,
    RowProducts,
    TableRows,
    WholeProducts,
)
from mlm.parallel.exact_experts import ExpertColumns, ExpertRows, SourceRuns
from mlm.parallel.exact_loss import exact_cross_entropy
from mlm.parallel.expert.experts import Experts
from mlm.parallel.expert.router import Router, Routing
from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
from mlm.parallel.linear import DEFAULT_COMPUTE
from mlm.parallel.low_rank import LowRankAdapter
from mlm.parallel.matmul import Runs
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.util.errors import UserError


def _column(layer: ColumnParallelLinear, region: Region, x: Tensor) -> tuple[Tensor, ...]:
    y: tuple[Tensor, ...] = ColumnProducts.apply(x, layer.weight, layer.bias, region, layer.compute)  # type: ignore[no-untyped-call]
    return y if layer.lora is None else layer.lora(x, y)


def _row(layer: RowParallelLinear, region: Region, parts: tuple[Tensor, ...]) -> Any:
    y = RowProducts.apply(layer.weight, layer.bias, region, layer.compute, *parts)  # type: ignore[no-untyped-call]
    return y if layer.lora is None else layer.lora(parts, y)


def _whole(layer: PlainLinear, region: Region, x: Tensor) -> Any:
    return WholeProducts.apply(x, layer.weight, layer.bias, region, layer.compute)  # type: ignore[no-untyped-call]


def _adapter(adapter: LowRankAdapter, region: Region, x: Any, y: Any) -> Any:
    """Add the adapter's products to those of its layer: y is in parts by column, x by row."""
    count, n = len(adapter.rows.adapted), region.terms
    if adapter.dropout and adapter.stream is not None:
        x = adapter.drop(x if adapter.by_column else torch.cat(x, -1), adapter.stream)
        x = x if adapter.by_column else x.chunk(n, -1)
    if not adapter.by_column:
        z = RowProducts.apply(adapter.a, None, region, DEFAULT_COMPUTE, *x)  # type: ignore[no-untyped-call]
        return y + WholeProducts.apply(z * adapter.scale, adapter.b, None, region, DEFAULT_COMPUTE)  # type: ignore[no-untyped-call]
    z = WholeProducts.apply(x, adapter.a, None, region, DEFAULT_COMPUTE) * adapter.scale  # type: ignore[no-untyped-call]
    blocks = adapter.b.unflatten(0, (-1, count, adapter.size)).unbind(1)  # each [blocks / t, size, r]
    changes = [
        ColumnProducts.apply(part.contiguous(), b.flatten(0, 1), None, region, DEFAULT_COMPUTE)  # type: ignore[no-untyped-call]
        for part, b in zip(z.chunk(count, -1), blocks, strict=True)
    ]
    size = min(adapter.size, changes[0][0].shape[-1])
    terms = [[x.unflatten(-1, (-1, size)) for x in xs] for xs in zip(*changes, strict=True)]
    return tuple(part + adapter.rows.place(xs) for part, xs in zip(y, terms, strict=True))


def _table(table: LearnedTable, region: Region, rows: range | Tensor) -> Any:
    if isinstance(rows, Tensor):
        return TableRows.apply(rows + table.offset, table.weight, region)  # type: ignore[no-untyped-call]
    # ranks read different rows: their sums over tp are of one number and zeros
    table.is_partial = region.sequence_parallel  # type: ignore[assignment]
    return LearnedTable.forward(table, rows)


def _look_up(table: VocabParallelEmbedding, region: Region, tokens: Tensor) -> Tensor:
    rows = tokens - table.first
    is_foreign = (rows < 0) | (rows >= table.weight.shape[0])
    y: Tensor = Lookup.apply(rows.masked_fill(is_foreign, 0), table.weight, table.add_lookup, region.cp)  # type: ignore[no-untyped-call]
    # of one number and zeros, so that any order of this sum will do; -0 becomes 0 on one rank, too
    return table.reduce_output(y.masked_fill(is_foreign.unsqueeze(-1), 0.0) + 0.0)


def _norm(norm: LayerNorm | RMSNorm, region: Region, x: Tensor) -> Any:
    weight: Any = 1 + norm.weight if norm.zero_centered else norm.weight
    bias = norm.bias if isinstance(norm, LayerNorm) else None
    # the weight of heads is the same for all, of which tp has split some
    sum_rows = region.sum_heads if isinstance(norm, HeadNorm) else region.sum_rows
    return Norm.apply(x, weight, bias, norm.eps, isinstance(norm, LayerNorm), sum_rows)  # type: ignore[no-untyped-call]


def _mlp(mlp: MLP, region: Region, x: Tensor) -> Any:
    return mlp.down(tuple(map(mlp.inner, mlp.up(x))))


def _attention(
    attention: SelfAttention,
    region: Region,
    x: Tensor,
    stream: DropoutStream | None,
    spans: Spans | None = None,
    reading: None = None,
    rotary: Rotary | None = None,
) -> Any:
    assert reading is None, "texts are continued by other models"
    if isinstance(attention, GroupedQueryAttention):
        q, kv = attention.query(x), attention.kv(x)
        parts = attention.parts(attention.join(torch.cat(q, -1), torch.cat(kv, -1), rotary), len(q))
    else:
        parts = attention.qkv(x)
    heads = attention.out.weight.shape[1] // attention.head_dim // len(parts)
    firsts = range(attention.first_head, attention.first_head + heads * len(parts), heads)
    return attention.out(
        tuple(attention.attend(part, stream, spans, first) for part, first in zip(parts, firsts, strict=True))
    )


def _as_it_is(x: Tensor, tp: Axis) -> Tensor:
    return x


def _router(router: Router, region: Region, x: Tensor) -> Routing:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return router.route(
        WholeProducts.apply(wide, router.weight, router.logit_bias, region, DEFAULT_COMPUTE)  # type: ignore[no-untyped-call]
    )


def _experts(experts: Experts, region: Region, x: Tensor, runs: Runs) -> Any:
    tp, sources = experts.expert_axes.tp, runs.sources or [runs.counts]
    # with expert_tp=1 the rows of a micro-batch come from all its tp ranks, in their order
    ranks = region.tp.size // tp.size
    groups = [sources[i : i + ranks] for i in range(0, len(sources), ranks)]
    units = SourceRuns([[sum(counts) for counts in zip(*group, strict=True)] for group in groups])
    parts = ExpertColumns.apply(x, experts.up, experts, units, tp)  # type: ignore[no-untyped-call]
    inner = [torch.cat(list(map(experts.inner, part.split(units.sizes)))) for part in parts]
    return ExpertRows.apply(experts.down, experts, units, tp, *inner)  # type: ignore[no-untyped-call]


FORMS: dict[type[nn.Module], Any] = {
    ColumnParallelLinear: _column,
    RowParallelLinear: _row,
    VocabParallelEmbedding: _look_up,
    LayerNorm: _norm,
    RMSNorm: _norm,
    HeadNorm: _norm,
    PlainLinear: _whole,
    LowRankAdapter: _adapter,
    LearnedTable: _table,
    MLP: _mlp,
    GatedMLP: _mlp,
    Router: _router,
    Experts: _experts,
    SelfAttention: _attention,
    GroupedQueryAttention: _attention,
}
"""`forward` of each type of module, after the module and its region."""
PLAIN = (
    *(GPT2, Llama, BERT, RoBERTa, TransformerLayer, LlamaLayer, MixtureOfExperts),
    *(MaskedTokenHead, VocabularyBias, nn.ModuleDict, nn.Identity),
)
"""Modules without sums that a layout changes."""


def exact_axes(ctx: ParallelContext, parts: tuple[int, int], leaves: int) -> ParallelContext:
    """The axes of a run whose sums over tp and cp have `parts` terms, and over micro-batches up to `leaves`.

    They are those given where `leaves` is 0.
    Raises UserError on a GPU, whose libraries nobody has asked whether they keep to it.
    """
    if not leaves:
        return ctx
    if ctx.device.type == "cuda":
        raise UserError("exact: CPUs are covered, GPUs not yet; use dist.device=cpu or exact=0")
    # kernels give each thread a part of a tensor, of whole vectors if there are 2^k of them
    torch.set_num_threads(1 << (torch.get_num_threads().bit_length() - 1))
    axes = zip((ctx.tp, ctx.experts.tp, ctx.cp, ctx.dp), (parts[0], *parts, leaves), strict=True)
    tp, expert_tp, cp, dp = (replace(axis, exact_parts=terms) for axis, terms in axes)
    return replace(ctx, tp=tp, cp=cp, dp=dp, experts=replace(ctx.experts, tp=expert_tp))


def make_exact(model: Transformer) -> None:
    """Give the modules of a model their forms. Raises UserError for one without."""
    region = Region(model.tp, model.sequence_parallel, model.cp)
    for name, module in model.named_modules():
        if type(module) in FORMS:
            module.forward = partial(FORMS[type(module)], module, region)
        elif type(module) not in PLAIN:
            kind = type(module).__name__
            raise UserError(f"exact: {name} is a {kind}, whose sums have no order of their own; use exact=0")
        if isinstance(module, MixtureOfExperts):
            # all ranks compute the same of all rows, and sum nothing
            is_split = region.sequence_parallel and module.axes.tp.size > 1
            ends: Any = (GatherOutputs.apply, KeepRows.apply) if is_split else (_as_it_is, _as_it_is)
            module.enter, module.leave = ends
        if isinstance(module, HeadNorm):
            module.is_partial = False  # its sum over tp is made in the backward pass
        if isinstance(module, VocabParallelEmbedding):
            module.exact_loss = partial(exact_cross_entropy, table=module, region=region)
