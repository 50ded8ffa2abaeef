"""Log-likelihoods of tokens given the ones before them, the basis of every language-model evaluation.

Requests are sorted by length, the longest first, and packed into micro-batches of about equal cost. Texts are
padded on the right, which a causal model ignores: a score depends neither on its micro-batch nor on the
layout, except for the rounding of sums. Requests that read the same tokens (choices of a task that differ in
their last token) are read once.

Documents are not separated (data.reset_positions, reset_attention, mask_eod_loss): a request is one text, and
an end-of-document token in it an ordinary one, as in the protocols and in an exported model.

Shapes: S sequence, B micro-batch, R scored tokens of a micro-batch, N requests.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.inference.trained import LoadedModel
from mlm.models.backbone import Transformer
from mlm.models.gpt2.model import GPT2
from mlm.parallel.collectives import all_reduce, to_device
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import EVAL_ROUNDS, PipelinedModel
from mlm.util.errors import UserError

CPU_TOKENS = 2048
"""Most tokens per micro-batch on a CPU, or one sequence: GPT-2 124M scores LAMBADA equally fast at 512 to
2048 tokens, and at 8192, which fall out of the cache, 20 % slower."""


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A text of which some tokens are scored."""

    tokens: NDArray[np.int64]
    """[n] token ids, n >= 2. The model reads all but the last: n - 1 <= max_positions."""
    first: int
    """tokens[first:] are scored, each given all before it; 1 <= first < n."""


@dataclass(frozen=True, slots=True)
class Score:
    loss: float
    """Summed over the scored tokens, in nats: the negative log-likelihood."""
    is_greedy: bool
    """True if every scored token is the argmax, given the text's own tokens before it."""
    tokens: int
    """Number of scored tokens."""


Reading = list[int]
"""Numbers of the requests that read the same tokens."""


@dataclass(frozen=True, eq=False)
class Packed:
    """A micro-batch of sequences, and the positions of their scored tokens."""

    tokens: Tensor
    """[B, S] int64."""
    places: Tensor
    """[R] int64: s * B + b for row b's token s, whose successor is scored."""
    labels: Tensor
    """[R] int64: the successors."""
    parts: tuple[tuple[int, slice], ...]
    """Each request's number and its part of the R scored tokens."""


def score(
    trained: LoadedModel,
    requests: Sequence[Request],
    *,
    batch_size: int,
    ctx: ParallelContext,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Score requests. Collective over all ranks; in the order of the requests and the same on each.

    Args:
        trained: the model.
        requests: the texts and their scored tokens.
        ctx: process groups.
        batch_size: most sequences of max_positions tokens per micro-batch and rank, or as many tokens of
            shorter ones. Scores do not depend on it.
        advance: called with the number of requests just done, on every rank.

    Raises UserError for a score that is not finite.
    """
    model, longest = trained.model, trained.config.model.max_positions
    if not requests:
        return []
    for r in requests:
        assert 1 <= r.first < len(r.tokens) <= longest + 1
        assert 0 <= r.tokens.min() <= r.tokens.max() < model.vocab_size
    table = torch.zeros(len(requests), 2, dtype=torch.float64)  # loss, is greedy
    readings = group_by_reading(requests)
    budget = min(batch_size * longest, CPU_TOKENS) if ctx.device.type == "cpu" else batch_size * longest
    groups = group_readings(requests, readings, budget=budget, size=ctx.dp.size)
    while batch := list(islice(groups, EVAL_ROUNDS * ctx.pp.size)):
        numbers = [number for group in batch for reading in group for number in reading]
        table[numbers] = score_groups(model, requests, batch, numbers, ctx)
        if diverged := [number for number in sorted(numbers) if not table[number, 0].isfinite()]:
            loss, dtype = table[diverged[0], 0].item(), str(model.dtype).removeprefix("torch.")
            problem = f"ckpt={trained.path}: request {diverged[0]} has the loss {loss} in {dtype}"
            raise UserError(f"{problem}: use another checkpoint, or precision=fp32 if this is a lower one")
        advance(len(numbers))
    return [
        Score(loss, bool(greedy), len(request.tokens) - request.first)
        for (loss, greedy), request in zip(table.tolist(), requests, strict=True)
    ]


def group_by_reading(requests: Sequence[Request]) -> list[Reading]:
    """Requests grouped by the tokens that the model reads, the longest first: too long shows at once."""
    readings: dict[bytes, Reading] = {}
    for number, request in enumerate(requests):
        readings.setdefault(request.tokens[:-1].tobytes(), []).append(number)
    return sorted(readings.values(), key=lambda reading: -len(requests[reading[0]].tokens))


def group_readings(
    requests: Sequence[Request], readings: Sequence[Reading], *, budget: int, size: int
) -> Iterator[list[Reading]]:
    """Readings for the `size` data-parallel ranks, each at most `budget` tokens with padding.

    A longer reading is a group alone.
    """
    first = 0
    while first < len(readings):
        rows = max(1, budget // (len(requests[readings[first][0]].tokens) - 1))
        yield list(readings[first : first + rows * size])
        first += rows * size


def score_groups(
    model: PipelinedModel,
    requests: Sequence[Request],
    groups: Sequence[Sequence[Reading]],
    numbers: Sequence[int],
    ctx: ParallelContext,
) -> Tensor:
    """Rows of the table for the requests in `groups`, which have these numbers; on every rank."""
    batches = [pack(requests, group, ctx.dp.rank, ctx.dp.size) for group in groups]

    def forward(chunk: Transformer, batch: Packed, x: Tensor | None) -> Tensor:
        tokens, places, labels = (
            to_device(t, ctx.device) for t in (batch.tokens, batch.places, batch.labels)
        )
        return cast(GPT2, chunk).scores(tokens, places, labels, x)

    table = torch.zeros(len(requests), 2, dtype=torch.float64)
    for batch, result in list(model.evaluate(batches, forward)):  # all are under way before the first is read
        if ctx.tp.rank:
            continue  # tp ranks know the same; one of them speaks
        losses, greedy = result.cpu().double()
        for number, part in batch.parts:
            table[number, 0] = losses[part].sum()
            table[number, 1] = greedy[part].all()
    return all_reduce(table[numbers], ctx.world)  # one rank wrote each row: nothing is rounded


def pack(requests: Sequence[Request], group: Sequence[Reading], rank: int, size: int) -> Packed:
    """One rank's micro-batch of a group. A rank without a reading repeats one, whose scores do not count."""
    shard = group[rank::size]
    rows = shard or group[:1]
    longest = max(len(requests[reading[0]].tokens) for reading in rows) - 1
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    places, labels, parts, end = [], [], [], 0
    for b, reading in enumerate(rows):
        text = requests[reading[0]].tokens[:-1]
        tokens[b, : len(text)] = text
        for number in reading:
            request = requests[number]
            places.append(np.arange(request.first - 1, len(text)) * len(rows) + b)
            labels.append(request.tokens[request.first :])
            begin, end = end, end + len(labels[-1])
            parts.append((number, slice(begin, end)))
    return Packed(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate(places)),
        torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        tuple(parts) if shard else (),
    )


def request_after(context: Sequence[int], scored: Sequence[int]) -> Request:
    """A request for `scored` after `context`, which is not empty."""
    return Request(np.array([*context, *scored], dtype=np.int64), len(context))


def rolling_windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Request]:
    """Windows of at most `length` tokens that score every token once, the first one after `prefix`.

    Each later one begins with at least the previous token as its context; the last has as many as fit.
    """
    if tokens:
        yield request_after([prefix], tokens[:length])
    for begin in range(length, len(tokens), length):
        end = min(begin + length, len(tokens))
        yield request_after(tokens[end - length - 1 : begin], tokens[begin:end])
