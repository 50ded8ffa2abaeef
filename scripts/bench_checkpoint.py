"""Cost of a checkpoint in training: saved synchronously and in the background, on this machine.

    python scripts/bench_checkpoint.py --out scripts/results/bench_checkpoint-cpu.json

Trains a GPT-2 on random tokens in windows of equally many steps. Windows come in rounds of four: no save, a
synchronous save, no save, a save in the background, begun with the window and over within it (or the round is
dropped). What a window takes beyond the mean of the two without a save is what its save cost training. The
result is the median cost in the background over the median cost of the synchronous one.
Exit code: 0 a result, 1 too few rounds were kept.
"""

import argparse
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness import Bench, Result, Say, positive, table_of
from rich.console import RenderableType

from mlm.config.cli.compose import load_config
from mlm.data.sampler import Batch, Loader
from mlm.data.synthetic import SyntheticDataset
from mlm.parallel.mesh import shape_context
from mlm.training.config import PretrainConfig
from mlm.training.memory import reuse_large_blocks
from mlm.training.observer import Observers
from mlm.training.saver import Saver
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

KINDS = ("synchronous", "background")


@dataclass
class Told:
    """The saver's reporter: remembers what it hears."""

    seconds: float = 0.0
    waited: float = 0.0
    path: Path | None = None

    def saved(self, step: int, path: Path, seconds: float, waited: float) -> None:
        """A checkpoint was written."""
        self.seconds, self.waited, self.path = seconds, waited, path

    def save_failed(self, step: int, error: str) -> None:
        """No result comes of this."""
        raise RuntimeError(error)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--model", default="gpt2_124m", help="preset of configs/model (default %(default)s)")
    add("--seq-length", type=positive, default=128)
    add("--steps", type=positive, default=16, help="steps per window (default %(default)s)")
    add("--rounds", type=positive, default=9)
    add("--folder", type=Path, default=Path(), help="on a disk: where checkpoints go (default: here)")


def windows(
    trainer: Trainer, saver: Saver, told: Told, batches: Iterator[list[Batch]], steps: int
) -> Iterator[dict[str, float]]:
    """One window after another: send what to save with, get the seconds it took."""
    kind = yield {}
    while True:
        saver._asynchronous = kind == "background"
        begin = time.perf_counter()
        if kind != "none":
            saver.begin()
        for _ in range(steps):
            outcome = trainer.train_step(next(batches))
            float(outcome.parts.item())
            saver.after_step(outcome)
        seconds, done = time.perf_counter() - begin, saver._pending is None
        saver.finish()
        kind = yield {"seconds": seconds, "done": done, "save_s": told.seconds, "waited_s": told.waited}


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Windows with and without saves. Raises UserError where no round was kept."""
    reuse_large_blocks()
    config: PretrainConfig = load_config(
        "pretrain", [f"model={args.model}", "data=synthetic", f"data.seq_length={args.seq_length}"]
    )
    train = replace(config.train, global_batch_size=1, micro_batch_size=1)
    config = replace(config, train=train, checkpoint=replace(config.checkpoint, keep_last=1))
    samples = SyntheticDataset(config.model.vocab_size, args.seq_length, 100_000, 0)
    trainer = Trainer(config, shape_context())
    loader = Loader(
        samples, consumed_samples=0, global_batch_size=1, micro_batch_size=1, rank=0, size=1, pin_memory=False
    )
    folder = Path(tempfile.mkdtemp(prefix="bench-", dir=args.folder))
    told, rounds = Told(), []
    saver = Saver(trainer, folder, told)  # type: ignore[arg-type]
    trainer.observers = Observers([saver])
    try:
        with loader as batches:
            run_window = windows(trainer, saver, told, batches, args.steps)
            next(run_window)
            for kind in ("none", "synchronous", "background", "none"):  # warm-up: memory, page cache, disk
                run_window.send(kind)
            for number in range(args.rounds):
                order = ["none", "synchronous", "none", "background"]
                if number % 2:
                    order = ["none", "background", "none", "synchronous"]
                found = [(kind, run_window.send(kind)) for kind in order]
                rounds.append(costs(found))
                say(line(rounds[-1], args.steps))
        size = sum(file.stat().st_size for file in told.path.iterdir()) if told.path else 0
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return summary(rounds, size)


def costs(found: list[tuple[str, dict[str, float]]]) -> dict[str, Any]:
    """Cost of both saves of a round, in seconds."""
    plain = sum(w["seconds"] for kind, w in found if kind == "none") / 2
    by_kind = dict(found)
    result: dict[str, Any] = {"plain_s": plain, "kept": bool(by_kind["background"]["done"])}
    for kind in KINDS:
        result[kind] = {"cost_s": by_kind[kind]["seconds"] - plain, **by_kind[kind]}
    return result


def line(entry: dict[str, Any], steps: int) -> str:
    """A round in words."""
    sync, background = entry["synchronous"], entry["background"]
    return (
        f"step {1e3 * entry['plain_s'] / steps:.0f} ms; synchronous {sync['cost_s']:.2f} s; "
        f"background {background['cost_s']:.2f} s, waited {background['waited_s']:.3f} s, written after "
        f"{background['save_s']:.1f} s" + ("" if entry["kept"] else ", beyond the window: dropped")
    )


def summary(rounds: list[dict[str, Any]], size: int) -> Result:
    """Medians and ratios of the rounds that were kept. Raises UserError if none was."""
    kept = [entry for entry in rounds if entry["kept"]]
    if not kept:
        raise UserError("no save ended within its window: use more --steps")
    columns = ("cost_s", "waited_s", "save_s")
    medians = {kind: {c: median(e[kind][c] for e in kept) for c in columns} for kind in KINDS}
    return {
        "bytes": size,
        "medians": medians,
        "ratio_of_medians": medians["background"]["cost_s"] / medians["synchronous"]["cost_s"],
        "ratios": sorted(e["background"]["cost_s"] / e["synchronous"]["cost_s"] for e in kept),
        "rounds": rounds,
    }


def tables(result: Result) -> Iterator[RenderableType]:
    """Both kinds of saves, and their ratio."""
    headings = ("save", "cost to training, s", "training waited, s", "whole save, s")
    medians, ratios = result["medians"], result["ratios"]
    yield table_of(headings, ((kind, *(f"{x:.3f}" for x in medians[kind].values())) for kind in KINDS))
    yield f"{result['bytes'] / 1e9:.2f} GB; {len(ratios)} of {len(result['rounds'])} rounds kept"
    ratio = result["ratio_of_medians"]
    yield f"background / synchronous: {ratio:.3f} (rounds: {ratios[0]:.2f} to {ratios[-1]:.2f})"


BENCH = Bench(
    name="bench_checkpoint",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: len(result["ratios"]) >= min(5, len(result["rounds"])),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
