"""Loss of one model in 8-bit floats, in bfloat16 and in float32.

    make demo                                  # or any corpus of `mlm data build` in demo/corpus
    python scripts/experiments/fp8.py --work runs/fp8 --out scripts/results

Trains the demo's model (4.3 million parameters) with precision=bf16, fp8 and fp32 on the same samples from
the same weights. A CPU emulates the 8-bit products: operands are rounded as on a GPU, sums are float32. Its
bfloat16 differs from a GPU's in one way: weight gradients are rounded to bfloat16 after each product, while
those of fp8 are not.

What is done is kept: the same command continues, and others add their runs to the record. Exit code: 0, or
that of the run that failed.
"""

import argparse
import json
import os
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package bench
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mlm of this checkout, installed or not

from bench.machine import machine_facts

from mlm.util.files import write_atomic

PRECISIONS = ("bf16", "fp8", "fp32")


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="fp8.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, default=Path("demo/corpus"), help="of the demo (default %(default)s)")
    add("--work", type=Path, default=Path("runs/fp8"), help="folder of the runs (default %(default)s)")
    add("--out", type=Path, help="folder for fp8-cpu.json")
    add("--steps", type=int, default=400, help="of 4 × 256 tokens (default %(default)s)")
    add("--seeds", type=int, nargs="+", default=[1234], help="of weights and samples (default 1234)")
    add("--precisions", nargs="+", choices=PRECISIONS, default=PRECISIONS)
    return parser.parse_args(arguments)


def settings(args: argparse.Namespace, precision: str, seed: int) -> list[str]:
    """The words of `mlm pretrain` after its folders."""
    return [
        *("experiment=shakespeare", "parallel=single", f"precision={precision}", f"seed={seed}"),
        *(f"train.steps={args.steps}", "train.global_batch_size=4", "train.micro_batch_size=4"),
        *("train.validate_every=100", "train.validate_batches=25", "checkpoint.save_every=0"),
        *("log.every=10", "log.live=off", "dist.device=cpu", "dist.threads_per_rank=1"),
    ]


def losses(run: Path, kind: str) -> dict[int, float]:
    """Losses by step that a run has recorded: of `kind` step or validation."""
    metrics = run / "metrics.jsonl"
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    records = [json.loads(line) for line in lines]
    return {record["step"]: record["loss"] for record in records if record["kind"] == kind}


def train(args: argparse.Namespace, precision: str, seed: int) -> dict[str, Any]:
    """Train one model, unless that is done; its losses."""
    run = args.work / f"{precision}-{seed}"
    words = settings(args, precision, seed)
    if args.steps not in losses(run, "validation"):
        folders = [f"data.path={args.corpus.resolve()}", f"out={run.resolve()}"]
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        subprocess.run([sys.executable, "-m", "mlm", "pretrain", *words, *folders], env=env, check=True)
    return {
        "precision": precision,
        "seed": seed,
        "command": ["mlm", "pretrain", *words],
        "loss": losses(run, "step"),
        "validation_loss": losses(run, "validation"),
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment; its exit code."""
    args = parse(arguments)
    try:
        runs = [train(args, precision, seed) for seed in args.seeds for precision in args.precisions]
    except subprocess.CalledProcessError as error:
        return int(error.returncode)
    for run in runs:
        scores = ", ".join(f"{step}: {loss:.3f}" for step, loss in run["validation_loss"].items())
        print(f"{run['precision']} seed {run['seed']}: validation loss at step {scores}")
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        record = args.out / "fp8-cpu.json"
        found = json.loads(record.read_text())["runs"] if record.exists() else []
        new = {(run["precision"], run["seed"]) for run in runs}
        runs += [run for run in found if (run["precision"], run["seed"]) not in new]
        when = datetime.now(UTC).isoformat(timespec="seconds")
        document = {"when": when, "machine": machine_facts(("torch",)), "runs": runs}
        write_atomic(record, (json.dumps(document) + "\n").encode())
    return 0


if __name__ == "__main__":
    sys.exit(main())
