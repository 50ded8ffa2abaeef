"""Rehearsal of what goes wrong on a cluster: SLURM and torchrun with two nodes, on this machine.

    scripts/slurm/rehearse.sh                                     # all cases
    scripts/slurm/rehearse.sh --only submit scancel               # some
    scripts/slurm/rehearse.sh --list

Needs root and Debian's packages slurmctld, slurmd, slurm-client, munge and iproute2. The nodes are network
namespaces, with addresses and host names of their own.
Jobs train a model of a few thousand parameters in float64, and their losses are compared with an
undisturbed process. All is taken down at the end, also after Ctrl-C.

Exit code: 0 if every case passed, 1 if one did not, 2 if the cluster could not be had, 130 Ctrl-C.
"""

import argparse
import datetime
import os
import platform
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

from rehearsal import agents, cases
from rehearsal.cases import Case, Stage
from rehearsal.cluster import ROOT, Cluster, Failed
from rehearsal.network import Network, sh
from rehearsal.record import Finding, Row, write
from rehearsal.training import train_alone

from mlm.util.lock import Lock

LOCK = Path("/run/mlm-rehearsal.lock")
CASES: dict[str, Case] = {**cases.CASES, **agents.CASES}


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="rehearse.sh", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    out = ROOT / "scripts/results/rehearsal"
    parser.add_argument("--only", nargs="+", metavar="CASE", choices=CASES, help="cases to run")
    parser.add_argument("--list", action="store_true", help="name the cases, and start nothing")
    parser.add_argument("--out", type=Path, default=out, help="folder of the record (%(default)s)")
    parser.add_argument("--keep", action="store_true", help="leave logs and runs in the temporary folder")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the cases; the exit code."""
    args = parse(arguments)
    if args.list:
        print("\n".join(CASES))
        return 0
    if os.geteuid():
        print(
            "rehearse.sh: SLURM's daemons and network namespaces need root: start it with sudo",
            file=sys.stderr,
        )
        return 2
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell ignores it for its background jobs
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    lock = Lock(LOCK)
    if not lock.take():
        print("rehearse.sh: another rehearsal runs on this machine: wait for its end", file=sys.stderr)
        return 2
    try:
        return rehearse(args)
    finally:
        lock.release(delete=True)


def rehearse(args: argparse.Namespace) -> int:
    """Bring the cluster up, run the cases and take all down; the exit code."""
    folder = Path(tempfile.mkdtemp(prefix="mlm-rehearsal-"))
    cluster = Cluster(Network(folder), folder)
    try:
        try:
            cluster.network.up()
        except (OSError, RuntimeError) as error:
            raise Failed(f"no network namespaces can be made here: {error}") from None
        rows = run(cluster, args.only or list(CASES), args.out)
    except Failed as error:
        print(f"rehearse.sh: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    finally:
        cluster.down()
        if args.keep:
            print(f"logs and runs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return 0 if all(row.passed for row in rows) else 1


def run(cluster: Cluster, names: list[str], out: Path) -> list[Row]:
    """Run cases, with SLURM up for its own, and write the record after each."""
    print(cluster.network.words, flush=True)
    alone, rows = train_alone(cluster.python, cluster.folder / "alone"), list[Row]()
    if any(name in cases.CASES for name in names):
        cluster.up()
    facts = facts_of(cluster)
    names = sorted(names, key=agents.CASES.__contains__)  # the last: they end SLURM's daemon on n2
    for number, name in enumerate(names):
        folder = cluster.folder / f"case-{number}"
        folder.mkdir()
        rows.append(attempt(name, Stage(cluster, folder, alone)))
        write(out, facts, rows)
        print(
            f"{'pass' if rows[-1].passed else 'FAIL'}  {rows[-1].took_s:4.0f} s  {name}: {rows[-1].said}",
            flush=True,
        )
    return rows


def attempt(name: str, stage: Stage) -> Row:
    begin, passed = time.monotonic(), True
    try:
        finding = CASES[name](stage)
    except Failed as error:
        finding, passed = Finding(name, None, str(error), "unknown"), False
    took = time.monotonic() - begin
    if name in cases.CASES:
        stage.cluster.clear()
    return Row(case=name, **vars(finding), took_s=round(took, 1), passed=passed)


def facts_of(cluster: Cluster) -> dict[str, str]:
    kernel = platform.release().partition("-")[0]
    return {
        "date": f"{datetime.date.today():%F}",
        "machine": f"{os.cpu_count()} cores, Linux {kernel}",
        "SLURM": sh("slurmctld", "-V").strip() if shutil.which("slurmctld") else "none",
        "network": cluster.network.words,
        "command": "scripts/slurm/rehearse.sh",
    }


if __name__ == "__main__":
    sys.exit(main())
