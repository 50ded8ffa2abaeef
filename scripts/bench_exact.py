"""Processor time of a step with exact=8 over that of the usual one, in turn, on one thread and one process.

    OMP_NUM_THREADS=1 python scripts/bench_exact.py --out scripts/results/bench_exact-cpu.json

Models of 8 heads, so that each layer is eight products; sequences of 512 tokens, 50,304 of them.
"""

import argparse
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from bench.harness import Bench, Result, Say, positive, table_of

from mlm.data.config import DataConfig
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.family import family_of
from mlm.optim.config import OptimizerConfig, PrecisionConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.trainer import Trainer

VOCAB, LENGTH = 50304, 512
UNDROPPED = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
"""Without dropout of attention a sequence is in parts, as for cp."""
CASES: dict[str, dict[str, Any]] = {
    "GPT-2 6x384 fp32": {"dtype": "fp32"},
    "GPT-2 6x384 bf16": {"dtype": "bf16"},
    "GPT-2 12x768 fp32": {"dtype": "fp32", "layers": 12, "width": 768, "samples": 2},
    "GPT-2 12x768 bf16": {"dtype": "bf16", "layers": 12, "width": 768, "samples": 2},
    "GPT-2 6x384 fp32, no dropout": {"dtype": "fp32", **UNDROPPED},
    "GPT-2 6x384 bf16, no dropout": {"dtype": "bf16", **UNDROPPED},
    "GPT-2 12x768 fp32, no dropout": {"dtype": "fp32", "layers": 12, "width": 768, "samples": 2, **UNDROPPED},
    "GPT-2 12x768 bf16, no dropout": {"dtype": "bf16", "layers": 12, "width": 768, "samples": 2, **UNDROPPED},
    "GPT-2 6x384 fp32, Muon": {"dtype": "fp32", "optimizer": "muon"},
    "GPT-2 6x384 bf16, adapters of rank 16": {"dtype": "bf16", "rank": 16},
    "BERT 6x384 fp32": {"dtype": "fp32", "kind": "bert", "activation": "gelu", "token_types": 2},
    "BERT 6x384 bf16": {"dtype": "bf16", "kind": "bert", "activation": "gelu", "token_types": 2},
}


def spec_of(
    exact: int,
    dtype: str,
    *,
    layers: int = 6,
    width: int = 384,
    samples: int = 4,
    optimizer: str = "adamw",
    rank: int = 0,
    **model: Any,
) -> PretrainConfig:
    return PretrainConfig(
        name="bench",
        out="unused",
        exact=exact,  # type: ignore[arg-type]
        model=ModelConfig(
            num_layers=layers,
            hidden_size=width,
            num_heads=8,
            max_positions=LENGTH,
            vocab_size=VOCAB,
            vocab_multiple=1,
            **model,
        ),
        lora=LoraConfig(rank=rank),
        optimizer=OptimizerConfig(kind=optimizer),
        precision=PrecisionConfig(dtype=dtype),  # type: ignore[arg-type]
        data=DataConfig(kind="synthetic", seq_length=LENGTH),
        train=TrainConfig(global_batch_size=samples, micro_batch_size=samples),
    )


def seconds_of(case: dict[str, Any], steps: int) -> tuple[float, float]:
    """Least processor time of a step, usual and exact."""
    trainers = [Trainer(spec_of(exact, **case), ParallelContext()) for exact in (0, 8)]
    config = trainers[0].config
    samples = family_of(config.model.kind).samples.synthetic(config.data, VOCAB, 100, 0)
    seconds: list[list[float]] = [[], []]
    with trainers[0].batches(samples) as batches:
        for _, batch in zip(range(steps + 1), batches, strict=False):
            for trainer, times in zip(trainers, seconds, strict=True):
                begin = time.process_time()
                trainer.train_step(batch)
                times.append(time.process_time() - begin)
    usual, ordered = (min(times[1:]) for times in seconds)  # the first step allocates
    return usual, ordered


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)} (default all)")
    parser.add_argument("--steps", type=positive, default=3, help="timed of each (default %(default)s)")


def measure(args: argparse.Namespace, say: Say) -> Result:
    torch.set_num_threads(1)
    rows = []
    for name in args.cases or CASES:
        say(name)
        usual, ordered = seconds_of(CASES[name], args.steps)
        rows.append({"case": name, "usual_s": usual, "exact_s": ordered, "ratio": ordered / usual})
    return {"steps": rows}


def tables(result: Result) -> Iterator[object]:
    rows = [
        (row["case"], *(f"{row[key]:.2f}" for key in ("usual_s", "exact_s", "ratio")))
        for row in result["steps"]
    ]
    yield table_of(("step", "usual, s", "exact=8, s", "ratio"), rows)


BENCH = Bench(name="bench_exact", doc=__doc__, add_options=add_options, measure=measure, tables=tables)

if __name__ == "__main__":
    sys.exit(BENCH.main())
