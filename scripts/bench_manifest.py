"""Bookkeeping of a checkpoint of GPT-2 8.3B at hundreds of ranks: what rank 0 does in a save, and a load.

    python scripts/bench_manifest.py --dp 64 128 256 --out scripts/results/bench_manifest-cpu.json

Makes what the ranks of tp=8 with zero=2 declare, merges it, writes and reads back the manifest, as rank 0
does in a save; then reads it and plans the reading of one rank, as each does in a load. No shard is written.
Seconds are of processor time, the least of several rounds.
Exit code: 0 a result.
"""

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import torch
from bench.command import guarded
from rich.console import Console
from rich.table import Table

import mlm
from mlm.checkpoint.native.declaration import declare_shards, file_name, merge_declared
from mlm.checkpoint.native.folders import problem_of
from mlm.checkpoint.native.format import MANIFEST, FileEntry, Manifest, read_manifest, write_manifest
from mlm.checkpoint.native.reader import plan_reading
from mlm.checkpoint.native.slices import Shard, Split
from mlm.util.atomic import write_atomic

LAYERS, HIDDEN, VOCABULARY, POSITIONS = 72, 3072, 51200, 1024
DIGEST = "xxh3:" + "0" * 32
BLOCK = 1 << 24


def tensors() -> Iterator[tuple[str, tuple[int, ...], int | None]]:
    """Name, shape and tp dim of each tensor: weights and both moments."""
    h = HIDDEN
    layer = [("norm1.weight", (h,), None), ("norm1.bias", (h,), None), ("norm2.weight", (h,), None)]
    layer += [("norm2.bias", (h,), None), ("qkv.weight", (3 * h, h), 0), ("qkv.bias", (3 * h,), 0)]
    layer += [("out.weight", (h, h), 1), ("out.bias", (h,), None), ("up.weight", (4 * h, h), 0)]
    layer += [("up.bias", (4 * h,), 0), ("down.weight", (h, 4 * h), 1), ("down.bias", (h,), None)]
    for prefix in ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq"):
        for number in range(LAYERS):
            for name, shape, dim in layer:
                yield f"{prefix}.layers.{number}.{name}", shape, dim
        yield f"{prefix}.token.weight", (VOCABULARY, h), 0
        yield f"{prefix}.position.weight", (POSITIONS, h), None
        yield f"{prefix}.norm.weight", (h,), None
        yield f"{prefix}.norm.bias", (h,), None


TENSORS = list(tensors())


def shards_of(tp: int, tp_rank: int, dp: int, dp_rank: int) -> dict[str, Shard]:
    """Slices that a rank declares: of its tp rank's, one of dp parts of the rows."""
    found = {}
    for name, shape, dim in TENSORS:
        if dim is None and tp_rank:
            continue
        offset, size = [0] * len(shape), list(shape)
        if dim is not None:
            size[dim] //= tp
            offset[dim] = tp_rank * size[dim]
        each = -(-size[0] // dp)
        begin, end = min(dp_rank * each, size[0]), min((dp_rank + 1) * each, size[0])
        offset[0], size[0] = offset[0] + begin, end - begin
        piece = torch.empty(size, device="meta")
        found[name] = Shard(piece, shape, tuple(offset), Split(dim, "first"))
    return found


def measure(tp: int, dp: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Seconds and sizes at tp * dp ranks."""
    parts = [(d, t) for d in range(dp) for t in range(tp)]
    declared, held = [], []
    for d, t in parts:
        shards = shards_of(tp, t, dp, d)
        declared.append(declare_shards(shards, 1, 1))
        held.append(4 * sum(s.tensor.numel() for s in shards.values()))
    files = {
        file_name(rank): FileEntry(size, DIGEST, (DIGEST,) * -(-size // BLOCK))
        for rank, size in enumerate(held)
    }
    wanted = shards_of(tp, 0, dp, 0)
    times: dict[str, list[float]] = {"merge_s": [], "write_s": [], "look_s": [], "read_s": [], "plan_s": []}
    for _ in range(rounds):
        marks = [time.process_time()]
        entries = merge_declared(folder, declared)
        marks.append(time.process_time())
        write_manifest(folder, Manifest(1, "bench", entries, files, {}))
        marks.append(time.process_time())
        problem_of(folder)
        marks.append(time.process_time())
        manifest = read_manifest(folder)
        marks.append(time.process_time())
        readings = plan_reading(manifest, wanted)
        marks.append(time.process_time())
        for name, seconds in zip(times, np.diff(marks).tolist(), strict=True):
            times[name].append(seconds)
    least = {name: min(seconds) for name, seconds in times.items()}
    return {
        "ranks": tp * dp,
        "chunks": sum(len(entry.chunks) for entry in manifest.tensors.values()),
        "bytes_declared": sum(map(len, declared)),
        "bytes": (folder / MANIFEST).stat().st_size,
        "rank_0_s": least["merge_s"] + least["write_s"] + least["look_s"],
        "load_s": least["read_s"] + least["plan_s"],
        "chunks_read": sum(map(len, readings.values())),
        **least,
    }


def run(args: argparse.Namespace, console: Console) -> int:
    """Measure, show, write."""
    made = Table("ranks", "chunks", "MB", "rank 0, s", "merge", "write", "look", "load, s", "read", "plan")
    found, folder = [], Path(tempfile.mkdtemp(prefix="bench-"))
    try:
        for dp in args.dp:
            each = measure(args.tp, dp, args.rounds, folder)
            found.append(each)
            size = each["bytes"] / 1e6
            keys = ("rank_0_s", "merge_s", "write_s", "look_s", "load_s", "read_s", "plan_s")
            numbers = (f"{each[key]:.2f}" for key in keys)
            made.add_row(f"{each['ranks']:,}", f"{each['chunks']:,}", f"{size:.0f}", *numbers)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    console.print(made)
    if args.out is not None:
        result = {
            "when": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": sys.argv[1:],
            "versions": {"mlm": mlm.__version__, "torch": torch.__version__, "numpy": np.__version__},
            "results": found,
        }
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_manifest.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--tp", type=int, default=8)
    add("--dp", type=int, nargs="+", default=[64, 128, 256], help="data-parallel sizes (default %(default)s)")
    add("--rounds", type=int, default=3)
    add("--out", type=Path, help="JSON file for machines")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_manifest", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
