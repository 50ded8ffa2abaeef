"""One run of nanoGPT itself, its train.py as it is, and its loss on the whole validation text.

    python -m mlm.reproduce.nanogpt.peer CHECKOUT CORPUS OUT --seed 1 --threads 2 --block_size=64 …

CORPUS is by `mlm data build`: nanoGPT reads the same token ids. Nothing is written into the checkout. OUT
gets nanoGPT's checkpoint and result.json: its losses, the times of its iterations, its own estimates, and the
loss of its checkpoint on the whole validation part, in the windows that `mlm pretrain` scores. What follows
the threads is for train.py.

train.py has no setting for its seed: its call of torch.manual_seed gets ours.
"""

import argparse
import math
import os
import pickle
import re
import runpy
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import torch
from numpy.typing import NDArray

from mlm.data.tokenizer import Tokenizer
from mlm.util.atomic import as_json, write_atomic

ITERATION = re.compile(r"iter (\d+): loss (\S+), time (\S+)ms")
ESTIMATE = re.compile(r"step (\d+): train loss (\S+), val loss (\S+)")
TRAIN, CONFIG, CHECKPOINT = "train.py", "config/train_shakespeare_char.py", "ckpt.pt"
ROWS = 64
"""Windows that are scored at a time."""


@dataclass
class Told:
    """Numbers that train.py prints. It counts iterations from 0, and takes one more than max_iters."""

    iterations: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    """Of each iteration, and of the estimate before it where there is one."""
    estimates: list[tuple[int, float, float]] = field(default_factory=list)
    """(iteration, training loss, validation loss), of eval_iters random batches each."""

    def read(self, line: str) -> None:
        """Take what a printed line tells."""
        if found := ITERATION.match(line):
            self.iterations.append(int(found[1]))
            self.losses.append(float(found[2]))
            self.seconds.append(float(found[3]) / 1000)
        elif found := ESTIMATE.match(line):
            self.estimates.append((int(found[1]), float(found[2]), float(found[3])))


class Listener:
    """A stream that reads each line before it passes it on."""

    def __init__(self, told: Told, to: TextIO) -> None:
        self.told, self.to, self.begun = told, to, ""

    def write(self, text: str) -> int:
        """Take a text of any length."""
        *lines, self.begun = (self.begun + text).split("\n")
        for line in lines:
            self.told.read(line)
        return self.to.write(text)

    def flush(self) -> None:
        """Pass on what was written."""
        self.to.flush()


def write_data(corpus: Path, folder: Path) -> None:
    """Write the corpus as prepare.py does: ids of 16 bits, and the characters that they stand for."""
    folder.mkdir(parents=True, exist_ok=True)
    for ours, theirs in (("train", "train"), ("validation", "val")):
        shutil.copyfile(corpus / f"{ours}.bin", folder / f"{theirs}.bin")
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    names = [tokenizer.name_of(id) for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids]
    meta = {
        "vocab_size": len(names),
        "itos": dict(enumerate(names)),
        "stoi": {c: i for i, c in enumerate(names)},
    }
    write_atomic(folder / "meta.pkl", pickle.dumps(meta))


@contextmanager
def as_script(checkout: Path, words: Sequence[str], seed: int) -> Iterator[None]:
    """Be `python train.py WORDS` in the checkout, with another seed."""
    arguments, folder, seeded, path = sys.argv, Path.cwd(), torch.manual_seed, list(sys.path)
    try:
        sys.argv, sys.dont_write_bytecode = [TRAIN, *words], True
        sys.path.insert(0, str(checkout))
        os.chdir(checkout)
        setattr(torch, "manual_seed", lambda _: seeded(seed))  # noqa: B010 (mypy rejects other types)
        yield
    finally:
        sys.argv, torch.manual_seed, sys.path[:] = arguments, seeded, path
        os.chdir(folder)


def train(checkout: Path, data: Path, out: Path, words: Sequence[str], seed: int) -> tuple[Told, Any]:
    """Run train.py to its end; return what it printed, and the checkpoint's model."""
    told = Told()
    here = [
        f"--dataset={data}",
        f"--out_dir={out}",
    ]  # both absolute: os.path.join takes them for what they are
    with as_script(checkout, [CONFIG, *words, *here], seed), redirect_stdout(Listener(told, sys.stdout)):
        names = runpy.run_path(TRAIN, run_name="__main__")
    kept = torch.load(out / CHECKPOINT, map_location="cpu", weights_only=True)
    model = names["GPT"](names["GPTConfig"](**kept["model_args"]))
    model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in kept["model"].items()})
    return told, model


@torch.no_grad()
def validation_loss(model: Any, ids: NDArray[np.int64], block: int) -> float:
    """Return the mean loss of all tokens but the first, each once, in windows one after another."""
    model.eval()
    whole = (len(ids) - 1) // block * block
    x, y = torch.from_numpy(ids[:-1]), torch.from_numpy(ids[1:])
    parts = [*zip(x[:whole].view(-1, block).split(ROWS), y[:whole].view(-1, block).split(ROWS), strict=True)]
    if whole < len(x):
        parts.append((x[whole:].unsqueeze(0), y[whole:].unsqueeze(0)))
    total = math.fsum(float(model(inputs, targets)[1]) * inputs.numel() for inputs, targets in parts)
    return total / len(x)


def main(arguments: list[str] | None = None) -> None:
    """Train, score, write."""
    parser = argparse.ArgumentParser(prog="peer", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("checkout", type=Path)
    add("corpus", type=Path)
    add("out", type=Path)
    add("--seed", type=int, required=True)
    add("--threads", type=int, required=True)
    options, words = parser.parse_known_args(arguments)
    torch.set_num_threads(options.threads)
    out = options.out.resolve()
    write_data(options.corpus, out / "data")
    told, model = train(options.checkout, out / "data", out, words, options.seed)
    ids = np.fromfile(out / "data" / "val.bin", dtype=np.uint16).astype(np.int64)
    scored = {
        "validation_loss": validation_loss(model, ids, model.config.block_size),
        "parameters": sum(each.numel() for each in model.parameters()),
    }
    write_atomic(out / "result.json", as_json({**asdict(told), **scored}))


if __name__ == "__main__":
    main()
