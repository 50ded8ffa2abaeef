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
import os
import random
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from bench.harness import Bench, Result, Say, alternate, positive, quartiles, ratio_of
from torch import Tensor

from mlm.finetune.examples import Example, InputText
from mlm.finetune.packing import AnswerLoss, PackedBatch, Packer
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.init import init_parameters
from mlm.parallel.labels import IGNORE_INDEX
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import PipelinedModel

VOCAB = 2048
TOLERANCE = 1e-4
"""Of float32 losses and gradients, as a fraction of the largest: sums in another order."""


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    defaults = {
        "layers": (4, "of the model"),
        "hidden": (256, "size of the model"),
        "length": (512, "task.max_length"),
        "median": (80, "tokens of a conversation"),
        "batch": (64, "conversations of a step"),
        "micro": (2, "sequences of --length tokens at once"),
        "pairs": (8, "turns"),
        "threads": (len(os.sched_getaffinity(0)), "of all forms"),
    }
    for name, (default, text) in defaults.items():
        help_text = f"{text} (default %(default)s)"
        parser.add_argument(f"--{name}", type=positive, default=default, help=help_text)


def conversations(args: argparse.Namespace) -> list[Example]:
    """Random tokens; of each conversation the second half is the answer."""
    draw, made = random.Random(1), []
    for row in range(args.batch):
        count = min(args.length, max(8, round(args.median * draw.lognormvariate(0.0, 0.7))))
        ids = torch.randint(VOCAB, (count,), generator=torch.Generator().manual_seed(row))
        labels = torch.full((count,), IGNORE_INDEX)
        labels[count // 2 : -1] = ids[count // 2 + 1 :]
        made.append(Example(row, (InputText(ids.int().numpy(), count),), labels.numpy()))
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
        "padded": [alone.batch(examples, [[n] for n in numbers], 0, 0) for numbers in some],
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


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Compare the forms, then time them in turns."""
    torch.set_num_threads(args.threads)
    examples, step = conversations(args), stepper(args)
    batches = forms(examples, args)
    loss, gradients = step(batches["packed"])
    first = loss, [gradient.clone() for gradient in gradients]
    if any(differ(first, step(batches[name])) for name in ("sorted", "padded")):
        return {"agree": False}
    rounds = alternate({name: partial(step, some) for name, some in batches.items()}, args.pairs, say)
    spent = {name: [each.cpu for each in every] for name, every in rounds.items()}
    return {
        "agree": True,
        "settings": {key: value for key, value in vars(args).items() if key != "out"},
        "tokens": {name: sum(b.tokens.numel() for b in some) for name, some in batches.items()},
        "tokens_of_conversations": sum(len(example.texts[0]) for example in examples),
        "cpu_s": spent,
        "ratio": {name: ratio_of(spent["packed"], spent[name]) for name in ("sorted", "padded")},
    }


def tables(result: Result) -> Iterator[str]:
    """A line for each form that is compared."""
    if not result["agree"]:
        yield "[bold red]the forms differ"
        return
    for name, ratio in result["ratio"].items():
        padding = 1 - result["tokens_of_conversations"] / result["tokens"][name]
        line = f"packed / {name}: {ratio['median']:.2f} ({quartiles(ratio)}) of its processor time"
        yield f"{line}; {padding:.0%} of the other's tokens are padding"


BENCH = Bench(
    name="bench_packing",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: bool(result["agree"]),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
