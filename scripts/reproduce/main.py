"""The command line of scripts/reproduce.py."""

import argparse
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from mlm.util.errors import CheckFailedError, UserError
from mlm.util.extras import load_extra
from reproduce.catalogue import EXPERIMENTS
from reproduce.experiment import Experiment, Settings, Stages
from reproduce.report import keep, write_report
from reproduce.results import Results
from reproduce.runner import Runner, shell_lines, signals_raised

STOPPED = 130
show = partial(print, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """List the experiments, or run those named; return the exit code."""
    names = [experiment.name for experiment in EXPERIMENTS]
    parser = arguments_of(names)
    options = parser.parse_args(arguments)
    if not options.names and not options.keep:
        for each in EXPERIMENTS:
            print(f"{each.name:20} {each.minutes:5g} min  {each.source}: {each.title}")
        return 0
    if unknown := sorted(set(options.names) - {*names, "all"}):
        parser.error(f"no experiment {', '.join(unknown)}; use all, or some of {', '.join(names)}")
    if min(options.seeds, options.cores) < 1:
        parser.error("--seeds and --cores are 1 or more")
    chosen = [each for each in EXPERIMENTS if each.name in options.names or "all" in options.names]
    settings = Settings(
        out=options.out.absolute(),
        cores=options.cores,
        seeds=options.seeds,
        corpus=options.corpus,
        peer=absolute(options.peer),
    )
    try:
        with signals_raised():
            for experiment in chosen:
                try:
                    stages = experiment.stages(settings)
                except UserError as error:  # files of the user's that it needs
                    if experiment.name in options.names:
                        raise
                    show(f"{experiment.name} is skipped: {error}")
                    continue
                reproduce(experiment, stages, settings, dry=options.dry_run)
    except KeyboardInterrupt:
        print("stopped; the same command continues", file=sys.stderr)
        return STOPPED
    except (UserError, CheckFailedError) as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    if options.keep:
        keep(settings.out, names)
    return 0


def arguments_of(names: Sequence[str]) -> argparse.ArgumentParser:
    """Return the parser."""
    parser = argparse.ArgumentParser(
        prog="reproduce.py",
        description="Run figures and tables of the papers on this machine; without a name, list them.",
    )
    add = parser.add_argument
    add("names", nargs="*", metavar="NAME", help="experiment, or all")
    add("--out", type=Path, default=Path("runs/reproduce"), help="folder of all experiments (%(default)s)")
    add("--seeds", type=int, default=3, help="seeds, or rounds of timed runs (%(default)s)")
    add("--cores", type=int, default=len(os.sched_getaffinity(0)), help="cores to use (%(default)s)")
    add("--corpus", default="debian", help="debian, plays, or a folder by `mlm data build` (%(default)s)")
    add("--peer", type=Path, help="checkout of nanoGPT, for nanogpt-shakespeare")
    add("--dry-run", action="store_true", help="print the command lines and run none")
    add("--keep", action="store_true", help="copy the reports in --out to scripts/results/reproduce")
    return parser


def absolute(path: Path | None) -> Path | None:
    """Return an absolute path: steps run in another folder."""
    return None if path is None else path.absolute()


def reproduce(experiment: Experiment, stages: Stages, settings: Settings, *, dry: bool) -> None:
    """Run what is left of an experiment, then write its report and show what it says."""
    runner = Runner(settings.out, stages, settings.cores, show)
    if dry:
        print("\n".join((f"# {experiment.name}", *shell_lines(stages, runner.records))))
        return
    load_extra("matplotlib", f"scripts/reproduce.py {experiment.name}", "reproduce")  # for its pictures
    runner.run()
    results = Results(experiment.name, settings, stages, runner.records)
    conclusion = experiment.conclude(results)
    page = write_report(experiment, conclusion, results)
    show(f"The paper: {experiment.claim}\nSeen here: {conclusion.seen}")
    show(f"{experiment.name}: {conclusion.verdict.value}; {page}")
