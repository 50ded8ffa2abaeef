"""Continuations of `train.sample_prompts` at each validation, by the model as it trains.

Each token is one forward pass in the layout, kernels and shapes of a validation. Without a KV cache, every
model that trains can be sampled. Draws are functions of seed, prompt and position; no random state changes.

Shapes: B prompts of a pass, S tokens, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm
from typing import cast

import torch
from torch import Tensor

from mlm.data.tokenizer import Tokenizer
from mlm.inference.config import Sampling
from mlm.inference.sampling import NOT_FINITE, next_tokens
from mlm.models.backbone import Transformer
from mlm.models.gpt2.model import GPT2
from mlm.parallel.collectives import broadcast
from mlm.tracking.reporter import Reporter
from mlm.training.observer import Observer
from mlm.training.preflight import PROMPTS
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from mlm.util.terminal import one_line

METHOD = "next_logits"
"""Model method that returns the next token's logits."""


@dataclass(frozen=True, eq=False)
class _Batch:
    """Sequences that need a next token."""

    tokens: Tensor
    """[B, S] int64, padded on the right: attention is causal."""
    last: Tensor
    """[B] int64: the position of each sequence's last token."""


class PromptSampler(Observer):
    """Continues a run's prompts. Every rank has one and calls its methods.

    Raises UserError for a model without METHOD.
    """

    def __init__(self, trainer: Trainer, reporter: Reporter, tokenizer: Tokenizer) -> None:
        self.trainer, self.reporter, self.tokenizer = trainer, reporter, tokenizer
        config = trainer.config
        if METHOD not in trainer.objective.methods:
            raise UserError(
                f"{PROMPTS}: the objective of model.kind={config.model.kind} has no {METHOD} among its "
                f"methods; remove {PROMPTS}",
                keys=(PROMPTS,),
            )
        self.texts = config.train.sample_prompts
        self.prompts = [tokenizer.encode_prompt(text) for text in self.texts]
        self.options = Sampling(
            max_new_tokens=config.train.sample_tokens,
            temperature=config.train.sample_temperature,
            seed=config.seed,
        )

    def after_validation(self) -> None:
        """Continue the prompts and report the texts. Collective over all ranks."""
        continuations = self.continue_prompts()
        if not self.trainer.ctx.is_main:
            return
        for number, (prompt, tokens) in enumerate(zip(self.texts, continuations, strict=True), start=1):
            text = self.tokenizer.decode(tokens)
            self.reporter.event("sample", {"step": self.trainer.step, "prompt": prompt, "text": text})
            self.reporter.note(f"sample {number}: {one_line(' '.join((prompt + text).split()))}")

    def continue_prompts(self) -> list[list[int]]:
        """Return the new tokens of each prompt, the same on every rank."""
        new = [list[int]() for _ in self.prompts]
        active = list(range(len(self.prompts)))
        for _ in range(self.options.max_new_tokens):
            if not active:
                break
            logits = self.logits([[*self.prompts[n], *new[n]] for n in active])
            tokens = self.choose(active, [len(new[n]) for n in active], logits)
            end_tokens = (self.tokenizer.eod_id, NOT_FINITE)
            for n, token in zip(active, tokens, strict=True):
                if token not in end_tokens:
                    new[n].append(token)
            active = [n for n, token in zip(active, tokens, strict=True) if token not in end_tokens]
        return new

    def logits(self, texts: Sequence[Sequence[int]]) -> Tensor | None:
        """Return the next token's logits for each text, [texts, V]; None except on the last stage's ranks.

        Reads the last data.seq_length tokens of a text.
        """
        config, ctx = self.trainer.config, self.trainer.ctx
        texts = [text[-config.data.seq_length :] for text in texts]
        size, batches = config.train.micro_batch_size, list[_Batch]()
        for first in range(0, len(texts), size):
            batch = texts[first : first + size]
            tokens = torch.zeros(self.shape(batch), dtype=torch.int64)
            for row, text in zip(tokens, batch, strict=False):
                row[: len(text)] = torch.tensor(text)
            last = torch.tensor([len(text) - 1 for text in batch] + [0] * (len(tokens) - len(batch)))
            batches.append(_Batch(tokens.to(ctx.device), last.to(ctx.device)))

        def forward(chunk: Transformer, batch: _Batch, x: Tensor | None) -> Tensor:
            return cast(GPT2, chunk).next_logits(batch.tokens, batch.last, x)

        outputs = [logits.cpu() for _, logits in self.trainer.model.evaluate(batches, forward)]
        unpadded = [logits[: len(texts) - n * size] for n, logits in enumerate(outputs)]
        return torch.cat(unpadded) if unpadded else None

    def shape(self, texts: Sequence[Sequence[int]]) -> tuple[int, int]:
        """Return rows and tokens of a pass: a micro-batch's where another shape would recompile."""
        config, ctx = self.trainer.config, self.trainer.ctx
        length = config.data.seq_length
        if config.compile or ctx.device.type != "cpu":
            return config.train.micro_batch_size, length
        quantum = lcm(2 * ctx.cp.size, ctx.cp.size * ctx.tp.size)  # cp's pieces, and tp's of each
        longest = max(map(len, texts))
        return len(texts), min(length, -(-longest // quantum) * quantum)

    def choose(self, numbers: Sequence[int], positions: Sequence[int], logits: Tensor | None) -> list[int]:
        """Return the token that the last stage's first rank chooses for each prompt, on every rank."""
        ctx = self.trainer.ctx
        tokens = torch.zeros(len(numbers), dtype=torch.int64)
        if logits is not None and ctx.tp.rank == 0 and ctx.replicas.rank == 0:
            tokens = torch.tensor(next_tokens(logits, numbers, positions, self.options))
        tokens = tokens.to(ctx.device)
        for axis, source in ((ctx.tp, 0), (ctx.pp, ctx.pp.size - 1), (ctx.replicas, 0)):
            broadcast(tokens, axis, source)
        return tokens.tolist()
