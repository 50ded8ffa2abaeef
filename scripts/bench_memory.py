"""Peak memory of training steps on a CPU: a dry run's forecast, PyTorch's count, and that of the process.

python scripts/bench_memory.py --out scripts/results/bench_memory-cpu.json
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import torch
from bench.machine import status_bytes
from torch.profiler import ProfilerActivity, profile

from mlm.cli.compose.composition import load_config
from mlm.parallel.mesh import ParallelContext
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.dry_run import CPU, PROCESS
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
    "SmolLM2-135M of 4 layers, adapters, 4 x 512": (
        *("model=smollm2_135m", *LORA, "model.num_layers=4", "data.seq_length=512"),
        *("train.micro_batch_size=4", "train.global_batch_size=8"),
    ),
    "GPT-2 124M, all weights, 2 x 256": (
        *("model=gpt2_124m", "precision=bf16", "data.seq_length=256"),
        *("train.micro_batch_size=2", "train.global_batch_size=4"),
    ),
}


def forecast(config: PlanDryRunConfig) -> int:
    return dry_run(config, 0, device=CPU).log.peak().bytes


def tensors(config: PlanDryRunConfig) -> int:
    """Bytes of tensors by PyTorch's allocator, which tells its profiler of every block."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        train(config)
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return max(accumulate(event.nbytes() for event in events if event.name() == "[memory]"))


def process(config: PlanDryRunConfig) -> int:
    """Bytes of the process at most, where freed blocks go back to the system."""
    train(config)
    return status_bytes("VmHWM")


def process_that_keeps(config: PlanDryRunConfig) -> int:
    """Bytes of the process at most, where it keeps freed blocks for the next, as `mlm pretrain` does."""
    reuse_large_blocks()
    return process(config)


def train(config: PlanDryRunConfig) -> None:
    ctx = ParallelContext()
    trainer = Trainer(config, ctx)
    for _ in range(STEPS):
        trainer.train_step(batches_of(config, [config.train.micro_batch_size] * 2))


MEASURES: dict[str, Callable[[PlanDryRunConfig], int]] = {
    each.__name__: each for each in (forecast, tensors, process, process_that_keeps)
}


def measured(measure: str, run: str) -> int:
    command = [sys.executable, __file__, "--measure", measure, "--run", run]
    env = dict(os.environ)
    if measure == "process":
        env["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    return int(done.stdout.splitlines()[-1])


def main() -> None:
    """Measure, print, and write; a file that is there keeps its other runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--run", choices=RUNS)
    parser.add_argument("--measure", choices=MEASURES)
    args = parser.parse_args()
    if args.measure:
        config: PlanDryRunConfig = load_config("plan_dry_run", list(RUNS[args.run]))
        print(MEASURES[args.measure](config))
        return
    found = json.loads(args.out.read_text())["runs"] if args.out and args.out.exists() else {}
    for run in RUNS if args.run is None else [args.run]:
        values = {measure: measured(measure, run) for measure in MEASURES}
        over = (
            values["forecast"] / values["tensors"] - 1,
            (values["forecast"] + PROCESS) / values["process"] - 1,
        )
        found[run] = {"settings": RUNS[run], "bytes": values, "tensors_off": over[0], "process_off": over[1]}
        print(f"{run}: tensors {over[0]:+.1%}, process {over[1]:+.1%}", flush=True)
        if args.out is not None:
            record = {"torch": torch.__version__, "threads": torch.get_num_threads(), "process": PROCESS}
            args.out.write_text(json.dumps({**record, "runs": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
