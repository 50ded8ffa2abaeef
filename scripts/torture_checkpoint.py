"""kill -9 at random instants, full disks, damage and mix-ups: no checkpoint may be lost, none be wrong.

    python scripts/torture_checkpoint.py --rounds 100 --seed 0 --out scripts/results/torture_checkpoint.json

Real training runs of a tiny GPT-2 with asynchronous saves, on one rank and on two. After every round:
whatever `latest` and the policy promised is whole by its digests, whatever passes for whole holds the bytes
of an undisturbed run, and the same command ends with the weights of that run. As root it mounts a small tmpfs
for the full disk, and gives up root where permissions are to count.
Exit code: 0 nothing was found, 1 something was, 2 a mistake.
"""

import argparse
import json
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path

import torch
from bench.harness import Bench, Result, Say
from torture.faults import FAULTS
from torture.inspection import Trial
from torture.kills import COMMAND, KILLS
from torture.record import FINDINGS, Record, Round, tables
from torture.runs import LAYOUTS, Reference, describe, make_reference

AIMS = ("saving", "loading", "resharding")
COMMAND_EVERY = 20  # rounds: starting Python and torch takes longer than all the rest
TWO_RANKS_EVERY = 5
TRIES = 5


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--rounds", type=int, default=100, help="kills (default %(default)s)")
    add("--faults", type=int, default=3, help="times each other fault is injected (default %(default)s)")
    add("--ranks", type=int, choices=(1, 2), default=2, help="most ranks of a run (default %(default)s)")
    add("--seed", type=int, default=0)


def planned(args: argparse.Namespace) -> list[tuple[str, str, str]]:
    """Each round as (kill or fault, aim, layout)."""
    layouts = [name for name, (ranks, _) in LAYOUTS.items() if ranks <= args.ranks]
    several = layouts[1:] or layouts
    rounds = []
    for i in range(args.rounds):
        layout = several[i // TWO_RANKS_EVERY % len(several)] if i % TWO_RANKS_EVERY == 4 else layouts[0]
        if i % COMMAND_EVERY == COMMAND_EVERY - 1:
            rounds.append(("kill", "command", layouts[0]))
        else:
            rounds.append(("kill", AIMS[i % len(AIMS)], layout))
    return rounds + [("fault", aim, layouts[i % len(layouts)]) for i in range(args.faults) for aim in FAULTS]


def torture(args: argparse.Namespace, folder: Path, say: Say) -> Record:
    """All rounds."""
    rounds = planned(args)
    used = dict.fromkeys(layout for _, _, layout in rounds)
    references = {name: make_reference(name, folder / f"reference-{i}") for i, name in enumerate(used)}
    record = Record(args.seed, {name: describe(reference) for name, reference in references.items()})
    for number, (kind, aim, layout) in enumerate(rounds):
        place = folder / f"round-{number}"
        place.mkdir()
        place.chmod(0o755)
        record.rounds.append(one_round(kind, aim, references[layout], place, f"{args.seed}-{number}"))
        say(f"{number + 1} of {len(rounds)}: {aim}, {record.rounds[-1].seconds:.0f} s")
        if not record.rounds[-1].found.all():
            shutil.rmtree(place)
    return record


def one_round(kind: str, aim: str, reference: Reference, place: Path, seed: str) -> Round:
    """One kill or fault in a folder of its own. A kill that meets something else than its aim is repeated."""
    begin = time.perf_counter()
    for attempt in range(TRIES):
        rng = random.Random(f"{seed}-{attempt}")
        trial = Trial(reference, place / f"run-{attempt}", rng, haste=0.5**attempt)
        try:
            met = KILLS[aim](trial) if kind == "kill" else inject(aim, trial)
        except (OSError, ValueError) as error:  # of what was to be there
            met = ""
            trial.found.other.append(f"the round broke off: {type(error).__name__}: {error}")
        if met in (aim, COMMAND, "") or trial.found.all():
            break
    return Round(kind, aim, met, trial.note, round(time.perf_counter() - begin, 2), trial.found)


def inject(aim: str, trial: Trial) -> str:
    """One fault, which meets nothing in particular."""
    FAULTS[aim](trial)
    return ""


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Torture; if anything was found, the folder of it stays."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder = Path(tempfile.mkdtemp(prefix="torture-"))
    folder.chmod(0o755)
    clean = False
    try:
        record = torture(args, folder, say)
        clean = record.clean
    finally:
        if clean or sys.exc_info()[0] is not None:
            shutil.rmtree(folder, ignore_errors=True)
    if not clean:
        say(f"runs with findings stay in {folder}")
    text = json.dumps(record.as_json()).replace(str(folder), "FOLDER")
    return dict(json.loads(text))


BENCH = Bench(
    name="torture_checkpoint",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: not any(result[name] for name in FINDINGS),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
