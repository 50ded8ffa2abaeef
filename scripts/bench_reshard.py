"""Peak memory, time and rate of `mlm reshard` on a large checkpoint, made here and deleted afterwards.

    python scripts/bench_reshard.py --gb 8 --folder /tmp --out reshard.json

The checkpoint has the shapes of model=gpt2_2_5b with as many layers as make --gb, weights and Adam's moments
in float32: random numbers, written a piece at a time. It is dropped from the page cache before it is read.
`mlm reshard` runs in a process of its own, one thread. Its peak memory is VmHWM of /proc/self/status (man 5
proc), which counts from the start of the program; ru_maxrss would count the process that started it too.
Exit code: 0 a result, 1 memory above --limit-gb, 2 a mistake.
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench.command import guarded
from bench.machine import REPOSITORY, commit_of, cpu_model
from rich.console import Console
from rich.table import Table
from torch import Tensor

from mlm.checkpoint.commands.config import ReshardConfig
from mlm.checkpoint.commands.reshard import run as reshard
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import GlobalTensor, write_streamed
from mlm.checkpoint.parameters import parameters
from mlm.config.build import to_dict
from mlm.models.config import ModelConfig
from mlm.training.config import PretrainConfig
from mlm.training.run_folder import check_space
from mlm.training.state import CHECKPOINTS
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

MODEL = ModelConfig(num_layers=1, hidden_size=1920, num_heads=20, max_positions=1024)
KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
BLOCK = 1 << 22  # random numbers drawn once and laid end to end
STEP = 1000


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_reshard.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--gb", type=float, default=8.0, help="size of the checkpoint in 10^9 bytes (default %(default)s)")
    add("--tp", type=int, default=4, help="of the layout to write (default %(default)s)")
    add("--pp", type=int, default=1, help="of the layout to write (default %(default)s)")
    add("--hidden-size", type=int, default=MODEL.hidden_size, help="default %(default)s")
    add(
        "--limit-gb", type=float, default=1.5, help="peak memory allowed, in 10^9 bytes (default %(default)s)"
    )
    add(
        "--folder",
        type=Path,
        default=Path(tempfile.gettempdir()),
        help="where to write (default %(default)s)",
    )
    add("--out", type=Path, help="JSON file for machines")
    add("--child", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def run(args: argparse.Namespace) -> int:
    """Make, reshard in a child, delete, report."""
    tensors, config = checkpoint_of(args.gb, args.hidden_size)
    sizes = [tensor.num_bytes for tensor in tensors.values()]
    check_space(args.folder, 2 * sum(sizes), f"--folder {args.folder}")
    with tempfile.TemporaryDirectory(prefix="bench_reshard-", dir=args.folder) as folder:
        begin = time.perf_counter()
        make(Path(folder), tensors, config)
        made = time.perf_counter() - begin
        told = child(args, Path(folder))
    result: dict[str, Any] = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": {
            "cpu": cpu_model(),
            "system": f"{platform.system()} {platform.release()}",
            "python": platform.python_version(),
            "torch": torch.__version__,
            "commit": commit_of(REPOSITORY),
            "load_average": [round(x, 2) for x in os.getloadavg()],
        },
        "layout": {"tp": args.tp, "pp": args.pp},
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "bytes": sum(sizes),
        "tensors": len(sizes),
        "largest_tensor_bytes": max(sizes),
        "seconds_to_make": made,
        **told,
        "bytes_per_second": sum(sizes) / told["seconds"],
    }
    show(result)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0 if result["peak_bytes"] <= args.limit_gb * 1e9 else 1


def checkpoint_of(gb: float, hidden_size: int) -> tuple[dict[str, GlobalTensor], PretrainConfig]:
    """The tensors of a checkpoint of about that size, and what it was trained with."""
    if hidden_size % MODEL.num_heads:
        raise UserError(f"--hidden-size {hidden_size}: use a multiple of the {MODEL.num_heads} heads")
    one = replace(MODEL, hidden_size=hidden_size)
    per_parameter = 4 * len(KINDS)
    layer = replace(one, num_layers=2).num_parameters() - one.num_parameters()
    layers = 1 + round((gb * 1e9 / per_parameter - one.num_parameters()) / layer)
    model = replace(one, num_layers=max(layers, 1))
    found = parameters(model)
    tensors = {kind + name: tensor for kind in KINDS for name, tensor in found.items()}
    return tensors, PretrainConfig(name="bench", out="bench", model=model)


def make(folder: Path, tensors: dict[str, GlobalTensor], config: PretrainConfig) -> None:
    """Write the checkpoint, and have the kernel forget it."""
    numbers = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0))

    def read(name: str, piece: Region) -> Tensor:
        out = torch.empty(piece.volume)
        for block in out.split(BLOCK):
            block.copy_(numbers[: len(block)])
        return out.view(piece.size)

    state = {"step": STEP, "config": to_dict(config)}
    path = write_streamed(folder / "run" / CHECKPOINTS, STEP, tensors, read, save_id="0" * 32, state=state)
    for file in path.iterdir():
        with open(file, "rb") as f:
            os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def child(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Report of a process that reshards in `folder`."""
    words = [sys.executable, __file__, "--child", str(folder), "--tp", str(args.tp), "--pp", str(args.pp)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environ, check=False)
    if done.returncode:
        raise UserError(f"mlm reshard ended with {done.returncode}: see above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def be_child(args: argparse.Namespace) -> int:
    """Reshard, and print one line of JSON."""
    before, begin = peak_bytes(), time.perf_counter()
    config = ReshardConfig(ckpt=str(args.child / "run"), out=str(args.child / "out"), tp=args.tp, pp=args.pp)
    reshard(config)
    seconds = time.perf_counter() - begin
    print(json.dumps({"peak_bytes": peak_bytes(), "imports_bytes": before, "seconds": seconds}))
    return 0


def peak_bytes() -> int:
    """The largest resident memory this program has had."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) << 10
    raise UserError("/proc/self/status: says no VmHWM; run this on Linux")


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table(show_header=False)
    for name, value in (
        ("checkpoint", f"{result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors"),
        ("largest tensor", f"{result['largest_tensor_bytes'] / 1e6:,.0f} MB"),
        ("to", " ".join(f"{key}={value}" for key, value in result["layout"].items())),
        ("peak memory", f"{result['peak_bytes'] / 1e6:,.0f} MB"),
        ("of it, program", f"{result['imports_bytes'] / 1e6:,.0f} MB"),
        ("time", f"{result['seconds']:.1f} s, verified, read and written"),
        ("rate", f"{result['bytes_per_second'] / 1e6:,.0f} MB/s"),
    ):
        table.add_row(name, value)
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = parse(arguments)
    return guarded("bench_reshard", lambda console: be_child(args) if args.child else run(args))


if __name__ == "__main__":
    sys.exit(main())
