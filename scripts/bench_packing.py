"""Time of a finetuning step on packed conversations against one conversation per sequence, in pairs.

    python scripts/bench_packing.py --out scripts/results/bench_packing-cpu.json

The same random conversations, of lengths drawn from a log-normal distribution, go through one Llama forward
and backward in three forms:

packed   as `mlm finetune chat` has them: as few sequences of --length tokens as first-fit finds
sorted   one conversation per sequence, about equally long ones in a micro-batch
padded   one conversation per sequence, in the order of the file, as a plain loop has them

First their losses and gradients are compared, in the same dtype. Then they take turns; a ratio is the packed
form's processor time over another's of the same turn.
Exit code: 0 a result, 1 the forms differ, 2 a mistake.
"""

import argparse
import json
import os
import random
import sys
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from statistics import quantiles
from typing import Any

import torch
from bench.command import guarded
from bench.random_gpt2 import machine_facts
from rich.console import Console
from torch import Tensor

from mlm.finetune.examples import Example, Text
from mlm.finetune.packing import AnswerLoss, PackedBatch, Packer
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.init import init_parameters
from mlm.parallel.labels import IGNORE
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import PipelinedModel
from mlm.util.atomic import write_atomic

VOCAB = 2048
TOLERANCE = 1e-4
"""Of float32 losses and gradients, as a fraction of the largest: sums in another order."""


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_packing.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--layers", type=int, default=4, help="default %(default)s")
    add("--hidden", type=int, default=256, help="default %(default)s")
    add("--length", type=int, default=512, help="task.max_length (default %(default)s)")
    add("--median", type=int, default=80, help="tokens of a conversation (default %(default)s)")
    add("--batch", type=int, default=64, help="conversations of a step (default %(default)s)")
    add("--micro", type=int, default=2, help="sequences of --length tokens at once (default %(default)s)")
    add("--pairs", type=int, default=8, help="turns (default %(default)s)")
    add("--threads", type=int, default=len(os.sched_getaffinity(0)))
    add("--out", type=Path, help="JSON file for machines")
    return parser.parse_args(arguments)


def conversations(args: argparse.Namespace) -> list[Example]:
    """Random tokens; of each conversation the second half is the answer."""
    draw, made = random.Random(1), []
    for row in range(args.batch):
        count = min(args.length, max(8, round(args.median * draw.lognormvariate(0.0, 0.7))))
        ids = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(row))
        labels = torch.full((count,), IGNORE)
        labels[count // 2 : -1] = ids[count // 2 + 1 :]
        made.append(Example(row, (Text(ids.int().numpy(), count),), labels.numpy()))
    return made


def forms(examples: Sequence[Example], args: argparse.Namespace) -> dict[str, list[PackedBatch]]:
    """The micro-batches of a step in each form."""
    order = sorted(range(len(examples)), key=lambda n: -len(examples[n].texts[0]))
    budget = args.micro * args.length
    packed, alone = (Packer(budget=budget, rank=0, size=1, length=n) for n in (args.length, 1))
    longest = max(len(example.texts[0]) for example in examples)
    rows = max(1, budget // longest)
    some = [range(n, min(n + rows, len(examples))) for n in range(0, len(examples), rows)]
    return {
        "packed": packed.micro_batches(examples, order, 0),
        "sorted": alone.micro_batches(examples, order, 0),
        "padded": [alone.packed(examples, [[n] for n in numbers], [0], 0) for numbers in some],
    }


def stepper(args: argparse.Namespace) -> Callable[[Sequence[PackedBatch]], tuple[float, list[Tensor]]]:
    """A function of micro-batches that gives their mean loss and its gradients."""
    shape: dict[str, Any] = {"num_layers": args.layers, "hidden_size": args.hidden, "vocab_size": VOCAB}
    config = ModelConfig(
        kind="llama",
        activation="silu",
        num_heads=args.hidden // 64 or 1,
        max_positions=args.length,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        **shape,
    )
    ctx = ParallelContext()
    model = PipelinedModel(config, ParallelConfig(), PrecisionConfig(dtype="fp32"), ctx)
    (chunk,) = model.chunks
    init_parameters(chunk, 1, ctx.tp)
    objective = AnswerLoss(ctx, torch.float32)

    def step(batches: Sequence[PackedBatch]) -> tuple[float, list[Tensor]]:
        chunk.zero_grad()
        count = sum(objective.counts(batch)[0] for batch in batches)
        loss = 0.0
        for batch in batches:
            mean = objective.output(chunk, batch, torch.full((1,), 1 / count), None, None)  # type: ignore[arg-type]
            mean.backward()
            loss += mean.item()
        return loss, [p.grad for p in chunk.parameters() if p.grad is not None]

    return step


def differ(one: tuple[float, list[Tensor]], other: tuple[float, list[Tensor]]) -> bool:
    """True if losses or gradients are further apart than by rounding."""
    pairs = zip(one[1], other[1], strict=True)
    apart = max(float((a - b).abs().max() / b.abs().max()) for a, b in pairs)
    return max(apart, abs(one[0] - other[0])) > TOLERANCE


def run(args: argparse.Namespace, console: Console) -> int:
    """Compare the forms, then time them in turns."""
    torch.set_num_threads(args.threads)
    examples, step = conversations(args), stepper(args)
    batches = forms(examples, args)
    loss, gradients = step(batches["packed"])
    first = loss, [gradient.clone() for gradient in gradients]
    if any(differ(first, step(batches[name])) for name in ("sorted", "padded")):
        console.print("the forms differ", style="bold red")
        return 1
    spent: dict[str, list[float]] = {name: [] for name in batches}
    for turn in range(args.pairs):
        for name in sorted(batches, reverse=turn % 2 == 1):
            begin = time.process_time()
            step(batches[name])
            spent[name].append(time.process_time() - begin)
    texts = sum(len(example.texts[0]) for example in examples)
    result = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(args.threads, ("torch",)),
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "tokens": {name: sum(b.tokens.numel() for b in some) for name, some in batches.items()},
        "tokens_of_conversations": texts,
        "cpu_s": spent,
        "ratio": {name: quartiles(spent["packed"], spent[name]) for name in ("sorted", "padded")},
    }
    for name, (low, middle, high) in result["ratio"].items():
        padding = 1 - texts / result["tokens"][name]
        line = f"packed / {name}: {middle:.2f} ({low:.2f} to {high:.2f}) of its processor time"
        console.print(f"{line}; {padding:.0%} of the other's tokens are padding", highlight=False)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0


def quartiles(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Quartiles of the ratios of the turns."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    return quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    return guarded("bench_packing", lambda console: run(parse(arguments), console))


if __name__ == "__main__":
    sys.exit(main())
