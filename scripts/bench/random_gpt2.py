"""A GPT-2 of random weights for benchmarks against `transformers`."""

from pathlib import Path

import torch


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
