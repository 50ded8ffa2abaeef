"""Batched incremental generation with a trained model: every token is read once.

The last stage of the first replica chooses each step's tokens, and all ranks learn them. When a text has
filled the model's max_positions, the newest half is read again from position 0 and generation continues from
there: one pass for every max_positions / 2 tokens, in place of one for every token.
"""

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import Tensor

from mlm.data.sampler import Batch
from mlm.data.tokenizer import Tokenizer
from mlm.inference.config import Sampling
from mlm.inference.sampling import NOT_FINITE, end_tokens, next_tokens
from mlm.inference.trained import Trained
from mlm.models.backbone import Transformer
from mlm.models.cache import DecodePass, KeyValueCache, PrefillPass, Reading
from mlm.models.gpt2.model import GPT2
from mlm.parallel.collectives import broadcast
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError

STOPPED = -2
"""In place of all tokens once no more are wanted; NOT_FINITE is -1."""
FILL_TOKENS = 4096
"""Tokens of prompts read in one pass, padding included: bounds its memory."""


@dataclass(eq=False)
class _Text:
    """A prompt and its continuation so far."""

    index: int
    """Its place among the prompts."""
    number: int
    """Number that its draws are a function of."""
    context: list[int]
    """Tokens from position 0 on."""
    whole: list[int]
    """Tokens of the prompt, as far as it is read, and of its continuation."""
    new: list[int] = field(default_factory=list)
    read: int = 0
    """Tokens of the context that are in the cache: none, or all but the last."""


def generate(
    trained: Trained,
    prompts: Sequence[Sequence[int]],
    options: Sampling,
    *,
    ctx: ParallelContext,
    eod_id: int | Collection[int] | None,
    until: Callable[[int, list[int]], bool] | None = None,
    numbers: Sequence[int] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, the same on every rank. Collective over all ranks.

    Args:
        trained: the model.
        prompts: token ids, at least one each; of more than max_positions the last ones are read.
        options: sampling settings.
        ctx: the ranks.
        eod_id: the token, or tokens, that end a sequence and are not part of it; None ends none.
        until: until(i, new tokens) ends prompt i's sequence after its newest token when true. Every rank
            calls it, so it must be a function of its arguments.
        numbers: prompt i's draws are a function of (seed, numbers[i], position); None means i.
        advance: called with the number of prompts just ended.

    Raises UserError when logits are not finite; LostPeer.
    """
    new: list[list[int]] = [[] for _ in prompts]
    chosen = continuations(trained, prompts, options, ctx=ctx, eod_id=eod_id, until=until, numbers=numbers)
    for index, token in chosen:
        if token is None:
            advance(1)
        else:
            new[index].append(token)
    return new


def continuations(
    trained: Trained,
    prompts: Sequence[Sequence[int]],
    options: Sampling,
    *,
    ctx: ParallelContext,
    eod_id: int | Collection[int] | None,
    until: Callable[[int, list[int]], bool] | None = None,
    numbers: Sequence[int] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, int | None]]:
    """(prompt, its next token) as they are chosen, (prompt, None) when its text has ended. See `generate`.

    Once `should_stop` is true on rank 0, all ranks end, whatever texts are under way.
    """
    ends = end_tokens(eod_id)
    reader = _Reader(trained, options, ctx, ends, should_stop)
    most = trained.config.model.max_positions
    waiting = deque(
        _Text(i, i if numbers is None else numbers[i], list(prompt[-most:]), list(prompt[-most:]))
        for i, prompt in enumerate(prompts)
    )
    assert all(text.context for text in waiting), "a text begins with a token"
    active: list[_Text] = []
    while waiting or active:
        while waiting and len(active) < options.batch_size:
            active.append(waiting.popleft())
        ended = []
        tokens = reader.advance(active)
        if tokens[0] == STOPPED:
            return
        for text, token in zip(active, tokens, strict=True):
            if token not in ends:
                text.new.append(token)
                text.context.append(token)
                text.whole.append(token)
                yield text.index, token
            full = len(text.new) == options.max_new_tokens
            if token in ends or full or (until is not None and until(text.index, text.new)):
                ended.append(text)
                yield text.index, None
        reader.drop(active, ended)


def ends_at(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[int, list[int]], bool] | None:
    """For `until`: true where one of the strings `stops` has just been completed; None without any."""
    if not stops:
        return None
    tail = max(len(stop.encode()) for stop in stops) + 1  # tokens: each is a byte or more

    def until(_: int, new: list[int]) -> bool:
        end = tokenizer.decode(new[-tail:])
        return any(stop in end for stop in stops)

    return until


def before_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """Text before the first of `stops` that begins at the character `start` or later; all without."""
    places = [place for stop in stops if (place := text.find(stop, start)) >= 0]
    return text[: min(places, default=len(text))]


class _Reader:
    """The model with a cache whose row n belongs to the n-th text under way."""

    def __init__(
        self,
        trained: Trained,
        options: Sampling,
        ctx: ParallelContext,
        ends: Collection[int],
        should_stop: Callable[[], bool],
    ) -> None:
        self.trained, self.model, self.ctx = trained, trained.model, ctx
        self.options, self.ends, self.should_stop = options, ends, should_stop
        self.cache = KeyValueCache(options.batch_size, trained.config.model.max_positions)

    def advance(self, texts: Sequence[_Text]) -> list[int]:
        """The next token of each text, or STOPPED. Raises UserError on all ranks if logits are not finite."""
        for text in texts:
            if len(text.context) > self.cache.max_columns:
                text.context = text.context[-max(1, self.cache.max_columns // 2) :]
                text.read = 0
        self._fill(texts)
        last = torch.tensor([[text.context[-1]] for text in texts], device=self.ctx.device)
        columns = [len(text.context) - 1 for text in texts]
        step = DecodePass(self.cache, columns, dtype=self.model.dtype, device=self.ctx.device)
        results = self._pass([last], [step])
        for text in texts:
            text.read = len(text.context)
        tokens = self._chosen(texts, results[0] if results else None)
        for text, token in zip(texts, tokens, strict=True):
            if token == NOT_FINITE:
                raise UserError(
                    f"{self.trained.path}: the logits of new token {len(text.new) + 1} of text "
                    f"{text.index + 1} are not finite: damaged weights, or too large for its precision; "
                    f"try precision=fp32, or another checkpoint"
                )
        return tokens

    def drop(self, texts: list[_Text], ended: Sequence[_Text]) -> None:
        """Remove ended sequences; the last rows move into their places."""
        for text in ended:
            row, last = texts.index(text), texts.pop()
            if last is not text:
                texts[row] = last
                self.cache.move(len(texts), row, last.read)

    def _fill(self, texts: Sequence[_Text]) -> None:
        """Read all but the last token of the sequences that are not in the cache."""
        rows = [row for row, text in enumerate(texts) if not text.read and len(text.context) > 1]
        rows.sort(key=lambda row: len(texts[row].context), reverse=True)  # like with like: little padding
        share = -(-len(rows) // self.ctx.pp.size)  # stages work side by side
        batches: list[Tensor] = []
        fills: list[Reading] = []
        while rows:
            length = len(texts[rows[0]].context) - 1
            some = rows[: max(1, min(share, FILL_TOKENS // length))]
            rows = rows[len(some) :]
            tokens = torch.zeros(len(some), length, dtype=torch.int64)
            for number, row in enumerate(some):
                read = texts[row].context[:-1]
                tokens[number, : len(read)] = torch.tensor(read)
            batches.append(tokens.to(self.ctx.device))
            fills.append(PrefillPass(self.cache, some))
        if batches:
            self._pass(batches, fills)

    def _pass(self, batches: Sequence[Tensor], readings: Sequence[Reading]) -> list[Tensor]:
        """Return the last stage's output for each batch of tokens [B, S]; nothing on other ranks."""

        def forward(chunk: Transformer, batch: Batch, x: Tensor | None) -> Tensor:
            return cast(GPT2, chunk).read(batch.tokens, readings[batch.first_sample], x)

        numbered = [Batch(tokens, tokens, number) for number, tokens in enumerate(batches)]
        return [result for _, result in self.model.evaluate(numbered, forward)]

    def _chosen(self, texts: Sequence[_Text], logits: Tensor | None) -> list[int]:
        """The tokens that the last stage's first rank chooses from logits [B, V], on every rank.

        Replicas take them, too: at ep > 1 each waits for all, and their rows of an expert may be rounded
        differently.
        """
        tokens = torch.empty(len(texts), dtype=torch.int64, device=self.ctx.device)
        is_stopped = self.should_stop()
        if self.ctx.pp.size > 1:  # rank 0 prints, and the last stage chooses
            told = torch.tensor([is_stopped], dtype=torch.int64, device=self.ctx.device)
            is_stopped = bool(broadcast(told, self.ctx.pp, 0).item())
        if logits is not None:
            if self.ctx.tp.rank == 0:
                numbers, places = [text.number for text in texts], [len(text.new) for text in texts]
                wholes = [text.whole for text in texts]
                if is_stopped:
                    tokens.fill_(STOPPED)
                else:
                    chosen = next_tokens(logits.cpu(), numbers, places, self.options, self.ends, wholes)
                    tokens.copy_(torch.tensor(chosen))
            broadcast(tokens, self.ctx.tp, 0)
        broadcast(tokens, self.ctx.pp, self.ctx.pp.size - 1)
        return broadcast(tokens, self.ctx.dp, 0).tolist()
