"""Sizes of the models that are measured, and how they get weights without minutes of drawing on the CPU."""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from bench.contenders import MlmTrainee
from bench.shapes import PADDED_VOCAB, Shape
from bench.spec import Spec
from torch import nn

from mlm.runs.config import PretrainConfig
from mlm.training import trainer

SIZES = {
    "124m": (12, 768, 12),
    "355m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.2b": (40, 1536, 16),
    "2.5b": (54, 1920, 20),
}
"""L, H, N of model=gpt2_… (configs/model)."""
TINY = (2, 64, 4)
Change = Callable[[PretrainConfig], PretrainConfig]
"""The settings to measure, of those of the benchmark."""


def gpt2(
    name: str, *, quick: bool, batch_size: int = 1, seq_length: int = 1024, dropout: float = 0.0
) -> Shape:
    """The shape of GPT-2 `name`; with `quick` a tiny one in its place."""
    layers, hidden, heads = TINY if quick else SIZES[name]
    vocab, seq = (512, min(seq_length, 64)) if quick else (PADDED_VOCAB, seq_length)
    return Shape(name, layers, hidden, heads, seq, vocab, batch_size, dropout)


def spec_of(shape: Shape, device: str, dtype: str = "bf16") -> Spec:
    return Spec(shape, device, dtype, torch.get_num_threads())  # type: ignore[arg-type]


@torch.no_grad()
def init_on_device(model: nn.Module, *_: Any) -> None:
    """Initial weights drawn where they are: of 2.5 billion the CPU draws for half a minute.

    Random, not zero: products of zeros take less power, so that clocks are higher than in training.
    """
    for name, parameter in model.named_parameters():
        if parameter.dim() > 1:
            parameter.normal_(0.0, 0.02)
        else:
            parameter.fill_(0.0 if name.endswith("bias") else 1.0)


class SpeedTrainee(MlmTrainee):
    """`mlm` by its Trainer, with any weights, at any micro-batch size, under any settings.

    A step is of `micro_batches`.
    """

    def __init__(
        self,
        name: str,
        spec: Spec,
        device: torch.device,
        change: Change = lambda config: config,
        micro_batches: int = 1,
    ) -> None:
        self.changed, self.micro_batches = change, micro_batches  # type: ignore[method-assign]
        super().__init__(name, spec, device)

    def step(self, index: int) -> None:
        n = len(self.batches)
        self.trainer.train_step([self.batches[(index + i) % n] for i in range(self.micro_batches)])

    def build(self, compiled: bool) -> trainer.Trainer:
        saved, trainer.init_parameters = trainer.init_parameters, init_on_device
        try:
            return super().build(compiled)
        finally:
            trainer.init_parameters = saved

    def load_weights(self) -> None:
        """They are random already."""

    def use(self, batch_size: int) -> None:
        self.spec = replace(self.spec, shape=replace(self.spec.shape, batch_size=batch_size))
        self.batches = self.make_batches()


@contextmanager
def freed(device: str) -> Iterator[None]:
    """Memory that what happens inside drops is free again afterwards, and compiled code is forgotten.

    The compiler would count the layers of the next trainee as recompilations of these: after eight it runs
    them as they are, which would be measured as compiled. So that limit is an error, too.
    """
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    try:
        yield
    finally:
        gc.collect()
        torch._dynamo.reset()
        if device == "cuda":
            torch.cuda.empty_cache()
