"""False alarms of clean runs and planted faults found: the rule for outliers, and the one before.

    python scripts/bench_alarms.py --steps 4000 --seeds 0 1 2 --series /tmp/series --out alarms.json

Trains tiny models, eleven types of runs, without any fault, and keeps losses and gradient norms. Then both
rules judge every step: of the runs as they were, and of synthetic ones, whose residuals are drawn in blocks
from the runs' and whose tails are continued exponentially, as far as steps are wanted. At every step faults
are asked about, too: a gradient norm times 10, 100 and 10,000, a loss 2 nats higher, a NaN. The rule before:
10 robust standard deviations above the median of 128 steps. Series in --series are read, not trained again.
"""

import argparse
import json
import math
import sys
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.command import guarded
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.labels import IGNORE
from mlm.parallel.mesh import ParallelContext
from mlm.training.config import IncidentConfig, PretrainConfig, TrainConfig
from mlm.training.incidents.recent import LEAST_SPREAD, NORMAL, TINY, Recent, median
from mlm.training.trainer import Trainer
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

FAULTS = ("gradient x 10", "gradient x 100", "gradient x 10,000", "loss + 2", "NaN")
BLOCK, TAIL = 16, 0.03
RUNS: dict[str, dict[str, Any]] = {
    "tiny batches 2x16": {"batch": 2, "seq": 16},
    "lr 1e-2, no warm-up": {"lr": 1e-2, "warmup": 0},
    "tiny batches, lr 1e-2, no warm-up": {"batch": 2, "seq": 16, "lr": 1e-2, "warmup": 0},
    "fp16": {"dtype": "fp16"},
    "bf16": {"batch": 8, "dtype": "bf16"},
    "llama": {"kind": "llama", "lr": 3e-3},
    "chat": {"batch": 2, "scored": "answers"},
    "finetune, small data": {"seq": 16, "lr": 3e-3, "decay": "constant", "text": 3000},
    "dropout, no clipping": {"dropout": 0.1, "clip": 0.0, "lr": 3e-3},
    "random tokens": {"seq": 16, "text": 0},
    "larger batch": {"batch": 16, "seq": 64, "lr": 3e-3, "share": 0.5},
}
"""Types of runs: what differs from a GPT-2 of 2 layers on text, 4 x 32 tokens a step, lr 1e-3."""
Series = NDArray[np.float64]
"""[steps, 2]: loss and gradient norm."""


def spec_of(run: dict[str, Any], steps: int, seed: int) -> PretrainConfig:
    """Settings of a run."""
    batch, seq, lr = run.get("batch", 4), run.get("seq", 32), run.get("lr", 1e-3)
    dropout = run.get("dropout", 0.0)
    return PretrainConfig(
        name="bench",
        out="",
        seed=seed,
        compile=False,
        model=ModelConfig(
            kind=run.get("kind", "gpt2"),
            num_layers=2,
            hidden_size=32,
            num_heads=2,
            max_positions=seq,
            vocab_size=256,
            hidden_dropout=dropout,
            attention_dropout=dropout,
        ),
        optimizer=OptimizerConfig(lr=lr, clip_grad_norm=run.get("clip", 1.0)),
        schedule=ScheduleConfig(
            warmup_steps=run.get("warmup", 50), min_lr=lr / 10, decay=run.get("decay", "cosine")
        ),
        precision=PrecisionConfig(dtype=run.get("dtype", "fp32")),
        train=TrainConfig(steps=steps, global_batch_size=batch, micro_batch_size=batch),
        data=DataConfig(kind="synthetic", seq_length=seq),
    )


def batches(run: dict[str, Any], text: Tensor, seed: int) -> Iterator[Batch]:
    """Micro-batches without end: windows of text, or random tokens."""
    draw = torch.Generator().manual_seed(seed)
    batch, seq, length = run.get("batch", 4), run.get("seq", 32), run.get("text", len(text))
    number = 0
    while True:
        if length:
            starts = torch.randint(min(length, len(text)) - seq - 1, (batch,), generator=draw).tolist()
            windows = torch.stack([text[start : start + seq + 1] for start in starts])
        else:
            windows = torch.randint(64, (batch, seq + 1), generator=draw)
        tokens, labels = windows[:, :-1], windows[:, 1:].clone()
        if run.get("scored") == "answers":
            for row in labels:
                row[: seq - int(torch.randint(2, seq // 2, (1,), generator=draw))] = IGNORE
        yield Batch(tokens, labels, number)
        number += batch


def train(run: dict[str, Any], steps: int, seed: int, text: Tensor) -> Series:
    """Losses and gradient norms of a clean run."""
    trainer: Trainer[Batch] = Trainer(spec_of(run, steps, seed), ParallelContext())
    found = []
    for _, batch in zip(range(steps), batches(run, text, seed), strict=False):
        outcome = trainer.train_step([batch])
        found.append((trainer.mean_loss(outcome), float(outcome.grad_norm)))
    return np.array(found)


class Before:
    """The rule before: 10 robust standard deviations, at least a hundredth of the median each."""

    def __init__(self, size: int = 128, threshold: float = 10.0) -> None:
        self.size, self.threshold = size, threshold
        self.values: tuple[deque[float], deque[float]] = deque(maxlen=size), deque(maxlen=size)
        self.ordered: tuple[list[float], list[float]] = [], []

    def add(self, loss: float, norm: float) -> None:
        """Take note of a step."""
        for values, ordered, new in zip(self.values, self.ordered, (loss, norm), strict=True):
            if len(values) == self.size:
                del ordered[bisect_left(ordered, values[0])]
            values.append(new)
            insort(ordered, new)

    def limits(self) -> tuple[float, float]:
        """The loss and the norm that raise an alarm."""
        if len(self.values[0]) < self.size // 4:
            return math.inf, math.inf
        loss, norm = (self.limit(ordered) for ordered in self.ordered)
        return loss, norm

    def limit(self, ordered: list[float]) -> float:
        """The number that raises an alarm."""
        middle = median(ordered)
        spread = NORMAL * median(abs(x - middle) for x in ordered)
        return middle + self.threshold * max(spread, LEAST_SPREAD * abs(middle), TINY)


def judged(series: Series, rule: Any, limits: Callable[[], tuple[float, float]]) -> NDArray[np.int64]:
    """Counts over the finite steps that a rule judges: steps, alarms, and each of FAULTS found."""
    counts = np.zeros(2 + len(FAULTS), dtype=np.int64)
    for loss, norm in series.tolist():
        if not math.isfinite(loss) or not math.isfinite(norm):
            continue  # an overflow of float16
        most_loss, most_norm = limits()
        if most_norm < math.inf:
            found = [norm * 10, norm * 100, norm * 1e4]
            counts += [
                1,
                loss >= most_loss or norm >= most_norm,
                *(each >= most_norm for each in found),
                loss + 2 >= most_loss,
                1,  # what is not finite is an incident of either rule
            ]
        rule.add(loss, norm)
    return counts


def synthetic(series: list[Series], steps: int, seed: int) -> Series:
    """A longer run: blocks of the runs' residuals, the tails continued exponentially."""
    draw = np.random.default_rng(seed)
    made = []
    for column in (0, 1):
        residuals, levels = [], []
        for each in series:
            x = each[np.isfinite(each).all(1), column][len(each) // 8 :]
            x = np.log(np.maximum(x, TINY)) if column else x
            windows = np.lib.stride_tricks.sliding_window_view(x, 32)
            level = np.median(windows[:-1], axis=1)
            residuals.append(x[32:] - level)
            levels.append(float(np.median(x)))
        pool = np.concatenate(residuals)
        starts = draw.integers(len(pool) - BLOCK, size=-(-steps // BLOCK))
        drawn = pool[starts[:, None] + np.arange(BLOCK)].reshape(-1)[:steps]
        start = np.quantile(pool, 1 - TAIL)
        mean = float((pool[pool > start] - start).mean())
        far = drawn > start
        drawn[far] = start + draw.exponential(mean, int(far.sum()))
        made.append(np.exp(levels[0] + drawn) if column else levels[0] + drawn)
    return np.stack(made, axis=1)


def rates(series: list[Series]) -> dict[str, dict[str, float]]:
    """Of both rules: steps judged, alarms, share of each fault found."""
    found = {}
    steps, window = IncidentConfig().threshold, IncidentConfig().window
    for name in ("before", "now"):
        total = np.zeros(2 + len(FAULTS), dtype=np.int64)
        for each in series:
            if name == "now":
                recent = Recent(window)
                total += judged(each, recent, lambda recent=recent: recent.limits(steps))  # type: ignore[misc]
            else:
                rule = Before()
                total += judged(each, rule, rule.limits)
        shares = {
            fault: count / max(1, int(total[0])) for fault, count in zip(FAULTS, total[2:], strict=True)
        }
        found[name] = {"steps": int(total[0]), "alarms": int(total[1]), **shares}
    return found


def collected(args: argparse.Namespace, console: Console) -> dict[str, list[Series]]:
    """Series of every type of run, trained or read."""
    files = [args.text] if args.text else sorted(Path(__file__).parents[1].glob("mlm/**/*.py"))
    content = b"".join(path.read_bytes() for path in files)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    found: dict[str, list[Series]] = {}
    for seed in args.seeds:
        for name, run in RUNS.items():
            file = args.series and args.series / f"{name}-{seed}.npy"
            if file is not None and file.exists():
                series = np.load(file, allow_pickle=False)
            elif args.read_only:
                continue
            else:
                series = train(run, max(64, int(args.steps * run.get("share", 1.0))), seed, text)
                console.print(f"{name}, seed {seed}: trained", highlight=False)
                if file is not None:
                    np.save(file, series)
            found.setdefault(name, []).append(series)
    return found


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, show, write."""
    if args.steps < 1:
        raise UserError(f"--steps {args.steps}: must be 1 or more")
    torch.set_num_threads(1)
    if args.series is not None:
        args.series.mkdir(parents=True, exist_ok=True)
    result: dict[str, Any] = {
        "command": ["scripts/bench_alarms.py", *args.words],
        "runs": {},
        "synthetic": {},
    }
    found = collected(args, console)
    for number, (name, series) in enumerate(found.items()):
        result["runs"][name] = rates(series)
        if args.synthetic:
            result["synthetic"][name] = rates([synthetic(series, args.synthetic, number)])
    for part in ("runs", "synthetic"):
        table = Table(part, "rule", "steps", "alarms", *FAULTS)
        for name, both in result[part].items():
            for rule, each in both.items():
                shares = [f"{each[fault]:.3f}" for fault in FAULTS]
                table.add_row(name, rule, f"{each['steps']:,}", str(each["alarms"]), *shares)
        for rule in ("before", "now"):
            rows = [both[rule] for both in result[part].values()]
            if not rows:
                continue
            shares = [f"{np.mean([each[fault] for each in rows]):.3f}" for fault in FAULTS]
            steps, alarms = (sum(each[key] for each in rows) for key in ("steps", "alarms"))
            table.add_row("all", rule, f"{steps:,}", f"{alarms:,}", *shares)
        Console(width=150).print(table)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_alarms.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=int, default=4000, help="steps of each run")
    add("--seeds", type=int, nargs="+", default=[0], help="runs of each type")
    add("--synthetic", type=int, default=100_000, help="steps of a synthetic run of each type")
    add("--text", type=Path, help="text to train on (default: this package's source)")
    add("--series", type=Path, help="folder that keeps the series of runs")
    add("--read-only", action="store_true", help="train nothing: judge what --series holds")
    add("--out", type=Path, help="JSON file for machines")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_alarms", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
