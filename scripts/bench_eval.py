"""Speed of scoring: mlm against lm-eval's own `hf` model, on the same weights, texts and interface.

    pip install 'lm-eval[hf]'
    python scripts/bench_eval.py --tokenizer GPT2_FOLDER --lambada lambada_test.jsonl \\
        --wikitext wiki.valid.tokens --out scripts/results/bench_eval-cpu.json

Both are asked through lm-eval's interface in this process, with the same threads: `loglikelihood` of the last
words of LAMBADA passages, and `loglikelihood_rolling` of whole WikiText articles. The model has GPT-2's sizes
(124M) and random weights unless --model names a folder of `transformers`. `hf` is timed once at each of
--hf-batches, then at the fastest; mlm at its default. Rounds alternate which of the two comes first.

Exit code: 0 a result, 1 the answers differ or a ratio is below its target (LAMBADA 1.5, WikiText 1.2), 2 a
mistake.
"""

import argparse
import contextlib
import io
import json
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench.command import guarded
from bench.random_gpt2 import machine_facts, save_random_gpt2
from bench.stats import Spread
from rich.console import Console
from rich.table import Table

from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.zero_shot import sources
from mlm.util.atomic import write_atomic
from mlm.util.errors import UserError

TARGETS = {"lambada": 1.5, "wikitext": 1.2}
"""Target speedup of mlm."""
AGREE = 1e-4
"""Largest relative difference of an answer; hits must be the same."""
PACKAGES = ("torch", "transformers", "lm_eval", "accelerate")
Ask = Callable[[], list[float]]


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bench_eval.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--model", type=Path, help="folder of a GPT-2 of transformers with its tokenizer")
    add("--tokenizer", type=Path, help="GPT-2's, for random weights: tokenizer.json or its folder")
    add("--layers", type=int, default=12, help="of the random model (default %(default)s)")
    add("--hidden", type=int, default=768, help="its hidden size, heads of 64 (default %(default)s)")
    add("--positions", type=int, default=1024, help="tokens it reads (default %(default)s)")
    add("--lambada", type=Path, help='JSON lines {"text": …}: its last words are scored')
    add("--wikitext", type=Path, help="wiki.….tokens: its articles are scored")
    add("--passages", type=int, default=100, help="of LAMBADA (default %(default)s)")
    add("--articles", type=int, default=4, help="of WikiText (default %(default)s)")
    add("--hf-batches", type=int, nargs="+", default=[1, 8, 16], help="batch sizes of hf that are tried")
    add("--rounds", type=int, default=5, help="pairs of runs (default %(default)s)")
    add("--threads", type=int, default=2, help="of both (default %(default)s)")
    add("--out", type=Path, help="JSON file for machines")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def run(args: argparse.Namespace, console: Console) -> int:
    """Make the model, check that answers agree, time, report."""
    if args.rounds < 1 or min(args.hf_batches) < 1:
        raise UserError("--rounds and --hf-batches: use 1 or more")
    if args.lambada is None and args.wikitext is None:
        raise UserError("nothing to score: give --lambada or --wikitext")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or random_model(args, Path(scratch))
        ours, theirs = open_models(folder)
        tasks = {
            name: compare(name, ours, theirs, requests, args, console)
            for name, requests in all_requests(args).items()
        }
    result = {
        "command": ["scripts/bench_eval.py", *map(str, args.words)],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(args.threads, PACKAGES),
        "model": str(args.model or f"random GPT-2: {args.layers} layers, hidden {args.hidden}"),
        "tasks": tasks,
    }
    show(result)
    if args.out is not None:
        write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
    good = all(one["agree"] and one["ratio"]["median"] >= TARGETS[name] for name, one in tasks.items())
    return 0 if good else 1


def random_model(args: argparse.Namespace, folder: Path) -> Path:
    """A GPT-2 of random weights with a tokenizer, as `transformers` saves it. Raises UserError."""
    if args.tokenizer is None:
        raise UserError("give --model, or for random weights --tokenizer")
    from transformers import PreTrainedTokenizerFast

    Tokenizer.load(args.tokenizer).save(folder / "tokenizer.json")
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    eod = tokenizer.eod_id
    save_random_gpt2(
        folder,
        layers=args.layers,
        hidden=args.hidden,
        positions=args.positions,
        vocab=tokenizer.vocab_size,
        eod=eod,
        seed=0,
    )
    end = tokenizer.decode([eod])
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(folder / "tokenizer.json"), eos_token=end, bos_token=end
    )
    fast.save_pretrained(folder)
    return folder


def open_models(folder: Path) -> tuple[Any, Any]:
    """Ours and lm-eval's, both float32 on the CPU. Raises UserError where lm-eval is not there."""
    try:
        from lm_eval.models.huggingface import HFLM

        from mlm.evaluate.lm_eval.adapter import MlmLM
    except ModuleNotFoundError as error:
        raise UserError(f"{error}: pip install 'lm-eval[hf]'") from None
    return MlmLM(ckpt=str(folder), device="cpu"), HFLM(pretrained=str(folder), device="cpu", dtype="float32")


def all_requests(args: argparse.Namespace) -> dict[str, list[Any]]:
    """Requests to both, by task. Raises UserError for files without such texts."""
    tasks = {}
    if args.lambada is not None:
        passages = sources.lambada(str(args.lambada), standard=False).texts[: args.passages]
        pairs = [passage.rsplit(" ", 1) for passage in passages]
        tasks["lambada"] = [SimpleNamespace(args=(context, f" {word}")) for context, word in pairs]
    if args.wikitext is not None:
        (whole,) = sources.wikitext(str(args.wikitext), raw=True).texts
        articles = sources.articles(whole)[: args.articles]
        tasks["wikitext"] = [SimpleNamespace(args=(article,)) for article in articles]
    return tasks


def asking(model: Any, task: str, requests: Sequence[Any]) -> Ask:
    """A function that has the model answer all requests, silently: numbers, hits among them as 0 and 1."""
    if task == "wikitext":
        return lambda: [float(x) for x in model.loglikelihood_rolling(requests, disable_tqdm=True)]
    return lambda: [float(x) for pair in model.loglikelihood(requests, disable_tqdm=True) for x in pair]


def compare(
    task: str, ours: Any, theirs: Any, requests: Sequence[Any], args: argparse.Namespace, console: Console
) -> dict[str, Any]:
    """Answers and times of both."""
    a, b = asking(ours, task, requests), asking(theirs, task, requests)
    trials = {}
    for size in args.hf_batches:
        theirs.batch_size_per_gpu = size
        console.print(f"{task}: hf with batches of {size}", highlight=False)
        timed(b)
        trials[size], _, wanted = timed(b)
    theirs.batch_size_per_gpu = min(trials, key=lambda size: trials[size])
    found = a()
    worst = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(found, wanted, strict=True))
    seconds: dict[str, list[float]] = {"mlm": [], "hf": []}
    cpu_seconds: dict[str, list[float]] = {"mlm": [], "hf": []}
    for number in range(args.rounds):
        console.print(f"{task}: round {number + 1} of {args.rounds}", highlight=False)
        pair = [("mlm", a), ("hf", b)]
        for name, ask in pair if number % 2 == 0 else reversed(pair):
            wall, cpu, _ = timed(ask)
            seconds[name].append(wall)
            cpu_seconds[name].append(cpu)
    ratio = Spread.of([hf / mlm for mlm, hf in zip(seconds["mlm"], seconds["hf"], strict=True)])
    return {
        "requests": len(requests),
        "tokens": sum(len(ours.tok_encode("".join(request.args))) for request in requests),
        "hf_batch": theirs.batch_size_per_gpu,
        "hf_trials_s": {str(size): trial for size, trial in trials.items()},
        "largest_difference": worst,
        "agree": worst <= AGREE,
        "seconds": seconds,
        "cpu_seconds": cpu_seconds,
        "ratio": {"median": ratio.median, "low": ratio.low, "high": ratio.high},
        "target": TARGETS[task],
    }


def timed(ask: Ask) -> tuple[float, float, list[float]]:
    """Seconds on the clock, of processor time, and the answers."""
    wall, cpu = time.perf_counter(), time.process_time()
    with contextlib.redirect_stderr(io.StringIO()):  # hf shows a bar for each batch, whatever it is told
        answers = ask()
    return time.perf_counter() - wall, time.process_time() - cpu, answers


def show(result: dict[str, Any]) -> None:
    """The table for people."""
    table = Table("", "texts", "tokens/s mlm", "tokens/s hf", "batch hf", "ratio", "quartiles", "difference")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, one in result["tasks"].items():
        rates = (one["tokens"] / Spread.of(one["seconds"][who]).median for who in ("mlm", "hf"))
        ratio = one["ratio"]
        table.add_row(
            name,
            str(one["requests"]),
            *(f"{rate:,.0f}" for rate in rates),
            str(one["hf_batch"]),
            f"{ratio['median']:.2f}",
            f"{ratio['low']:.2f} to {ratio['high']:.2f}",
            f"{one['largest_difference']:.1e}",
        )
    Console().print(table)


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; its exit code."""
    args = parse(arguments)
    return guarded("bench_eval", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
