"""Log-likelihoods of tokens given the ones before them, the basis of every language-model evaluation.

Requests are sorted by length, the longest first, and packed into micro-batches of about equal cost. Texts are
padded on the right, where a causal model does not look: a score depends neither on what shares its
micro-batch nor on the layout, but for the rounding of sums. Requests that read the same tokens (choices of a
task that differ in their last token) are read once.

What a run does where a document ends (data.reset_positions, reset_attention, mask_eod_loss) plays no part
here: a request is one text, and an end-of-document token in it is a token like any other, to the model and to
the score. So the protocols mean it, and so an exported model does it.

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

from mlm.inference.trained import Trained
from mlm.models.backbone import Transformer
from mlm.models.gpt2.model import GPT2
from mlm.parallel.collectives import all_reduce
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.transfer import to_device
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
    """Score of one request."""

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
    trained: Trained,
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
        batch_size: most sequences of max_positions tokens per micro-batch and rank; the shorter they are,
            the more of them go together. Scores do not depend on it.
        advance: called with the number of requests just done, on every rank.

    Raises UserError for a score that is not finite.
    """
    model, longest = trained.model, trained.config.model.max_positions
    assert batch_size >= 1
    assert all(is_valid(request, longest, model.vocab_size) for request in requests)
    table = torch.zeros(len(requests), 2, dtype=torch.float64)  # loss, is greedy
    readings = group_by_reading(requests)
    budget = batch_size * longest
    if ctx.device.type == "cpu":
        budget = min(budget, CPU_TOKENS)
    groups = group_readings(requests, readings, budget=budget, size=ctx.dp.size)
    while some := list(islice(groups, EVAL_ROUNDS * ctx.pp.size)):
        numbers = [number for group in some for reading in group for number in reading]
        table[numbers] = score_groups(model, requests, some, numbers, ctx)
        check_finite(table, numbers, trained)
        advance(len(numbers))
    return [
        Score(loss, bool(greedy), len(request.tokens) - request.first)
        for (loss, greedy), request in zip(table.tolist(), requests, strict=True)
    ]


def is_valid(request: Request, max_positions: int, vocab_size: int) -> bool:
    """Check that the model can score a request."""
    tokens = request.tokens
    fits = 1 <= request.first < len(tokens) <= max_positions + 1
    return fits and int(tokens.min()) >= 0 and int(tokens.max()) < vocab_size


def group_by_reading(requests: Sequence[Request]) -> list[Reading]:
    """Group requests by what the model reads for them, the longest first: too long shows at once."""
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
    """One rank's micro-batch of a group. A rank that is left without a reading repeats one, unheard."""
    mine = group[rank::size]
    rows = mine or group[:1]
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
        tuple(parts) if mine else (),
    )


def check_finite(table: Tensor, numbers: Sequence[int], trained: Trained) -> None:
    """Raises UserError if a request of `numbers` has a loss that is not finite; on all ranks alike."""
    for number in sorted(numbers):
        if not table[number, 0].isfinite():
            dtype = str(trained.model.dtype).removeprefix("torch.")
            raise UserError(
                f"ckpt={trained.path}: request {number} has the loss {table[number, 0].item()} in {dtype}: "
                "use another checkpoint, or precision=fp32 if this is a lower one"
            )


def rolling_request(context: Sequence[int], scored: Sequence[int]) -> Request:
    """A request for `scored` after `context`, which is not empty."""
    return Request(np.array([*context, *scored], dtype=np.int64), len(context))


def rolling_windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Request]:
    """Windows that score every token once, the first one after `prefix`.

    Each begins with the last token of the one before as its context; the last scores what is left, after as
    many tokens as still fit.
    """
    if tokens:
        yield rolling_request([prefix], tokens[:length])
    for begin in range(length, len(tokens), length):
        end = min(begin + length, len(tokens))
        yield rolling_request(tokens[end - length - 1 : begin], tokens[begin:end])
