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
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench.harness import Bench, Result, Say, table_of
from rich.console import RenderableType
from rich.text import Text
from torture.faults import FAULTS
from torture.inspection import FINDINGS, Findings, Trial
from torture.kills import COMMAND, KILLS
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


@dataclass
class Round:
    """One kill or one fault."""

    kind: str
    """kill, or fault."""
    aim: str
    """The target: saving, …; or the injected error."""
    met: str
    """The operation that a kill hit; empty for an injected error."""
    note: str
    seconds: float
    found: Findings


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Torture; if anything was found, the folder of it stays."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    folder, begun = Path(tempfile.mkdtemp(prefix="torture-")), time.perf_counter()
    folder.chmod(0o755)
    plan, rounds, kept = planned(args), list[Round](), False
    try:
        layouts = dict.fromkeys(layout for _, _, layout in plan)
        references = {name: make_reference(name, folder / f"reference-{i}") for i, name in enumerate(layouts)}
        for number, (kind, aim, layout) in enumerate(plan):
            place = folder / f"round-{number}"
            place.mkdir()
            place.chmod(0o755)
            rounds.append(one_round(kind, aim, references[layout], place, f"{args.seed}-{number}"))
            say(f"{number + 1} of {len(plan)}: {aim}, {rounds[-1].seconds:.0f} s")
            if not rounds[-1].found.all():
                shutil.rmtree(place)
        kept = any(each.found.all() for each in rounds)
    finally:
        if not kept:
            shutil.rmtree(folder, ignore_errors=True)
    if kept:
        say(f"runs with findings stay in {folder}")
    kills = [each for each in rounds if each.kind == "kill"]
    result = {
        "seed": args.seed,
        "rounds": len(rounds),
        "kills": len(kills),
        "kills_by_aim": dict(Counter(each.aim for each in kills)),
        "kills_by_what_they_met": dict(Counter(each.met for each in kills)),
        "faults": len(rounds) - len(kills),
        "faults_by_kind": dict(Counter(each.aim for each in rounds if each.kind == "fault")),
        **{name: sum(len(getattr(each.found, field)) for each in rounds) for name, field in FINDINGS.items()},
        "seconds": round(time.perf_counter() - begun, 1),
        "layouts": {name: describe(reference) for name, reference in references.items()},
        "log": [asdict(each) for each in rounds],
    }
    return dict(json.loads(json.dumps(result).replace(str(folder), "FOLDER")))


def one_round(kind: str, aim: str, reference: Reference, place: Path, seed: str) -> Round:
    """One kill or fault in a folder of its own. A kill that meets something else than its aim is repeated."""
    begin = time.perf_counter()
    for attempt in range(TRIES):
        rng = random.Random(f"{seed}-{attempt}")
        trial, met = Trial(reference, place / f"run-{attempt}", rng, haste=0.5**attempt), ""
        try:
            if kind == "kill":
                met = KILLS[aim](trial)
            else:
                FAULTS[aim](trial)
        except (OSError, ValueError) as error:  # of what was to be there
            trial.found.other.append(f"the round broke off: {type(error).__name__}: {error}")
        if met in (aim, COMMAND, "") or trial.found.all():
            break
    return Round(kind, aim, met, trial.note, round(time.perf_counter() - begin, 2), trial.found)


def tables(result: Result) -> Iterator[RenderableType]:
    """Counts of each kill and fault, and every finding."""
    log, rows = result["log"], []
    for kind, aim in dict.fromkeys((r["kind"], r["aim"]) for r in log):
        mine = [r for r in log if (r["kind"], r["aim"]) == (kind, aim)]
        sums = (str(sum(len(r["found"][name]) for r in mine)) for name in FINDINGS.values())
        rows.append((f"kill -9: {aim}" if kind == "kill" else aim, str(len(mine)), *sums))
    rows.append(("all", str(len(log)), *(str(result[name]) for name in FINDINGS)))
    yield table_of(("what was done", "times", *(name.replace("_", " ") for name in FINDINGS)), rows)
    met = result["kills_by_what_they_met"]
    yield "kills met: " + ", ".join(f"{what} {times}" for what, times in met.items())
    for number, r in enumerate(log, 1):
        for line in (line for lines in r["found"].values() for line in lines):
            yield Text(f"round {number}, {r['aim']} ({r['note']}): {line}")


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
