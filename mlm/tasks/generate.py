"""`mlm generate`: sample a continuation of a prompt, token by token.

Every rank sees the same gathered logits and draws with the same generator, so all extend the
same sequence. The whole sequence is read again for each token, its last max_positions tokens as context.
"""

import math
import sys
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from mlm.checkpoint.save_load import resolve
from mlm.config.errors import UserError
from mlm.config.schema import PrecisionConfig
from mlm.config.task_schema import GenerateConfig
from mlm.data.sampler import Batch
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.collectives import broadcast
from mlm.parallel.mesh import ParallelContext
from mlm.tasks.trained import checkpoint_faults, load_tokenizer, load_trained
from mlm.train.pipelined import PipelinedModel


def preflight(config: GenerateConfig) -> list[str]:
    """Faults that reading the named files shows; called before any rank starts."""
    faults = checkpoint_faults(config.ckpt, config.parallel)
    if faults:
        return faults
    try:
        tokenizer = load_tokenizer(config.tokenizer, resolve(config.ckpt))
    except UserError as error:
        return [str(error)]
    if not tokenizer.encode(config.prompt):
        return ["prompt is empty: give some text to continue"]
    return []


def run(config: GenerateConfig, ctx: ParallelContext) -> None:
    """Print the prompt and its continuation as it is drawn; rank 0 speaks."""
    trained = load_trained(config.ckpt, config.parallel, PrecisionConfig(), ctx)
    tokenizer = load_tokenizer(config.tokenizer, trained.path)
    if tokenizer.vocab_size > trained.config.model.vocab_size:
        raise UserError(
            f"the tokenizer has {tokenizer.vocab_size} tokens, the model model.vocab_size="
            f"{trained.config.model.vocab_size}: give the tokenizer= the model was trained with"
        )
    stream = Stream(tokenizer, shown=ctx.is_main)
    ids = tokenizer.encode(config.prompt)
    stream.add(ids)
    read = NextLogits(trained.model, trained.config.model.max_positions, ctx)
    for token in sample(read, ids, config, tokenizer.eod_id):
        stream.add([token])
    stream.end()


class NextLogits:
    """Logits of the token after a sequence, the same on every rank."""

    def __init__(self, model: PipelinedModel, max_positions: int, ctx: ParallelContext) -> None:
        self.model, self.max_positions, self.ctx = model, max_positions, ctx

    def __call__(self, ids: list[int]) -> Tensor:
        """float32 [vocab_size] on the CPU, after the last max_positions of `ids`. Collective."""
        tokens = torch.tensor([ids[-self.max_positions :]], device=self.ctx.device)
        results = self.model.evaluate(
            [Batch(tokens, tokens, 0)], lambda chunk, batch, x: chunk.last_logits(batch.tokens, x)
        )
        logits = torch.empty(self.model.vocab_size, dtype=torch.float32, device=self.ctx.device)
        for _, result in results:
            logits.copy_(result[0])
        return broadcast(logits, self.ctx.pp, self.ctx.pp.size - 1).cpu()


@torch.no_grad()
def sample(
    read: Callable[[list[int]], Tensor], ids: list[int], config: GenerateConfig, eod_id: int
) -> Iterator[int]:
    """Yield token ids that continue `ids`, up to max_new_tokens or the end of the document."""
    generator = torch.Generator().manual_seed(config.seed)
    ids = list(ids)
    for drawn in range(config.max_new_tokens):
        logits = read(ids)
        if drawn < config.min_new_tokens:
            logits[eod_id] = -math.inf
        ids.append(choose(logits, config, generator))
        if ids[-1] == eod_id:
            return
        yield ids[-1]


def choose(logits: Tensor, config: GenerateConfig, generator: torch.Generator) -> int:
    """A token from logits [V]: the best at temperature 0, else drawn among the top_k and top_p best."""
    if config.temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits / config.temperature, -1).sort(descending=True)
    if config.top_k:
        probabilities[config.top_k :] = 0.0
    before = probabilities.cumsum(-1) - probabilities  # mass of the better tokens: the best one always stays
    probabilities[before >= config.top_p * probabilities.sum()] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


class Stream:
    """Prints text as its tokens come; a character split over tokens waits until it is whole."""

    def __init__(self, tokenizer: Tokenizer, *, shown: bool) -> None:
        self.tokenizer, self.shown = tokenizer, shown
        self.ids: list[int] = []
        self.printed = 0

    def add(self, ids: list[int]) -> None:
        """More tokens."""
        self.ids += ids
        text = self.tokenizer.decode(self.ids)
        if not text.endswith("\ufffd"):
            self._print(text)

    def end(self) -> None:
        """No more tokens."""
        self._print(self.tokenizer.decode(self.ids))
        if self.shown:
            print(flush=True)

    def _print(self, text: str) -> None:
        if self.shown:
            sys.stdout.write(text[self.printed :])
            sys.stdout.flush()
        self.printed = len(text)
