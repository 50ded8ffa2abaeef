"""Processor time of a step with exact=8 over the usual one, in turn, on one thread and one process.

    OMP_NUM_THREADS=1 python scripts/bench_exact.py --out scripts/results/bench_exact-cpu.json

Models of 8 heads, so that each layer is eight products; sequences of 512 tokens, 50,304 of them.
"""

import argparse
import sys
import time
from collections.abc import Iterator

import torch
from bench.harness import Bench, Result, Say, positive, table_of

from mlm.cli.compose.composition import load_config
from mlm.parallel.mesh import ParallelContext
from mlm.runs.corpora import train_dataset
from mlm.training.trainer import Trainer

SIZES = "model.vocab_size=50304 model.vocab_multiple=1 model.max_positions=512 model.num_heads=8"
USUAL = f"data=synthetic dist.device=cpu compile=false {SIZES}"
SMALL = "model.num_layers=6 model.hidden_size=384 train.global_batch_size=4 train.micro_batch_size=4"
LARGE = "model.num_layers=12 model.hidden_size=768 train.global_batch_size=2 train.micro_batch_size=2"
DROPPED = "model.hidden_dropout=0.1 model.attention_dropout=0.1"
"""Without dropout of attention parts of a sequence are of 128 tokens, with it of 256."""
EXPERTS = "model.options.num_experts=8 model.options.experts_per_token=2 model.options.expert_ffn_size=1024"
MIXTURE = f"model=llama_tiny model.ffn_hidden_size=null model.options.num_kv_heads=8 {EXPERTS}"
FORMS = {
    "GPT-2 6x384 {}": f"model=gpt2_tiny {SMALL} {DROPPED}",
    "GPT-2 12x768 {}": f"model=gpt2_tiny {LARGE} {DROPPED}",
    "GPT-2 6x384 {}, no dropout": f"model=gpt2_tiny {SMALL}",
    "GPT-2 12x768 {}, no dropout": f"model=gpt2_tiny {LARGE}",
    "mixture 6x384 {}, no dropout": f"{MIXTURE} {SMALL}",
    "BERT 6x384 {}": f"model=bert_tiny {SMALL} {DROPPED}",
}
"""Each in two formats."""
CASES = {
    form.format(dtype): f"{words} precision={dtype}"
    for form, words in FORMS.items()
    for dtype in ("fp32", "bf16")
}
SMALL_GPT2 = FORMS["GPT-2 6x384 {}"]
CASES["GPT-2 6x384 fp32, Muon"] = f"{SMALL_GPT2} precision=fp32 optimizer=muon"
CASES |= {
    f"GPT-2 6x384 {dtype}, adapters of rank 16": f"{SMALL_GPT2} precision={dtype} lora.rank=16"
    for dtype in ("fp32", "bf16")
}


def seconds_of(words: str, steps: int) -> tuple[float, float]:
    """Least processor time of a step, usual and exact."""
    configs = [load_config("pretrain", f"{USUAL} {words} exact={exact}".split()) for exact in (0, 8)]
    trainers = [Trainer(config, ParallelContext()) for config in configs]
    samples = train_dataset(configs[0], (steps + 1) * configs[0].train.global_batch_size)
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
