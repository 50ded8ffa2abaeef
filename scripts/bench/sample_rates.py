"""Rates of making sample orders and of reading samples: tokens per second on one core."""

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from bench.stats import Spread
from bench.text_supply import document_lengths, write_tokens
from mlm.data.blend import BlendedDataset
from mlm.data.gpt import GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.data.sampler import Dataset, Loader

KINDS = ("long", "short")
INDEX_TARGET, LOAD_TARGET = 1e8, 5e7
MICRO_BATCH, GLOBAL_BATCH = 8, 256
WEIGHTS = (0.3, 0.7)


def index(args: argparse.Namespace) -> dict[str, Any]:
    """Opening a corpus up to its first samples: without a cache, writing one, and reading it."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="bench_data-", dir=args.folder) as name:
        for kind in KINDS:
            prefix = Path(name, kind)
            lengths = document_lengths(kind, args.tokens)
            write_tokens(prefix, lengths, sparse=True)
            total = int(lengths.sum(dtype="int64"))
            seconds: dict[str, list[float]] = {"no cache": [], "cache written": [], "cache read": []}
            for i in range(args.rounds):
                cache = Path(name, f"cache-{kind}-{i}")
                cache.mkdir()
                for how, folder in zip(seconds, (None, cache, cache), strict=True):
                    begin = time.perf_counter()
                    open_corpus(prefix, args.seq_length, total, folder).gather(range(32))
                    seconds[how].append(time.perf_counter() - begin)
            rows += [
                row(f"{kind} documents, {how}", total, times, args.target) for how, times in seconds.items()
            ]
    return {"tokens": args.tokens, "seq_length": args.seq_length, "rows": rows}


def open_corpus(prefix: Path, seq_length: int, total: int, cache: Path | None) -> GPTDataset:
    """A dataset of one epoch."""
    corpus = IndexedDataset(prefix)
    return GPTDataset(
        corpus, seq_length=seq_length, num_samples=total // seq_length, seed=1, cache_dir=cache, cache_from=0
    )


def load(args: argparse.Namespace) -> dict[str, Any]:
    """Samples from the map in the order of training: bare, through the loader, and from a blend."""
    rows = list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="bench_data-", dir=args.folder) as name:
        for kind in KINDS:
            lengths = document_lengths(kind, args.tokens)
            write_tokens(Path(name, kind), lengths, sparse=False)
            total = int(lengths.sum(dtype="int64"))
            for seq_length in args.seq_lengths:
                one = open_corpus(Path(name, kind), seq_length, total, None)
                blended = BlendedDataset([one, one], WEIGHTS, num_samples=len(one))
                steps = min(args.steps, len(one) // GLOBAL_BATCH)
                contenders: dict[str, Callable[[], None]] = {
                    "gather": lambda one=one, steps=steps: gather_all(one, steps),
                    "loader": lambda one=one, steps=steps: load_all(one, steps),
                    "blend, gather": lambda blended=blended, steps=steps: gather_all(blended, steps),
                    "blend, loader": lambda blended=blended, steps=steps: load_all(blended, steps),
                }
                one.epoch(0)  # the order is what `index` measures
                seconds = take_turns(contenders, args.rounds)
                tokens = steps * GLOBAL_BATCH * seq_length
                rows += [
                    row(f"{kind} documents, S={seq_length}, {how}", tokens, times, args.target)
                    for how, times in seconds.items()
                ]
    return {"tokens": args.tokens, "steps": args.steps, "global_batch": GLOBAL_BATCH, "rows": rows}


def take_turns(contenders: dict[str, Callable[[], None]], rounds: int) -> dict[str, list[float]]:
    """CPU seconds of each contender, all threads of the process, in `rounds` rounds after a warm-up."""
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for i in range(rounds + 1):
        for name, run in contenders.items():
            begin = time.process_time()
            run()
            if i:
                seconds[name].append(time.process_time() - begin)
    return seconds


def gather_all(dataset: Dataset, steps: int) -> None:
    """Samples step by step, as int64 arrays."""
    for step in range(steps):
        dataset.gather(range(step * GLOBAL_BATCH, (step + 1) * GLOBAL_BATCH))


def load_all(dataset: Dataset, steps: int) -> None:
    """Samples step by step, as micro-batches of tensors."""
    with Loader(
        dataset,
        consumed_samples=0,
        global_batch_size=GLOBAL_BATCH,
        micro_batch_size=MICRO_BATCH,
        rank=0,
        size=1,
    ) as loader:
        for _ in range(steps):
            next(loader)


def row(name: str, tokens: int, seconds: Sequence[float], target: float) -> dict[str, Any]:
    """Tokens per second of one contender."""
    rate = Spread.of(seconds).inverse_of(tokens)
    return {"name": name, "tokens": tokens, "seconds": list(seconds), "target": target} | {
        "rate": asdict(rate)
    }
