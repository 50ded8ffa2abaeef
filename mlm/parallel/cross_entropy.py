"""Vocabulary projection and cross-entropy in one, over chunks of tokens, with the vocabulary split over tp.

The logits of a micro-batch are V/H times its activations. Here only a chunk of them exists at a time: it is
projected, normalised, turned into its gradient in place and used for both gradient products, all in the
forward pass, so nothing is computed twice and nothing of size V is kept but the weight's gradient: until the
backward pass, or in the sum over micro-batches alone (`VocabParallelEmbedding.fuses_grad`).
Ranks exchange two numbers per token, two more where hits are counted, and never a logit (arXiv:1909.08053,
section 3).

Where a compiler is at hand, half-precision logits are read in two passes. PyTorch's kernels, one after the
other, read and write some 34 bytes a logit for cast, largest, softmax, label, scale and cast; compiled,
`log_sum_and_target` and `logits_gradient` read 2 bytes, then read 2 and write 2 (a compiler that makes two
passes of a log-sum-exp reads 2 more).

`differentiable_losses` serves objectives that are functions of sequences' likelihoods: each token's weight in
the loss is known only later, so its logits are computed again in backward.

Shapes: R rows (tokens, S * B), H hidden, V padded vocabulary, t = tensor-parallel size.
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mlm.parallel.collectives import all_gather, copy_to_tp, gather_sequence
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.layers import VocabParallelEmbedding
from mlm.parallel.matmul import (
    add_weight_gradient,
    onednn_is_faster,
    product,
    uses_onednn,
    weight_gradient,
)

LogSum = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]
Gradient = Callable[[Tensor, Tensor, Tensor, Tensor, int], Tensor]

HALF = (torch.bfloat16, torch.float16)
ORDERED = ("cpu",)
"""Devices on which gradients are added in autograd's order, whatever that costs."""
CHUNK_BYTES = {"cpu": (64 if onednn_is_faster() else 256) << 20, "cuda": 1 << 30}
"""Largest piece of float32 logits. CPU: smaller starves the products, larger falls out of the cache. With
oneDNN's products on a Zen 5 256 rows at V=50,304 are best; with MKL's on an Intel Xeon 1,024 at H=768 take
0.94 of the time of those. GPU: few chunks, as a small model's step waits for the host's launches."""
HALF_CHUNKS = (512 << 20) // CHUNK_BYTES["cpu"]
"""Chunks of float32 logits whose rows make one of half-precision ones on a CPU: adding a chunk's gradient of
the weight takes three passes over the weight there."""
HALF_BLOCK_BYTES = 4 << 20
"""Largest block of half-precision logits that are float32 at a time on a CPU: the passes over one find it in
the cache. 2,048 rows at V=50,304 take a Zen 4 core 95 to 120 ms, and 140 to 150 in blocks of CHUNK_BYTES.
Smaller is no faster, and over tp each block waits for the other ranks: 5 % of the loss's time in 2 MiB."""
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
        passes = compiled() if table.compiled and half and bias is None and not counts_hits else None
        buffer: Tensor | None = None
        if half and passes is None:
            buffer = torch.empty(block_rows, len(weight), dtype=dtype, device=hidden.device)
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
        elif is_trained and d_weight is None:  # nothing to score
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


def cap_logits(logits: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """Bound logits by the table's softcap, in place (arXiv:2408.00118, section 2)."""
    if not table.softcap:
        return logits
    return logits.div_(table.softcap).tanh_().mul_(table.softcap)


def softcap_slope(capped: Tensor, table: VocabParallelEmbedding) -> Tensor | None:
    """Derivative of `cap_logits` from its results, 1 - tanh^2; None without a softcap."""
    return (capped / table.softcap).square_().neg_().add_(1) if table.softcap else None


def losses_and_gradient(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    factor: Tensor,
    buffer: Tensor | None,
    passes: tuple[LogSum, Gradient] | None,
) -> tuple[Tensor, Tensor]:
    """Each row's loss [R] (0 where ignored), and `factor` times its gradient [R, V/t] in the logits' dtype.

    The gradient is of the logits before `cap_logits`. By the compiled `log_sum_and_target` and
    `logits_gradient`, if they are the `passes`. Else in place, and in float32 and float64 without the factor.
    Other arguments as of `softmax_and_loss`.
    """
    slope = softcap_slope(logits, table)  # before the logits are overwritten
    if passes is None:
        losses = softmax_and_loss(logits, labels, table, subtract_label=True, buffer=buffer, factor=factor)
        return losses, logits if slope is None else logits.mul_(slope)
    column = columns_of(labels, table)
    log_sum, target = passes[0](logits, column, table.true_local_rows)
    if table.tp.size > 1:
        parts = all_gather(torch.stack([log_sum, target]), table.tp)  # [t, 2, R]
        log_sum, target = torch.logsumexp(parts[:, 0], 0), parts[:, 1].sum(0)
    losses = (log_sum - target).masked_fill(labels == IGNORE_INDEX, 0.0)
    gradient = passes[1](logits, log_sum, column, factor, table.true_local_rows)
    return losses, gradient if slope is None else gradient.mul_(slope)


def softmax_and_loss(
    logits: Tensor,
    labels: Tensor,
    table: VocabParallelEmbedding,
    *,
    subtract_label: bool = False,
    buffer: Tensor | None = None,
    factor: Tensor | None = None,
) -> Tensor:
    """Replace this rank's logits by their softmax over the whole vocabulary; return each row's loss.

    Args:
        logits: [R, V/t] in float32 or float64; overwritten. Of half precision with `buffer` and `factor`.
        labels: [R] int64 global token ids, or IGNORE_INDEX.
        table: the vocabulary-parallel weight that gave the logits.
        subtract_label: True leaves the loss's gradient instead, p - onehot(label).
        buffer: [r, V/t] float32, through which the logits of half precision go r rows at a time.
        factor: 0-d, multiplies what leaves the buffer before it is rounded.

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
    blocks = (
        [tensors] if buffer is None else zip(*(x.split(max(1, len(buffer))) for x in tensors), strict=True)
    )
    for block, block_index, block_minus_one, block_log_sum, block_largest, block_target in blocks:
        p = block if buffer is None else buffer[: len(block)].copy_(block)
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
            global_log_sum = torch.logsumexp(parts[:, 0], 0)
            p.mul_((block_log_sum - global_log_sum).exp_().unsqueeze(1))
            block_log_sum.copy_(global_log_sum)
            block_target.copy_(parts[:, 1].sum(0))
        if subtract_label:
            p.scatter_add_(1, block_index, block_minus_one)
        if buffer is not None:
            assert factor is not None
            if p.is_cpu:  # its product that also casts is four times slower than the two passes
                block.copy_(p if factor.item() == 1.0 else p.mul_(factor))
            else:
                torch.mul(p, factor, out=block)
    return log_sum.sub_(target).masked_fill_(labels == IGNORE_INDEX, 0.0)


def columns_of(labels: Tensor, table: VocabParallelEmbedding) -> Tensor:
    """This shard's column of each label, -1 where the label lives elsewhere or is IGNORE_INDEX."""
    if table.tp.size == 1:
        return labels.clamp(min=-1)  # IGNORE_INDEX is negative, padding is no label
    column = labels - table.first
    return column.masked_fill((column < 0) | (column >= table.true_local_rows), -1)


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


def loss_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


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


def add_chunk(
    total: Tensor | None, d_logits: Tensor, hidden: Tensor, dtype: torch.dtype, is_transposed: bool
) -> Tensor:
    """Add a chunk's part d_logits^T @ hidden of the weight's gradient: [V/t, H], [H, V/t] if transposed.

    The sum is in the dtype in which losses of weights of `dtype` are computed.
    """
    if total is not None and not is_transposed:  # in its place, if the library can
        add_weight_gradient(total, d_logits, hidden)
        return total
    if is_transposed:
        part = product(hidden.t(), d_logits.t())
    else:
        part = weight_gradient(d_logits, hidden, loss_dtype(dtype))
    return part if total is None else total.add_(part)


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


def chunk_rows(
    rows: int, columns: int, device: str, *, half: bool, chunk_bytes: int | None = None
) -> tuple[int, int]:
    """Return the rows in a chunk of `rows` [columns] logits, and in a block of it: equal ones, but the last.

    The products of a chunk are computed together. A block is float32 (float64 for float64 input); on a CPU it
    is less than a chunk in half precision. `device` is a torch.device's type, `half` true for 16-bit input;
    `chunk_bytes` overrides CHUNK_BYTES.
    """

    def even_part(rows: int, most: int) -> int:
        """The least size of which as few parts hold `rows` as of size `most`."""
        return math.ceil(rows / max(1, math.ceil(rows / most)))

    limit = CHUNK_BYTES.get(device, CHUNK_BYTES["cuda"]) if chunk_bytes is None else chunk_bytes
    most = max(1, limit // (4 * columns))
    if not half or device != "cpu":
        return even_part(rows, most), even_part(rows, most)
    chunk = even_part(rows, HALF_CHUNKS * most)
    return chunk, even_part(chunk, max(1, min(limit, HALF_BLOCK_BYTES) // (4 * columns)))


@cache
def compiled() -> tuple[LogSum, Gradient]:
    """The two passes below, compiled; half-precision losses of compiled models take them."""
    return torch.compile(log_sum_and_target), torch.compile(logits_gradient)


def log_sum_and_target(logits: Tensor, column: Tensor, true: int) -> tuple[Tensor, Tensor]:
    """Log-sum-exp of the first `true` columns, and each row's logit at `column`, 0 where that is -1.

    [R, V/t] half, [R] int64 -> [R], [R] float32.
    """
    target = logits.gather(1, column.clamp(min=0).unsqueeze(1)).squeeze(1).float()
    return torch.logsumexp(logits[:, :true].float(), -1), target.masked_fill(column < 0, 0.0)


def logits_gradient(logits: Tensor, log_sum: Tensor, column: Tensor, factor: Tensor, true: int) -> Tensor:
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
