"""Vocabulary projection and cross-entropy in one, over chunks of tokens, with the vocabulary split over tp.

The logits of a micro-batch are V/H times its activations. Here only a chunk of them exists at a time: it is
projected, normalised, turned into its gradient in place and used for both gradient products, all in the
forward pass, so nothing is computed twice and nothing of size V is kept but the weight's gradient: until the
backward pass, or in the sum over micro-batches alone (`VocabParallelEmbedding.fuses_grad`).
Ranks exchange two numbers per token, two more where hits are counted, and never a logit (arXiv:1909.08053,
section 3).

Where a compiler is at hand, half-precision logits are read in two passes. PyTorch's kernels, one after the
other, read and write some 34 bytes a logit for cast, largest, softmax, label, scale and cast; compiled,
`log_sum_and_target` and `gradient` read 2 bytes, then read 2 and write 2 (a compiler that makes two passes of
a log-sum-exp reads 2 more).

Shapes: R rows (tokens, S * B), H hidden, V padded vocabulary, t = tensor-parallel size.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from mlm.parallel.chunks import chunk_rows
from mlm.parallel.collectives import all_gather, copy_to_tp, gather_sequence
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.matmul import add_weight_gradient, product, uses_onednn, weight_gradient

LogSum = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]


def log_sum_and_target(logits: Tensor, column: Tensor, true: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the first `true` columns, and each row's logit at `column`, 0 where that is -1.

    [R, V/t] half, [R] int64 -> [R], [R] float32.
    """
    wide = logits[:, :true].float()
    target = logits.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return torch.logsumexp(wide, -1), target.masked_fill(column < 0, 0.0)


def gradient(logits: Tensor, log_sum: Tensor, column: Tensor, factor: Tensor, true: int) -> Tensor:
    """Factor * (softmax - onehot(column)) in the dtype of `logits`: 0 from column `true` on.

    Args:
        logits: [R, V/t] half.
        log_sum: [R] float32, over the whole vocabulary.
        column: [R] int64, -1 where the label lives elsewhere.
        factor: 0-d float32.
        true: columns of this shard that belong to tokens.
    """
    columns = torch.arange(logits.shape[1], device=logits.device)
    p = torch.exp(logits.float() - log_sum.unsqueeze(1))
    p = torch.where(columns < true, p, 0.0) - (columns == column.unsqueeze(1)).float()
    return (p * factor).to(logits.dtype)


_compiled: list[tuple[LogSum, Gradient]] = []


def use_compiler() -> None:
    """Compile the passes; half-precision losses of compiled models take them."""
    if not _compiled:
        _compiled.append((torch.compile(log_sum_and_target), torch.compile(gradient)))


def compiled() -> tuple[LogSum, Gradient] | None:
    """The compiled passes, if `use_compiler` was called."""
    return _compiled[0] if _compiled else None


HALF = (torch.bfloat16, torch.float16)
ORDERED = ("cpu",)
"""Devices on which gradients are added in autograd's order, whatever that costs."""


ENTERED = {"_CopyToTPBackward": "copy_to_tp", "_GatherSequenceBackward": "gather_sequence"}
"""Operators that sum the gradients of hidden states over tp, by their nodes of autograd's graph."""
VIEWS = ("ViewBackward0", "UnsafeViewBackward0", "TransposeBackward0")


def columns_of(labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """This shard's column of each label, -1 where the label lives elsewhere or is IGNORE_INDEX."""
    if table.tp.size == 1:
        return labels.clamp(min=-1)  # IGNORE_INDEX is negative, padding is no label
    column = labels - table.first
    return column.masked_fill((column < 0) | (column >= table.true_local_rows), -1)


def softmax_and_loss(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    *,
    subtract_label: bool = False,
    wide: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Replace this rank's logits by their softmax over the whole vocabulary; return each row's loss.

    Args:
        logits: [R, V/t] in float32 or float64; overwritten. Of half precision with `wide` and `factor`.
        labels: [R] int64 global token ids, or IGNORE_INDEX.
        table: the vocabulary-parallel weight that gave the logits.
        subtract_label: True leaves the loss's gradient instead, p - onehot(label).
        wide: [r, V/t] float32 buffer, through which the logits of half precision go r rows at a time.
        factor: 0-d, multiplies what leaves that buffer before it is rounded.

    Returns:
        losses [R] (0 where ignored) in float32 or float64.
    """
    tp, true = table.tp, table.true_local_rows
    column = columns_of(labels, table)
    index = column.clamp(min=0).unsqueeze(1)
    target = logits.gather(1, index).squeeze(1).to(loss_dtype(logits.dtype)).masked_fill_(column < 0, 0.0)
    minus_one = (column >= 0).to(target.dtype).neg_().unsqueeze(1)  # -1 where the label is here
    log_sum, largest = torch.empty_like(target), torch.empty_like(target)
    if true < logits.shape[1]:
        logits[:, true:] = -math.inf  # padding takes no probability, at every tp
    tensors = (logits, index, minus_one, log_sum, largest, target)
    blocks = [tensors] if wide is None else zip(*(x.split(max(1, len(wide))) for x in tensors), strict=True)
    for block, block_index, block_minus_one, block_log_sum, block_largest, block_target in blocks:
        p = block if wide is None else wide[: len(block)].copy_(block)
        if true == 0:  # a shard of nothing but padding
            block_log_sum.fill_(-math.inf)
            p.zero_()
        else:
            torch.amax(p, -1, out=block_log_sum)
            torch.softmax(p, -1, out=p)
            # log-sum-exp from the largest probability, at least 1/V: no pass over the row is repeated
            block_log_sum.sub_(torch.amax(p, -1, out=block_largest).log_())
        if tp.size > 1:
            parts = all_gather(torch.stack([block_log_sum, block_target]), tp)  # [t, 2, r]
            whole_log_sum = torch.logsumexp(parts[:, 0], 0)
            p.mul_((block_log_sum - whole_log_sum).exp_().unsqueeze(1))
            block_log_sum.copy_(whole_log_sum)
            block_target.copy_(parts[:, 1].sum(0))
        if subtract_label:
            p.scatter_add_(1, block_index, block_minus_one)
        if wide is not None:
            assert factor is not None
            round_gradient(p, factor, out=block)
    return log_sum.sub_(target).masked_fill_(labels == IGNORE_INDEX, 0.0)


def fused_losses(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    factor: Tensor,
    passes: tuple[LogSum, Gradient],
) -> tuple[Tensor, Tensor]:
    """Each row's loss [R] (0 where ignored), and `factor` times its gradient [R, V/t] in the logits' dtype.

    `passes` are the compiled `log_sum_and_target` and `gradient`. Other arguments as of `softmax_and_loss`.
    """
    tp, true = table.tp, table.true_local_rows
    column = columns_of(labels, table)
    log_sum, target = passes[0](logits, column, true)
    if tp.size > 1:
        parts = all_gather(torch.stack([log_sum, target]), tp)  # [t, 2, R]
        log_sum, target = torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)
    losses = (log_sum - target).masked_fill(labels == IGNORE_INDEX, 0.0)
    return losses, passes[1](logits, log_sum, column, factor, true)


def losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    factor: Tensor,
    wide: Tensor | None,
    passes: tuple[LogSum, Gradient] | None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss and its gradient [R, V/t]: by the compiled `passes` where there are any."""
    if passes is not None:
        return fused_losses(logits, labels, table, factor, passes)
    losses = softmax_and_loss(logits, labels, table, subtract_label=True, wide=wide, factor=factor)
    return losses, logits


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype logits are normalised in."""
    return torch.float64 if dtype == torch.float64 else torch.float32


OFF_LATTICE = 1.296875
"""Exact in bfloat16, and far from a power of two in the logarithm."""


def split_scale(scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Two factors of `scale`: of float32 logits' gradients before their cast to `dtype`, and of what follows.

    bfloat16 has eight bits. Rounded to it, the scale would be off by up to 0.4 %, for all gradients alike; so
    would a product of bfloat16 numbers with a scale next to a power of two, as all would be rounded one way.
    The first factor then moves such numbers elsewhere. It is exact in bfloat16, so that p - 1 of a label
    whose p is small is not rounded one way either. In float16 all goes first, or small probabilities vanish.
    """
    one = torch.ones_like(scale)
    if dtype == torch.float16:
        return scale, one
    if dtype != torch.bfloat16:
        return one, scale
    mantissa = torch.frexp(scale).mantissa  # in [0.5, 1)
    is_near = ((mantissa > 0.5) & (mantissa < 0.5 * (1 + 2**-5))) | (mantissa > 1 - 2**-6)  # itself is exact
    first = torch.where(is_near, OFF_LATTICE, one)
    return first, scale / first


def add_to_grad(weight: nn.Parameter, part: Tensor, factor: Tensor | None) -> None:
    """Add `factor` (0-d; None for 1) times `part` to a weight's gradient, which may keep or overwrite `part`.

    On `ORDERED` devices the sum is that of autograd bit for bit; elsewhere it takes one pass over both.
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


def round_gradient(p: Tensor, factor: Tensor, out: Tensor) -> None:
    """Write `factor` (0-d) times p into `out`, of a half dtype; p may be overwritten."""
    if p.is_cpu:  # its product that also casts is four times slower than the two passes
        out.copy_(p if factor.item() == 1.0 else p.mul_(factor))
    else:
        torch.mul(p, factor, out=out)


def add_chunk(
    total: Tensor | None, d_logits: Tensor, hidden: Tensor, dtype: torch.dtype, is_transposed: bool
) -> Tensor:
    """Add a chunk's part d_logits^T @ hidden of the weight's gradient: [V/t, H], [H, V/t] if transposed.

    The sum is in the dtype in which losses of weights of `dtype` are computed.
    """
    dtype = loss_dtype(dtype)
    if total is not None and not is_transposed:  # where it is, if the library can
        add_weight_gradient(total, d_logits, hidden)
        return total
    part = product(hidden.t(), d_logits.t()) if is_transposed else weight_gradient(d_logits, hidden, dtype)
    return part if total is None else total.add_(part)


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
        compute = table.weight_in(hidden.dtype)
        compute_bias = None if bias is None else bias.to(hidden.dtype)
        half = hidden.dtype in HALF
        logit_factor, row_factor = split_scale(scale.to(loss_dtype(hidden.dtype)), hidden.dtype)
        device_type = table.device_type or hidden.device.type
        rows, wide_rows = chunk_rows(
            hidden.shape[0], weight.shape[0], device_type, half=half, chunk_bytes=chunk_bytes
        )
        d_hidden = torch.empty_like(hidden)
        # [H, V/t] where the product is faster that way round (matmul.weight_gradient), transposed at the end
        is_transposed, is_trained = uses_onednn(hidden, compute), ctx.needs_input_grad[1]
        d_weight: Tensor | None = None  # summed over the chunks, so wide even where the weight is not
        d_bias = None if bias is None else torch.zeros_like(bias, dtype=loss_dtype(bias.dtype))
        loss = torch.zeros((), dtype=loss_dtype(hidden.dtype), device=hidden.device)
        hits = torch.zeros_like(loss)
        fused = compiled() if table.compiled and half and bias is None and not counts_hits else None
        wide: Tensor | None = None
        if half and fused is None:
            wide = torch.empty(wide_rows, weight.shape[0], dtype=loss.dtype, device=loss.device)
        for first in range(0, hidden.shape[0], rows):
            part = slice(first, first + rows)
            logits = product(hidden[part], compute, compute_bias)
            scored = (labels[part] != IGNORE_INDEX).unsqueeze(1)  # [rows, 1]: ignored rows get weight 0
            if counts_hits:
                hits += is_argmax(logits, labels[part], table).sum()
            losses, d_logits = losses_and_gradient(logits, labels[part], table, logit_factor, wide, fused)
            loss += losses.sum()
            if d_bias is not None:
                d_bias += (d_logits * scored).sum(0, dtype=d_bias.dtype) * row_factor
            row_factors = (row_factor * scored).to(loss.dtype)  # [rows, 1]
            torch.mul(product(d_logits, compute.t()), row_factors, out=d_hidden[part])
            if is_trained:
                # the row scale multiplies H-wide operands rather than V-wide ones
                scaled_hidden = hidden[part] * (scored if half else (scale * scored).to(loss.dtype))
                d_weight = add_chunk(d_weight, d_logits, scaled_hidden, weight.dtype, is_transposed)
        if is_trained and d_weight is None:  # nothing to score
            d_weight, is_transposed = torch.zeros_like(weight, dtype=loss_dtype(weight.dtype)), False
        d_weight = d_weight.t().contiguous() if d_weight is not None and is_transposed else d_weight
        d_bias = None if d_bias is None else d_bias.to(weight.dtype)
        grad_factor: Tensor | None = row_factor if half else None  # d_weight has yet to be multiplied by it
        if fuses_grad and d_weight is not None:
            add_to_grad(table.weight, d_weight, grad_factor)
            d_weight = grad_factor = None
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


def linear_cross_entropy(
    hidden: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    scale: Tensor,
    chunk_bytes: int | None = None,
) -> Tensor:
    """Return scale * sum of the losses of scored rows, logits = hidden @ table.weight^T. Differentiable once.

    The gradient of `hidden` is summed over tp here: no `copy_to_tp` or `gather_sequence` goes before it.

    Args:
        hidden: [R, H] replicated over tp; [R/t, H], this rank's rows, if the table is sequence-parallel.
        labels: [R] int64, IGNORE_INDEX where not scored.
        table: the (tied) vocabulary-parallel weight [V/t, H].
        scale: 0-d float tensor, for instance loss_scale / tokens of the global batch.
        chunk_bytes: largest chunk of logits; the default suits the device.

    Returns:
        0-d float32 (float64 for float64 input).

    Raises:
        ValueError: `hidden` has entered the region before, or has not as many rows as there are labels.
    """
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
    hidden = enter(hidden, labels, table)
    result: tuple[Tensor, Tensor] = _LinearCrossEntropy.apply(  # type: ignore[no-untyped-call]
        hidden, table.weight, bias, labels, scale, table, chunk_bytes, True, table.fuses_now
    )
    return result


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


@torch.no_grad()
def token_losses(hidden: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Each row's loss without gradients: [R, H], [R] -> [R]; 0 where the label is IGNORE_INDEX."""
    compute = table.weight_in(hidden.dtype)
    rows = chunk_rows(hidden.shape[0], compute.shape[0], hidden.device.type, half=False).chunk
    losses = [
        softmax_and_loss(product(h, compute).to(loss_dtype(h.dtype)), y, table)
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
    added = None if bias is None else bias.to(hidden.dtype)
    compute = table.weight_in(hidden.dtype)
    rows = chunk_rows(hidden.shape[0], compute.shape[0], hidden.device.type, half=False).chunk
    scores = []
    for h, y in zip(hidden.split(rows), labels.split(rows), strict=True):
        logits = product(h, compute, added).to(loss_dtype(h.dtype))
        best = is_argmax(logits, y, table)
        scores.append(torch.stack([softmax_and_loss(logits, y, table), best.to(logits.dtype)]))
    return torch.cat(scores, 1)


def is_argmax(logits: Tensor, labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """True if each row's label has the largest logit, of equals the lowest id: [R, V/t], [R] -> bool [R].

    Ranks exchange their shard's largest logit and whether the label has it, never logits.
    """
    true = table.true_local_rows
    if true == 0:  # a shard of nothing but padding
        peak, best = logits.new_full(labels.shape, -math.inf), torch.zeros_like(labels, dtype=torch.bool)
    else:
        peak, column = logits[:, :true].max(-1)  # the first of equals
        best = column + table.first == labels
    if table.tp.size == 1:
        return best
    parts = all_gather(torch.stack([peak, best.to(peak.dtype)]), table.tp)  # [t, 2, R]
    winner = parts[:, 0].argmax(0, keepdim=True)  # the first of equals: lower ranks hold lower ids
    return parts[:, 1].gather(0, winner).squeeze(0) > 0


@torch.no_grad()
def full_logits(hidden: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Logits over the true vocabulary on every tp rank: [R, H] -> [R, vocab_size]. For sampling."""
    local = product(hidden, table.weight_in(hidden.dtype))
    if table.tp.size == 1:
        return local[:, : table.true_rows]
    whole = all_gather(local, table.tp)  # [t, R, V/t]
    return whole.permute(1, 0, 2).reshape(hidden.shape[0], -1)[:, : table.true_rows]
