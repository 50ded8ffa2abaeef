"""A trained model in Python: load it, generate, compute logits, score documents. Public as `mlm.load`.

Shapes: B sequences, S tokens, V vocabulary.
"""

import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal, TypeVar, cast, get_args, overload

import torch
from torch import Tensor, nn

from mlm.data.sampler import Batch
from mlm.data.tokenizer import Tokenizer
from mlm.errors import ConfigError, Problem, UserError
from mlm.inference.generation import Sampling, before_stop, ends_at, generate
from mlm.inference.scoring import rolling_windows, score
from mlm.inference.trained import (
    Trained,
    checkpoint_problems,
    continuation_problem,
    load_tokenizer,
    load_trained,
    vocabulary_problem,
)
from mlm.launch.join import build_mesh
from mlm.models.backbone import Transformer
from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.optim.config import PrecisionConfig
from mlm.parallel.collectives import broadcast
from mlm.parallel.config import ParallelConfig
from mlm.parallel.cross_entropy import wide
from mlm.parallel.mesh import ParallelContext

Precision = Literal["fp32", "bf16", "fp16", "fp64"]
Text = TypeVar("Text", str, list[str])
USUAL = Sampling()
"""Defaults of `Model.generate`, those of `mlm generate`."""


def load(
    ckpt: str | Path,
    *,
    tp: int = 1,
    pp: int = 1,
    precision: Precision = "fp32",
    device: str = "auto",
    tokenizer: str | Path | None = None,
    ctx: ParallelContext | None = None,
) -> "Model":
    """Load a trained model, at any layout whatever layout it was trained at. Collective over all ranks.

    Args:
        ckpt: Run directory (its latest checkpoint), checkpoint (step-…), or Hugging Face folder or id.
        tp: Tensor-parallel size; more than 1 under torchrun or SLURM.
        pp: Pipeline-parallel size.
        precision: Number format of weights and activations.
        device: auto, cpu or cuda.
        tokenizer: tokenizer.json; None takes the one saved with the model.
        ctx: Process groups of `build_mesh`, in place of tp, pp and device.

    Raises:
        UserError: There is no such checkpoint, it is damaged, or it cannot be split so.
    """
    if precision not in get_args(Precision):
        known = ", ".join(get_args(Precision))
        raise UserError(
            f"precision={precision}: no such number format", keys=("precision",), fix=f"use {known}"
        )
    if ctx is None:
        ctx = build_mesh(tp=tp, pp=pp, device=device)
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    if problems := checkpoint_problems(str(ckpt), layout):
        raise ConfigError(problems)
    trained = load_trained(str(ckpt), layout, PrecisionConfig(dtype=precision), ctx)
    for chunk in trained.model.chunks:
        chunk.to(trained.model.dtype)  # half precision: no float32 copy, no cast at each use
    model = Model(trained, ctx, None if tokenizer is None else str(tokenizer))
    if tokenizer is not None:
        assert model.tokenizer, "read now, so that its problems show here"
    return model


class Model:
    """A trained model, or this rank's part of one: `load` returns it.

    Under torchrun every rank calls a method with the same arguments, and gets the same result.

    Attributes:
        path: Its checkpoint (step-…), or the Hugging Face folder.
        config: Shape of the model.
        ctx: Process groups.
        chunks: This rank's modules: the whole model if tp = pp = 1.
    """

    def __init__(self, trained: Trained, ctx: ParallelContext, tokenizer: str | None = None) -> None:
        self.trained, self.ctx, self._named_tokenizer = trained, ctx, tokenizer
        self.path: Path = trained.path
        self.config: ModelConfig = trained.config.model
        self.chunks: list[nn.Module] = list(trained.model.chunks)

    def __repr__(self) -> str:
        layout = f"tp={self.ctx.tp.size}, pp={self.ctx.pp.size}"
        return (
            f"Model({self.path}, {self.config.kind}, {self.config.num_parameters():,} parameters, {layout})"
        )

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer: `encode` and `decode`. Raises UserError if there is none."""
        tokenizer = load_tokenizer(self._named_tokenizer, self.path)
        if problem := vocabulary_problem(self._named_tokenizer, tokenizer, self.config):
            raise UserError(problem)
        return tokenizer

    def generate(
        self,
        prompt: Text,
        *,
        max_new_tokens: int = USUAL.max_new_tokens,
        min_new_tokens: int = USUAL.min_new_tokens,
        temperature: float = USUAL.temperature,
        top_k: int = USUAL.top_k,
        top_p: float = USUAL.top_p,
        repetition_penalty: float = USUAL.repetition_penalty,
        stop: str | Sequence[str] = (),
        special_tokens: bool = False,
        seed: int = USUAL.seed,
        batch_size: int = USUAL.batch_size,
    ) -> Text:
        """Return the continuation of a prompt, or of each of several, without the prompt.

        Of a list, prompt i draws what line i of a file draws in `mlm generate`: repeat a prompt to get
        several samples.

        Args:
            prompt: Text, or texts; an empty one begins a document.
            max_new_tokens: Most tokens to add; the end-of-document token ends a continuation earlier.
            min_new_tokens: Tokens before which it may not.
            temperature: Divides the logits; 0 takes the most probable token.
            top_k: Sample among this many most probable tokens; 0 means all.
            top_p: Sample among the fewest most probable tokens whose probabilities reach this sum.
            repetition_penalty: Divides the positive logits of tokens present already (arXiv:1909.05858).
            stop: Strings that end a continuation, which is truncated before the first of them.
            special_tokens: Read names of special tokens in a prompt, such as <|endoftext|>, as those tokens.
            seed: Seed of the draws. What is drawn depends on neither the layout nor batch_size.
            batch_size: Prompts continued at a time.
        """
        self._check_causal()
        options = Sampling(
            max_new_tokens=max_new_tokens,
            min_new_tokens=min_new_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            repetition_penalty=repetition_penalty,
            seed=seed,
            batch_size=batch_size,
        )
        stops = [stop] if isinstance(stop, str) else list(stop)
        problems = options.problems()
        if "" in stops:
            problems.append(Problem.at("stop", '""', "would end every continuation at once", "omit it"))
        if problems:
            raise ConfigError(problems)
        tokenizer = self.tokenizer
        encode = tokenizer.encode_special if special_tokens else tokenizer.encode
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        new = generate(
            self.trained,
            [encode(text) or [tokenizer.eod_id] for text in prompts],
            options,
            ctx=self.ctx,
            eod_id=tokenizer.eod_id,
            until=ends_at(tokenizer, stops),
        )
        texts = [before_stop(tokenizer.decode(tokens), stops) for tokens in new]
        return texts[0] if isinstance(prompt, str) else texts

    def logits(self, tokens: Tensor) -> Tensor:
        """Return the logits of the token after each token: int64 [B, S] -> [B, S, V], on every rank.

        float32 (float64 for precision=fp64), on the model's device, without gradients. V is the vocabulary
        without padding.
        """
        self._check_causal()
        longest, size = self.config.max_positions, self.config.vocab_size
        if tokens.dtype != torch.int64 or tokens.dim() != 2 or not tokens.numel():
            found = f"{str(tokens.dtype).removeprefix('torch.')} {list(tokens.shape)}"
            raise UserError(f"tokens: {found}, not int64 [B, S]; use torch.tensor([ids])")
        if tokens.shape[1] > longest:
            raise UserError(
                f"tokens: S={tokens.shape[1]} is more than max_positions={longest}; truncate them"
            )
        if int(tokens.min()) < 0 or int(tokens.max()) >= size:
            raise UserError(f"tokens: ids must be 0 to {size - 1}; encode with the model's tokenizer")

        def forward(chunk: Transformer, batch: Batch, x: Tensor | None) -> Tensor:
            return cast(GPT2, chunk).logits(batch.tokens, x)

        model, pp = self.trained.model, self.ctx.pp
        tokens = tokens.to(self.ctx.device)
        found_here = [y.contiguous() for _, y in model.evaluate([Batch(tokens, tokens, 0)], forward)]
        y = found_here[0] if found_here else tokens.new_empty(*tokens.shape, size, dtype=wide(model.dtype))
        return broadcast(y, pp, pp.size - 1)

    @overload
    def score(self, texts: str, *, batch_size: int = ...) -> float: ...

    @overload
    def score(self, texts: list[str], *, batch_size: int = ...) -> list[float]: ...

    def score(self, texts: str | list[str], *, batch_size: int = 8) -> float | list[float]:
        """Return the log-likelihood in nats of a document, or of each of several.

        It is the sum over the document's tokens of log p(token | tokens before it). The first is predicted
        after the tokenizer's `prefix_id`, which is not scored. A document of more than max_positions tokens
        is scored in windows of that many, each token once: a window begins after the last token of the one
        before, which is its context, and the last is moved back to be full. Equal to lm-eval's
        `loglikelihood_rolling`. An empty document has 0.

        Args:
            texts: Document, or documents.
            batch_size: Documents of max_positions tokens per micro-batch; scores do not depend on it.
        """
        self._check_causal()
        if batch_size < 1:
            raise ConfigError([Problem.at("batch_size", batch_size, "must be at least 1")])
        tokenizer, longest = self.tokenizer, self.config.max_positions
        documents = [texts] if isinstance(texts, str) else list(texts)
        windows = [
            list(rolling_windows(tokenizer.encode(d), tokenizer.prefix_id, longest)) for d in documents
        ]
        requests = [request for some in windows for request in some]
        scores = iter(score(self.trained, requests, batch_size=batch_size, ctx=self.ctx))
        sums = [-math.fsum(next(scores).loss for _ in some) for some in windows]
        return sums[0] if isinstance(texts, str) else sums

    def _check_causal(self) -> None:
        """Raise UserError unless the model predicts the next token."""
        if problem := continuation_problem(str(self.path), self.config):
            raise UserError(problem)
