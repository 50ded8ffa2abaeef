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
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from bench.harness import Bench, Result, Say, alternate, positive, quartiles, ratio_of, table_of, timed
from bench.random_gpt2 import save_random_gpt2
from bench.stats import Spread
from rich.table import Table

from mlm.data.tokenizer import Tokenizer
from mlm.evaluate.zero_shot import sources
from mlm.util.errors import UserError

TARGETS = {"lambada": 1.5, "wikitext": 1.2}
"""Target speedup of mlm."""
AGREE = 1e-4
"""Largest relative difference of an answer; hits must be the same."""
Ask = Callable[[], list[float]]


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    add = parser.add_argument
    add("--model", type=Path, help="folder of a GPT-2 of transformers with its tokenizer")
    add("--tokenizer", type=Path, help="GPT-2's, for random weights: tokenizer.json or its folder")
    add("--layers", type=positive, default=12, help="of the random model (default %(default)s)")
    add("--hidden", type=positive, default=768, help="its hidden size, heads of 64 (default %(default)s)")
    add("--positions", type=positive, default=1024, help="tokens it reads (default %(default)s)")
    add("--lambada", type=Path, help='JSON lines {"text": …}: its last words are scored')
    add("--wikitext", type=Path, help="wiki.….tokens: its articles are scored")
    add("--passages", type=positive, default=100, help="of LAMBADA (default %(default)s)")
    add("--articles", type=positive, default=4, help="of WikiText (default %(default)s)")
    add("--hf-batches", type=positive, nargs="+", default=[1, 8, 16], help="batch sizes of hf that are tried")
    add("--rounds", type=positive, default=5, help="pairs of runs (default %(default)s)")
    add("--threads", type=positive, default=2, help="of both (default %(default)s)")


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Make the model, check that answers agree, time."""
    if args.lambada is None and args.wikitext is None:
        raise UserError("nothing to score: give --lambada or --wikitext")
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = args.model or random_model(args, Path(scratch))
        ours, theirs = open_models(folder)
        tasks = {
            name: compare(name, ours, theirs, requests, args, say)
            for name, requests in all_requests(args).items()
        }
    model = str(args.model or f"random GPT-2: {args.layers} layers, hidden {args.hidden}")
    return {"model": model, "tasks": tasks}


def random_model(args: argparse.Namespace, folder: Path) -> Path:
    """A GPT-2 of random weights with a tokenizer, as `transformers` saves it. Raises UserError."""
    if args.tokenizer is None:
        raise UserError("give --model, or for random weights --tokenizer")
    from transformers import PreTrainedTokenizerFast

    Tokenizer.load(args.tokenizer).save(folder / "tokenizer.json")
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    eod = tokenizer.eod_id
    save_random_gpt2(folder, args, vocab=tokenizer.vocab_size, eod=eod)
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

    def ask() -> list[float]:
        with contextlib.redirect_stderr(io.StringIO()):  # hf shows a bar for each batch, whatever it is told
            if task == "wikitext":
                return [float(x) for x in model.loglikelihood_rolling(requests, disable_tqdm=True)]
            return [float(x) for pair in model.loglikelihood(requests, disable_tqdm=True) for x in pair]

    return ask


def compare(
    task: str, ours: Any, theirs: Any, requests: Sequence[Any], args: argparse.Namespace, say: Say
) -> Result:
    """Answers and times of both."""
    a, b = asking(ours, task, requests), asking(theirs, task, requests)
    trials = {}
    for size in args.hf_batches:
        theirs.batch_size_per_gpu = size
        say(f"{task}: hf with batches of {size}")
        wanted = b()
        trials[size] = timed(b).wall
    theirs.batch_size_per_gpu = min(trials, key=lambda size: trials[size])
    worst = max(abs(x - y) / max(1.0, abs(y)) for x, y in zip(a(), wanted, strict=True))
    rounds = alternate({"mlm": a, "hf": b}, args.rounds, lambda line: say(f"{task}: {line}"))
    seconds = {name: [each.wall for each in every] for name, every in rounds.items()}
    return {
        "requests": len(requests),
        "tokens": sum(len(ours.tok_encode("".join(request.args))) for request in requests),
        "hf_batch": theirs.batch_size_per_gpu,
        "hf_trials_s": {str(size): trial for size, trial in trials.items()},
        "largest_difference": worst,
        "agree": worst <= AGREE,
        "seconds": seconds,
        "cpu_seconds": {name: [each.cpu for each in every] for name, every in rounds.items()},
        "ratio": ratio_of(seconds["hf"], seconds["mlm"]),
        "target": TARGETS[task],
    }


def tables(result: Result) -> Iterator[Table]:
    """A row for each task."""
    headings = ("", "texts", "tokens/s mlm", "tokens/s hf", "batch hf", "ratio", "quartiles", "difference")
    rows = []
    for name, one in result["tasks"].items():
        rates = (f"{one['tokens'] / Spread.of(one['seconds'][who]).median:,.0f}" for who in ("mlm", "hf"))
        ratio = f"{one['ratio']['median']:.2f}", quartiles(one["ratio"])
        difference = f"{one['largest_difference']:.1e}"
        rows.append((name, str(one["requests"]), *rates, str(one["hf_batch"]), *ratio, difference))
    yield table_of(headings, rows)


BENCH = Bench(
    name="bench_eval",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: all(
        one["agree"] and one["ratio"]["median"] >= one["target"] for one in result["tasks"].values()
    ),
    packages=("torch", "transformers", "lm_eval", "accelerate"),
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
