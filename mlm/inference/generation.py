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
from mlm.inference.sampling import NOT_FINITE, next_tokens
from mlm.inference.trained import LoadedModel
from mlm.models.backbone import Transformer
from mlm.models.cache import DecodePass, KeyValueCache, PrefillPass, Reading
from mlm.models.gpt2.model import GPT2
from mlm.models.shape import architecture_of
from mlm.parallel.collectives import broadcast
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError

STOPPED = -2
"""Broadcast in place of each token once rank 0 asks to stop; NOT_FINITE is -1."""
PREFILL_TOKENS = 4096
"""Most prompt tokens per forward pass, padding included: bounds its memory."""


def generate(
    trained: LoadedModel,
    prompts: Sequence[Sequence[int]],
    options: Sampling,
    *,
    ctx: ParallelContext,
    end_ids: Collection[int] = (),
    until: Callable[[int, list[int]], bool] | None = None,
    advance: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Return the new tokens of each prompt, the same on every rank. Collective over all ranks.

    Args:
        trained: the model.
        prompts: token ids, at least one each; a prompt longer than max_positions loses its beginning.
        options: sampling settings.
        ctx: process groups.
        end_ids: tokens that end a sequence and are not part of it.
        until: until(i, new tokens) ends prompt i's sequence after its newest token when true. Every rank
            calls it, so it must be a function of its arguments.
        advance: called with 1 as each prompt ends.

    Raises UserError for logits that are not finite; LostPeer.
    """
    new: list[list[int]] = [[] for _ in prompts]
    for index, token in continuations(trained, prompts, options, ctx=ctx, end_ids=end_ids, until=until):
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
    end_ids: Collection[int] = (),
    until: Callable[[int, list[int]], bool] | None = None,
    numbers: Sequence[int] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Iterator[tuple[int, int | None]]:
    """Yield (index of a prompt, its next token), and (index, None) at its end. For arguments see `generate`.

    Draws of prompt i are a function of (seed, numbers[i], position); by default numbers[i] is i. Once
    `should_stop` is true on rank 0, all ranks end, with texts unfinished.
    """
    decoder = _Decoder(trained, options, ctx, end_ids, should_stop)
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
        tokens = decoder.advance(active)
        if tokens[0] == STOPPED:
            return
        for text, token in zip(active, tokens, strict=True):
            if token not in end_ids:
                text.new.append(token)
                text.context.append(token)
                text.history.append(token)
                yield text.index, token
            is_full = len(text.new) == options.max_new_tokens
            if token in end_ids or is_full or (until is not None and until(text.index, text.new)):
                ended.append(text)
                yield text.index, None
        # move the last rows of the batch and of the cache into the rows of ended texts
        for text in ended:
            row, last = active.index(text), active.pop()
            if last is not text:
                active[row] = last
                decoder.cache.move(len(active), row, last.cached)


def stop_check(tokenizer: Tokenizer, stops: Sequence[str]) -> Callable[[int, list[int]], bool] | None:
    """Return an `until` that is true once a text holds one of the strings `stops`; None without any."""
    if not stops:
        return None
    tail = max(len(stop.encode()) for stop in stops) + 1  # tokens to decode: each is a byte or more

    def until(_: int, new: list[int]) -> bool:
        end = tokenizer.decode(new[-tail:])
        return any(stop in end for stop in stops)

    return until


def truncate_at_stop(text: str, stops: Sequence[str], start: int = 0) -> str:
    """Return the text before the first of `stops` that begins at the character `start` or later."""
    begins = [begin for stop in stops if (begin := text.find(stop, start)) >= 0]
    return text[: min(begins, default=len(text))]


@dataclass(eq=False)
class _Text:
    index: int
    """Index among the prompts."""
    number: int
    """Key of its draws, with the seed and the position."""
    context: list[int]
    """Tokens at the model's positions 0, 1, …"""
    history: list[int]
    """Tokens of the prompt, truncated to max_positions, and of its continuation."""
    new: list[int] = field(default_factory=list)
    cached: int = 0
    """Tokens of the context in the cache: 0, or all but the last."""


@dataclass(eq=False)
class _Decoder:
    """The model with a key-value cache, whose row n belongs to the n-th active text."""

    trained: LoadedModel
    options: Sampling
    ctx: ParallelContext
    end_ids: Collection[int]
    should_stop: Callable[[], bool]

    def __post_init__(self) -> None:
        self.model = self.trained.model
        self.reread_length = architecture_of(self.trained.config.model).changes_positions_after + 1
        self.cache = KeyValueCache(self.options.batch_size, self.trained.config.model.max_positions)

    def advance(self, texts: Sequence[_Text]) -> list[int]:
        """Return the next token of each text, or STOPPED. Raises UserError for logits that are not finite."""
        for text in texts:
            if len(text.context) > self.cache.max_columns:
                text.context = text.context[-max(1, self.cache.max_columns // 2) :]
                text.cached = 0
            elif len(text.context) == self.reread_length:
                text.cached = 0
        self._prefill(texts)
        last = torch.tensor([[text.context[-1]] for text in texts], device=self.ctx.device)
        columns = [len(text.context) - 1 for text in texts]
        step = DecodePass(self.cache, columns, dtype=self.model.dtype, device=self.ctx.device)
        logits = self._forward([last], [step])
        for text in texts:
            text.cached = len(text.context)
        tokens = self._choose_tokens(texts, logits[0] if logits else None)
        for text, token in zip(texts, tokens, strict=True):
            if token == NOT_FINITE:
                raise UserError(
                    f"{self.trained.path}: the logits of new token {len(text.new) + 1} of text "
                    f"{text.index + 1} are not finite: damaged weights, or too large for its precision; "
                    f"try precision=fp32, or another checkpoint"
                )
        return tokens

    def _prefill(self, texts: Sequence[_Text]) -> None:
        """Read all but the last token of the sequences that are not in the cache."""
        rows = [row for row, text in enumerate(texts) if not text.cached and len(text.context) > 1]
        rows.sort(key=lambda row: len(texts[row].context), reverse=True)  # equal lengths need no padding
        most = -(-len(rows) // self.ctx.pp.size)  # rows of a batch: one batch for each pipeline stage
        batches: list[Tensor] = []
        passes: list[Reading] = []
        while rows:
            length = len(texts[rows[0]].context) - 1
            count = max(1, min(most, PREFILL_TOKENS // length))
            batch, rows = rows[:count], rows[count:]
            tokens = torch.zeros(len(batch), length, dtype=torch.int64)
            for number, row in enumerate(batch):
                context = texts[row].context[:-1]
                tokens[number, : len(context)] = torch.tensor(context)
            batches.append(tokens.to(self.ctx.device))
            passes.append(PrefillPass(self.cache, batch, [len(texts[row].context) for row in batch]))
        if batches:
            self._forward(batches, passes)

    def _forward(self, batches: Sequence[Tensor], passes: Sequence[Reading]) -> list[Tensor]:
        """Return the last stage's output for each batch of tokens [B, S]; an empty list on other stages."""

        def forward(chunk: Transformer, batch: Batch, x: Tensor | None) -> Tensor:
            return cast(GPT2, chunk).read(batch.tokens, passes[batch.first_sample], x)

        numbered = [Batch(tokens, tokens, number) for number, tokens in enumerate(batches)]
        return [result for _, result in self.model.evaluate(numbered, forward)]

    def _choose_tokens(self, texts: Sequence[_Text], logits: Tensor | None) -> list[int]:
        """Choose on the first rank of the last stage, from logits [B, V]; return the tokens on every rank.

        Replicas take the same tokens: with ep > 1 they wait for each other, and may round an expert's rows
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
                history = [text.history for text in texts]
                chosen = next_tokens(logits.cpu(), numbers, positions, self.options, self.end_ids, history)
                tokens.copy_(torch.tensor(chosen))
            broadcast(tokens, self.ctx.tp, 0)
        broadcast(tokens, self.ctx.pp, self.ctx.pp.size - 1)
        return broadcast(tokens, self.ctx.dp, 0).tolist()
