"""nanoGPT's text and training, as they are, for nanogpt-shakespeare.

    python -m reproduce.nanogpt text CHECKOUT OUT
    python -m reproduce.nanogpt train CHECKOUT CORPUS OUT --seed=1 --threads=2 --block_size=64 …

`text` writes tiny-shakespeare's two parts, divided and numbered as by prepare.py. `train` runs train.py on
the token ids of a corpus, with the options that follow, and writes result.json: the times of its iterations,
its own estimates (iteration, validation loss), and the loss of its checkpoint on the whole validation part,
in the windows that `mlm pretrain` scores. Nothing is written into the checkout.
"""

import json
import math
import pickle
import re
import runpy
import shutil
import string
import sys
from contextlib import chdir, redirect_stdout
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import EOD

CHARACTERS = "".join(sorted("\n !$&',-.3:;?" + string.ascii_letters))
"""The 65 of tiny-shakespeare."""
INPUT = "data/shakespeare_char/input.txt"
TRAINING = 0.9
ITERATION = re.compile(r"^iter \d+: loss \S+, time (\S+)ms", re.MULTILINE)
ESTIMATE = re.compile(r"^step (\d+): train loss \S+, val loss (\S+)", re.MULTILINE)
ROWS = 64
"""Windows that are scored at a time."""


def write_text(checkout: Path, out: Path) -> None:
    """Write the two parts and a tokenizer of single characters, with the end-of-document token that none
    uses."""
    text = (checkout / INPUT).read_text("utf-8")
    (out / "text").mkdir(parents=True, exist_ok=True)
    border = int(len(text) * TRAINING)
    (out / "text" / "train.txt").write_text(text[:border], "utf-8")
    (out / "text" / "validation.txt").write_text(text[border:], "utf-8")
    backend = Backend(models.BPE({name: id for id, name in enumerate([*CHARACTERS, EOD])}, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(EOD, special=True, normalized=False)])
    (out / "tokenizer.json").write_text(backend.to_str(), "utf-8")


def write_data(corpus: Path, folder: Path) -> None:
    """Write the corpus as prepare.py does: ids of 16 bits, and the characters that they stand for."""
    folder.mkdir(parents=True, exist_ok=True)
    for ours, theirs in (("train", "train"), ("validation", "val")):
        shutil.copyfile(corpus / f"{ours}.bin", folder / f"{theirs}.bin")
    tokenizer = Tokenizer.load(corpus / "tokenizer.json")
    names = [tokenizer.name_of(id) for id in range(tokenizer.vocab_size) if id not in tokenizer.special_ids]
    codes = {"itos": dict(enumerate(names)), "stoi": {name: id for id, name in enumerate(names)}}
    (folder / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": len(names), **codes}))


def train(checkout: Path, out: Path, words: list[str], seed: int) -> Any:
    """Run train.py to its end, its output in out/train.log; return its checkpoint's model."""
    seeded = torch.manual_seed
    torch.manual_seed = lambda _: seeded(seed)  # type: ignore[assignment]  # train.py has no setting for it
    sys.argv = ["train.py", "config/train_shakespeare_char.py", *words]
    sys.argv += [f"--dataset={out / 'data'}", f"--out_dir={out}"]  # absolute: os.path.join keeps them so
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(checkout))
    with open(out / "train.log", "w") as log, chdir(checkout), redirect_stdout(log):
        names = runpy.run_path("train.py", run_name="__main__")
    kept = torch.load(out / "ckpt.pt", map_location="cpu", weights_only=True)
    model = names["GPT"](names["GPTConfig"](**kept["model_args"]))
    model.load_state_dict({name.removeprefix("_orig_mod."): value for name, value in kept["model"].items()})
    return model.eval()


@torch.no_grad()
def validation_loss(model: Any, ids: np.ndarray, block: int) -> float:
    """Return the mean loss of all tokens but the first, each once, in windows one after another."""
    whole = (len(ids) - 1) // block * block
    x, y = torch.from_numpy(ids[:-1]), torch.from_numpy(ids[1:])
    parts = [*zip(x[:whole].view(-1, block).split(ROWS), y[:whole].view(-1, block).split(ROWS), strict=True)]
    if whole < len(x):
        parts.append((x[whole:].unsqueeze(0), y[whole:].unsqueeze(0)))
    return math.fsum(float(model(inputs, labels)[1]) * inputs.numel() for inputs, labels in parts) / len(x)


def main(words: list[str]) -> None:
    if words[0] == "text":
        write_text(Path(words[1]), Path(words[2]))
        return
    checkout, corpus, out = (Path(word).resolve() for word in words[1:4])
    seed, threads = (int(word.partition("=")[2]) for word in words[4:6])
    torch.set_num_threads(threads)
    write_data(corpus, out / "data")
    model = train(checkout, out, words[6:], seed)
    ids = np.fromfile(out / "data" / "val.bin", dtype=np.uint16).astype(np.int64)
    printed = (out / "train.log").read_text("utf-8")
    result = {
        "seconds": [float(milliseconds) / 1000 for milliseconds in ITERATION.findall(printed)],
        "estimates": [(int(step), float(loss)) for step, loss in ESTIMATE.findall(printed)],
        "validation_loss": validation_loss(model, ids, model.config.block_size),
    }
    (out / "result.json").write_text(json.dumps(result), "utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
