"""Bounds of single numbers, by key."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from mlm.config.build import show


@dataclass(frozen=True)
class Bound:
    """A condition on a number and how to say it."""

    holds: Callable[[float], bool]
    words: str


POSITIVE = Bound(lambda x: x > 0, "greater than 0")
NOT_NEGATIVE = Bound(lambda x: x >= 0, "0 or more")
FRACTION = Bound(lambda x: 0 <= x < 1, "at least 0 and below 1")
PROBABILITY = Bound(lambda x: 0 < x <= 1, "above 0 and at most 1")
SHARE = Bound(lambda x: 0 <= x <= 1, "from 0 to 1")
PORT = Bound(lambda x: 0 <= x < 65536, "0 (any free port) to 65535")
SEED = Bound(lambda x: 0 <= x < 2**63, "0 to 2**63 - 1")

BOUNDS: dict[str, Bound] = (
    {
        "seed": SEED,
        "data.seed": SEED,
        "dropout": FRACTION,
        "schedule.warmup": FRACTION,
        "dist.master_port": PORT,
        "optimizer.betas": FRACTION,
        "model.hidden_dropout": FRACTION,
        "model.attention_dropout": FRACTION,
        "top_p": PROBABILITY,
        "data.masked_lm_prob": PROBABILITY,
        "data.short_seq_prob": SHARE,
        "dedup.threshold": FRACTION,
        "normalise.min_language_score": PROBABILITY,
        "filter.max_bullet_lines": SHARE,
        "filter.max_ellipsis_lines": SHARE,
        "filter.min_alphabetic_words": SHARE,
        "filter.max_duplicate_lines": SHARE,
    }
    | dict.fromkeys(
        [
            *("tp", "pp", "vp", "dp", "batch_size", "seq_length", "max_new_tokens"),
            *("num_samples", "repetition_penalty"),
            *("overlapping_eval", "limit", "max_length", "max_gen_toks"),
            *("model.num_layers", "model.hidden_size", "model.num_heads", "model.ffn_hidden_size"),
            *("model.max_positions", "model.vocab_size", "model.vocab_multiple", "model.layer_norm_eps"),
            *("optimizer.lr", "optimizer.eps", "schedule.decay_steps", "data.seq_length", "data.max_ngram"),
            *("precision.initial_loss_scale", "precision.min_loss_scale", "precision.loss_scale_window"),
            *("train.steps", "train.global_batch_size", "train.micro_batch_size", "train.validate_batches"),
            *("checkpoint.keep_last", "keep_last", "log.every"),
            *("dist.checkpoint_timeout_s",),
            *("seeds", "data.train_rows", "train.epochs", "train.sort_batches"),
            *("dist.timeout_s", "dist.threads_per_rank", "dist.peak_tflops"),
            *("steps", "micro_batches", "forward_cost", "backward_cost"),
            *("input_gradient_cost", "weight_gradient_cost"),
            *("max_document_bytes", "executor.workers", "executor.memory_gb", "filter.min_tokens"),
            *("dedup.ngram", "dedup.bands", "dedup.rows", "decontaminate.ngram", "decontaminate.min_ngram"),
        ],
        POSITIVE,
    )
    | dict.fromkeys(
        [
            *(
                "temperature",
                "top_k",
                "min_new_tokens",
                "model.init_std",
                "schedule.warmup_steps",
                "schedule.min_lr",
            ),
            *("optimizer.weight_decay", "optimizer.clip_grad_norm"),
            *(
                "train.validate_every",
                "train.patience",
                "checkpoint.save_every",
                "checkpoint.keep_every",
                "keep_every",
            ),
            *("data.eod_id", "model.token_types", "model.num_labels"),
            *("transfer_cost", "samples", "filter.min_words", "filter.max_words", "filter.min_stop_words"),
            *("filter.min_mean_word_length", "filter.max_mean_word_length", "filter.max_symbol_ratio"),
            *("decontaminate.margin", "decontaminate.min_piece", "decontaminate.max_matches"),
        ],
        NOT_NEGATIVE,
    )
)


MOST = 2**31 - 1
"""Of every whole number but seeds and bytes: what tensors and files count with, and no slip of a finger."""


def _limit(key: str) -> float:
    return math.inf if key == "max_document_bytes" or BOUNDS.get(key) is SEED else MOST


def out_of_range(values: dict[str, Any]) -> dict[str, str]:
    """The fault of each key whose number (or list of numbers) breaks its bound; null breaks none."""
    faults = {}
    for key, value in values.items():
        bound = BOUNDS.get(key)
        numbers = value if isinstance(value, (list, tuple)) else [value]
        numbers = [number for number in numbers if isinstance(number, int | float)]  # `samples` may be a path
        if bound and not all(map(bound.holds, numbers)):
            faults[key] = f"{key}={show(value)} must be {bound.words}"
        elif bound and any(isinstance(number, int) and number > _limit(key) for number in numbers):
            faults[key] = f"{key}={show(value)} must be at most {MOST}"
    return faults


def check_numbers(config: Any) -> list[str]:
    """Numbers out of their bounds."""
    return list(out_of_range(asdict(config)).values())
