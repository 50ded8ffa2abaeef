"""Log-likelihoods of tokens given the ones before them, the basis of every language-model evaluation.

Requests are sorted by length, the longest first, and packed into micro-batches of about equal cost. Texts are
padded on the right, which a causal model ignores: a score depends neither on its micro-batch nor on the
layout, except for the rounding of sums. Requests that read the same tokens (choices of a task that differ in
their last token) are read once.

Documents are not separated (data.reset_positions, reset_attention, mask_eod_loss): a request is one text, and
an end-of-document token in it an ordinary one, as in the protocols and in an exported model.

Shapes: S sequence, B micro-batch, R scored tokens of a micro-batch, N requests.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import cast

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch import Tensor

from mlm.inference.trained import LoadedModel
from mlm.models.backbone import Transformer
from mlm.models.gpt2.model import GPT2
from mlm.parallel.collectives import all_reduce, to_device
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import EVAL_ROUNDS, PipelinedModel
from mlm.util.errors import UserError, writing_to
from mlm.util.files import digest_name, write_atomic

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
    positions: Tensor
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
    kept: Path | None = None,
    identity: str = "",
    advance: Callable[[int], None] = lambda count: None,
    resumed: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Score requests. Collective over all ranks; in the order of the requests and the same on each.

    Args:
        trained: the model.
        requests: the texts and their scored tokens.
        ctx: process groups.
        batch_size: most sequences of max_positions tokens per micro-batch and rank, or as many tokens of
            shorter ones. Scores do not depend on it.
        kept: file in which rank 0 keeps scores, for a command that is stopped and started again; its folder
            exists. The caller deletes it after saving the result.
        identity: other inputs of scores, such as the checkpoint's digest; a file of others is replaced.
        advance: called with the number of requests just done, on every rank; kept ones come first.
        resumed: called on every rank with the number of requests that were kept, if there are any.

    Raises UserError for a score that is not finite, and where `kept` cannot be read or written.
    """
    model, longest = trained.model, trained.config.model.max_positions
    if not requests:
        return []
    for r in requests:
        assert 1 <= r.first < len(r.tokens) <= longest + 1
        assert 0 <= r.tokens.min() <= r.tokens.max() < model.vocab_size
    table, store = torch.zeros(len(requests), 3, dtype=torch.float64), None  # loss, is greedy, is done
    if kept is not None and ctx.is_main:
        store = KeptScores(kept, f"{identity} {model.dtype}", requests)
        for number, (loss, greedy) in store.found.items():
            table[number] = torch.tensor([loss, greedy, 1.0], dtype=torch.float64)
    all_reduce(table, ctx.world)
    if count := int(table[:, 2].sum()):
        resumed(count)
        advance(count)
    readings = group_by_reading(requests, (table[:, 2] == 0).nonzero().flatten().tolist())
    budget = min(batch_size * longest, CPU_TOKENS) if ctx.device.type == "cpu" else batch_size * longest
    groups = group_readings(requests, readings, budget=budget, size=ctx.dp.size)
    while batch := list(islice(groups, EVAL_ROUNDS * ctx.pp.size)):
        numbers = [number for group in batch for reading in group for number in reading]
        table[numbers] = score_groups(model, requests, batch, numbers, ctx)
        if diverged := [number for number in sorted(numbers) if not table[number, 0].isfinite()]:
            loss, dtype = table[diverged[0], 0].item(), str(model.dtype).removeprefix("torch.")
            problem = f"ckpt={trained.path}: request {diverged[0]} has the loss {loss} in {dtype}"
            raise UserError(f"{problem}: use another checkpoint, or precision=fp32 if this is a lower one")
        if store is not None:
            store.add({number: (table[number, 0].item(), bool(table[number, 1])) for number in numbers})
        advance(len(numbers))
    return [
        Score(loss, bool(greedy), len(request.tokens) - request.first)
        for (loss, greedy, _), request in zip(table.tolist(), requests, strict=True)
    ]


class KeptScores:
    """Scores kept on disk while a long evaluation runs, so that it resumes after a stop.

    JSON lines: a header of identity and requests, then one line for each request that is done. A command that
    is killed may leave half a line at the end, which is dropped.

    Attributes:
        found: (loss, is greedy) by the request's number, from an earlier command.
    """

    def __init__(self, path: Path, identity: str, requests: Sequence[Request]) -> None:
        """Read the file, and replace it by a sound one. Raises UserError."""
        self.path, self.found = path, dict[int, tuple[float, bool]]()
        header = json.dumps({"identity": identity, "requests": digest_requests(requests)}).encode() + b"\n"
        with writing_to(str(path)):
            content = path.read_bytes() if path.exists() else b""
            if content.startswith(header):
                # the last is half a line; a damaged file counts for nothing
                with suppress(ValueError, TypeError):
                    rows = map(json.loads, content[len(header) :].split(b"\n")[:-1])
                    self.found = {number: (loss, greedy) for number, loss, greedy in rows}
            write_atomic(path, header + self._lines(self.found))

    def add(self, results: Mapping[int, tuple[float, bool]]) -> None:
        """Append finished requests. Raises UserError."""
        with writing_to(str(self.path)), open(self.path, "ab") as f:
            f.write(self._lines(results))

    def _lines(self, results: Mapping[int, tuple[float, bool]]) -> bytes:
        return b"".join(json.dumps([number, *result]).encode() + b"\n" for number, result in results.items())


def digest_requests(requests: Sequence[Request]) -> str:
    digest = xxhash.xxh3_128()
    for request in requests:
        digest.update(np.array([len(request.tokens), request.first], dtype="<i8").tobytes())
        digest.update(np.ascontiguousarray(request.tokens, dtype="<i8").tobytes())
    return digest_name(digest)


def group_by_reading(requests: Sequence[Request], numbers: Sequence[int]) -> list[Reading]:
    """Requests grouped by the tokens that the model reads, the longest first: too long shows at once."""
    readings: dict[bytes, Reading] = {}
    for number in numbers:
        readings.setdefault(requests[number].tokens[:-1].tobytes(), []).append(number)
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
        tokens, positions, labels = (
            to_device(t, ctx.device) for t in (batch.tokens, batch.positions, batch.labels)
        )
        return cast(GPT2, chunk).scores(tokens, positions, labels, x)

    table = torch.zeros(len(requests), 3, dtype=torch.float64)
    for batch, result in list(model.evaluate(batches, forward)):  # all are under way before the first is read
        if ctx.tp.rank:
            continue  # tp ranks know the same; one of them speaks
        losses, greedy = result.cpu().double()
        for number, part in batch.parts:
            table[number, 0] = losses[part].sum()
            table[number, 1] = greedy[part].all()
            table[number, 2] = 1.0
    return all_reduce(table[numbers], ctx.world)  # one rank wrote each row: nothing is rounded


def pack(requests: Sequence[Request], group: Sequence[Reading], rank: int, size: int) -> Packed:
    """One rank's micro-batch of a group. A rank without a reading repeats one, whose scores do not count."""
    shard = group[rank::size]
    rows = shard or group[:1]
    longest = max(len(requests[reading[0]].tokens) for reading in rows) - 1
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    positions, labels, parts, end = [], [], [], 0
    for b, reading in enumerate(rows):
        text = requests[reading[0]].tokens[:-1]
        tokens[b, : len(text)] = text
        for number in reading:
            request = requests[number]
            positions.append(np.arange(request.first - 1, len(text)) * len(rows) + b)
            labels.append(request.tokens[request.first :])
            begin, end = end, end + len(labels[-1])
            parts.append((number, slice(begin, end)))
    return Packed(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate(positions)),
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


def mean_stderr(values: Sequence[float]) -> float | None:
    """Standard error of a mean: the sample's deviation (over n - 1) over sqrt(n); None for n < 2.

    For zeros and ones of mean p this is sqrt(p (1 - p) / (n - 1)), as in lm_eval/api/metrics.py.
    """
    n = len(values)
    if n < 2:
        return None
    centre = math.fsum(values) / n
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (n - 1) / n)
