"""Batched incremental generation with a trained model: every token is read once.

The last stage of the first replica chooses each step's tokens and broadcasts them. When a text has filled the
model's max_positions, the newest half is read again from position 0 and generation continues from there: one
pass for every max_positions / 2 tokens, in place of one for every token.
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
from mlm.inference.trained import LoadedModel
from mlm.models.backbone import Transformer
from mlm.models.cache import DecodePass, KeyValueCache, PrefillPass, Reading
from mlm.models.gpt2.model import GPT2
from mlm.models.shape import architecture_of
from mlm.parallel.collectives import broadcast
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError

STOPPED = -2
"""In place of all tokens once no more are wanted; NOT_FINITE is -1."""
FILL_TOKENS = 4096
"""Tokens of prompts read in one pass, padding included: bounds its memory."""


def generate(
    trained: LoadedModel,
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
        prompts: token ids, at least one each; a prompt longer than max_positions loses its beginning.
        options: sampling settings.
        ctx: the ranks.
        eod_id: the token, or tokens, that end a sequence and are not part of it; None for none.
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
    trained: LoadedModel,
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

    Once `should_stop` is true on rank 0, all ranks end, with texts unfinished.
    """
    ends = end_tokens(eod_id)
    reader = _Reader(trained, options, ctx, ends, should_stop)
    longest = trained.config.model.max_positions
    waiting = deque[_Text]()
    for i, prompt in enumerate(prompts):
        tokens = list(prompt[-longest:])
        assert tokens, "a text begins with a token"
        waiting.append(_Text(i, i if numbers is None else numbers[i], tokens, [*tokens]))
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
                text.full.append(token)
                yield text.index, token
            is_full = len(text.new) == options.max_new_tokens
            if token in ends or is_full or (until is not None and until(text.index, text.new)):
                ended.append(text)
                yield text.index, None
        # the last rows of the batch and of the cache take the places of ended texts
        for text in ended:
            row, last = active.index(text), active.pop()
            if last is not text:
                active[row] = last
                reader.cache.move(len(active), row, last.read)


def ends_at(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[int, list[int]], bool] | None:
    """Return an `until` that is true once one of the strings `stops` is complete; None without any."""
    if not stops:
        return None
    tail = max(len(stop.encode()) for stop in stops) + 1  # tokens: each is a byte or more

    def until(_: int, new: list[int]) -> bool:
        end = tokenizer.decode(new[-tail:])
        return any(stop in end for stop in stops)

    return until


def before_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """Text before the first of `stops` that begins at the character `start` or later; all without."""
    begins = [begin for stop in stops if (begin := text.find(stop, start)) >= 0]
    return text[: min(begins, default=len(text))]


@dataclass(eq=False)
class _Text:
    index: int
    """Its index among the prompts."""
    number: int
    """Number that its draws are a function of."""
    context: list[int]
    """Tokens from position 0 on."""
    full: list[int]
    """Tokens of the prompt, as far as it is read, and of its continuation."""
    new: list[int] = field(default_factory=list)
    read: int = 0
    """Tokens of the context that are in the cache: none, or all but the last."""


@dataclass(eq=False)
class _Reader:
    """The model with a cache whose row n belongs to the n-th active text."""

    trained: LoadedModel
    options: Sampling
    ctx: ParallelContext
    ends: Collection[int]
    should_stop: Callable[[], bool]

    def __post_init__(self) -> None:
        self.model = self.trained.model
        self.reread_length = architecture_of(self.trained.config.model).changes_positions_after + 1
        self.cache = KeyValueCache(self.options.batch_size, self.trained.config.model.max_positions)

    def advance(self, texts: Sequence[_Text]) -> list[int]:
        """The next token of each text, or STOPPED. Raises UserError on all ranks if logits are not finite."""
        for text in texts:
            if len(text.context) > self.cache.max_columns:
                text.context = text.context[-max(1, self.cache.max_columns // 2) :]
                text.read = 0
            elif len(text.context) == self.reread_length:
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

    def _fill(self, texts: Sequence[_Text]) -> None:
        """Read all but the last token of the sequences that are not in the cache."""
        rows = [row for row, text in enumerate(texts) if not text.read and len(text.context) > 1]
        rows.sort(key=lambda row: len(texts[row].context), reverse=True)  # equal lengths need no padding
        share = -(-len(rows) // self.ctx.pp.size)  # a batch for each pipeline stage
        batches: list[Tensor] = []
        passes: list[Reading] = []
        while rows:
            length = len(texts[rows[0]].context) - 1
            count = max(1, min(share, FILL_TOKENS // length))
            batch, rows = rows[:count], rows[count:]
            tokens = torch.zeros(len(batch), length, dtype=torch.int64)
            for number, row in enumerate(batch):
                read = texts[row].context[:-1]
                tokens[number, : len(read)] = torch.tensor(read)
            batches.append(tokens.to(self.ctx.device))
            passes.append(PrefillPass(self.cache, batch, [len(texts[row].context) for row in batch]))
        if batches:
            self._pass(batches, passes)

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
            stop = torch.tensor([is_stopped], dtype=torch.int64, device=self.ctx.device)
            is_stopped = bool(broadcast(stop, self.ctx.pp, 0).item())
        if logits is not None:
            if is_stopped:
                tokens.fill_(STOPPED)
            elif self.ctx.tp.rank == 0:
                numbers, positions = [text.number for text in texts], [len(text.new) for text in texts]
                full = [text.full for text in texts]
                chosen = next_tokens(logits.cpu(), numbers, positions, self.options, self.ends, full)
                tokens.copy_(torch.tensor(chosen))
            broadcast(tokens, self.ctx.tp, 0)
        broadcast(tokens, self.ctx.pp, self.ctx.pp.size - 1)
        return broadcast(tokens, self.ctx.dp, 0).tolist()
