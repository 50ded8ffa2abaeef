"""Peak memory of training steps on a CPU: a dry run's forecast, PyTorch's count, and the process's growth.

python scripts/bench_memory.py --out scripts/results/bench_memory-cpu.json
"""

import argparse
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from bench.machine import status_bytes
from torch.profiler import ProfilerActivity, profile

from mlm.config.cli.compose import load_config
from mlm.parallel.mesh import ParallelContext
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run_rank import batches_of, dry_run
from mlm.training.memory import reuse_large_blocks
from mlm.training.trainer import Trainer

STEPS = 2
LORA = ("precision=bf16", "lora.rank=16")
RUNS: dict[str, tuple[str, ...]] = {
    "SmolLM2-135M, adapters, 4 x 512": (
        *("model=smollm2_135m", *LORA, "data.seq_length=512"),
        *("train.micro_batch_size=4", "train.global_batch_size=8"),
    ),
    "SmolLM2-135M, adapters, 1 x 1024, recompute=full": (
        *("model=smollm2_135m", *LORA, "data.seq_length=1024", "recompute=full"),
        *("train.micro_batch_size=1", "train.global_batch_size=2"),
    ),
    "GPT-2 124M, all weights, 2 x 256": (
        *("model=gpt2_124m", "precision=bf16", "data.seq_length=256"),
        *("train.micro_batch_size=2", "train.global_batch_size=4"),
    ),
}


def forecast(config: PlanDryRunConfig) -> int:
    """Bytes of tensors by the dry run."""
    return dry_run(config, 0, device=torch.device("cpu")).log.peak().bytes


def tensors(config: PlanDryRunConfig) -> int:
    """Bytes of tensors by PyTorch's allocator, which tells its profiler of every block."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(config)
    total = most = 0
    for event in profiler.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            total += event.nbytes()
            most = max(most, total)
    return most


def process(config: PlanDryRunConfig) -> int:
    """Bytes by which the process grows at most."""
    if "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        reuse_large_blocks()
    before = status_bytes("VmRSS")
    train(config)
    return status_bytes("VmHWM") - before


def libraries(config: PlanDryRunConfig) -> int:
    """Bytes of a process that has imported what trains."""
    return status_bytes("VmRSS")


def train(config: PlanDryRunConfig) -> None:
    """Take some steps, as `mlm pretrain` does."""
    ctx = ParallelContext()
    trainer = Trainer(config, ctx)
    for _ in range(STEPS):
        trainer.train_step(batches_of(config, ctx, 2))


MEASURES: dict[str, Callable[[PlanDryRunConfig], int]] = {
    f.__name__: f for f in (forecast, tensors, process, libraries)
}


def measured(measure: str, run: str, **environment: str) -> int:
    """One measure of a run, in a process of its own."""
    command = [sys.executable, __file__, "--measure", measure, "--run", run]
    done = subprocess.run(
        command, env=os.environ | environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", choices=RUNS)
    parser.add_argument("--measure", choices=MEASURES)
    args = parser.parse_args()
    if args.measure:
        config: PlanDryRunConfig = load_config("plan_dry_run", list(RUNS[args.run]))
        print(MEASURES[args.measure](config))
        return
    result = {"command": shlex.join(sys.argv), "torch": torch.__version__, "runs": {}}
    for run in RUNS if args.run is None else [args.run]:
        bytes_of = {measure: measured(measure, run) for measure in MEASURES}
        bytes_of["process, freed blocks unmapped"] = measured("process", run, MALLOC_MMAP_THRESHOLD_="65536")
        result["runs"][run] = bytes_of
        print(run, {name: f"{n / 1e9:.3f} GB" for name, n in bytes_of.items()}, flush=True)
    if args.out is not None:
        args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
