"""Does depth hurt a BERT with layer norm after the residual sums, and not with layer norm before attention
and MLP?

    python scripts/demo_corpus.py plays
    mlm data tokenizer input=plays/train.jsonl kind=wordpiece vocab_size=8192 out=plays/wordpiece.json
    mlm data build data=plays tokenizer=plays/wordpiece.json sentences=true append_eod=false out=plays/bert
    python scripts/experiments/bert_norm.py --corpus plays/bert --work runs/bert_norm --out scripts/results

The claim is that of arXiv:1909.08053, section 5.3 and figure 7: the first BERT's order (norm=post, 7a) makes
deep models unstable, the other (norm=pre, 7b) trains them, and to a lower loss. Shown there with 336M and
752M parameters (24 and 48 layers of 1024) on 174 GB of text; here with narrow models of the same depths on
5 MB, each pair from the same seed, on the same samples, at the same learning rate and schedule: model.norm is
all that differs.

How to read it. Both orders start from normal weights of model.init_std, those of residual outputs divided by
sqrt(2 L) (as GPT-2 and Megatron-LM do): at first a deep model is as near to the identity as a shallow one,
which helps norm=post too. The paper's 0.02 at a width of 1024 is scaled by sqrt(1024 / hidden), so that the
sublayers weigh as much beside the residual stream as they do there. There is no dropout, and gradients are
clipped at 1 as always. Not shown: what a model of full width would do, and what another learning rate would
have given each order (--lr takes several); on so small a corpus no loss says how good a model is, only
whether it trains.

Verdicts: "learns" is a final training loss below the entropy of masked tokens, "single tokens" one that shows
knowledge of their frequencies and of no context, "diverged" one that rose again by 0.3 nats, or was not
finite.

Runs are `mlm pretrain` in processes of their own, --jobs at a time. A stopped run resumes at its last
checkpoint when the same command is typed again; what is done is kept.

Exit code: 0 all runs are over, 2 a mistake, 130 stopped by Ctrl-C.
"""

import argparse
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package bench
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # mlm of this checkout, installed or not

from bench.command import guarded
from bench.norm_report import curve_of, draw, markdown, masked_entropy, row_of, thinned
from bench.norm_runs import Runs, Sizes, Trial, about
from bench.random_gpt2 import machine_facts

from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.files.atomic import write_atomic

PAPER_STD, PAPER_WIDTH = 0.02, 1024


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="bert_norm.py", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--corpus", type=Path, required=True, help="folder by `mlm data build sentences=true`")
    add("--work", type=Path, default=Path("runs/bert_norm"), help="folder of the runs (default %(default)s)")
    add("--out", type=Path, help="folder for bert_norm.png, .md and .json")
    add("--layers", type=int, nargs="+", default=[12, 24, 48], help="depths (default 12 24 48)")
    add("--norm", nargs="+", choices=("post", "pre"), default=["post", "pre"], help="orders")
    add("--lr", type=float, nargs="+", default=[3e-3], help="peak learning rates, each for both orders")
    add("--seeds", type=int, nargs="+", default=[1234], help="of weights and samples (default 1234)")
    add("--hidden", type=int, default=64, help="width, in heads of 16 (default %(default)s)")
    add("--seq-length", type=int, default=64, help="tokens of a sample (default %(default)s)")
    add("--batch", type=int, default=16, help="samples of a step (default %(default)s)")
    add("--steps", type=int, default=3000, help="of each run (default %(default)s)")
    add("--warmup", type=float, default=0.05, help="share of the steps that warm up (default %(default)s)")
    add("--init-std", type=float, help="instead of 0.02 * sqrt(1024 / hidden)")
    add("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="runs at a time (default: the cores)")
    add("--threads", type=int, default=1, help="of each run (default %(default)s)")
    args = parser.parse_args(arguments)
    args.words = sys.argv[1:] if arguments is None else arguments
    return args


def run(args: argparse.Namespace, console: Console) -> int:
    """Do what is left of the runs, then report all."""
    sizes, trials = sizes_of(args), trials_of(args)
    if args.out is not None and not args.out.is_dir():
        raise UserError(f"--out {args.out}: no such folder")
    with Runs(trials, sizes, args.work.resolve(), args.jobs) as runs:
        kept = len(trials) - len(runs.waiting)
        console.print(f"{len(trials)} runs, {kept} of them done", highlight=False)
        with progress_line(console, runs.steps_in_all) as progress:
            runs.wait(progress, lambda line: console.print(line, highlight=False))
    report(args, sizes, trials)
    return 0


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Inputs shared by all runs. Raises UserError."""
    if min([*args.layers, args.steps, args.batch, args.jobs, args.threads]) < 1:
        raise UserError("--layers, --steps, --batch, --jobs and --threads: use 1 or more")
    if args.hidden < 16 or args.hidden % 16:
        raise UserError(f"--hidden {args.hidden} must be a multiple of 16, the width of a head")
    if not 0 <= args.warmup < 1:
        raise UserError(f"--warmup {args.warmup:g} must be from 0 to below 1")
    corpus = args.corpus.resolve()
    if not (corpus / "train.idx").is_file() or not (corpus / "tokenizer.json").is_file():
        raise UserError(
            f"--corpus {args.corpus} holds no train.idx and tokenizer.json: the commands above build one"
        )
    return Sizes(
        hidden=args.hidden,
        heads=args.hidden // 16,
        seq_length=args.seq_length,
        batch=args.batch,
        steps=args.steps,
        warmup=math.ceil(args.warmup * args.steps),
        vocab=Tokenizer.load(corpus / "tokenizer.json").vocab_size,
        init_std=args.init_std or PAPER_STD * math.sqrt(PAPER_WIDTH / args.hidden),
        corpus=str(corpus),
        threads=args.threads,
    )


def trials_of(args: argparse.Namespace) -> list[Trial]:
    """All runs, the deepest first: the last to end are then short ones."""
    return [
        Trial(layers=layers, norm=norm, lr=lr, seed=seed)
        for layers in sorted(set(args.layers), reverse=True)
        for lr in sorted(set(args.lr))
        for seed in sorted(set(args.seeds))
        for norm in dict.fromkeys(args.norm)
    ]


@contextmanager
def progress_line(console: Console, total: int) -> Iterator[Callable[[int, str], None]]:
    """A line with what runs and the time left; nothing where stderr is no terminal."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=20), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=total)
        yield lambda done, words: bar.update(task, completed=done, description=words)


def report(args: argparse.Namespace, sizes: Sizes, trials: list[Trial]) -> None:
    """Print the table; with --out write it, the picture, and all numbers."""
    entropy = masked_entropy(Path(sizes.corpus), sizes.seq_length)
    ordered = sorted(trials, key=lambda t: (t.lr, t.layers, t.seed, t.norm))
    work = args.work.resolve()
    curves = {trial: curve_of(work / trial.name) for trial in ordered}
    rows = [row_of(trial, work / trial.name, curves[trial], entropy) for trial in ordered]
    note = (
        f"Hidden {sizes.hidden}, {sizes.heads} heads, {sizes.batch} × {sizes.seq_length} tokens a step, "
        f"{sizes.steps} steps ({sizes.warmup} of warm-up, then linear to 0), init_std {sizes.init_std:.3f}, "
        f"vocabulary {sizes.vocab}. Losses are of masked tokens, in nats."
    )
    text = markdown(rows, entropy, note)
    sys.stdout.write(text)
    if args.out is None:
        return
    document = {
        "command": ["scripts/experiments/bert_norm.py", *(shown(word) for word in args.words)],
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_facts(sizes.threads, ("torch",)),
        "sizes": about(sizes),
        "masked_entropy": entropy,
        "rows": [asdict(row) for row in rows],
        "curves": {trial.name: thinned(curve) for trial, curve in curves.items()},
    }
    write_atomic(args.out / "bert_norm.json", (json.dumps(document) + "\n").encode())
    write_atomic(args.out / "bert_norm.md", text.encode())
    draw(curves, entropy, args.out / "bert_norm.png")


def shown(word: str) -> str:
    """A word of the command line without the folders of this machine."""
    return Path(word).name if Path(word).is_absolute() else word


def main(arguments: list[str] | None = None) -> int:
    """Run the experiment; its exit code."""
    args = parse(arguments)
    return guarded("bert_norm", lambda console: run(args, console))


if __name__ == "__main__":
    sys.exit(main())
