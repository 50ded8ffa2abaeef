"""A few random texts, and what a checkpoint of ours makes of them: to be compared with `transformers`.

Shapes: B texts, S tokens, R tokens before the padding of all texts, V vocabulary, H hidden.
"""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from mlm.inference.trained import load_trained
from mlm.models.backbone import Inputs, Transformer
from mlm.models.bert.model import BERT
from mlm.models.config import ModelConfig
from mlm.models.documents import without_padding
from mlm.models.gpt2.model import GPT2
from mlm.optim.config import PrecisionConfig
from mlm.parallel.collectives import gather_rows
from mlm.parallel.config import ParallelConfig
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.mesh import ParallelContext, shape_context

BATCH, LENGTH = 2, 64
SEED = 0


@dataclass(frozen=True, eq=False)
class Probe:
    """Texts of random tokens, the same at every call for models of the same shape."""

    tokens: Tensor
    """[B, S] int64, over the whole vocabulary."""
    lengths: Tensor
    """[B] int64: tokens before the padding; where a model has a head of its own or reads both ways, the last
    text is shorter."""
    token_types: Tensor | None
    """[B, S] int64; None for a model that knows none."""

    @classmethod
    def of(cls, model: ModelConfig) -> "Probe":
        """Texts that a model can read."""
        generator = torch.Generator().manual_seed(SEED)
        shape = (BATCH, min(model.max_positions, LENGTH))
        tokens = torch.randint(model.vocab_size, shape, generator=generator)
        lengths = torch.full((BATCH,), shape[1])
        if model.kind == "bert" or model.head == "classification":
            lengths[-1] -= shape[1] // 3
        types = torch.randint(model.token_types, shape, generator=generator) if model.token_types else None
        return cls(tokens, lengths, types)

    @property
    def mask(self) -> Tensor:
        """bool [B, S]: which tokens are no padding."""
        return torch.arange(self.tokens.shape[1]) < self.lengths[:, None]


Outputs = dict[str, Tensor]
"""What a model says, by what to call it. What it says of each token is [R, …], of each text [B, …]."""


@torch.no_grad()
def our_outputs(run: Path, ctx: ParallelContext | None = None) -> Outputs:
    """What a checkpoint makes of its probe; on the last pipeline stage, empty elsewhere.

    Collective over all ranks of `ctx`; None for this process alone.
    """
    ctx = ctx or shape_context()
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(str(run), layout, PrecisionConfig(), ctx)
    found: Outputs = {}

    def forward(chunk: Transformer, probe: Probe, x: Tensor | None) -> Tensor:
        inputs = inputs_of(probe, ctx.device, reads_both_ways=chunk.config.kind == "bert")
        has_outputs = chunk.config.head in ("classification", "span")
        y = (chunk.outputs if has_outputs else chunk.encode)(inputs, None, x)
        if chunk.stage.is_last:
            found.update(said(chunk, y, probe.mask.to(ctx.device)))
        return y

    for _ in trained.model.evaluate([Probe.of(trained.config.model)], forward):
        pass
    return {name: value.cpu() for name, value in found.items()}


def inputs_of(probe: Probe, device: torch.device, *, reads_both_ways: bool) -> Inputs:
    """The probe as a model reads it."""
    width = probe.tokens.shape[1]
    spans = without_padding(probe.lengths, width, torch.float32, device) if reads_both_ways else None
    types = None if probe.token_types is None else probe.token_types.to(device)
    return Inputs(probe.tokens.to(device), probe.lengths.to(device), types, spans)


def said(chunk: Transformer, y: Tensor, mask: Tensor) -> Outputs:
    """What the last stage says, of what a head for finetuning gives or else of hidden states [S, B, H]."""
    if chunk.config.head == "classification":
        return {"logits": y}
    if chunk.config.head == "span":
        return {"logits": y[mask]}
    rows = y.transpose(0, 1)[mask]  # [R, H]
    if isinstance(chunk, GPT2):
        return {"logits": full_logits(rows, chunk.token)} if chunk.config.is_tied else {"hidden states": rows}
    assert isinstance(chunk, BERT)
    pooled = chunk.pool(y)
    if not chunk.config.is_tied:
        return {"hidden states": rows, "pooled states": pooled[0]}
    head = chunk.mlm_head
    bias = head.vocabulary.bias if chunk.tp.size == 1 else gather_rows(head.vocabulary.bias, chunk.tp)
    tokens = full_logits(head(rows), chunk.token) + bias[: chunk.config.vocab_size]
    return {"token logits": tokens, "order logits": chunk.sop_head(pooled)[0]}
