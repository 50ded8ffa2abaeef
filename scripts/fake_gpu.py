"""Run a command on fake GPUs: PyTorch's CUDA code runs to its end on a machine without one.

    python scripts/fake_gpu.py -- -m mlm pretrain model=gpt2_tiny data=synthetic train.steps=4
    python scripts/fake_gpu.py --gpus 4 -- -m mlm parity model=gpt2_tiny precision=fp64 tp=2 pp=2
    python scripts/fake_gpu.py --no-arithmetic -- scripts/gpu_check.py --quick --out /tmp/check

Needs a PyTorch built for CUDA 13, gcc from version 12, nm, and no GPU. A stub library answers in place of the
driver, cuBLAS, cuDNN and NCCL (scripts/gpu/fake): allocations, streams, events, captures and launches work;
kernels are counted and do nothing. With arithmetic, the default, PyTorch's operators compute with their CPU
kernels on that memory, so that results are right to rounding; what is compiled or replayed as a graph
computes nothing. NCCL's messages really travel between processes, behind streams as on a device.

It shows that the code of the device path runs, that its messages are awaited, and that a layout gives the
right numbers. It cannot show a missing wait for a copy or between two computations: both finish before the
call returns. It says nothing about kernels, their speed or rounding, or about links.

Exit code: the command's; 2 if the stub cannot be built.
"""

import argparse
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from gpu.fake.build import UnavailableError, library

SCRIPTS = Path(__file__).resolve().parent
CACHE = SCRIPTS.parent / "build" / "fake_gpu"


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="fake_gpu.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="of this host (default %(default)s)")
    add("--capability", type=int, default=90, help="of each, as major and minor digit (default %(default)s)")
    add("--no-arithmetic", action="store_true", help="compute nothing: fast, for any size, with any numbers")
    add("--rendezvous", action="store_true", help="a send completes only when it is received")
    add("--late", type=int, metavar="MS", help="delay each message, so that what does not wait for it shows")
    add("--kernels", type=Path, help="file for the kernels launched and how often, by each process")
    add("command", nargs=argparse.REMAINDER, help="what follows `python`, such as -- -m mlm pretrain")
    return parser.parse_args(arguments)


def environment(args: argparse.Namespace, built: Path, messages: Path) -> dict[str, str]:
    paths = [str(SCRIPTS), str(SCRIPTS.parent), os.environ.get("PYTHONPATH", "")]
    if not args.no_arithmetic:
        paths.insert(0, str(SCRIPTS / "gpu/fake/site"))
    libraries = [str(built.parent), os.environ.get("LD_LIBRARY_PATH", "")]
    found = {
        **os.environ,
        "LD_PRELOAD": str(built),
        "LD_LIBRARY_PATH": ":".join(filter(None, libraries)),
        "PYTHONPATH": ":".join(filter(None, paths)),
        "MLM_FAKE_GPUS": str(args.gpus),
        "MLM_FAKE_GPU_CAPABILITY": str(args.capability),
        "MLM_FAKE_GPU_ARITHMETIC": str(int(not args.no_arithmetic)),
        "MLM_FAKE_GPU_MESSAGES": str(messages),
    }
    if args.rendezvous:
        found["MLM_FAKE_GPU_RENDEZVOUS"] = "1"
    if args.late is not None:
        found["MLM_FAKE_GPU_LATE_MS"] = str(args.late)
    if args.kernels is not None:
        found["MLM_FAKE_GPU_KERNELS"] = str(args.kernels.resolve())
    return found


def wait_for(command: list[str], variables: dict[str, str] | None) -> int:
    """Exit code of a command, which ends in its own way when it is asked to: it may save first."""
    signal.signal(signal.SIGINT, lambda *_: None)  # of the terminal: the command hears it too
    passed = (signal.SIGTERM, signal.SIGHUP)
    signal.pthread_sigmask(signal.SIG_BLOCK, passed)  # until there is a process to pass them to
    process = subprocess.Popen(
        command, env=variables, preexec_fn=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    )
    for number in passed:
        signal.signal(number, lambda number, _: process.send_signal(number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, passed)
    code = process.wait()
    return code if code >= 0 else 128 - code


def mistake(words: str) -> int:
    """Say what is wrong; its exit code."""
    print(f"fake_gpu.py: {words}", file=sys.stderr)
    return 2


def main(arguments: list[str] | None = None) -> int:
    """Exit code of the command."""
    args = parse(arguments)
    command = args.command[1:] if args.command[:1] == ["--"] else args.command
    if not command:
        return mistake("name a command")
    if args.gpus < 1:
        return mistake(f"--gpus {args.gpus}: use 1 or more")
    if not 70 <= args.capability <= 120:
        return mistake(f"--capability {args.capability}: use 70 to 120")
    if (args.late or 0) < 0:
        return mistake(f"--late {args.late}: use 0 or more")
    if args.kernels is not None and not args.kernels.parent.is_dir():
        return mistake(f"--kernels {args.kernels}: its folder does not exist")
    try:
        built = library(CACHE)
    except UnavailableError as error:
        return mistake(str(error))
    # messages between processes, in memory where there is a folder for it
    shared = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(
        prefix="mlm-fake-gpu-", dir=shared, ignore_cleanup_errors=True
    ) as folder:
        return wait_for([sys.executable, *command], environment(args, built, Path(folder)))


if __name__ == "__main__":
    sys.exit(main())
