"""The command line of scripts/reproduce.py, and the runner of the experiments in experiments.yaml."""

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from math import exp, inf
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from mlm.launch.doctor.findings import versions
from mlm.plan.hardware import cpu_name
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.files import write_atomic
from reproduce.counts import count_kept

SCRIPTS = Path(__file__).resolve().parents[1]
CATALOGUE: dict[str, Any] = yaml.safe_load(Path(__file__).with_name("experiments.yaml").read_text("utf-8"))
EXPERIMENTS: dict[str, dict[str, Any]] = CATALOGUE["experiments"]
PROGRAMS = {"mlm": (sys.executable, "-P", "-m", "mlm"), "python": (sys.executable, "-P")}
DIVERGED = ("gradients still overflow", "gradients are not finite")
WARM_UP = 3
"""First steps of a run whose times do not count."""
SAVE_S = 120.0
"""Seconds in which a stopped training run must have saved; later it is killed, and resumes earlier."""


@dataclass(frozen=True)
class Step:
    """One command, run in the folder of all experiments."""

    name: str
    words: tuple[str, ...]
    result: str
    """File or run folder that it leaves."""
    is_prepared: bool = False
    """True for a corpus or a text: one that is there is kept, whoever made it."""


def stages_of(name: str, args: argparse.Namespace) -> list[list[Step]]:
    """Stages of an experiment: the steps of a stage side by side, one stage after the other."""
    experiment = EXPERIMENTS[name]
    options = {"threads": args.cores, "peer": args.peer and args.peer.absolute()}
    if args.peer is None and "{peer}" in str(experiment["runs"]):
        raise UserError(f"{name} needs --peer, a checkout of nanoGPT with the text of its prepare.py")
    stages = []
    for result in experiment.get("prepare", []):
        words = shlex.split(CATALOGUE["prepare"][result].format(**options))
        stages.append([Step(result.replace("/", "-"), tuple(words), result, is_prepared=True)])
    if "counted" in experiment:
        return stages
    is_timed = "timed" in experiment
    common = f"{CATALOGUE['timed']} {experiment['timed']}" if is_timed else experiment["trained"]
    seeds = []
    for seed in range(1, args.seeds + 1):
        for run, entry in reversed(experiment["runs"].items()):
            own = entry["words"] if isinstance(entry, dict) else entry
            out = f"runs/{run_name(name, run, seed)}"
            words = shlex.split(f"{common} {own}".format(**options, out=out, seed=seed))
            if words[0] == "mlm":
                words += [f"out={out}"] if is_timed else [f"seed={seed}", f"out={out}"]
            seeds.append(Step(Path(out).name, tuple(words), out))
    is_alone = is_timed or experiment.get("alone", False)
    return [*stages, *([step] for step in seeds)] if is_alone else [*stages, seeds]


def run_name(experiment: str, run: str, seed: int) -> str:
    return f"{experiment}-{run.replace(' ', '-').replace('=', '')}-{seed}"


class Runner:
    """Runs what is left of stages; what is done is remembered in steps/NAME.json, with its log."""

    def __init__(self, folder: Path, cores: int) -> None:
        self.folder, self.cores = folder, cores
        self.running: list[tuple[Step, subprocess.Popen[bytes], float]] = []

    def run(self, stages: Sequence[Sequence[Step]]) -> None:
        """Run the stages. Whatever ends this, running steps are asked to save and stop.

        Raises CheckFailedError if a step fails, UserError for a step that ran with other settings.
        """
        try:
            for stage in stages:
                waiting = [step for step in stage if not self.is_done(step)]
                while waiting or self.running:
                    while waiting and len(self.running) < self.cores:
                        self.start(waiting.pop(0))
                    time.sleep(0.1)
                    for entry in [entry for entry in self.running if entry[1].poll() is not None]:
                        self.running.remove(entry)
                        self.finish(*entry)
        finally:
            self.stop()

    def path(self, step: Step, suffix: str) -> Path:
        return self.folder / "steps" / f"{step.name}{suffix}"

    def is_done(self, step: Step) -> bool:
        """True if a step need not run."""
        if step.is_prepared:
            return (self.folder / step.result).exists()
        if not self.path(step, ".json").is_file():
            return False
        words = json.loads(self.path(step, ".json").read_text("utf-8"))["words"]
        if changed := sorted(set(words) ^ set(step.words)):
            raise UserError(
                f"--out={self.folder}: step {step.name} ran with other settings there "
                f"({', '.join(changed[:4])}); use another folder"
            )
        return (self.folder / step.result).exists()

    def start(self, step: Step) -> None:
        """Start a step; a training run continues from its last checkpoint."""
        program, *rest = step.words
        for path in (self.folder / step.result, self.path(step, ".log")):
            path.parent.mkdir(parents=True, exist_ok=True)
        paths = (str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", ""))
        with open(self.path(step, ".log"), "wb") as log:
            process = subprocess.Popen(
                [*PROGRAMS.get(program, (program,)), *rest],
                cwd=self.folder,
                env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C reaches it through `stop` alone
            )
        self.running.append((step, process, time.monotonic()))

    def finish(self, step: Step, process: "subprocess.Popen[bytes]", begin: float) -> None:
        """Remember a step that has ended. Raises CheckFailedError if it failed."""
        code, seconds = process.returncode, time.monotonic() - begin
        log = self.path(step, ".log").read_text("utf-8", errors="replace").strip().splitlines()
        message = log[-1] if log else ""
        has_diverged = 0 < code < 128 and any(words in message for words in DIVERGED)
        if code and not has_diverged:
            raise CheckFailedError(
                f"step {step.name} ended with {code}: {message} (its output: {self.path(step, '.log')}; "
                f"the command: {shlex.join(step.words)})"
            )
        if not code and not (self.folder / step.result).exists():
            raise CheckFailedError(f"step {step.name} was stopped; the same command continues")
        record = {"words": step.words, "diverged": has_diverged, "seconds": round(seconds, 3)}
        write_atomic(self.path(step, ".json"), json.dumps(record).encode())
        print(f"{step.name}: {seconds / 60:.1f} min{', diverged' if has_diverged else ''}", flush=True)

    def stop(self) -> None:
        """Ask what runs to save and stop, and kill what does not."""
        for _, process, _ in self.running:
            process.terminate()
        end = time.monotonic() + SAVE_S
        for _, process, _ in self.running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(end - time.monotonic(), 0.0))
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def read_metrics(folder: Path, kind: str) -> list[dict[str, Any]]:
    """A run's records of a kind in order of steps; those that a resumed run repeats replace older ones."""
    lines = (folder / "metrics.jsonl").read_text("utf-8").splitlines()
    records = {record.get("step", 0): record for record in map(json.loads, lines) if record["kind"] == kind}
    return [records[step] for step in sorted(records)]


def measure(folder: Path, experiment: Mapping[str, Any]) -> dict[str, Any]:
    """Numbers of a run: of a timed one median seconds or TFLOP/s, of a trained one its losses and time."""
    if (folder / "result.json").is_file() and not (folder / "metrics.jsonl").is_file():  # nanoGPT's
        found = json.loads((folder / "result.json").read_text("utf-8"))
        return {
            "last loss": found["validation_loss"],
            "seconds": median(found["seconds"][WARM_UP:]),
            "curve": [point for point in found["estimates"] if point[0]],
        }
    steps = read_metrics(folder, "step")[WARM_UP:]
    seconds = median(record["step_time_s"] for record in steps if "step_time_s" in record)
    if "timed" in experiment:
        rate = median(record["tflops"] for record in steps if "tflops" in record)
        return {"seconds": seconds, "tflops": rate, "waiting": waiting_share(folder)}
    key = experiment.get("loss", "loss")
    curve = [(record["step"], record[key]) for record in read_metrics(folder, "validation")]
    return {"last loss": curve[-1][1] if curve else inf, "seconds": seconds, "curve": curve}


def waiting_share(folder: Path) -> float:
    """Share of all ranks' time in which they wait for each other, by the last record; 0 of a single rank."""
    records = read_metrics(folder, "ranks")
    ranks = records[-1]["ranks"] if len(records) > 1 else []
    times = [(key, value) for rank in ranks for key, value in rank.items() if key != "host"]
    total = sum(value for _, value in times)
    return sum(value for key, value in times if key.startswith("waiting")) / total if total else 0.0


def rows_of(name: str, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A row of the report for each run, every number a list over seeds."""
    experiment = EXPERIMENTS[name]
    if "counted" in experiment:
        yield from count_kept(experiment)
        return
    folder, base = args.out.absolute() / "runs", list[float]()
    for run, entry in experiment["runs"].items():
        options = entry if isinstance(entry, dict) else {}
        names = [run_name(name, run, seed) for seed in range(1, args.seeds + 1)]
        found = [measure(folder / each, experiment) for each in names]
        if "timed" not in experiment:
            logs = (args.out / "steps" / f"{each}.json" for each in names)
            diverged = sum(json.loads(log.read_text("utf-8"))["diverged"] for log in logs)
            losses = [each["last loss"] for each in found]
            yield {
                "run": run,
                "validation loss": losses,
                "perplexity": [exp(min(loss, 99.0)) for loss in losses],
                "seconds of a step": [each["seconds"] for each in found],
                "diverged": diverged,
                "curves": [each["curve"] for each in found],
            }
            continue
        values = [each[experiment["measure"]] / options.get("per", 1) for each in found]
        base = base or values
        yield {
            "run": run,
            {"seconds": "seconds", "tflops": "TFLOP/s of a rank"}[experiment["measure"]]: values,
            "of the first": [value / first for value, first in zip(values, base, strict=True)],
            "by the paper": options.get("paper", ""),
            "waiting": [each["waiting"] for each in found],
        }


def report(name: str, args: argparse.Namespace) -> str:
    """Write NAME/result.json and report.md; return the latter."""
    experiment, rows = EXPERIMENTS[name], list(rows_of(name, args))
    columns = [key for key in rows[0] if key != "curves"]
    lines = [
        f"# {name}: {experiment['title']}",
        f"**{experiment['source']}.** {experiment['claim']}",
        "\n".join(
            f"| {' | '.join(cells)} |"
            for cells in (
                columns,
                ["---"] * len(columns),
                *([cell(row[key]) for key in columns] for row in rows),
            )
        ),
        "Medians of the seeds or rounds, least to largest. A difference counts if all of three show it.",
        "## What this cannot show",
        "\n".join(f"- {line}" for line in experiment["limits"]),
        "## Measured with",
        f"{cpu_name()}, {args.cores} cores; {', '.join(f'{k} {v}' for k, v in versions().items())}; "
        f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
    ]
    folder = args.out / name
    folder.mkdir(parents=True, exist_ok=True)
    if curves := {row["run"]: row["curves"] for row in rows if row.get("curves")}:
        draw(curves, folder / "validation.png")
        lines.insert(4, "![Validation loss](validation.png)")
    text = "\n\n".join(lines) + "\n"
    write_atomic(folder / "report.md", text.encode())
    write_atomic(
        folder / "result.json", (json.dumps({"experiment": name, "rows": rows}, indent=1) + "\n").encode()
    )
    return text


def cell(value: Any) -> str:
    if isinstance(value, list):
        ends = f" ({min(value):.4g} to {max(value):.4g})" if len(value) > 1 else ""
        return f"{median(value):.4g}{ends}"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def draw(curves: Mapping[str, Sequence[Sequence[tuple[int, float]]]], path: Path) -> None:
    from matplotlib.figure import Figure  # of an extra: lists and dry runs go without

    figure = Figure(figsize=(6.4, 4.0), dpi=100, layout="constrained")
    axes = figure.subplots()
    for number, (name, seeds) in enumerate(curves.items()):
        for seed, curve in enumerate(curve for curve in seeds if curve):
            axes.plot(*zip(*curve, strict=True), f"C{number}", lw=1, label=None if seed else name)
    axes.set(xlabel="step", ylabel="validation loss, nats")
    axes.legend(frameon=False, fontsize=8)
    figure.savefig(path, format="png")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="reproduce.py",
        description="Run figures and tables of the papers on this machine; without a name, list them.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="experiment, or all")
    add("--out", type=Path, default=Path("runs/reproduce"), help="folder of all experiments (%(default)s)")
    add("--seeds", type=int, default=3, help="seeds, or rounds of timed runs (%(default)s)")
    add("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores to use (%(default)s)")
    add("--peer", type=Path, help="checkout of nanoGPT, for nanogpt-shakespeare")
    add("--dry-run", action="store_true", help="print the command lines and run none")
    args = parser.parse_args(arguments)
    if unknown := sorted(set(args.names) - {*EXPERIMENTS, "all"}):
        parser.error(f"no experiment {', '.join(unknown)}; use all, or some of {', '.join(EXPERIMENTS)}")
    if min(args.seeds, args.cores) < 1:
        parser.error("--seeds and --cores are 1 or more")
    return args


def main(arguments: Sequence[str] | None = None) -> int:
    """List the experiments, or run those named; return the exit code."""
    args = parse(arguments)
    if not args.names:
        for name, experiment in EXPERIMENTS.items():
            print(f"{name:20} {experiment['minutes']:5g} min  {experiment['source']}: {experiment['title']}")
        return 0
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler)
    try:
        for name in EXPERIMENTS if "all" in args.names else args.names:
            if "all" in args.names and args.peer is None and "{peer}" in str(EXPERIMENTS[name]["runs"]):
                print(f"{name} is skipped: it needs --peer")
                continue
            stages = stages_of(name, args)
            if args.dry_run:
                lines = (shlex.join(step.words) for stage in stages for step in stage)
                print("\n".join((f"# {name}", *lines)))
                continue
            Runner(args.out.absolute(), args.cores).run(stages)
            print(report(name, args), flush=True)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return 130
    except (UserError, CheckFailedError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0
