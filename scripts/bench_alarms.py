"""False alarms of clean runs, and planted faults that are noticed, by the rule for outliers.

    python scripts/bench_alarms.py --steps 4000 --seeds 0 1 2 --out alarms.json

Trains tiny models, eleven types of runs, without any fault, and judges loss and gradient norm of every step.
At every step faults are asked about, too: a gradient norm times 10, 100 and 10,000, a loss 2 nats higher.
"""

import argparse
import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.harness import Bench, Result, Say, positive, table_of
from numpy.typing import NDArray
from rich.table import Table
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import IncidentConfig, PretrainConfig, TrainConfig
from mlm.training.incidents.numbers import RecentSteps
from mlm.training.trainer import Trainer

FAULTS = ("gradient x 10", "gradient x 100", "gradient x 10,000", "loss + 2")
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
                row[: seq - int(torch.randint(2, seq // 2, (1,), generator=draw))] = IGNORE_INDEX
        yield Batch(tokens, labels, number)
        number += batch


def train(run: dict[str, Any], steps: int, seed: int, text: Tensor) -> Series:
    trainer: Trainer[Batch] = Trainer(spec_of(run, steps, seed), ParallelContext())
    found = []
    for _, batch in zip(range(steps), batches(run, text, seed), strict=False):
        outcome = trainer.train_step([batch])
        found.append((trainer.mean_loss(outcome), float(outcome.grad_norm)))
    return np.array(found)


def judged(series: Series) -> NDArray[np.int64]:
    """Counts over the finite steps that are judged: steps, alarms, and each of FAULTS found."""
    counts, recent = np.zeros(2 + len(FAULTS), dtype=np.int64), RecentSteps(IncidentConfig().window)
    for loss, norm in series.tolist():
        if not math.isfinite(loss) or not math.isfinite(norm):
            continue  # an overflow of float16
        most_loss, most_norm = recent.limits(IncidentConfig().threshold)
        if most_norm < math.inf:
            norms = [norm * 10, norm * 100, norm * 1e4]
            alarm = loss >= most_loss or norm >= most_norm
            counts += [1, alarm, *(each >= most_norm for each in norms), loss + 2 >= most_loss]
        recent.add(loss, norm)
    return counts


def rates(counts: NDArray[np.int64]) -> Result:
    steps, alarms, *faults = counts.tolist()
    shares = {fault: count / max(1, steps) for fault, count in zip(FAULTS, faults, strict=True)}
    return {"steps": steps, "alarms": alarms, **shares}


def measure(args: argparse.Namespace, say: Say) -> Result:
    torch.set_num_threads(1)
    files = [args.text] if args.text else sorted(Path(__file__).parents[1].glob("mlm/**/*.py"))
    content = b"".join(path.read_bytes() for path in files)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    counts: dict[str, NDArray[np.int64]] = {}
    for seed in args.seeds:
        for name, run in RUNS.items():
            steps = max(64, int(args.steps * run.get("share", 1.0)))
            counts[name] = counts.get(name, 0) + judged(train(run, steps, seed, text))
            say(f"{name}, seed {seed}: trained")
    every = {**counts, "all": np.sum(list(counts.values()), axis=0)}
    return {"runs": {name: rates(each) for name, each in every.items()}}


def tables(result: Result) -> Iterator[Table]:
    rows = []
    for name, each in result["runs"].items():
        shares = (f"{each[fault]:.3f}" for fault in FAULTS)
        rows.append((name, f"{each['steps']:,}", str(each["alarms"]), *shares))
    yield table_of(("runs", "steps", "alarms", *FAULTS), rows)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--steps", type=positive, default=4000, help="steps of each run")
    add("--seeds", type=int, nargs="+", default=[0], help="runs of each type")
    add("--text", type=Path, help="text to train on (default: this package's source)")


BENCH = Bench("bench_alarms", __doc__, add_options, measure, tables)

if __name__ == "__main__":
    sys.exit(BENCH.main())
