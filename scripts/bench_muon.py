"""Time of a step with Muon over one with AdamW, steps of both in turn in one process a rank.

python scripts/bench_muon.py --out bench_muon-cpu.json
torchrun --nproc-per-node 2 scripts/bench_muon.py --tp 2 --threads 1 --out bench_muon-tp2-cpu.json
"""

import argparse
import json
import shlex
import sys
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from mlm.data.sampler import RankSampler
from mlm.launch.join import build_mesh
from mlm.models.config import ModelConfig
from mlm.optim.auto_precision import CPUINFO, has_fast_bfloat16
from mlm.optim.config import MuonConfig, OptimizerConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.training.config import DataConfig, PretrainConfig, TrainConfig
from mlm.training.corpora import train_dataset
from mlm.training.memory import reuse_large_blocks
from mlm.training.trainer import Trainer

SHAPES = {"6x384": (6, 384, 6, 256, 8), "12x768": (12, 768, 12, 1024, 8)}
"""Layers, width, heads, tokens of a sample, samples of a step."""


def main() -> None:
    """Measure and write the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="bf16")
    parser.add_argument("--steps", type=int, default=4)
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
        "shapes": {},
    }
    for name in args.shapes:
        layers, width, heads, seq, samples = SHAPES[name]
        spec = PretrainConfig(
            name="bench",
            out="unused",
            model=ModelConfig(
                num_layers=layers,
                hidden_size=width,
                num_heads=heads,
                max_positions=seq,
                hidden_dropout=0.0,
                attention_dropout=0.0,
            ),
            parallel=ParallelConfig(tp=args.tp),
            precision=PrecisionConfig(dtype=args.precision),
            data=DataConfig(kind="synthetic", seq_length=seq),
            train=TrainConfig(steps=100, global_batch_size=samples, micro_batch_size=samples // 4),
        )
        kinds = {
            "adamw": OptimizerConfig(),
            "muon bf16": OptimizerConfig(kind="muon", muon=MuonConfig(dtype="bf16")),
            "muon fp32": OptimizerConfig(kind="muon", muon=MuonConfig(dtype="fp32")),
        }
        sampler = RankSampler(train_dataset(spec, samples), 0, samples, samples // 4, 0, 1, False)
        batches = sampler.step(0)
        assert batches is not None
        times: dict[str, list[float]] = {kind: [] for kind in kinds}
        updates: dict[str, list[float]] = {kind: [] for kind in kinds}
        trainers = {kind: Trainer(replace(spec, optimizer=o), ctx) for kind, o in kinds.items()}
        for _ in range(args.steps + 1):
            for kind, each in trainers.items():
                begin = time.perf_counter()
                found = each.compute_gradients(batches)
                middle = time.perf_counter()
                each.clip_and_update(found)
                times[kind].append(time.perf_counter() - begin)
                updates[kind].append(time.perf_counter() - middle)
        adamw = median(times["adamw"][1:])
        result["shapes"][name] = {
            "tokens_a_step": seq * samples,
            **{
                kind: {
                    "step_s": median(times[kind][1:]),
                    "update_s": median(updates[kind][1:]),
                    "over_adamw": median(times[kind][1:]) / adamw - 1,
                }
                for kind in kinds
            },
        }
    if ctx.is_main:
        args.out.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(result["shapes"], indent=1))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
