"""Throughput of generation: mlm against `transformers.generate`, on the same weights and prompts.

    python scripts/bench_generate.py --out scripts/results/bench_generate-cpu.json

Both are greedy, in float32, with their caches of keys and values, in this process and with the same threads;
each adds --new tokens to --prompt random ones, --batches of them at a time. The model has GPT-2's sizes
(124M) and random weights unless --model names a folder of `transformers`. Rounds alternate which comes first.
The ratio is that of the times per token, prompts included.

Exit code: 0 a result, 1 the tokens differ or a ratio is below its target (1.2), 2 a mistake.
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from bench.command import guarded
from bench.random_gpt2 import machine_facts, save_random_gpt2
from bench.stats import Spread
from rich.console import Console
from rich.table import Table

from mlm.inference.generation import Sampling, generate
from mlm.inference.trained import load_trained
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import shape_context
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

TARGET = 1.2
"""Target speedup of mlm."""
SEED = 0
Run = Callable[[], list[list[int]]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_generate.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a GPT-2 of transformers")
    add("--layers", type=int, default=12, help="of the random model (default %(default)s)")
    add("--hidden", type=int, default=768, help="its hidden size, heads of 64 (default %(default)s)")
    add("--vocab", type=int, default=50257, help="its vocabulary (default %(default)s)")
    add("--positions", type=int, default=1024, help="tokens it reads (default %(default)s)")
    add("--batches", type=int, nargs="+", default=[1, 8], help="texts at a time (default 1 and 8)")
    add("--prompt", type=int, default=32, help="tokens of a prompt (default %(default)s)")
    add("--new", type=int, default=64, help="tokens added to each (default %(default)s)")
    add("--rounds", type=int, default=8, help="pairs of runs (default %(default)s)")
    add("--threads", type=int, default=2, help="of both (default %(default)s)")
    add("--out", type=Path, help="JSON file for machines")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def run(args: argparse.Namespace, console: Console) -> int:
    """Make the model, check that tokens agree, time, report."""
    if min(args.rounds, args.prompt, args.new, args.threads, *args.batches) < 1:
        raise UserError("--rounds, --prompt, --new, --threads and --batches: use 1 or more")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or random_model(args, Path(scratch))
        ours, theirs = open_models(folder)
        if args.prompt + args.new > ours.config.model.max_positions:
            raise UserError(
                f"--prompt {args.prompt} and --new {args.new} are more tokens than the model reads: "
                f"use {ours.config.model.max_positions} or less in all"
            )
        series = [compare(batch, ours, theirs, args, console) for batch in args.batches]
    result = {
        "command": ["scripts/bench_generate.py", *map(str, args.words)],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(args.threads, ("torch", "transformers")),
        "model": str(args.model or f"random GPT-2: {args.layers} layers, hidden {args.hidden}"),
        "prompt_tokens": args.prompt,
        "new_tokens": args.new,
        "target": TARGET,
        "series": series,
    }
    show(result)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    return 0 if all(one["agree"] and one["ratio"]["median"] >= TARGET for one in series) else 1


def random_model(args: argparse.Namespace, folder: Path) -> Path:
    """A GPT-2 of random weights, as `transformers` saves it."""
    save_random_gpt2(
        folder,
        layers=args.layers,
        hidden=args.hidden,
        positions=args.positions,
        vocab=args.vocab,
        eod=0,
        seed=SEED,
    )
    return folder


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


def compare(batch: int, ours: Any, theirs: Any, args: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Tokens and times of both at a number of texts."""
    generator = torch.Generator().manual_seed(SEED)
    size = ours.config.model.vocab_size
    prompts = torch.randint(size, (batch, args.prompt), generator=generator).tolist()
    runs: dict[str, Run] = {
        "mlm": lambda: continue_by_mlm(ours, prompts, args.new),
        "transformers": lambda: continue_by_transformers(theirs, prompts, args.new),
    }
    agree = runs["mlm"]() == runs["transformers"]()  # and warm
    times: dict[str, list[float]] = {name: [] for name in runs}
    for number in range(args.rounds):
        console.print(f"batch {batch}: round {number + 1} of {args.rounds}", highlight=False)
        for name in runs if number % 2 == 0 else reversed(runs):
            begin = time.perf_counter()
            runs[name]()
            times[name].append((time.perf_counter() - begin) / args.new)
    pairs = zip(times["mlm"], times["transformers"], strict=True)
    ratio = Spread.of([other / mine for mine, other in pairs])
    return {
        "batch": batch,
        "agree": agree,
        "seconds_per_step": times,
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
    }


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table("texts", "ms/step mlm", "ms/step transformers", "ratio", "quartiles", "same tokens")
    for column in table.columns[:-1]:
        column.justify = "right"
    for one in result["series"]:
        times, ratio = one["seconds_per_step"], one["ratio"]
        table.add_row(
            str(one["batch"]),
            *(f"{1e3 * Spread.of(times[name]).median:.1f}" for name in ("mlm", "transformers")),
            f"{ratio['median']:.2f}",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            "yes" if one["agree"] else "NO",
        )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = parse(arguments)
    return guarded("bench_generate", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
