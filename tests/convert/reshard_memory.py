"""Writes a checkpoint of 120 MB in FOLDER, reshards it, and prints how far peak memory grew, in bytes:
`python -m tests.convert.reshard_memory FOLDER`.

The peak is VmHWM of /proc/self/status: ru_maxrss keeps that of the process which started this one.
"""

import json
import sys
from pathlib import Path

import torch

from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.stream import write_streamed
from mlm.checkpoint.parameters import parameters
from mlm.cli.convert.reshard import run
from mlm.cli.convert.settings import ReshardConfig
from mlm.config.build import to_dict
from mlm.models.config import ModelConfig
from mlm.runs.config import PretrainConfig

MODEL = ModelConfig(num_layers=3, hidden_size=512, num_heads=8, vocab_size=512, max_positions=64)


def main(folder: Path) -> None:
    kinds = ("model.", "optimizer.exp_avg.", "optimizer.exp_avg_sq.")
    tensors: dict[str, TensorEntry] = {k + n: t for k in kinds for n, t in parameters(MODEL).items()}
    config = PretrainConfig(name="large", out="unused", model=MODEL)
    state = {"step": 1, "config": to_dict(config)}
    torch.ones(1 << 20).sum()
    before = peak_bytes()
    write_streamed(
        folder / "run" / "checkpoints",
        1,
        tensors,
        lambda name, piece: torch.full(piece.size, float(len(name))),
        save_id="0" * 32,
        state=state,
    )
    run(ReshardConfig(ckpt=str(folder / "run"), out=str(folder / "out"), tp=4))
    growth = peak_bytes() - before
    sizes = [tensor.num_bytes for tensor in tensors.values()]
    print(json.dumps({"total": sum(sizes), "largest": max(sizes), "growth": growth}))


def peak_bytes() -> int:
    (said,) = (line for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)
    return int(said.split()[1]) << 10


if __name__ == "__main__":
    main(Path(sys.argv[1]))
