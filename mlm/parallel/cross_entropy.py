"""Vocabulary projection and cross-entropy in one, over chunks of tokens, with the vocabulary split over tp.

The logits of a micro-batch are V/H times its activations. Only a chunk of them exists at a time: it is
projected, normalised, turned into its gradient in place and used for both gradient products, all in the
forward pass. Nothing is computed twice, and of size V only the weight's gradient is kept: until the backward
pass, or in the sum over micro-batches alone (`VocabParallelEmbedding.fuses_grad`).

`differentiable_losses` is for objectives that are functions of sequences' likelihoods: each token's weight in
the loss is known later, so backward computes its logits again.

Shapes: R rows (tokens, S * B), H hidden, V padded vocabulary, t = tensor-parallel size.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from mlm.parallel.collectives import all_gather, copy_to_tp, gather_sequence
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.logits import (
    cap_logits,
    compiled_passes,
    is_argmax,
    loss_dtype,
    losses_and_gradient,
    softcap_slope,
    softmax_and_loss,
)
from mlm.parallel.matmul import (
    add_weight_gradient,
    onednn_is_faster,
    product,
    uses_onednn,
    weight_gradient,
)

HALF = (torch.bfloat16, torch.float16)
ORDERED = ("cpu",)
"""Devices on which gradients are always added in autograd's order."""
CHUNK_BYTES = {"cpu": (64 if onednn_is_faster() else 256) << 20, "cuda": 1 << 30}
"""Largest chunk of float32 logits. CPU: smaller chunks starve the products, larger ones leave the cache. With
oneDNN on a Zen 5 256 rows at V=50,304 are best; with MKL on an Intel Xeon 1,024 rows at H=768 take 0.94 of
the time of 256. GPU: few chunks, as a small model's step waits for the host's launches."""
HALF_CHUNKS = (512 << 20) // CHUNK_BYTES["cpu"]
"""Float32 chunks whose rows form one half-precision chunk on a CPU, where adding a chunk's weight gradient
takes three passes over the weight."""
HALF_BLOCK_BYTES = 4 << 20
"""Largest block of half-precision logits that is float32 at a time on a CPU, so that it stays in the cache.
2,048 rows at V=50,304 take a Zen 4 core 95 to 120 ms, and 140 to 150 in blocks of CHUNK_BYTES. Smaller blocks
are not faster, and over tp each block waits for the other ranks: 5 % of the loss's time with 2 MiB."""
OFF_LATTICE = 1.296875
"""Exact in bfloat16, and far from a power of two in the logarithm."""
ENTERED = {"_CopyToTPBackward": "copy_to_tp", "_GatherSequenceBackward": "gather_sequence"}
"""Operators that sum the gradients of hidden states over tp, by their nodes of autograd's graph."""
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0")


def linear_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    scale: Tensor,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Return scale * sum of the losses of scored rows, logits = hidden @ table.weight^T. Differentiable once.

    The gradient of `hidden` is summed over tp here: do not apply `copy_to_tp` or `gather_sequence` before.

    Args:
        hidden: [R, H] replicated over tp; [R/t, H], this rank's rows, if the table is sequence-parallel.
        labels: [R] int64, IGNORE_INDEX where not scored.
        table: the (tied) vocabulary-parallel weight [V/t, H].
        scale: 0-d float tensor, for instance loss_scale / tokens of the global batch.
        chunk_bytes: largest chunk of logits; the default suits the device.

    Returns:
        0-d float32 (float64 for float64 input).

    Raises:
        ValueError: `hidden` has already passed one of these, or its rows do not match the labels.
    """
    if table.exact_loss is not None:
        return table.exact_loss(hidden, labels, scale, None)[0]
    hidden = enter(hidden, labels, table)
    loss: Tensor = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, table.weight, None, labels, scale, table, chunk_bytes, False, table.fuses_now
    )[0]
    return loss


def cross_entropy_and_hits(
    hidden: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    bias: Tensor,
    scale: Tensor,
    chunk_bytes: int | None = None,
) -> tuple[Tensor, Tensor]:
    """As `linear_cross_entropy` with `bias` [V/t] on the logits; and scale * the number of hits, 0-d.

    A hit is a scored row whose label is the most probable token. Hits have no gradient.
    """
    if table.exact_loss is not None:
        return table.exact_loss(hidden, labels, scale, bias)
    hidden = enter(hidden, labels, table)
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, table.weight, bias, labels, scale, table, chunk_bytes, True, table.fuses_now
    )
    return result


def differentiable_losses(hidden: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Return the loss of each row, 0 where it is not scored: [R] float32 (float64 for float64), on all ranks.

    The gradient of `hidden` is summed over tp here. Arguments as of `linear_cross_entropy`.
    """
    hidden = enter(hidden, labels, table)
    losses: Tensor = _TokenLosses.apply(hidden, table.weight, labels, table)  # type: ignore[no-untyped-call]
    return losses


def enter(hidden: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Return the hidden states of all rows, whose gradients are summed over tp. Raises ValueError."""
    node = hidden.grad_fn
    while node is not None and node.name() in VIEWS:
        node = node.next_functions[0][0]
    if node is not None and node.name() in ENTERED:
        name = ENTERED[node.name()]
        raise ValueError(f"hidden: its gradient would be summed over tp twice; omit {name} before the loss")
    operator = gather_sequence if table.sequence_parallel else copy_to_tp
    hidden = operator(hidden, table.tp)
    if len(hidden) != len(labels):
        raise ValueError(f"hidden: {len(hidden)} rows over tp for {len(labels)} labels; give one to each")
    return hidden


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        scale: Tensor,
        table: VocabParallelEmbedding,
        chunk_bytes: int | None,
        counts_hits: bool,
        fuses_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        compute_weight = table.weight_in(hidden.dtype)
        compute_bias = None if bias is None else bias.to(hidden.dtype)
        half, dtype = hidden.dtype in HALF, loss_dtype(hidden.dtype)
        logit_factor, row_factor = split_scale(scale.to(dtype), hidden.dtype)
        kind = table.device_type or hidden.device.type
        rows, block_rows = chunk_rows(len(hidden), len(weight), kind, half=half, chunk_bytes=chunk_bytes)
        passes = compiled_passes() if table.compiled and half and bias is None and not counts_hits else None
        buffer = hidden.new_empty((block_rows, len(weight)), dtype=dtype) if half and passes is None else None
        # [H, V/t] where the product is faster that way round (matmul.weight_gradient), transposed at the end
        is_transposed, is_trained = uses_onednn(hidden, compute_weight), ctx.needs_input_grad[1]
        d_hidden = torch.empty_like(hidden)
        d_weight: Tensor | None = None  # in the dtype of losses, as it is summed over the chunks
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=loss_dtype(bias.dtype))
        loss = torch.zeros((), dtype=dtype, device=hidden.device)
        hits = torch.zeros_like(loss)
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = cap_logits(product(hidden[part], compute_weight, compute_bias), table)
            scored = (labels[part] != IGNORE_INDEX).unsqueeze(1)  # [rows, 1]: ignored rows get weight 0
            if counts_hits:
                hits += is_argmax(logits, labels[part], table).sum()
            losses, d_logits = losses_and_gradient(logits, labels[part], table, logit_factor, buffer, passes)
            loss += losses.sum()
            if d_bias is not None:
                d_bias += (d_logits * scored).sum(0, dtype=d_bias.dtype) * row_factor
            row_factors = (row_factor * scored).to(dtype)  # [rows, 1]
            torch.mul(product(d_logits, compute_weight.t()), row_factors, out=d_hidden[part])
            if is_trained:
                # the row scale multiplies H-wide operands rather than V-wide ones
                scaled_hidden = hidden[part] * (scored if half else (scale * scored).to(dtype))
                d_weight = add_chunk(d_weight, d_logits, scaled_hidden, weight.dtype, is_transposed)
        if d_weight is not None and is_transposed:
            d_weight = d_weight.t().contiguous()
        elif is_trained and d_weight is None:  # no rows
            d_weight = torch.zeros_like(weight, dtype=loss_dtype(weight.dtype))
        grad_factor: Tensor | None = row_factor if half else None  # d_weight has yet to be multiplied by it
        if fuses_grad and d_weight is not None:
            add_to_grad(table.weight, d_weight, grad_factor)
            d_weight = grad_factor = None
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight, d_bias, grad_factor)
        ctx.weight_dtype, ctx.fuses_grad = weight.dtype, fuses_grad
        hits = hits * scale
        ctx.mark_non_differentiable(hits)
        return loss * scale, hits

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight, d_bias, grad_factor = ctx.saved_tensors
        is_one = dy.device.type == "cpu" and dy.item() == 1.0  # reading it would synchronise on a GPU
        if ctx.fuses_grad and not is_one:
            torch._assert_async(dy == 1.0, "the weight's gradient was added as of a seed of 1")
        elif not is_one:
            d_hidden, grad_factor = d_hidden.mul_(dy), dy if grad_factor is None else grad_factor * dy
            d_bias = None if d_bias is None else d_bias.mul_(dy)
        if d_weight is not None:
            # both factors in one pass over [V/t, H]
            d_weight = (d_weight if grad_factor is None else d_weight.mul_(grad_factor)).to(ctx.weight_dtype)
        return d_hidden, d_weight, d_bias, None, None, None, None, None, None


class _TokenLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, table: VocabParallelEmbedding
    ) -> Tensor:
        ctx.save_for_backward(hidden, labels)
        ctx.table = table
        return token_losses(hidden, labels, table)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        hidden, labels = ctx.saved_tensors
        table, is_trained = ctx.table, ctx.needs_input_grad[1]
        weight = table.weight_in(hidden.dtype)
        dy = dy.masked_fill(labels == IGNORE_INDEX, 0.0)
        d_hidden, d_weight = torch.empty_like(hidden), None
        rows, _ = chunk_rows(len(hidden), len(weight), hidden.device.type, half=False)
        for first in range(0, len(hidden), rows):
            part = slice(first, first + rows)
            logits = cap_logits(product(hidden[part], weight).to(loss_dtype(hidden.dtype)), table)
            slope = softcap_slope(logits, table)
            softmax_and_loss(logits, labels[part], table, subtract_label=True)
            logits = logits if slope is None else logits.mul_(slope)
            d_logits = logits.mul_(dy[part].unsqueeze(1)).to(hidden.dtype)
            d_hidden[part] = product(d_logits, weight.t())
            if is_trained:
                dw = weight_gradient(d_logits, hidden[part], table.weight.dtype)
                d_weight = dw if d_weight is None else d_weight.add_(dw)
        return d_hidden, d_weight, None, None


@torch.no_grad()
def token_losses(hidden: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Each row's loss without gradients: [R, H], [R] -> [R]; 0 where the label is IGNORE_INDEX."""
    weight = table.weight_in(hidden.dtype)
    rows, _ = chunk_rows(len(hidden), len(weight), hidden.device.type, half=False)
    losses = [
        softmax_and_loss(cap_logits(product(h, weight).to(loss_dtype(h.dtype)), table), y, table)
        for h, y in zip(hidden.split(rows), labels.split(rows), strict=True)
    ]
    return torch.cat(losses)


@torch.no_grad()
def token_scores(
    hidden: Tensor, labels: Tensor, table: VocabParallelEmbedding, bias: Tensor | None = None
) -> Tensor:
    """Each row's loss, and 1 where its label is the most probable token, else 0: [R, H], [R] -> [2, R].

    float32 (float64 for float64 input), the same on every tp rank. Of equal logits the one of the lowest
    token id is the most probable, at every tp; padding never is. `bias` [V/t] is added to the logits. Both
    are 0 where the label is IGNORE_INDEX.
    """
    bias = None if bias is None else bias.to(hidden.dtype)
    weight = table.weight_in(hidden.dtype)
    rows, _ = chunk_rows(len(hidden), len(weight), hidden.device.type, half=False)
    scores = []
    for h, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        logits = cap_logits(product(h, weight, bias).to(loss_dtype(h.dtype)), table)
        best = is_argmax(logits, y, table)
        scores.append(torch.stack([softmax_and_loss(logits, y, table), best.to(logits.dtype)]))
    return torch.cat(scores, 1)


@torch.no_grad()
def full_logits(hidden: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Logits over the true vocabulary on every tp rank: [R, H] -> [R, vocab_size]. For sampling."""
    local = cap_logits(product(hidden, table.weight_in(hidden.dtype)), table)
    if table.tp.size == 1:
        return local[:, : table.true_rows]
    parts = all_gather(local, table.tp)  # [t, R, V/t]
    return parts.permute(1, 0, 2).reshape(hidden.shape[0], -1)[:, : table.true_rows]


def split_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Split `scale` into factors for logit gradients before their cast to `dtype` and for later products.

    bfloat16 has eight bits. Rounding the scale to it would change all gradients by up to 0.4 %; so would a
    scale next to a power of two, which rounds all products in one direction. The first factor then avoids
    these numbers. It is exact in bfloat16, so that p - 1 of a label with small p is not biased either. In
    float16 the first factor is the full scale, or small probabilities would underflow.
    """
    one = torch.ones_like(scale)
    if dtype == torch.float16:
        return scale, one
    if dtype != torch.bfloat16:
        return one, scale
    mantissa = torch.frexp(scale).mantissa  # in [0.5, 1)
    # a power of two itself is exact
    is_near = ((mantissa > 0.5) & (mantissa < 0.5 * (1 + 2**-5))) | (mantissa > 1 - 2**-6)
    first = torch.where(is_near, OFF_LATTICE, one)
    return first, scale / first


def add_chunk(
    total: Tensor | None, d_logits: Tensor, hidden: Tensor, dtype: torch.dtype, is_transposed: bool
) -> Tensor:
    """Add a chunk's term d_logits^T @ hidden to the weight's gradient: [V/t, H], [H, V/t] if transposed.

    The sum has the dtype of losses for weights of `dtype`.
    """
    if total is not None and not is_transposed:  # in place, if the library can
        add_weight_gradient(total, d_logits, hidden)
        return total
    if is_transposed:
        part = product(hidden.t(), d_logits.t())
    else:
        part = weight_gradient(d_logits, hidden, loss_dtype(dtype))
    return part if total is None else total.add_(part)


def add_to_grad(weight: nn.Parameter, part: Tensor, factor: Tensor | None) -> None:
    """Add `factor` (0-d; None for 1) times `part`, which may be kept or overwritten, to a weight's gradient.

    On `ORDERED` devices the sum equals autograd's bit for bit; elsewhere it takes one pass over both.
    """
    part = part.to(weight.dtype)
    if weight.grad is not None and factor is not None and part.device.type not in ORDERED:
        weight.grad.addcmul_(part, factor.to(part.dtype))
        return
    part = part if factor is None else part.mul_(factor)
    if weight.grad is None:
        weight.grad = part
    else:
        weight.grad.add_(part)


def chunk_rows(
    rows: int, columns: int, device: str, *, half: bool, chunk_bytes: int | None = None
) -> tuple[int, int]:
    """Return the rows of a chunk of logits [rows, columns], and of a block of the chunk.

    The products of a chunk are computed together. A block is float32 (float64 for float64 input), and smaller
    than a chunk for half precision on a CPU. `device` is a torch.device's type, `half` true for 16-bit input;
    `chunk_bytes` overrides CHUNK_BYTES.
    """

    def even_part(rows: int, most: int) -> int:
        """Smallest part size that splits `rows` into as few parts as `most` does."""
        return math.ceil(rows / max(1, math.ceil(rows / most)))

    limit = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) if chunk_bytes is None else chunk_bytes
    most = max(1, limit // (4 * columns))
    if not half or device != "cpu":
        return even_part(rows, most), even_part(rows, most)
    chunk = even_part(rows, HALF_CHUNKS * most)
    return chunk, even_part(chunk, max(1, min(limit, HALF_BLOCK_BYTES) // (4 * columns)))
