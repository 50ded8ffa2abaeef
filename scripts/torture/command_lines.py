"""Command lines as people mistype them: none may end in a traceback or an undocumented exit code."""

import os
import random
import shutil
import stat
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mlm.config.cli import main
from torture.children import HUNG, start
from torture.flips import CORPUS, RUN, TRAIN

ALLOWED = (0, 1, 2, 130)
"""Documented exit codes of every command."""
LINES: tuple[tuple[str, ...], ...] = (
    (*TRAIN, "train.steps=3"),
    ("pretrain", "model=gpt2_8b", "tp=8", "dp=64"),
    ("pretrain", "experiment=shakespeare", "train.steps=2000", "out=runs/longer", "tp=1", "model=gpt2_tiny"),
    ("pretrain", "model=bert_336m", "data.path=corpus", "tp=2", "dp=64", "precision=bf16"),
    ("pretrain", f"resume={RUN}", "train.steps=3"),
    ("pretrain", "--config-dir", "run", f"resume={RUN}", "train.steps=2"),
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
    ("replay", f"{RUN}/incidents/step-00000001", "zero=0"),
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
--help -h --version -sc --cfg job --info --resolve -m --multirun --dry-run -- - -x --config-dir --config-name
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


def try_line(words: tuple[str, ...], template: Path, place: Path) -> Verdict | None:
    """Run a line in a copy of the template; None if it ended as documented."""
    shutil.copytree(template, place, symlinks=True)
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
        return Verdict(words, "traceback", last)
    if code not in ALLOWED:
        return Verdict(words, "hung" if code == HUNG else f"exit code {code}", last)
    if code and last == "silent":
        return Verdict(words, f"exit code {code} without a word", last)
    return None
