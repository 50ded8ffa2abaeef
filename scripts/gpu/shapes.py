"""Sizes of the models that are measured, and how they get weights without minutes of drawing on the CPU."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from bench.shapes import PADDED_VOCAB
from torch import nn

from mlm.data.sampler import Loader
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import train_dataset

SIZES = {
    "124m": (12, 768, 12),
    "355m": (24, 1024, 16),
    "774m": (36, 1280, 20),
    "1.2b": (40, 1536, 16),
    "2.5b": (54, 1920, 20),
}
"""L, H, N of model=gpt2_… (configs/model)."""
TINY = (2, 64, 4)


def gpt2(
    name: str,
    *,
    quick: bool,
    batch_size: int,
    micro_batches: int = 1,
    seq_length: int = 1024,
    dropout: float = 0.0,
) -> str:
    """Settings of GPT-2 `name` in bf16, with a micro-batch of `batch_size`; with `quick` of a tiny one."""
    layers, hidden, heads = TINY if quick else SIZES[name]
    vocab, seq = (512, min(seq_length, 64)) if quick else (PADDED_VOCAB, seq_length)
    return (
        f"model=gpt2_tiny model.num_layers={layers} model.hidden_size={hidden} model.num_heads={heads} "
        f"model.vocab_size={vocab} model.max_positions={seq} data.seq_length={seq} precision=bf16 "
        f"model.hidden_dropout={dropout} model.attention_dropout={dropout} "
        f"train.global_batch_size={micro_batches * batch_size} train.micro_batch_size={batch_size}"
    )


def loader_of(config: PretrainConfig, steps: int, *, pin_memory: bool = False) -> Loader:
    """The micro-batches of so many steps on one rank."""
    train = config.train
    return Loader(
        train_dataset(config, steps * train.global_batch_size),
        consumed_samples=0,
        global_batch_size=train.global_batch_size,
        micro_batch_size=train.micro_batch_size,
        rank=0,
        size=1,
        pin_memory=pin_memory,
    )


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


@contextmanager
def freed(device: str) -> Iterator[None]:
    """Memory that what happens inside drops is free again afterwards, and compiled code is forgotten.

    The compiler would count the layers of the next model as recompilations of these: after eight it runs
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
