"""Cost of watching a run: steps with the checks of mlm/training/incidents at their defaults, and without.

    python scripts/bench_incidents.py --out scripts/results/bench_incidents-cpu.json

Two trainers of one process with the same weights take steps in turn; one is watched: their ratio shows costs
above the noise of a step. The hooks of a step are timed alone too, and so are the comparisons that are due
every `check.every` steps (a step computed twice, digests of all weights and moments), divided by that number:
these two are the share. Seconds are of processor time. The exchange between ranks is not in it.
Exit code: 0 within 1 %, 1 above, 2 a mistake.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench.command import guarded
from bench.random_gpt2 import machine_facts
from bench.stats import Spread
from rich.console import Console
from rich.table import Table

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.config import PretrainConfig, TrainConfig
from mlm.training.incidents.replicas import digests, state_of
from mlm.training.incidents.watcher import Incidents
from mlm.training.trainer import Trainer
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

TARGET = 0.01
"""Share of a step that watching may cost."""
WARM_UP, REPEATS = 3, 200


def config_of(args: argparse.Namespace) -> PretrainConfig:
    """A small GPT-2 without dropout."""
    model = ModelConfig(
        num_layers=args.layers,
        hidden_size=args.hidden,
        num_heads=max(1, args.hidden // 64),
        max_positions=args.seq,
        vocab_size=args.vocab,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    return PretrainConfig(
        name="bench",
        out="",
        model=model,
        compile=False,
        train=TrainConfig(steps=10_000, global_batch_size=args.batch, micro_batch_size=args.batch),
        data=DataConfig(kind="synthetic", seq_length=args.seq),
    )


class Watched:
    """A trainer, with the hooks of the training loop or without."""

    def __init__(self, config: PretrainConfig, folder: Path | None) -> None:
        self.trainer: Trainer[Batch] = Trainer(config, ParallelContext())
        tokens = torch.randint(
            config.model.vocab_size, (config.train.micro_batch_size, config.data.seq_length)
        )
        self.batches = [Batch(tokens, tokens.roll(-1, 1), 0)]
        self.hooks = None
        if folder is not None:
            quiet: Callable[..., None] = lambda *_: None  # noqa: E731
            reporter = SimpleNamespace(problem=quiet, note=quiet, event=quiet, rewound=quiet)
            self.hooks = Incidents(self.trainer, folder, reporter, SimpleNamespace())  # type: ignore[arg-type]

    def step(self) -> None:
        """Take a step as `Loop.run_steps` does."""
        if self.hooks is None:
            self.trainer.train_step(self.batches)
            return
        with self.hooks.timed("data"):
            batches = self.batches
        self.hooks.begin(batches)
        self.trainer.train_step(batches)
        self.hooks.must_rewind()
        self.hooks.end()


def watch(each: Watched) -> None:
    """Do all that watching adds to a step."""
    assert each.hooks is not None
    each.hooks.begin(each.batches)
    each.trainer.judge(torch.tensor([7.0]), torch.tensor(1.0))
    each.hooks.must_rewind()
    each.hooks.end()


def seconds(run: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(args: argparse.Namespace, folder: Path, console: Console) -> dict[str, Any]:
    """The share of a step that watching costs."""
    config = config_of(args)
    every = config.check.every
    steps_alone = replace(config, check=replace(config.check, every=0))
    contenders = {"without": Watched(steps_alone, None), "with": Watched(steps_alone, folder)}
    for each in contenders.values():
        for _ in range(WARM_UP):
            each.step()
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(args.rounds):
        for name in contenders if number % 2 == 0 else reversed(contenders):
            times[name].append(seconds(contenders[name].step))
    console.print(f"{args.rounds} rounds", highlight=False)
    trainer = contenders["with"].trainer
    again = min(seconds(lambda: trainer.forward_backward(contenders["with"].batches)) for _ in range(3))
    digest = min(
        seconds(lambda: digests(state_of(trainer, trainer.shards), torch.device("cpu"))) for _ in range(3)
    )
    step = Spread.of(times["without"]).median
    own = seconds(lambda: [watch(contenders["with"]) for _ in range(REPEATS)]) / REPEATS
    ratio = Spread.of([mine / other for mine, other in zip(times["with"], times["without"], strict=True)])
    due = (again + digest) / every / step
    return {
        "parameters": config.model.num_parameters(),
        "seconds_per_step": times,
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "hooks_s": own,
        "repetition_s": again,
        "digests_s": digest,
        "check_every": every,
        "comparisons": due,
        "share": own / step + due,
    }


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, show, write."""
    if args.rounds < 1:
        raise UserError(f"--rounds {args.rounds}: must be 1 or more")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        found = measure(args, Path(folder), console)
    found = {
        "command": ["scripts/bench_incidents.py", *args.words],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(args.threads, ("torch",)),
        "target": TARGET,
        **found,
    }
    made = Table("parameters", "step, ms", "with / without", "quartiles", "hooks, us", "comparisons", "share")
    ratio = found["ratio"]
    made.add_row(
        f"{found['parameters'] / 1e6:.1f}M",
        f"{1e3 * Spread.of(found['seconds_per_step']['without']).median:.1f}",
        f"{ratio['median']:.3f}",
        f"{ratio['low']:.3f} to {ratio['high']:.3f}",
        f"{1e6 * found['hooks_s']:.0f}",
        f"{found['comparisons']:.2%}",
        f"{found['share']:.2%}",
    )
    Console().print(made)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(found, indent=1) + "\n").encode())
    return 0 if found["share"] <= TARGET else 1


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_incidents.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4)
    add("--hidden", type=int, default=256)
    add("--vocab", type=int, default=8192)
    add("--seq", type=int, default=128)
    add("--batch", type=int, default=8)
    add("--rounds", type=int, default=40)
    add("--threads", type=int, default=1)
    add("--out", type=Path, help="JSON file for machines")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_incidents", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
