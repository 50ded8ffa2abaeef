"""A GPT-2 of random weights for benchmarks against `transformers`, and what both say of the machine."""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from bench.machine import REPOSITORY, commit_of, cpu_model, package_version


def save_random_gpt2(
    folder: Path, *, layers: int, hidden: int, positions: int, vocab: int, eod: int, seed: int
) -> None:
    """Write it as `transformers` saves it, with heads of 64."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=vocab,
        n_positions=positions,
        n_embd=hidden,
        n_layer=layers,
        n_head=hidden // 64,
        bos_token_id=eod,
        eos_token_id=eod,
    )
    torch.manual_seed(seed)
    GPT2LMHeadModel(settings).save_pretrained(folder)


def machine_facts(threads: int, packages: Sequence[str]) -> dict[str, Any]:
    """Settings that a measurement depends on, for its result file."""
    return {
        "cpu": cpu_model(),
        "threads": threads,
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "commit": commit_of(REPOSITORY),
        "load_average": [round(x, 2) for x in os.getloadavg()],
        **{name: package_version(name) for name in packages},
    }
