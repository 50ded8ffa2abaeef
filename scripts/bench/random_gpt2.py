"""A GPT-2 of random weights for benchmarks against `transformers`."""

import argparse
from pathlib import Path

import torch


def save_random_gpt2(folder: Path, args: argparse.Namespace, *, vocab: int, eod: int = 0) -> None:
    """Write it as `transformers` saves it, with heads of 64, in the sizes of the options."""
    from transformers import GPT2Config, GPT2LMHeadModel

    settings = GPT2Config(
        vocab_size=vocab,
        n_positions=args.positions,
        n_embd=args.hidden,
        n_layer=args.layers,
        n_head=args.hidden // 64,
        bos_token_id=eod,
        eos_token_id=eod,
    )
    torch.manual_seed(0)
    GPT2LMHeadModel(settings).save_pretrained(folder)
