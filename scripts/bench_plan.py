"""Predicted against measured on this machine: step times of layouts after `mlm plan calibrate`, and memory.

    python scripts/bench_plan.py                    # calibrates, then measures what is not in --out yet
    python scripts/bench_plan.py --again            # from the beginning
    python scripts/bench_plan.py --again --keep-calibration --seconds 1 --only time:3,9,15

Layouts run on one or two ranks of this host (loopback), one thread each, and one on a rank with both cores. A
step counts with its fastest repetition. On a machine with other work compare with `--clock cpu`: the ranks'
processor time, beside the predicted time that they compute. Memory is the peak of a fresh process above what
it has after a step of a tiny model. Every measurement is kept in --out as soon as it is made, so that a
stopped run continues.
Exit code: 0 all targets met, 1 some not, 2 a mistake.
"""

import argparse
import json
import multiprocessing as mp
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime, timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from bench.command import guarded
from bench.machine import cpu_model
from bench.memory import reset_high_water_mark, return_freed_memory, status_bytes
from rich.console import Console
from rich.table import Table

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, build_mesh
from mlm.plan.cost import CostModel
from mlm.plan.hardware import HardwareConfig, hardware_of
from mlm.plan.memory import MemoryModel
from mlm.plan.report import label
from mlm.plan.shape import Layout, Shape
from mlm.training.config import PretrainConfig, TrainConfig
from mlm.training.memory import reuse_large_blocks
from mlm.training.trainer import Trainer
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

RESULTS = Path(__file__).parent / "results/bench_plan.json"
RANKS = 2
LEAST_RHO, MOST_ERROR, MOST_LOSS, MOST_MEMORY_ERROR = 0.9, 0.15, 0.10, 0.10
CONTEXT = mp.get_context("spawn")
WARM_UP, LEAST_STEPS = 1, 3
Result = dict[str, Any]


def gpt2(layers: int, hidden: int, seq: int, vocab: int, dropout: float = 0.0) -> ModelConfig:
    """A model with heads of 64."""
    return ModelConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=hidden // 64,
        max_positions=seq,
        vocab_size=vocab,
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )


WIDE, DEEP = gpt2(4, 384, 256, 8192), gpt2(8, 256, 128, 4096, dropout=0.1)
SMALL, LONG = gpt2(2, 256, 128, 2048), gpt2(4, 512, 512, 1024)
LARGE = gpt2(6, 512, 256, 16384)


@dataclass(frozen=True)
class Case:
    """A layout of a model."""

    kind: str
    """time or memory."""
    shape: str
    model: ModelConfig
    layout: Layout
    threads: int = 1
    """Of each rank."""

    @property
    def name(self) -> str:
        """Key in the results."""
        both = f" {self.threads} threads" if self.threads > 1 else ""
        return f"{self.kind} {self.shape} {label(self.layout)}{both}"

    @property
    def config(self) -> PretrainConfig:
        """Settings of the run."""
        layout = self.layout
        return PretrainConfig(
            name="bench",
            out="",
            model=self.model,
            parallel=ParallelConfig(
                tp=layout.tp,
                pp=layout.pp,
                vp=layout.vp,
                dp=layout.dp,
                sequence_parallel=layout.sequence_parallel,
                pipeline=layout.pipeline,
                zero=layout.zero,
                recompute=layout.recompute,
            ),
            train=TrainConfig(
                steps=1000, global_batch_size=layout.global_batch, micro_batch_size=layout.micro_batch
            ),
            data=DataConfig(kind="synthetic", seq_length=self.model.max_positions),
        )


def times_of(shape: str, model: ModelConfig, batch: int, *layouts: Layout) -> list[Case]:
    """Cases of one model whose step time is measured."""
    return [Case("time", shape, model, replace(layout, global_batch=batch)) for layout in layouts]


CASES = [
    *times_of(
        "wide",
        WIDE,
        8,
        Layout(micro_batch=4),
        Layout(tp=2, micro_batch=4),
        Layout(tp=2, micro_batch=1),
        Layout(tp=2, sequence_parallel=True, micro_batch=4),
        Layout(tp=2, recompute="full", micro_batch=4),
        Layout(pp=2, micro_batch=1),
        Layout(pp=2, micro_batch=4),
        Layout(pp=2, vp=2, micro_batch=1),
        Layout(pp=2, pipeline="zb_h1", micro_batch=1),
        Layout(pp=2, pipeline="gpipe", micro_batch=2),
        Layout(dp=2, micro_batch=4),
        Layout(dp=2, zero=2, micro_batch=2),
        Layout(dp=2, zero=3, micro_batch=2),
        Layout(dp=2, recompute="full", micro_batch=4),
    ),
    *times_of(
        "deep, dropout",
        DEEP,
        8,
        Layout(micro_batch=4),
        Layout(tp=2, micro_batch=4),
        Layout(pp=2, micro_batch=2),
        Layout(dp=2, micro_batch=4),
        Layout(dp=2, recompute="selective", micro_batch=4),
    ),
    *times_of(
        "small", SMALL, 8, Layout(micro_batch=8), Layout(tp=2, micro_batch=8), Layout(dp=2, micro_batch=4)
    ),
    *times_of(
        "long",
        LONG,
        8,
        Layout(micro_batch=2),
        Layout(pp=2, micro_batch=1),
        Layout(dp=2, zero=2, micro_batch=2),
    ),
    Case("time", "wide", WIDE, Layout(micro_batch=4, global_batch=8), threads=RANKS),
    *(
        Case("memory", "large", LARGE, replace(layout, global_batch=8))
        for layout in (
            Layout(micro_batch=8),
            Layout(recompute="full", micro_batch=8),
            Layout(tp=2, micro_batch=8),
            Layout(dp=2, zero=2, micro_batch=4),
            Layout(pp=2, micro_batch=2),
        )
    ),
]


def batches_of(case: Case, ctx: ParallelContext) -> list[Batch]:
    """This rank's micro-batches of a step, of random tokens."""
    layout, generator = case.layout, torch.Generator().manual_seed(0)
    shape = (layout.global_batch, case.model.max_positions + 1)
    tokens = torch.randint(case.model.vocab_size, shape, generator=generator)
    parts = enumerate(tokens.split(layout.micro_batch))
    every = [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous(), n * layout.micro_batch) for n, x in parts]
    return every[ctx.dp.rank :: layout.dp]


def context_of(layout: Layout) -> ParallelContext:
    """The context of this rank; of a layout of one rank without groups."""
    if layout.gpus == 1:
        return ParallelContext()
    cpu = torch.device("cpu")
    return build_mesh(tp=layout.tp, pp=layout.pp, dp=layout.dp, device=cpu, timeout_s=300)


def measure_time(case: Case, seconds: float) -> tuple[float, float]:
    """Seconds of the fastest step, and its processor time, on this rank."""
    ctx = context_of(case.layout)
    trainer: Trainer[Batch] = Trainer(case.config, ctx)
    batches = batches_of(case, ctx)
    found: list[tuple[float, float]] = []
    end = time.monotonic() + seconds
    while True:
        done = torch.tensor([float(len(found) >= WARM_UP + LEAST_STEPS and time.monotonic() > end)])
        if ctx.world.group is not None:
            dist.all_reduce(done, group=ctx.world.group)  # all ranks take as many steps
        if done.item():
            break
        begin, processor = time.perf_counter(), time.process_time()
        trainer.train_step(batches)
        if ctx.world.group is not None:
            dist.barrier(group=ctx.world.group)
        found.append((time.perf_counter() - begin, time.process_time() - processor))
    timed = found[WARM_UP:]
    return min(wall for wall, _ in timed), min(cpu for _, cpu in timed)


def measure_memory(case: Case) -> int:
    """Bytes of this rank's peak above what it has after a step of a tiny model."""
    ctx = context_of(case.layout)
    tiny = replace(case, model=gpt2(case.layout.pp * case.layout.vp, 128, 16, 256))
    trainer: Trainer[Batch] | None = Trainer(tiny.config, ctx)
    assert trainer is not None
    trainer.train_step(batches_of(tiny, ctx))
    trainer = None
    return_freed_memory()
    reset_high_water_mark()
    base = status_bytes("VmRSS")
    trainer = Trainer(case.config, ctx)
    for _ in range(2):
        trainer.train_step(batches_of(case, ctx))
    return status_bytes("VmHWM") - base


def serve(pipe: Connection, rank: int, ranks: int, store: str, threads: int) -> None:
    """A rank: measure what the first process asks for."""
    torch.set_num_threads(threads)
    reuse_large_blocks()
    if ranks > 1:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        file = dist.FileStore(store, ranks)
        dist.init_process_group(
            "gloo", store=file, rank=rank, world_size=ranks, timeout=timedelta(seconds=300)
        )
    while (message := pipe.recv()) is not None:
        case, seconds = message
        pipe.send(measure_time(case, seconds) if case.kind == "time" else measure_memory(case))


class Workers:
    """Processes of the ranks, kept between cases of one kind."""

    def __init__(self, ranks: int, threads: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="bench-plan-")
        self.members = []
        for rank in range(ranks):
            parent, child = CONTEXT.Pipe()
            arguments = (child, rank, ranks, f"{self.folder.name}/store", threads)
            process = CONTEXT.Process(target=serve, args=arguments, daemon=True)
            process.start()
            child.close()
            self.members.append((process, parent))

    def ask(self, case: Case, seconds: float) -> list[Any]:
        """Each rank's answer."""
        for _, pipe in self.members:
            pipe.send((case, seconds))
        try:
            return [pipe.recv() for _, pipe in self.members]
        except EOFError:
            raise UserError(f"{case.name}: a rank failed") from None

    def close(self) -> None:
        """End the processes."""
        for process, _ in self.members:
            process.kill()
            process.join()
        self.folder.cleanup()


def measure(cases: Sequence[Case], seconds: float, keep: Callable[[Case, Result], None]) -> None:
    """Measure cases, those of time in the same processes, those of memory each in new ones."""
    ordered = sorted(cases, key=lambda case: (case.kind, case.layout.gpus, case.threads))
    workers, serving = None, None
    try:
        for case in ordered:
            key = (case.kind, case.layout.gpus, case.threads)
            if workers is None or key != serving or case.kind == "memory":
                if workers is not None:
                    workers.close()
                workers, serving = Workers(case.layout.gpus, case.threads), key
            answers = workers.ask(case, seconds)
            if case.kind == "time":
                walls, processor = zip(*answers, strict=True)
                keep(case, {"wall_s": max(walls), "cpu_s": list(processor)})
            else:
                keep(case, {"bytes": answers})
    finally:
        if workers is not None:
            workers.close()


def calibrate(out: Path) -> Result:
    """The hardware of this machine as `mlm plan calibrate` writes it."""
    words = [sys.executable, "-m", "mlm", "plan", "calibrate", f"ranks={RANKS}", f"out={out}"]
    with tempfile.TemporaryDirectory() as cache:
        code = subprocess.run(words, env={**os.environ, "XDG_CACHE_HOME": cache}, check=False).returncode
    if code:
        raise UserError(f"mlm plan calibrate ended with {code}")
    values: Result = yaml.safe_load(out.read_text("utf-8"))
    return values


def predicted_time(case: Case, hardware: HardwareConfig, clock: str) -> float:
    """Seconds of a step; by the processors' clock those that an average rank computes."""
    layout = case.layout
    shape = Shape.of(case.model, case.model.max_positions, layout.tp)
    mine = hardware.for_ranks(layout.gpus) if case.threads > 1 else hardware
    step = CostModel(shape, mine, "fp32").step(layout)
    return step.total if clock == "wall" else step.total - step.parts["bubble"] - step.parts["pp"]


def measured_time(case: Case, result: Result, clock: str) -> float:
    """The measured time that `predicted_time` is compared with."""
    if clock == "wall":
        return float(result["wall_s"])
    return fmean(result["cpu_s"])


def predicted_memory(case: Case) -> list[float]:
    """Bytes of each rank."""
    layout = case.layout
    model = MemoryModel(case.model, case.model.max_positions, "fp32", device="cpu")
    return [
        model.peak(layout, rank // (layout.tp * layout.dp), rank // layout.tp % layout.dp).total
        for rank in range(layout.gpus)
    ]


def ranks_of(values: Sequence[float]) -> list[int]:
    """The place of each value in their order."""
    order = sorted(range(len(values)), key=values.__getitem__)
    return [order.index(n) for n in range(len(values))]


def spearman(one: Sequence[float], other: Sequence[float]) -> float:
    """Rank correlation of two lists without equal values."""
    n = len(one)
    squares = sum((a - b) ** 2 for a, b in zip(ranks_of(one), ranks_of(other), strict=True))
    return 1 - 6 * squares / (n * (n * n - 1))


def verdicts(found: dict[str, Result], hardware: HardwareConfig, clock: str) -> Iterator[tuple[str, bool]]:
    """Each target with its number, and True if it is met."""
    timed = [case for case in CASES if case.kind == "time" and case.name in found]
    if clock == "cpu":  # threads that wait for each other use their cores
        timed = [case for case in timed if case.threads == 1]
    expected = [predicted_time(case, hardware, clock) for case in timed]
    measured = [measured_time(case, found[case.name], clock) for case in timed]
    if len(timed) > 2:
        rho = spearman(expected, measured)
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


def show(found: dict[str, Result], hardware: HardwareConfig, clock: str, console: Console) -> bool:
    """Print every case and the verdicts; return True if all targets are met."""
    table = Table("case", "predicted", "measured", "error", "processor, s", box=None)
    for case in (case for case in CASES if case.name in found):
        result = found[case.name]
        if case.kind == "time":
            expected = predicted_time(case, hardware, clock)
            measured = measured_time(case, result, clock)
            row = [f"{expected:.3f} s", f"{measured:.3f} s", f"{expected / measured - 1:+.0%}"]
            table.add_row(case.name, *row, " ".join(f"{cpu:.3f}" for cpu in result["cpu_s"]))
            continue
        for expected, size in zip(predicted_memory(case), result["bytes"], strict=True):
            row = [f"{expected / 2**20:.0f} MiB", f"{size / 2**20:.0f} MiB", f"{expected / size - 1:+.0%}"]
            table.add_row(case.name, *row, "")
    console.print(table)
    met = True
    for words, holds in verdicts(found, hardware, clock):
        console.print(f"{'ok  ' if holds else 'MISS'} {words}", highlight=False, markup=False)
        met = met and holds
    return met


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_plan.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--out", type=Path, default=RESULTS, help="JSON of all results (default %(default)s)")
    add("--again", action="store_true", help="forget what was measured before")
    add("--keep-calibration", action="store_true", help="with --again: keep the hardware in --out")
    add("--seconds", type=float, default=4.0, help="seconds of a layout's steps (default %(default)s)")
    add("--clock", choices=("wall", "cpu"), default="wall", help="time that is compared")
    add("--only", help="numbers of cases by kind: time:0,3 or memory:1; measures no others")
    add("--show", action="store_true", help="measure nothing")
    return parser.parse_args(arguments)


def chosen(only: str | None) -> list[Case]:
    """The cases to measure."""
    if only is None:
        return CASES
    kind, _, numbers = only.partition(":")
    mine = [case for case in CASES if case.kind == kind]
    try:
        return [mine[int(number)] for number in numbers.split(",")] if numbers else mine
    except (ValueError, IndexError):
        raise UserError(f"--only {only}: give time or memory, and numbers below {len(mine)}") from None


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure what is missing, compare, and return 0 if all targets are met."""
    old: Result = json.loads(args.out.read_text()) if args.out.exists() else {}
    state: Result = {} if args.again and not args.keep_calibration else old
    if args.keep_calibration and args.again:
        state["cases"] = {}
    found: dict[str, Result] = state.setdefault("cases", {})

    def save() -> None:
        write_atomic(args.out, (json.dumps(state, indent=1) + "\n").encode())

    if "hardware" not in state:
        with tempfile.TemporaryDirectory() as folder:
            state |= {"hardware": calibrate(Path(folder) / "machine.yaml"), "cpu": cpu_model()}
        state["when"] = datetime.now(UTC).isoformat(timespec="seconds")
        save()

    def keep(case: Case, result: Result) -> None:
        found[case.name] = {**result, "layout": asdict(case.layout)}
        console.print(f"measured {case.name}", highlight=False, markup=False)
        save()

    missing = [case for case in chosen(args.only) if case.name not in found]
    if not args.show:
        measure(missing, args.seconds, keep)
    return 0 if show(found, hardware_of(state["hardware"]), args.clock, console) else 1


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_plan", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
