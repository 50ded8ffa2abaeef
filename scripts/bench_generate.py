"""Throughput of generation: mlm against `transformers.generate`, on the same weights and prompts.

    python scripts/bench_generate.py --out scripts/results/bench_generate-cpu.json

Both are greedy, in float32, with their caches of keys and values, in this process and with the same threads;
each adds --new tokens to --prompt random ones, --batches of them at a time. The model has GPT-2's sizes
(124M) and random weights unless --model names a folder of `transformers`. Rounds alternate which comes first.
The ratio is that of the times per token, prompts included.

Exit code: 0 a result, 1 the tokens differ or a ratio is below its target (1.2), 2 a mistake.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from bench.harness import Bench, Result, Say, alternate, positive, quartiles, ratio_of, table_of
from bench.random_gpt2 import save_random_gpt2
from bench.stats import Spread
from rich.table import Table

from mlm.inference.generation import Sampling, generate
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import shape_context
from mlm.util.errors import UserError

TARGET = 1.2
"""Target speedup of mlm."""
SEED = 0
Run = Callable[[], list[list[int]]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--model", type=Path, help="folder of a GPT-2 of transformers")
    add("--layers", type=positive, default=12, help="of the random model (default %(default)s)")
    add("--hidden", type=positive, default=768, help="its hidden size, heads of 64 (default %(default)s)")
    add("--vocab", type=positive, default=50257, help="its vocabulary (default %(default)s)")
    add("--positions", type=positive, default=1024, help="tokens it reads (default %(default)s)")
    add("--batches", type=positive, nargs="+", default=[1, 8], help="texts at a time (default 1 and 8)")
    add("--prompt", type=positive, default=32, help="tokens of a prompt (default %(default)s)")
    add("--new", type=positive, default=64, help="tokens added to each (default %(default)s)")
    add("--rounds", type=positive, default=8, help="pairs of runs (default %(default)s)")
    add("--threads", type=positive, default=2, help="of both (default %(default)s)")


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Make the model, check that tokens agree, time."""
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or Path(scratch)
        if args.model is None:
            save_random_gpt2(folder, args, vocab=args.vocab)
        ours, theirs = open_models(folder)
        if args.prompt + args.new > ours.config.model.max_positions:
            raise UserError(
                f"--prompt {args.prompt} and --new {args.new} are more tokens than the model reads: "
                f"use {ours.config.model.max_positions} or less in all"
            )
        series = [compare(batch, ours, theirs, args, say) for batch in args.batches]
    return {
        "model": str(args.model or f"random GPT-2: {args.layers} layers, hidden {args.hidden}"),
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "target": TARGET,
        "series": series,
    }


def open_models(folder: Path) -> tuple[Any, Any]:
    """Ours and theirs, both float32 on the CPU."""
    from transformers import GPT2LMHeadModel

    ours = load_trained(str(folder), ParallelConfig(), PrecisionConfig(), shape_context())
    return ours, GPT2LMHeadModel.from_pretrained(folder, dtype=torch.float32).eval()


def continue_by_mlm(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The most probable tokens, by mlm."""
    options = Sampling(max_new_tokens=count, temperature=0.0, batch_size=len(prompts))
    return generate(model, prompts, options, ctx=shape_context(), eod_id=None)


def continue_by_transformers(model: Any, prompts: list[list[int]], count: int) -> list[list[int]]:
    """The most probable tokens, by transformers."""
    tokens = torch.tensor(prompts)
    with torch.inference_mode():
        out = model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=count,
            do_sample=False,
            use_cache=True,
            eos_token_id=None,
            pad_token_id=0,
        )
    return out[:, tokens.shape[1] :].tolist()


def compare(batch: int, ours: Any, theirs: Any, args: argparse.Namespace, say: Say) -> Result:
    """Tokens and times of both at a number of texts."""
    generator = torch.Generator().manual_seed(SEED)
    size = ours.config.model.vocab_size
    prompts = torch.randint(size, (batch, args.prompt), generator=generator).tolist()
    runs: dict[str, Run] = {
        "mlm": lambda: continue_by_mlm(ours, prompts, args.new),
        "transformers": lambda: continue_by_transformers(theirs, prompts, args.new),
    }
    agree = runs["mlm"]() == runs["transformers"]()  # and warm
    rounds = alternate(runs, args.rounds, lambda line: say(f"batch {batch}: {line}"))
    times = {name: [each.wall / args.new for each in every] for name, every in rounds.items()}
    ratio = ratio_of(times["transformers"], times["mlm"])
    return {"batch": batch, "agree": agree, "seconds_per_step": times, "ratio": ratio}


def tables(result: Result) -> Iterator[Table]:
    """A row for each number of texts."""
    headings = ("texts", "ms/step mlm", "ms/step transformers", "ratio", "quartiles", "same tokens")
    rows = []
    for one in result["series"]:
        steps = (Spread.of(times).median for times in one["seconds_per_step"].values())
        ratio = one["ratio"]
        numbers = (*(f"{1e3 * step:.1f}" for step in steps), f"{ratio['median']:.2f}", quartiles(ratio))
        rows.append((str(one["batch"]), *numbers, "yes" if one["agree"] else "NO"))
    yield table_of(headings, rows)


BENCH = Bench(
    name="bench_generate",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: all(
        one["agree"] and one["ratio"]["median"] >= result["target"] for one in result["series"]
    ),
    packages=("torch", "transformers"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
