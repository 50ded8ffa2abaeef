"""Log-likelihoods of tokens given the ones before them, the basis of every language-model evaluation.

Requests are sorted by length, the longest first, and packed into micro-batches of about equal cost. Texts are
padded on the right, which a causal model ignores: a score depends neither on its micro-batch nor on the
layout, except for the rounding of sums. Requests with the same input (choices of a task that differ in their
last token) run through the model once.

Documents are not separated (data.reset_positions, reset_attention, mask_eod_loss): a request is one text, in
which an end-of-document token is an ordinary token, as in the protocols and in an exported model.

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
    """A text whose last tokens are scored."""

    tokens: NDArray[np.int64]
    """[n] token ids, n >= 2. The model reads all but the last: n - 1 <= max_positions."""
    first: int
    """tokens[first:] are scored, each given all tokens before it; 1 <= first < n."""


@dataclass(frozen=True, slots=True)
class Score:
    loss: float
    """Negative log-likelihood of the scored tokens, summed, in nats."""
    is_greedy: bool
    """True if every scored token is the argmax, given the text's own tokens before it."""
    tokens: int
    """Number of scored tokens."""


SharedInput = list[int]
"""Numbers of the requests with the same input tokens."""


@dataclass(frozen=True, eq=False)
class RequestBatch:
    """A micro-batch of sequences, and the positions of their scored tokens."""

    tokens: Tensor
    """[B, S] int64."""
    positions: Tensor
    """[R] int64: s * B + b for row b's token s, after which a token is scored."""
    labels: Tensor
    """[R] int64: the scored tokens."""
    parts: tuple[tuple[int, slice], ...]
    """Each request's number and its slice of the R scored tokens."""


def score(
    trained: LoadedModel,
    requests: Sequence[Request],
    *,
    batch_size: int,
    ctx: ParallelContext,
    saved: Path | None = None,
    identity: str = "",
    advance: Callable[[int], None] = lambda count: None,
    on_resume: Callable[[int], None] = lambda count: None,
) -> list[Score]:
    """Return the score of each request, the same on every rank. Collective over all ranks.

    Args:
        trained: the model.
        requests: the texts and their scored tokens.
        ctx: process groups.
        batch_size: most sequences of max_positions tokens per micro-batch and rank, or as many tokens of
            shorter ones. Scores do not depend on it.
        saved: file in which rank 0 saves scores, so that a stopped command resumes; its folder exists. The
            caller deletes it after saving the result.
        identity: other inputs of scores, such as the checkpoint's digest; a file with another is replaced.
        advance: called on every rank with the number of requests just done, first of all the saved ones.
        on_resume: called on every rank with the number of saved requests, unless it is 0.

    Raises UserError for a score that is not finite, and where `saved` cannot be read or written.
    """
    model, longest = trained.model, trained.config.model.max_positions
    if not requests:
        return []
    for r in requests:
        assert 1 <= r.first < len(r.tokens) <= longest + 1
        assert 0 <= r.tokens.min() <= r.tokens.max() < model.vocab_size
    table, file = torch.zeros(len(requests), 3, dtype=torch.float64), None  # loss, is greedy, is done
    if saved is not None and ctx.is_main:
        file = SavedScores(saved, f"{identity} {model.dtype}", requests)
        for number, (loss, greedy) in file.scores.items():
            table[number] = torch.tensor([loss, greedy, 1.0], dtype=torch.float64)
    all_reduce(table, ctx.world)
    if count := int(table[:, 2].sum()):
        on_resume(count)
        advance(count)
    inputs = group_by_input(requests, (table[:, 2] == 0).nonzero().flatten().tolist())
    budget = min(batch_size * longest, CPU_TOKENS) if ctx.device.type == "cpu" else batch_size * longest
    batches = split_inputs(requests, inputs, budget=budget, size=ctx.dp.size)
    while next_batches := list(islice(batches, EVAL_ROUNDS * ctx.pp.size)):
        numbers = [number for batch in next_batches for shared in batch for number in shared]
        table[numbers] = score_batches(model, requests, next_batches, numbers, ctx)
        if diverged := [number for number in sorted(numbers) if not table[number, 0].isfinite()]:
            loss, dtype = table[diverged[0], 0].item(), str(model.dtype).removeprefix("torch.")
            problem = f"ckpt={trained.path}: request {diverged[0]} has the loss {loss} in {dtype}"
            raise UserError(f"{problem}: use another checkpoint, or precision=fp32 if this is a lower one")
        if file is not None:
            file.add({number: (table[number, 0].item(), bool(table[number, 1])) for number in numbers})
        advance(len(numbers))
    return [
        Score(loss, bool(greedy), len(request.tokens) - request.first)
        for (loss, greedy, _), request in zip(table.tolist(), requests, strict=True)
    ]


class SavedScores:
    """File of scores of a long evaluation, so that it resumes after a stop.

    JSON lines: a header of identity and requests, then a line for each scored request. A command that is
    killed may leave half a line at the end, which is dropped.

    Attributes:
        scores: (loss, is greedy) by the request's number, from an earlier command.
    """

    def __init__(self, path: Path, identity: str, requests: Sequence[Request]) -> None:
        """Read the file, and rewrite it without damaged lines. Raises UserError."""
        self.path, self.scores = path, dict[int, tuple[float, bool]]()
        header = json.dumps({"identity": identity, "requests": digest_requests(requests)}).encode() + b"\n"
        with writing_to(str(path)):
            content = path.read_bytes() if path.exists() else b""
            if content.startswith(header):
                # the last may be half a line; nothing is taken from a damaged file
                with suppress(ValueError, TypeError):
                    rows = map(json.loads, content[len(header) :].split(b"\n")[:-1])
                    self.scores = {number: (loss, greedy) for number, loss, greedy in rows}
            write_atomic(path, header + self._lines(self.scores))

    def add(self, results: Mapping[int, tuple[float, bool]]) -> None:
        """Append scored requests. Raises UserError."""
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


def group_by_input(requests: Sequence[Request], numbers: Sequence[int]) -> list[SharedInput]:
    """Group requests by their input tokens, the longest first: a lack of memory shows at once."""
    inputs: dict[bytes, SharedInput] = {}
    for number in numbers:
        inputs.setdefault(requests[number].tokens[:-1].tobytes(), []).append(number)
    return sorted(inputs.values(), key=lambda shared: -len(requests[shared[0]].tokens))


def split_inputs(
    requests: Sequence[Request], inputs: Sequence[SharedInput], *, budget: int, size: int
) -> Iterator[list[SharedInput]]:
    """Split inputs into batches for `size` data-parallel ranks, at most `budget` tokens on each with padding.

    A longer input is alone in its micro-batch.
    """
    first = 0
    while first < len(inputs):
        rows = max(1, budget // (len(requests[inputs[first][0]].tokens) - 1))
        yield list(inputs[first : first + rows * size])
        first += rows * size


def score_batches(
    model: PipelinedModel,
    requests: Sequence[Request],
    batches: Sequence[Sequence[SharedInput]],
    numbers: Sequence[int],
    ctx: ParallelContext,
) -> Tensor:
    """Return the rows of the table for the requests of `batches`, which have these numbers, on every rank."""
    packed = [pack(requests, batch, ctx.dp.rank, ctx.dp.size) for batch in batches]

    def forward(chunk: Transformer, batch: RequestBatch, x: Tensor | None) -> Tensor:
        tokens, positions, labels = (
            to_device(t, ctx.device) for t in (batch.tokens, batch.positions, batch.labels)
        )
        return cast(GPT2, chunk).scores(tokens, positions, labels, x)

    table = torch.zeros(len(requests), 3, dtype=torch.float64)
    # list: all batches are launched before the first result is copied to the host
    for batch, result in list(model.evaluate(packed, forward)):
        if ctx.tp.rank:
            continue  # tp ranks have equal results, and the sum below needs one
        losses, greedy = result.cpu().double()
        for number, part in batch.parts:
            table[number, 0] = losses[part].sum()
            table[number, 1] = greedy[part].all()
            table[number, 2] = 1.0
    return all_reduce(table[numbers], ctx.world)  # exact: one rank wrote each row


def pack(requests: Sequence[Request], batch: Sequence[SharedInput], rank: int, size: int) -> RequestBatch:
    """Return one rank's micro-batch of a batch; a rank without inputs repeats one and scores nothing."""
    shard = batch[rank::size]
    rows = shard or batch[:1]
    longest = max(len(requests[shared[0]].tokens) for shared in rows) - 1
    tokens = np.zeros((len(rows), longest), dtype=np.int64)
    positions, labels, parts, end = [], [], [], 0
    for b, shared in enumerate(rows):
        text = requests[shared[0]].tokens[:-1]
        tokens[b, : len(text)] = text
        for number in shared:
            request = requests[number]
            positions.append(np.arange(request.first - 1, len(text)) * len(rows) + b)
            labels.append(request.tokens[request.first :])
            begin, end = end, end + len(labels[-1])
            parts.append((number, slice(begin, end)))
    return RequestBatch(
        torch.from_numpy(tokens),
        torch.from_numpy(np.concatenate(positions)),
        torch.from_numpy(np.concatenate(labels).astype(np.int64)),
        tuple(parts) if shard else (),
    )


def request_after(context: Sequence[int], scored: Sequence[int]) -> Request:
    """Return a request for `scored` after `context`, which is not empty."""
    return Request(np.array([*context, *scored], dtype=np.int64), len(context))


def rolling_windows(tokens: Sequence[int], prefix: int, length: int) -> Iterator[Request]:
    """Yield windows of at most `length` tokens that score every token once, the first one after `prefix`.

    A later window has the token before it as its context; the last one has as many as fit.
    """
    if tokens:
        yield request_after([prefix], tokens[:length])
    for begin in range(length, len(tokens), length):
        end = min(begin + length, len(tokens))
        yield request_after(tokens[end - length - 1 : begin], tokens[begin:end])


def mean_stderr(values: Sequence[float]) -> float | None:
    """Return the standard error of a mean: the sample deviation (over n - 1) over sqrt(n); None for n < 2.

    For zeros and ones of mean p this is sqrt(p (1 - p) / (n - 1)), as in lm_eval/api/metrics.py.
    """
    n = len(values)
    if n < 2:
        return None
    centre = math.fsum(values) / n
    return math.sqrt(math.fsum((x - centre) ** 2 for x in values) / (n - 1) / n)
