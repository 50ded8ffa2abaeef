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
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from bench.harness import Bench, Result, Say, positive, table_of, timed
from bench.machine import status_bytes
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
from mlm.util.errors import UserError

MODEL = ModelConfig(num_layers=1, hidden_size=1920, num_heads=20, max_positions=1024)
KINDS = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
BLOCK = 1 << 22  # random numbers drawn once and laid end to end
STEP = 1000


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--gb", type=float, default=8.0, help="size of the checkpoint in 10^9 bytes (default %(default)s)")
    add("--tp", type=positive, default=4, help="of the layout to write (default %(default)s)")
    add("--pp", type=positive, default=1, help="of the layout to write (default %(default)s)")
    add("--hidden-size", type=positive, default=MODEL.hidden_size, help="default %(default)s")
    peak = "peak memory allowed, in 10^9 bytes (default %(default)s)"
    add("--limit-gb", type=float, default=1.5, help=peak)
    scratch = Path(tempfile.gettempdir())
    add("--folder", type=Path, default=scratch, help="where to write (default %(default)s)")


def measure(args: argparse.Namespace, _: Say) -> Result:
    """Make, reshard in a child, delete."""
    tensors, config = checkpoint_of(args.gb, args.hidden_size)
    sizes = [tensor.num_bytes for tensor in tensors.values()]
    check_space(args.folder, 2 * sum(sizes), f"--folder {args.folder}")
    with tempfile.TemporaryDirectory(prefix="bench_reshard-", dir=args.folder) as folder:
        made = timed(lambda: make(Path(folder), tensors, config))
        told = child(args, Path(folder))
    return {
        "layout": {"tp": args.tp, "pp": args.pp},
        "num_layers": config.model.num_layers,
        "hidden_size": config.model.hidden_size,
        "bytes": sum(sizes),
        "tensors": len(sizes),
        "largest_tensor_bytes": max(sizes),
        "limit_bytes": args.limit_gb * 1e9,
        "seconds_to_make": made.wall,
        **told,
        "bytes_per_second": sum(sizes) / told["seconds"],
    }


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
    words = [sys.executable, __file__, str(folder), str(args.tp), str(args.pp)]
    environ = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, env=environ, check=False)
    if done.returncode:
        raise UserError(f"mlm reshard ended with {done.returncode}: see above")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def be_child(folder: Path, tp: int, pp: int) -> None:
    """Reshard, and print one line of JSON."""
    before, begin = status_bytes("VmHWM"), time.perf_counter()
    reshard(ReshardConfig(ckpt=str(folder / "run"), out=str(folder / "out"), tp=tp, pp=pp))
    seconds = time.perf_counter() - begin
    told = {"peak_bytes": status_bytes("VmHWM"), "imports_bytes": before, "seconds": seconds}
    print(json.dumps(told))


def tables(result: Result) -> Iterator[Table]:
    """Name and value of each fact."""
    facts = {
        "checkpoint": f"{result['bytes'] / 1e9:.2f} GB in {result['tensors']} tensors",
        "largest tensor": f"{result['largest_tensor_bytes'] / 1e6:,.0f} MB",
        "to": " ".join(f"{key}={value}" for key, value in result["layout"].items()),
        "peak memory": f"{result['peak_bytes'] / 1e6:,.0f} MB",
        "of it, program": f"{result['imports_bytes'] / 1e6:,.0f} MB",
        "time": f"{result['seconds']:.1f} s, verified, read and written",
        "rate": f"{result['bytes_per_second'] / 1e6:,.0f} MB/s",
    }
    yield table_of(("", ""), facts.items())


BENCH = Bench(
    name="bench_reshard",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: bool(result["peak_bytes"] <= result["limit_bytes"]),
)

if __name__ == "__main__":
    if len(sys.argv) == 4 and not sys.argv[1].startswith("-"):  # what `child` starts
        be_child(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        sys.exit(BENCH.main())
