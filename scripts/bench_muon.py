"""Time of a step with Muon over one with AdamW: one gradient, then an update by each of them, in turn.

python scripts/bench_muon.py --out bench_muon-cpu.json
torchrun --nproc-per-node 2 scripts/bench_muon.py --tp 2 --threads 1 --out bench_muon-tp2-cpu.json

A step is a gradient and an update, clipping included; medians of both are added. The first round warms up.
"""

import argparse
import json
import shlex
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mlm.data.sampler import RankSampler
from mlm.launch.join import build_mesh
from mlm.models.config import ModelConfig
from mlm.optim.adamw import build_optimizer
from mlm.optim.auto_precision import CPUINFO, has_fast_bfloat16
from mlm.optim.config import MuonConfig, OptimizerConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import DataConfig, PretrainConfig, TrainConfig
from mlm.runs.corpora import train_dataset
from mlm.training.memory import reuse_large_blocks
from mlm.training.trainer import Trainer

SHAPES = {
    "4x256": (4, 256, 8, 128, 8, 8, 4096),
    "6x384": (6, 384, 6, 256, 8, 2, 50257),
    "12x768": (12, 768, 12, 1024, 8, 2, 50257),
}
"""Layers, width, heads, tokens of a sample, samples of a step and of a micro-batch, vocabulary; the first is
recipe.py's."""
KINDS = {
    "adamw": OptimizerConfig(),
    "muon bf16": OptimizerConfig(kind="muon", muon=MuonConfig(dtype="bf16")),
    "muon fp32": OptimizerConfig(kind="muon", muon=MuonConfig(dtype="fp32")),
}


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reuse_large_blocks()
    ctx = build_mesh(tp=args.tp)
    result: dict[str, Any] = {
        "command": shlex.join(sys.argv),
        "threads": args.threads,
        "tp": args.tp,
        "precision": args.precision,
        "torch": torch.__version__,
        "fast_bfloat16": has_fast_bfloat16(CPUINFO.read_text()),
        "shapes": {name: measure(spec_of(name, args), ctx, args.kinds, args.rounds) for name in args.shapes},
    }
    if ctx.is_main:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["shapes"], indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


def spec_of(shape: str, args: argparse.Namespace) -> PretrainConfig:
    """A run of a GPT-2 of this shape on synthetic data."""
    layers, width, heads, seq, samples, micro, vocabulary = SHAPES[shape]
    return PretrainConfig(
        name="bench",
        out="unused",
        model=ModelConfig(
            num_layers=layers,
            hidden_size=width,
            num_heads=heads,
            max_positions=seq,
            vocab_size=vocabulary,
            hidden_dropout=0.0,
            attention_dropout=0.0,
        ),
        parallel=ParallelConfig(tp=args.tp),
        precision=PrecisionConfig(dtype=args.precision),
        data=DataConfig(kind="synthetic", seq_length=seq),
        train=TrainConfig(steps=100, global_batch_size=samples, micro_batch_size=micro),
    )


def measure(spec: PretrainConfig, ctx: ParallelContext, kinds: list[str], rounds: int) -> dict[str, Any]:
    """Seconds of a gradient and of an update by each optimizer, all of one model's weights."""
    train = spec.train
    data = train_dataset(spec, train.global_batch_size)
    sampler = RankSampler(data, 0, train.global_batch_size, train.micro_batch_size, 0, 1, False)
    batches = sampler.step(0)
    assert batches is not None
    trainer = Trainer(spec, ctx)
    optimizers = {kind: build_optimizer(trainer.shards, KINDS[kind], ctx.replicas) for kind in kinds}
    gradients: list[float] = []
    updates: dict[str, list[float]] = {kind: [] for kind in kinds}
    for number in range(rounds + 1):
        parts, seconds = timed(partial(trainer.compute_gradients, batches))
        gradients.append(seconds)
        for kind in kinds if number % 2 else reversed(kinds):
            trainer.optimizer = optimizers[kind]
            updates[kind].append(timed(partial(trainer.clip_and_update, parts))[1])
    gradient = median(gradients[1:])
    update = {kind: median(each[1:]) for kind, each in updates.items()}
    return {
        "tokens_a_step": spec.data.seq_length * train.global_batch_size,
        "gradient_s": gradients[1:],
        **{
            kind: {
                "step_s": gradient + update[kind],
                "update_s": updates[kind][1:],
                "over_adamw": (gradient + update[kind]) / (gradient + update["adamw"]) - 1,
            }
            for kind in kinds
        },
    }


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """Return a function's result and its seconds, from when all ranks are ready."""
    if dist.is_initialized():
        dist.barrier()
    begin = time.perf_counter()
    result = function()
    return result, time.perf_counter() - begin


if __name__ == "__main__":
    main()
