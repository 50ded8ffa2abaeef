"""Predicted against measured on this machine: step times of layouts after `mlm plan calibrate`, and memory.

    python scripts/bench_plan.py                    # calibrates, then measures what is not in --results yet
    python scripts/bench_plan.py --again            # from the beginning

Layouts run on one or two ranks of this host (loopback), one thread each, and one on a rank with both cores. A
step counts with its fastest repetition. Memory is the peak of a process above what
another has after a step of a tiny model. Every measurement is kept in --results as soon as it is made, so
that a stopped run continues.
Exit code: 0 all targets met, 1 some not, 2 a mistake.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from bench.harness import Bench, Say, table_of
from bench.machine import cpu_model
from bench.ranks import Ranks
from bench.shapes import Shape as Sizes
from bench.spec import Spec
from bench.stats import rank_correlation
from rich.table import Table

from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig
from mlm.plan.cost import CostModel
from mlm.plan.hardware import HardwareConfig, hardware_of
from mlm.plan.layer_counts import LayerCounts, counts_of
from mlm.plan.layout import PlannedLayout
from mlm.plan.memory import MemoryModel
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.util.errors import UserError
from mlm.util.files import write_atomic

RESULTS = Path(__file__).parent / "results/bench_plan.json"
RANKS = 2
LEAST_RHO, MOST_ERROR, MOST_LOSS, MOST_MEMORY_ERROR = 0.9, 0.15, 0.10, 0.10
WARM_UP, LEAST_STEPS = 1, 3
Result = dict[str, Any]

BATCH = 8
WIDE = Sizes("wide", 4, 384, 6, 256, 8192, BATCH)
DEEP = Sizes("deep, dropout", 8, 256, 4, 128, 4096, BATCH, dropout=0.1)
SMALL = Sizes("small", 2, 256, 4, 128, 2048, BATCH)
LONG = Sizes("long", 4, 512, 8, 512, 1024, BATCH)
LARGE = Sizes("large", 6, 512, 8, 256, 16384, BATCH)
SETTINGS = ("tp", "pp", "vp", "dp", "sequence_parallel", "pipeline", "zero", "recompute")


@dataclass(frozen=True)
class Case:
    """A layout of a model."""

    kind: str
    """time or memory."""
    sizes: Sizes
    layout: PlannedLayout
    threads: int = 1
    """Of each rank."""

    @property
    def shape(self) -> str:
        return self.sizes.name

    @property
    def model(self) -> ModelConfig:
        return self.sizes.model()

    @property
    def name(self) -> str:
        both = f" {self.threads} threads" if self.threads > 1 else ""
        return f"{self.kind} {self.shape} {self.layout.label}{both}"

    @property
    def words(self) -> str:
        count = BATCH // (self.layout.micro_batch * self.layout.dp)
        settings = {name: getattr(self.layout, name) for name in SETTINGS} | {"micro_batches": count}
        return ",".join(f"{name}={str(value).lower()}" for name, value in settings.items())

    def ranks(self, sizes: Sizes | None = None) -> Ranks:
        """Its processes, with a model of other sizes where they are given."""
        threads = self.threads * self.layout.gpus
        return Ranks(self.words, Spec(sizes or self.sizes, "cpu", "fp32", threads), self.layout.gpus)


def run_of(model: ModelConfig) -> PretrainConfig:
    data = DataConfig(kind="synthetic", seq_length=model.max_positions)
    train = TrainConfig(global_batch_size=BATCH)
    return PretrainConfig(name="bench", out="", model=model, data=data, train=train)


def cases_of(kind: str, sizes: Sizes, labels: str, threads: int = 1) -> list[Case]:
    """Cases of layouts by their names, separated by commas."""
    run = run_of(sizes.model())
    layouts = (PlannedLayout.named(label, run) for label in labels.split(", "))
    return [Case(kind, sizes, layout, threads) for layout in layouts]


CASES = [
    *cases_of("time", WIDE, "mb4, tp2 mb4, tp2 mb1, tp2 sp mb4, tp2 full mb4"),
    *cases_of("time", WIDE, "pp2 mb1, pp2 mb4, pp2 vp2 mb1, pp2 zb_h1 mb1, pp2 gpipe mb2"),
    *cases_of("time", WIDE, "dp2 mb4, dp2 zero2 mb2, dp2 zero3 mb2, dp2 full mb4"),
    *cases_of("time", DEEP, "mb4, tp2 mb4, pp2 mb2, dp2 mb4, dp2 selective mb4"),
    *cases_of("time", SMALL, "mb8, tp2 mb8, dp2 mb4"),
    *cases_of("time", LONG, "mb2, pp2 mb1, dp2 zero2 mb2"),
    *cases_of("time", WIDE, "mb4", threads=RANKS),
    *cases_of("memory", LARGE, "mb8, full mb8, tp2 mb8, dp2 zero2 mb4, pp2 mb2"),
]


def measure_time(case: Case, seconds: float) -> Result:
    with case.ranks() as ranks:
        ranks.time(0, WARM_UP)
        timings, end = [], time.monotonic() + seconds
        while len(timings) < LEAST_STEPS or time.monotonic() < end:
            timings.append(ranks.time(len(timings), 1))
    return {"wall_s": min(timing.seconds for timing in timings)}


def measure_memory(case: Case) -> Result:
    """Bytes of each rank's peak above what it holds with a tiny model."""
    layers = case.layout.pp * case.layout.vp
    with case.ranks(Sizes("tiny", layers, 128, 2, 16, 256, BATCH)) as tiny:
        tiny.time(0, 1)
        base = [rank["baseline_bytes"] for rank in tiny.memory()]
    with case.ranks() as ranks:
        ranks.time(0, 1)
        peaks = [rank["baseline_bytes"] + rank["peak_above_bytes"] for rank in ranks.memory()]
    return {"bytes": [peak - held for peak, held in zip(peaks, base, strict=True)]}


def calibrate(out: Path) -> Result:
    """The hardware of this machine as `mlm plan calibrate` writes it."""
    words = [sys.executable, "-m", "mlm", "plan", "calibrate", f"ranks={RANKS}", f"out={out}"]
    with tempfile.TemporaryDirectory() as cache:
        code = subprocess.run(words, env={**os.environ, "XDG_CACHE_HOME": cache}, check=False).returncode
    if code:
        raise UserError(f"mlm plan calibrate ended with {code}")
    values: Result = yaml.safe_load(out.read_text("utf-8"))
    return values


def counts(case: Case) -> LayerCounts:
    return counts_of(run_of(case.model), "cpu")


def predicted_time(case: Case, hardware: HardwareConfig) -> float:
    layout = case.layout
    mine = hardware.for_ranks(layout.gpus) if case.threads > 1 else hardware
    return CostModel(counts(case), mine, layout.gpus).step(layout).total


def predicted_memory(case: Case) -> list[float]:
    layout, model = case.layout, MemoryModel(counts(case))
    return [
        model.peak(layout, rank // (layout.tp * layout.dp), rank // layout.tp % layout.dp).total
        for rank in range(layout.gpus)
    ]


def verdicts(found: dict[str, Result], hardware: HardwareConfig) -> Iterator[tuple[str, bool]]:
    timed = [case for case in CASES if case.kind == "time" and case.name in found]
    expected = [predicted_time(case, hardware) for case in timed]
    measured = [float(found[case.name]["wall_s"]) for case in timed]
    if len(timed) > 2:
        rho = rank_correlation(expected, measured)
        error = median(abs(p / m - 1) for p, m in zip(expected, measured, strict=True))
        yield f"rank correlation {rho:.3f} of {len(timed)} layouts, at least {LEAST_RHO}", rho >= LEAST_RHO
        yield f"median error {error:.1%}, at most {MOST_ERROR:.0%}", error <= MOST_ERROR
    for shape in dict.fromkeys(case.shape for case in timed):
        mine = [n for n, case in enumerate(timed) if case.shape == shape]
        chosen = measured[min(mine, key=expected.__getitem__)]
        loss = chosen / min(measured[n] for n in mine) - 1
        yield f"{shape}: the best predicted is {loss:.1%} slower than the best", loss <= MOST_LOSS
    for case in (case for case in CASES if case.kind == "memory" and case.name in found):
        pairs = zip(predicted_memory(case), found[case.name]["bytes"], strict=True)
        worst = max((p / m - 1 for p, m in pairs), key=abs)
        yield f"{case.name}: {worst:+.1%}, at most {MOST_MEMORY_ERROR:.0%}", abs(worst) <= MOST_MEMORY_ERROR


def tables(state: Result) -> Iterator[Table | str]:
    found, hardware = state["cases"], hardware_of(state["hardware"])
    rows = []
    for case in (case for case in CASES if case.name in found):
        result = found[case.name]
        if case.kind == "time":
            expected, measured = predicted_time(case, hardware), float(result["wall_s"])
            row = (f"{expected:.3f} s", f"{measured:.3f} s", f"{expected / measured - 1:+.0%}")
            rows.append((case.name, *row))
            continue
        for size, expected in zip(result["bytes"], predicted_memory(case), strict=True):
            row = (f"{expected / 2**20:.0f} MiB", f"{size / 2**20:.0f} MiB", f"{expected / size - 1:+.0%}")
            rows.append((case.name, *row))
    yield table_of(("case", "predicted", "measured", "error"), rows)
    yield from (f"{'ok  ' if holds else 'MISS'} {words}" for words, holds in verdicts(found, hardware))


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--results", type=Path, default=RESULTS, help="JSON of all results (default %(default)s)")
    add("--again", action="store_true", help="forget what was measured before")
    add("--seconds", type=float, default=4.0, help="seconds of a layout's steps (default %(default)s)")
    add("--show", action="store_true", help="measure nothing")


def measure(args: argparse.Namespace, say: Say) -> Result:
    state: Result = {}
    if args.results.exists() and not args.again:
        state = json.loads(args.results.read_text())

    def save() -> None:
        write_atomic(args.results, (json.dumps(state, indent=1) + "\n").encode())

    if "hardware" not in state:
        with tempfile.TemporaryDirectory() as folder:
            state |= {"hardware": calibrate(Path(folder) / "machine.yaml"), "cpu": cpu_model(), "cases": {}}
        state["when"] = datetime.now(UTC).isoformat(timespec="seconds")
        save()
    for case in () if args.show else CASES:
        if case.name not in state["cases"]:
            result = measure_time(case, args.seconds) if case.kind == "time" else measure_memory(case)
            state["cases"][case.name] = {**result, "layout": asdict(case.layout)}
            say(f"measured {case.name}")
            save()
    return state


def is_success(state: Result) -> bool:
    hardware = hardware_of(state["hardware"])
    return all(holds for _, holds in verdicts(state["cases"], hardware))


BENCH = Bench("bench_plan", __doc__, add_options, measure, tables, is_success)

if __name__ == "__main__":
    sys.exit(BENCH.main())
