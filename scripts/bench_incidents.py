"""Cost of watching a run: steps with the checks of mlm/training/incidents at their defaults, and without.

    python scripts/bench_incidents.py --out scripts/results/bench_incidents-cpu.json

Two trainers of one process with the same weights take steps in turn; one is watched: their ratio shows costs
above the noise of a step. The observer of a step is timed alone too, and so are the comparisons that are due
every `check.every` steps (a step computed twice, digests of all weights and moments), divided by that number:
these two are the share. Seconds are of processor time. The exchange between ranks is not in it.
Exit code: 0 within 1 %, 1 above, 2 a mistake.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import torch
from bench.harness import Bench, Result, Say, alternate, positive, quartiles, ratio_of, table_of
from bench.stats import Spread
from rich.table import Table

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.config import PretrainConfig, TrainConfig
from mlm.training.incidents.comparisons import digests, parameters_and_moments
from mlm.training.incidents.watcher import Incidents
from mlm.training.observer import Observers
from mlm.training.trainer import StepOutcome, Trainer

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
    """A trainer, with the observers of the training loop or without."""

    def __init__(self, config: PretrainConfig, folder: Path | None) -> None:
        self.trainer: Trainer[Batch] = Trainer(config, ParallelContext())
        tokens = torch.randint(
            config.model.vocab_size, (config.train.micro_batch_size, config.data.seq_length)
        )
        self.batches = [Batch(tokens, tokens.roll(-1, 1), 0)]
        self.incidents = None
        if folder is not None:
            quiet: Callable[..., None] = lambda *_: None  # noqa: E731
            reporter = SimpleNamespace(problem=quiet, note=quiet, event=quiet, rewound=quiet)
            incidents = Incidents(self.trainer, folder, reporter, SimpleNamespace())  # type: ignore[arg-type]
            self.trainer.observers, self.incidents = Observers([incidents]), incidents

    def step(self) -> None:
        """Take a step as `Loop.run_steps` does."""
        observers = self.trainer.observers
        with observers.phase("data"):
            batches = self.batches
        observers.on_step_start(batches)
        observers.after_step(self.trainer.train_step(batches))


def watch(each: Watched) -> None:
    """Do all that watching adds to a step."""
    assert each.incidents is not None
    each.incidents.on_step_start(each.batches)
    each.incidents.judge(torch.tensor([7.0]), torch.tensor(1.0))
    each.incidents.after_step(StepOutcome(torch.tensor([7.0]), torch.tensor(1.0), 0.0))


def seconds(run: Callable[[], object]) -> float:
    """Processor seconds of a call."""
    begin = time.process_time()
    run()
    return time.process_time() - begin


def measure(args: argparse.Namespace, say: Say) -> Result:
    """The share of a step that watching costs."""
    torch.set_num_threads(args.threads)
    config = config_of(args)
    every = config.check.every
    steps_alone = replace(config, check=replace(config.check, every=0))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        contenders = {"without": Watched(steps_alone, None), "with": Watched(steps_alone, Path(folder))}
        alternate({name: each.step for name, each in contenders.items()}, WARM_UP)
        times = alternate({name: each.step for name, each in contenders.items()}, args.rounds, say, seconds)
        watched = contenders["with"]
        trainer = watched.trainer
        again = min(seconds(lambda: trainer.compute_gradients(watched.batches)) for _ in range(3))
        digest = min(
            seconds(lambda: digests(parameters_and_moments(trainer, trainer.shards))) for _ in range(3)
        )
        step = Spread.of(times["without"]).median
        own = seconds(lambda: [watch(watched) for _ in range(REPEATS)]) / REPEATS
    due = (again + digest) / every / step
    return {
        "target": TARGET,
        "parameters": config.model.num_parameters(),
        "seconds_per_step": times,
        "ratio": ratio_of(times["with"], times["without"]),
        "hooks_s": own,
        "repetition_s": again,
        "digests_s": digest,
        "check_every": every,
        "comparisons": due,
        "share": own / step + due,
    }


def tables(result: Result) -> Iterator[Table]:
    """One row."""
    headings = ("parameters", "step, ms", "with / without", "quartiles", "hooks, us", "comparisons", "share")
    row = (
        f"{result['parameters'] / 1e6:.1f}M",
        f"{1e3 * Spread.of(result['seconds_per_step']['without']).median:.1f}",
        f"{result['ratio']['median']:.3f}",
        quartiles(result["ratio"]),
        f"{1e6 * result['hooks_s']:.0f}",
        f"{result['comparisons']:.2%}",
        f"{result['share']:.2%}",
    )
    yield table_of(headings, [row])


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    sizes = {"layers": 4, "hidden": 256, "vocab": 8192, "seq": 128, "batch": 8, "rounds": 40, "threads": 1}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=positive, default=default, help="default %(default)s")


BENCH = Bench(
    name="bench_incidents",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: result["share"] <= result["target"],
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
