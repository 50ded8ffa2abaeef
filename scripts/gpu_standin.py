"""Run a command on stand-ins for GPUs: PyTorch's CUDA code runs to its end on a machine without one.

    python scripts/gpu_standin.py -- -m mlm pretrain model=gpt2_tiny data=synthetic train.steps=4
    python scripts/gpu_standin.py --gpus 4 -- -m mlm parity model=gpt2_tiny precision=fp64 tp=2 pp=2
    python scripts/gpu_standin.py --no-arithmetic -- scripts/gpu_check.py --quick --out /tmp/check
    python scripts/gpu_standin.py --rehearse scripts/results/gpu_standin      # the list of commands, recorded

Needs a PyTorch built for CUDA, gcc, and no GPU. A small library answers in place of the driver, cuBLAS, cuDNN
and NCCL (scripts/gpu/standin): allocations, streams, events, captures and launches work; kernels are counted
and do nothing. With arithmetic, the default, PyTorch's operators compute with their CPU kernels on that
memory, so that results are right to rounding; what is compiled or replayed as a graph computes nothing.
NCCL's messages really travel between processes, behind streams as on a device.

It shows that the code of the device path runs, waits where it must and nowhere else, and gives the right
numbers in any layout. It says nothing about kernels, their speed or rounding, or about real links.

Exit code: that of the command; of a rehearsal 0 if all is as expected, else 1; 2 if there can be no stand-in.
"""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpu.standin.build import UnavailableError, library
from gpu.standin.rehearsal import RecordError, rehearse

SCRIPTS = Path(__file__).resolve().parent
CACHE = SCRIPTS.parent / "build" / "standin"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="gpu_standin.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="of this host (default %(default)s)")
    add("--capability", type=int, default=90, help="of each, as major and minor digit (default %(default)s)")
    add("--no-arithmetic", action="store_true", help="compute nothing: fast, for any size, with any numbers")
    add("--rendezvous", action="store_true", help="a message leaves only when its receiver is there")
    add(
        "--late", type=int, metavar="MS", help="each message begins so late, to show who does not wait for it"
    )
    add("--kernels", type=Path, help="file for the kernels launched and how often, by each process")
    add("--rehearse", type=Path, metavar="FOLDER", help="run the rehearsal's commands, and record them there")
    add("command", nargs=argparse.REMAINDER, help="what follows `python`, such as -- -m mlm pretrain")
    return parser.parse_args(arguments)


def environment(args: argparse.Namespace, built: Path, messages: Path) -> dict[str, str]:
    """Variables of the command."""
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    if not args.no_arithmetic:
        paths.insert(0, str(SCRIPTS / "gpu/standin/site"))
    libraries = [str(built.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    found = {
        **os.environ,
        "LD_PRELOAD": str(built),
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PYTHONPATH": ":".join(filter(None, paths)),
        "MLM_STANDIN_GPUS": str(args.gpus),
        "MLM_STANDIN_CAPABILITY": str(args.capability),
        "MLM_STANDIN_ARITHMETIC": str(int(not args.no_arithmetic)),
        "MLM_STANDIN_MESSAGES": str(messages),
    }
    if args.rendezvous:
        found["MLM_STANDIN_RENDEZVOUS"] = "1"
    if args.late is not None:
        found["MLM_STANDIN_LATE_MS"] = str(args.late)
    if args.kernels is not None:
        found["MLM_STANDIN_KERNELS"] = str(args.kernels.resolve())
    return found


@contextmanager
def messages() -> Iterator[Path]:
    """A folder for messages between processes, in memory where there is one; deleted afterwards."""
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    folder = Path(tempfile.mkdtemp(prefix="mlm-standin-", dir=shared))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def wait_for(command: list[str], variables: dict[str, str] | None) -> int:
    """Exit code of a command, which ends in its own way when it is asked to: it may save first."""
    signal.signal(signal.SIGINT, lambda *_: None)  # of the terminal: the command hears it too
    process = subprocess.Popen(command, env=variables)
    signal.signal(signal.SIGTERM, lambda *_: process.terminate())
    code = process.wait()
    return code if code >= 0 else 128 - code


def mistake(words: str) -> int:
    """Say what is wrong; its exit code."""
    print(f"gpu_standin.py: {words}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    args = parse(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if bool(command) == (args.rehearse is not None):
        return mistake("name a command, or --rehearse FOLDER")
    if args.gpus < 1 or not 70 <= args.capability <= 120 or (args.late or 0) < 0:
        return mistake("--gpus from 1, --capability from 70 to 120, --late from 0")
    if args.kernels is not None and not args.kernels.parent.is_dir():
        return mistake(f"--kernels {args.kernels}: its folder does not exist")
    try:
        built = library(CACHE)
        if args.rehearse is not None:
            return rehearse(args.rehearse)
    except (UnavailableError, RecordError) as error:
        return mistake(str(error))
    except KeyboardInterrupt:
        return 130
    with messages() as folder:
        return wait_for([sys.executable, *command], environment(args, built, folder))


if __name__ == "__main__":
    sys.exit(main())
