"""Mutated command lines: no traceback, no exit code but 0, 1, 2 and 130, no failure without a word.

    python scripts/torture_commands.py --lines 1000 --seed 0 --out scripts/results/torture_commands.json

Each line runs as a user types it, in a forked child, in a folder with a small run, corpus and texts; in every
third one bit of one of their files is flipped.
Exit code: 0 nothing was found, 1 something was, 2 a mistake.
"""

import argparse
import json
import os
import random
import shutil
import stat
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from bench.harness import Bench, Result, Say, positive
from rich.text import Text
from torture.children import HUNG, start

from mlm.config.cli import main

HALF = 2
RUN, CORPUS = Path("run"), Path("corpus")
MODEL = [
    *("model=gpt2_tiny", "model.num_layers=1", "model.hidden_size=16", "model.num_heads=2"),
    *("model.max_positions=16", "model.vocab_size=384"),
]
TRAIN = [
    *("pretrain", *MODEL, f"data.path={CORPUS}", f"out={RUN}", "train.global_batch_size=2"),
    *("train.micro_batch_size=2", "train.validate_every=0", "checkpoint.save_every=1"),
    *("checkpoint.keep_last=2", "schedule=constant", "optimizer.lr=1e-2", "dist.device=cpu", "log.every=1"),
]
SENTENCES = ("The river bends to the south.", "A lamp burns in the tower.", "No one has seen the fox.")


ALLOWED = (0, 1, 2, 130)
"""Documented exit codes of every command."""
LINES: tuple[tuple[str, ...], ...] = (
    (*TRAIN, "train.steps=3"),
    ("pretrain", "model=gpt2_8b", "tp=8", "dp=64"),
    ("pretrain", "experiment=shakespeare", "train.steps=2000", "out=runs/longer", "tp=1", "model=gpt2_tiny"),
    ("pretrain", "model=bert_336m", "data.path=corpus", "tp=2", "dp=64", "precision=bf16"),
    ("pretrain", f"resume={RUN}", "train.steps=3"),
    ("pretrain", "--config-dir", "run", "--config-name", "config", "train.steps=2"),
    ("eval", "loss", f"ckpt={RUN}", f"path={CORPUS}/validation", "dist.device=cpu"),
    ("eval", "lambada", f"ckpt={RUN}", "samples=l.jsonl", "data.path=text/all.jsonl", "limit=2"),
    ("eval", "wikitext103", f"ckpt={RUN}", "data.path=text/all.jsonl", "limit=2"),
    ("eval", "all", f"ckpt={RUN}", "data.wikitext103=a", "data.lambada=b"),
    ("eval", "race", f"ckpt={RUN}"),
    ("generate", f"ckpt={RUN}", "prompt=JULIET.", "temperature=0.9", "max_new_tokens=2", "num_samples=2"),
    ("data", "tokenizer", "input=text", "vocab_size=300", "out=other.json"),
    ("data", "build", "data=text", "tokenizer=tokenizer.json", "out=built", "recipe=plain"),
    ("data", "inspect", str(CORPUS)),
    ("data", "verify", str(CORPUS)),
    ("ckpt", "inspect", str(RUN)),
    ("ckpt", "verify", str(RUN)),
    ("ckpt", "diff", str(RUN), str(RUN)),
    ("ckpt", "prune", str(RUN), "keep_last=1"),
    ("reshard", "--tp", "2", "--pp", "1", str(RUN), "out=resharded"),
    ("import", "hf", "folder", "out=imported"),
    ("import", "megatron", "checkpoints/345m", "out=345m"),
    ("export", "hf", str(RUN), "out=exported", "verify=false"),
    ("plan", "schedule", "pp=4", "vp=2", "micro_batches=8"),
    ("parity", "model=gpt2_8b", "tp=7", "zero=9"),
    ("doctor", "tp=7", "dp=9", "out=nowhere/doctor.json"),
    ("verify-resume", "tp=7", "zero=9", "model=gpt2_8b"),
    ("finetune", "race", f"ckpt={RUN}", "tp=3"),
    ("finetune", "sst2", "ckpt=nowhere", "seeds=5"),
    ("pretrain", "--check", "data.blend=[0.3 corpus/train,0.7 corpus/validation]", "data.seq_length=16"),
    ("pretrain", "experiment=laptop", f"data.path={CORPUS}", "--check", "8"),
    ("pretrain", "--multirun", "--check", "optimizer.lr=1e-3,1e-4", f"data.path={CORPUS}"),
    ("pretrain", "model=gpt2_8b", "tp=8", "dp=64", "--cfg", "job"),
    ("parity", f"ckpt={RUN}", "steps=1", "out=parity", "--check"),
    ("replay", f"{RUN}/incidents/step-00000001", "bisect=true"),
    ("report", str(RUN), "out=page.html"),
    ("plan", "layouts", "model=gpt2_tiny", "gpus=4", "hardware=rtx_4090", "tokens=1e9", "out=layouts.json"),
    ("plan", "memory", "model=gpt2_8b", "parallel=v1_8_3b", "hardware=dgx2h_v100_32g", "precision=fp16"),
    ("plan", "dry-run", "model=gpt2_tiny", "pp=2", "rank=1", "out=rank.json"),
    ("plan", "calibrate", "out=machine.yaml", "ranks=0"),
    ("generate", f"ckpt={RUN}", "prompts=text/all.jsonl", "stop=[a]", "max_new_tokens=1", "out=more.jsonl"),
    ("data", "tokenizer", "input=text", "kind=wordpiece", "vocab_size=300", "out=other.json"),
    ("finetune", "chat", f"ckpt={RUN}", "data=text/all.jsonl", "task.epochs=1", "--check"),
    ("finetune", f"resume={RUN}"),
    ("--help",),
    ("help", "pretrain"),
    ("pretrain", "--help", "model"),
)
"""Lines to mutate; what they would train is small, or cannot start for two reasons: one slip may lift one."""
PLAIN_VALUES = """
null true -1 0 1e400 nan inf 1e-400 [1] [1,2] [] {} (0.9,0.95) ' " a,b 1,2,3 ${x} ??? ${oc.env:HOME} ~ ~/x
device . / .. a=b = * 16 gpt2 lion 0x10 1_000 1, @ %s {0} !!python/object:os.system choice(1,2) link text
"""
VALUES = (
    *("", "a b", "\n", "- a", "{a: 1}", "\u202e", "\x1b[31m", "é€😀", "\\", "x" * 5000, "1" * 40, "1" * 4400),
    *PLAIN_VALUES.split(),
)
PLAIN_WORDS = """
--help -h --version -sc --cfg job --resolve -m --multirun --dry-run -- - -x --config-dir --config-name
nope +a=1 ~tp ++tp=2 +++x=1 ~precision=inf --tp = =x x= block_size=8 learning_rate=1 max_iters=5 dropout=0.1
hydra.run.dir=x hydra.mode=MULTIRUN optimizer.betas=(0.9,0.95) precision=16 num_heads=10000000019
model.num_heads=10000000019 seed=-1 tp=0 model@x=gpt2_tiny out=device out=text out=link out= out=~
"""
WORDS = ("optimizer={lr: 0.1, foo: 2}", "\udc80", *PLAIN_WORDS.split())


@dataclass(frozen=True)
class Verdict:
    """A mutated command line that ended badly."""

    words: tuple[str, ...]
    why: str
    last: str
    """The last line it said."""
    damaged: str = ""
    """The file of which a bit was flipped."""


def mutate(rng: random.Random) -> tuple[str, ...]:
    """A line with one to three slips."""
    words = list(rng.choice(LINES))
    for _ in range(rng.choice((1, 1, 2, 3))):
        rng.choice(SLIPS)(words, rng)
    return tuple(words)


def _new_value(words: list[str], rng: random.Random) -> None:
    keyed = [n for n, word in enumerate(words) if "=" in word]
    if keyed:
        n = rng.choice(keyed)
        words[n] = f"{words[n].partition('=')[0]}={rng.choice(VALUES)}"


def _slip_in_word(words: list[str], rng: random.Random) -> None:
    n = rng.randrange(len(words))
    letters = list(words[n])
    place = rng.randrange(len(letters) + 1)
    action = rng.randrange(4)
    if action == 0 and letters:
        del letters[min(place, len(letters) - 1)]
    elif action == 1:
        letters.insert(place, rng.choice("=.-[]{},'\"$~+@:#%é 0"))
    elif action == 2 and len(letters) > 1:
        place = min(place, len(letters) - 2)
        letters[place], letters[place + 1] = letters[place + 1], letters[place]
    else:
        letters.insert(place, rng.choice("aeklmopx"))
    words[n] = "".join(letters)


def _extra_word(words: list[str], rng: random.Random) -> None:
    words.insert(rng.randrange(len(words) + 1), rng.choice(WORDS))


def _lost_word(words: list[str], rng: random.Random) -> None:
    if len(words) > 1:
        del words[rng.randrange(len(words))]


def _twice(words: list[str], rng: random.Random) -> None:
    words.append(rng.choice(words))


SLIPS: tuple[Callable[[list[str], random.Random], None], ...] = (
    *(_new_value,) * 3,
    *(_slip_in_word,) * 2,
    *(_extra_word,) * 2,
    _lost_word,
    _twice,
)


def try_line(
    words: tuple[str, ...], template: Path, place: Path, damage: random.Random | None = None
) -> Verdict | None:
    """Run a line in a copy of the template, with a file damaged; None if it ended as documented."""
    shutil.copytree(template, place, symlinks=True)
    damaged = "" if damage is None else flip_bit(place, damage)
    (place / "link").symlink_to("text")
    with suppress(PermissionError):
        os.mknod(place / "device", stat.S_IFCHR | 0o666, os.makedev(1, 3))  # a /dev/null of our own
    log = place.with_suffix(".log")
    log.unlink(missing_ok=True)

    def work(_: int) -> int:
        os.chdir(place)
        os.environ.update(HF_HUB_OFFLINE="1", HOME=str(place))
        return main(list(words))

    try:
        job = start(work, log)
        code, said = job.end(), job.said()
    finally:
        shutil.rmtree(place, ignore_errors=True)
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "silent")[:300]
    if "Traceback (most recent call last)" in said:
        return Verdict(words, "traceback", last, damaged)
    if code not in ALLOWED:
        return Verdict(words, "hung" if code == HUNG else f"exit code {code}", last, damaged)
    if code and last == "silent":
        return Verdict(words, f"exit code {code} without a word", last, damaged)
    return None


def make_template(place: Path) -> None:
    """A corpus, a tokenizer, and a run on it that stopped halfway. Raises RuntimeError if that fails."""
    rng = random.Random(0)
    (place / "text").mkdir(parents=True)
    with open(place / "text" / "all.jsonl", "w", encoding="utf-8") as f:
        for _ in range(60):
            text = " ".join(rng.choice(SENTENCES) for _ in range(12))
            f.write(json.dumps({"text": f"{rng.random()} {text}"}) + "\n")
    for words in (
        ["data", "tokenizer", "input=text", "vocab_size=300", "out=tokenizer.json"],
        [
            *("data", "build", "input=text", "tokenizer=tokenizer.json", f"out={CORPUS}", "recipe=plain"),
            *("split=0.8,0.2,0", "executor.workers=1"),
        ],
        [*TRAIN, f"train.steps={HALF}"],
    ):
        job = start(lambda _, words=words: (os.chdir(place), main(words))[1], place / "making.log")
        if code := job.end():
            raise RuntimeError(f"mlm {' '.join(words)} ended with {code}:\n{job.said()}")


def flip_bit(place: Path, rng: random.Random) -> str:
    """Flip one bit of a file of the run or the corpus; its name."""
    files = sorted(path for root in (RUN, CORPUS) for path in (place / root).rglob("*") if path.is_file())
    path = rng.choice([path for path in files if path.stat().st_size])
    damaged = bytearray(path.read_bytes())
    damaged[rng.randrange(len(damaged))] ^= 1 << rng.randrange(8)
    path.write_bytes(damaged)
    return str(path.relative_to(place))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    parser.add_argument("--lines", type=positive, default=100, help="mutated lines (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)


def measure(args: argparse.Namespace, say: Say) -> Result:
    """Run all lines; those that ended badly."""
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    log: list[Verdict] = []
    with tempfile.TemporaryDirectory(prefix="lines-") as name:
        folder = Path(name)
        make_template(folder / "template")
        for number in range(args.lines):
            rng = random.Random(f"{args.seed}-{number}")
            words = mutate(rng)
            verdict = try_line(words, folder / "template", folder / "place", rng if number % 3 == 2 else None)
            if verdict is not None:
                log.append(verdict)
                say(f"{verdict.why}: {words!r}: {verdict.last}")
    counts = dict(Counter(verdict.why for verdict in log))
    return {"lines": args.lines, "found": counts, "log": [asdict(verdict) for verdict in log]}


def tables(result: Result) -> Iterator[Text]:
    """One line."""
    yield Text(f"{result['lines']} lines: {result['found'] or 'all ended as documented'}")


BENCH = Bench(
    name="torture_commands",
    doc=__doc__,
    add_options=add_options,
    measure=measure,
    tables=tables,
    is_success=lambda result: not result["found"],
)

if __name__ == "__main__":
    sys.exit(BENCH.main())
