"""Inputs of training: model shapes, weights and tokens, the same for every contender.

The vocabulary is the padded one for everybody (50,304 for GPT-2's 50,257), so that all compute one function:
who pads and masks, who pads and does not, would otherwise differ.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from mlm.convert.huggingface.families import mapping_of
from mlm.models.config import ModelConfig
from mlm.models.shape import flops_per_token, parameters_by_name
from mlm.optim.config import OptimizerConfig
from mlm.util.errors import UserError

GPT2_TOKENS = 50257
PADDED_VOCAB = 50304
NUM_BATCHES = 4  # prepared before timing and read in turn

OPTIMIZER = OptimizerConfig()
"""AdamW settings of every contender: the project's defaults, clipped at 1.0."""


@dataclass(frozen=True)
class Shape:
    """Sizes of a GPT-2 and of the batch of one step."""

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    seq_length: int
    vocab_size: int
    batch_size: int
    dropout: float = 0.0
    """Of hidden states and of attention."""

    @property
    def tokens_per_step(self) -> int:
        return self.batch_size * self.seq_length

    def model(self) -> ModelConfig:
        """The configuration of `mlm`; no padding rows at any tp."""
        return ModelConfig(
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            max_positions=self.seq_length,
            vocab_size=self.vocab_size,
            vocab_multiple=1,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )

    def state(self, seed: int) -> dict[str, Tensor]:
        """Random float32 weights, named and laid out as in `transformers`; none is zero, so all shows."""
        generator, model, state = torch.Generator().manual_seed(seed), self.model(), dict[str, Tensor]()
        mapping, parameters = mapping_of(model), parameters_by_name(model)
        assert mapping is not None
        for name, location in mapping.locations(model):
            mean = float(name.endswith("norm.weight"))
            value = torch.empty(parameters[name].shape).normal_(mean, 0.02, generator=generator)
            names = (mapping.stored_name(stored, model) for stored in location.names)
            state |= zip(names, location.to_stored(value), strict=True)
        return state

    def flops_per_token(self) -> float:
        return flops_per_token(self.model(), self.seq_length)

    def describe(self) -> str:
        return (
            f"{self.num_layers} layers × {self.hidden_size} × {self.num_heads} heads, S={self.seq_length}, "
            f"V={self.vocab_size:,}, micro-batch {self.batch_size}"
        )


NAMED: dict[str, dict[str, tuple[Shape, ...]]] = {
    "cpu": {
        "tiny": (Shape("tiny", 2, 32, 2, 16, 128, 2),),
        "tune": (Shape("tune", 6, 384, 6, 512, PADDED_VOCAB, 8),),
        "report": (
            Shape("2x64", 2, 64, 4, 128, 512, 8),
            Shape("4x256", 4, 256, 4, 256, 8192, 8),
            Shape("6x384", 6, 384, 6, 512, PADDED_VOCAB, 4),
            Shape("12x768", 12, 768, 12, 512, PADDED_VOCAB, 1),
        ),
    },
    "cuda": {
        "tiny": (Shape("tiny", 2, 64, 2, 64, 512, 2),),
        "tune": (Shape("tune-124m", 12, 768, 12, 1024, PADDED_VOCAB, 8),),
        "report": (Shape("report-355m", 24, 1024, 16, 1024, PADDED_VOCAB, 8),),
    },
}
"""Shapes by device: `tune` to tune on, `report` to report (each has a name too), `tiny` to try the tool."""


def shapes_of(words: list[str], device: str) -> tuple[Shape, ...]:
    """The shapes that `--shape WORDS` names: tune, report or some of its, tiny, or custom L,H,N,S,V,B.

    Raises UserError.
    """
    named = NAMED[device] | {shape.name: (shape,) for shape in NAMED[device]["report"]}
    if all(word in named for word in words):
        return tuple(shape for word in words for shape in named[word])
    if len(words) == 2 and words[0] == "custom":
        try:
            layers, hidden, heads, seq, vocab, batch = (int(word) for word in words[1].split(","))
        except ValueError:
            pass
        else:
            shape = Shape("custom", layers, hidden, heads, seq, vocab, batch)
            if min(layers, hidden, heads, seq, vocab, batch) < 1:
                raise UserError(f"--shape {shape.describe()}: every size must be at least 1")
            if hidden % heads:
                raise UserError(f"--shape: H={hidden} must be a multiple of N={heads}")
            return (shape,)
    raise UserError(
        f"--shape {' '.join(words)!r} is no shape: use some of {', '.join(named)}, "
        "or custom L,H,N,S,V,B with six whole numbers"
    )


def make_batches(shape: Shape, seed: int) -> list[tuple[Tensor, Tensor]]:
    """Tokens and labels, each [B, S] int64 on the CPU, for NUM_BATCHES steps."""
    generator = torch.Generator().manual_seed(seed)
    highest = min(shape.vocab_size, GPT2_TOKENS)
    size = (NUM_BATCHES, shape.batch_size, shape.seq_length + 1)
    samples = torch.randint(highest, size, generator=generator)
    return [(s[:, :-1].contiguous(), s[:, 1:].contiguous()) for s in samples]


TRANSPOSED = ("attn.c_attn.weight", "attn.c_proj.weight", "mlp.c_fc.weight", "mlp.c_proj.weight")
"""Weights that GPT2LMHeadModel stores [in, out] and nn.Linear [out, in]."""
