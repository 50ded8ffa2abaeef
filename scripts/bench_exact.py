"""Processor time of a step with exact=8 over that of the usual one, in turn, on one thread and one process.

    OMP_NUM_THREADS=1 python scripts/bench_exact.py 6x384 --dtype bf16

GPT-2 with 8 heads, so that each layer is eight products; sequences of 512 tokens, 50,304 of them.
"""

import argparse
import time

import torch

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.trainer import Trainer

VOCAB, LENGTH = 50304, 512


def spec_of(layers: int, width: int, samples: int, dtype: str, exact: int) -> PretrainConfig:
    return PretrainConfig(
        name="bench",
        out="unused",
        exact=exact,
        model=ModelConfig(
            num_layers=layers,
            hidden_size=width,
            num_heads=8,
            max_positions=LENGTH,
            vocab_size=VOCAB,
            vocab_multiple=1,
        ),
        precision=PrecisionConfig(dtype=dtype),
        data=DataConfig(kind="synthetic", seq_length=LENGTH),
        train=TrainConfig(global_batch_size=samples, micro_batch_size=samples),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("shape", help="layers x width, such as 6x384")
    parser.add_argument("--dtype", default="fp32", choices=["fp32", "bf16", "fp64"])
    parser.add_argument("--samples", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(1)
    layers, width = map(int, args.shape.split("x"))
    tokens = torch.randint(0, VOCAB, (args.samples, LENGTH + 1))
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 0)
    trainers = {
        exact: Trainer(spec_of(layers, width, args.samples, args.dtype, exact), ParallelContext())
        for exact in (0, 8)
    }
    seconds: dict[int, list[float]] = {0: [], 8: []}
    for _ in range(args.steps + 1):
        for exact, trainer in trainers.items():
            begin = time.process_time()
            trainer.train_step([batch])
            seconds[exact].append(time.process_time() - begin)
    usual, ordered = (min(times[1:]) for times in seconds.values())  # the first step allocates
    print(f"{args.shape} {args.dtype}: usual {usual:.2f} s, exact=8 {ordered:.2f} s, {ordered / usual:.2f}")


if __name__ == "__main__":
    main()
