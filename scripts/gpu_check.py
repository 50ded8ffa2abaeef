"""Check of an installation on one GPU: whether it computes what the CPU does, and how fast.

    python scripts/gpu_check.py                                       # about 8 minutes; again: what is left
    python scripts/gpu_check.py --minutes 4 --only facts graphs waits agree     # of a quarter of an hour,
    python scripts/gpu_check.py --minutes 9 --only stacks peers speed-1.2b switches    # the two calls
    python scripts/gpu_check.py --device cpu --quick --out /tmp/check # a rehearsal on any machine
    python scripts/gpu_check.py --again agree --out FOLDER            # one step once more

Steps run in order of value, each in a process of its own with a time limit. Results are in gpu_check.json,
gpu_check.md and gpu_check.log of the folder, written after every step; a second call skips the steps that
are recorded for the same code and torch. Needs torch, this checkout and the
packages of pyproject.toml.

Exit code: 0 if no step failed (some may not be reached), 1 if one did, 2 a mistake, 130 Ctrl-C.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpu.catalogue import STEPS
from gpu.record import Record
from gpu.runner import child_command, python_environment, run_steps

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "scripts/results/gpu"
SOURCES = ("mlm/**/*.py", "configs/**/*.yaml", "scripts/gpu/*.py", "scripts/gpu/*.yaml", "scripts/bench/*.py")
"""Files that results depend on."""
NEEDED = ("numpy", "yaml", "hydra", "omegaconf", "antlr4", "pydantic", "xxhash", "rich")
NEEDED += ("packaging", "tokenizers", "rensa", "ftfy", "safetensors")
PROBE = f"""
import json, sys
from importlib.util import find_spec
missing = [name for name in {NEEDED!r} if find_spec(name) is None]
import torch
print(json.dumps([torch.__version__, torch.cuda.is_available(), sys.version.split()[0], missing]))
"""
PROBE_S = 240.0  # the first import reads gigabytes from a cold disk


class UsageError(Exception):
    """A mistake that the user can correct, in one line."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="gpu_check.py",
        description=__doc__,
        epilog="steps:\n" + "\n".join(f"  {step.name:16} {step.title}" for step in STEPS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    names = [step.name for step in STEPS]
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--quick", action="store_true", help="tiny sizes: a rehearsal, whose speeds mean nothing")
    add("--out", type=Path, default=RESULTS, help="folder of the results (%(default)s)")
    add("--minutes", type=float, default=8.0, help="for all; steps that do not fit are left (%(default)s)")
    add("--again", nargs="+", default=[], metavar="STEP", choices=names, help="steps to repeat")
    add("--only", nargs="+", default=names, metavar="STEP", choices=names, help="steps to run")
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    """Run the steps that are not recorded; the exit code. Raises UsageError."""
    begin = time.monotonic()
    is_fake = "MLM_FAKE_GPUS" in os.environ
    if is_fake and args.out.resolve() == RESULTS.resolve():
        raise UsageError(
            f"--out {args.out}: holds a GPU's results, and this is a fake GPU; name another folder"
        )
    args.out.mkdir(parents=True, exist_ok=True)
    environment = python_environment(ROOT, os.environ)
    torch, has_gpu, python, missing = probe(environment)
    if args.device == "cuda" and not has_gpu:
        raise UsageError("--device cuda: torch sees no GPU here; rehearse with --device cpu --quick")
    code = hashlib.sha256()  # a checkout without its history has no commit to go by
    for path in sorted(path for pattern in SOURCES for path in ROOT.glob(pattern)):
        code.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    identity: dict[str, Any] = {"code": code.hexdigest()[:12], "torch": torch}
    identity["device"] = "fake" if is_fake else args.device
    identity |= {"quick": True} if args.quick else {}
    say(f"code {identity['code']}, commit {commit()}, torch {torch}, Python {python}, {args.device}")
    if missing:
        say(f"not installed: {', '.join(missing)}; steps that need them fail")
    try:
        record = Record(args.out, STEPS, identity)
    except ValueError as error:
        raise UsageError(f"--out {error}") from None
    return run_steps(
        [step for step in STEPS if step.name in {*args.only, *args.again}],
        record,
        child_command(args.device, args.quick, args.out / "gpu_check.json"),
        environment=environment,
        end=begin + 60 * args.minutes,
        again=args.again,
        say=say,
        log=args.out / "gpu_check.log",
    )


def say(line: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {line}", flush=True)


def probe(environment: Mapping[str, str]) -> tuple[str, bool, str, list[str]]:
    """Torch's version, True if it sees a GPU, Python's version, packages not installed. Raises UsageError."""
    command = [sys.executable, "-c", PROBE]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PROBE_S)
    except subprocess.TimeoutExpired:
        raise UsageError(f"importing torch took more than {PROBE_S:.0f} s") from None
    if done.returncode:
        raise UsageError(f"{sys.executable} cannot import torch: {done.stderr.strip().splitlines()[-1]}")
    torch, has_gpu, python, missing = json.loads(done.stdout.splitlines()[-1])
    return torch, has_gpu, python, missing


def commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def main(arguments: list[str] | None = None) -> int:
    """Run the check; its exit code."""
    args = parse(arguments)
    try:
        return run(args)
    except UsageError as mistake:
        print(f"gpu_check: {mistake}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("gpu_check: stopped; the steps before are recorded", file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
