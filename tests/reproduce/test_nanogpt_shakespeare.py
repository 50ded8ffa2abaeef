"""nanogpt-shakespeare: its text, nanoGPT as a step, and its conclusion from made-up runs."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mlm.config.cli import main
from mlm.config.cli.compose import load_config
from mlm.data.gpt import EvalWindows
from mlm.data.indexed import IndexedDataset
from mlm.data.tokenizer import Tokenizer
from mlm.parallel.labels import IGNORE
from mlm.reproduce.conclusion import Conclusion, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.nanogpt import characters, peer, shakespeare
from tests.reproduce.made_runs import made_results, write_result, write_run

TEXT = "First Citizen:\nBefore we proceed any further, hear me speak.\n\nAll:\nSpeak, speak.\n" * 20


def make_corpus(folder: Path) -> Path:
    """Build the corpus of a short text, as the steps do."""
    (folder / "input.txt").write_text(TEXT)
    characters.main([str(folder / "input.txt"), str(folder / "text")])
    words = [f"input={folder}/text/text", f"tokenizer={folder}/text/tokenizer.json", f"out={folder}/corpus"]
    assert main(["data", "build", *words, "recipe=plain", "append_eod=false"]) == 0
    return folder / "corpus"


def test_the_corpus_is_the_text_in_the_parts_and_ids_of_nanogpt(tmp_path: Path) -> None:
    corpus = make_corpus(tmp_path)
    order = sorted(characters.CHARACTERS)
    ids = [order.index(c) for c in TEXT]
    found = [
        np.fromfile(corpus / f"{part}.bin", dtype=np.uint16).tolist() for part in ("train", "validation")
    ]
    assert found == [ids[: int(0.9 * len(ids))], ids[int(0.9 * len(ids)) :]]
    assert len(order) == 65


def test_other_characters_become_those_of_tiny_shakespeare() -> None:
    assert characters.in_characters("“Où est—l’æther?” [2]\n") == "'Ou est--l'aether?' \n"


class Counting(torch.nn.Module):
    """A stub of nanoGPT's model whose loss is the mean of its targets."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, y.double().mean()


def test_both_are_scored_on_the_same_tokens(tmp_path: Path) -> None:
    """The windows of `mlm pretrain` have the targets that nanoGPT is scored on, each once."""
    corpus = make_corpus(tmp_path)
    indexed = IndexedDataset(corpus / "validation")
    every = EvalWindows(indexed, seq_length=64)
    windows = every.gather(range(len(every)))
    targets = windows[:, 1:][windows[:, 1:] != IGNORE]
    ids = np.fromfile(corpus / "validation.bin", dtype=np.uint16).astype(np.int64)
    assert peer.validation_loss(Counting(), ids, 64) == pytest.approx(targets.mean())
    assert len(targets) == len(ids) - 1


SCRIPT = """
import os, pickle, sys
import torch
from model import GPT, GPTConfig
settings = dict(word[2:].split("=") for word in sys.argv[2:])
torch.manual_seed(1337)
first = float(torch.rand(()))
meta = pickle.load(open(os.path.join("data", settings["dataset"], "meta.pkl"), "rb"))
print("step 0: train loss 4.0000, val loss 4.1000")
print(f"iter 0: loss {first:.6f}, time 2000.00ms, mfu -100.00%")
print("iter 1: loss 3.5000, time 250.00ms, mfu 1.00%")
args = {"block_size": int(settings["block_size"]), "vocab_size": meta["vocab_size"]}
model = GPT(GPTConfig(**args))
torch.save({"model": model.state_dict(), "model_args": args}, os.path.join(settings["out_dir"], "ckpt.pt"))
"""
MODEL = """
from dataclasses import dataclass
import torch
@dataclass
class GPTConfig:
    block_size: int
    vocab_size: int
class GPT(torch.nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
        self.bias = torch.nn.Parameter(torch.zeros(config.vocab_size))
    def forward(self, x, y):
        logits = self.bias.expand(*y.shape, -1)
        return logits, torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten())
"""


def make_checkout(folder: Path) -> Path:
    """Write a program with nanoGPT's files and printed lines."""
    folder.mkdir()
    (folder / "train.py").write_text(SCRIPT)
    (folder / "model.py").write_text(MODEL)
    return folder


def test_nanogpt_runs_as_it_is_and_leaves_its_numbers(tmp_path: Path) -> None:
    corpus, checkout, out = make_corpus(tmp_path), make_checkout(tmp_path / "nanoGPT"), tmp_path / "out"
    before = sorted(checkout.rglob("*"))
    peer.main([*map(str, (checkout, corpus, out)), "--seed=7", "--threads=1", "--block_size=64"])
    found = json.loads((out / "result.json").read_bytes())
    torch.manual_seed(7)
    assert found["losses"] == [pytest.approx(float(torch.rand(())), abs=1e-6), 3.5]
    assert found["seconds"] == [2.0, 0.25]
    assert found["estimates"] == [[0, 4.0, 4.1]]
    assert found["validation_loss"] == pytest.approx(np.log(65))  # without the end-of-document token
    assert found["parameters"] == 65
    assert sorted(checkout.rglob("*")) == before
    meta = pickle.loads((out / "data/meta.pkl").read_bytes())
    assert "".join(meta["itos"].values()) == characters.CHARACTERS


def test_a_checkout_without_its_text_takes_the_plays(tmp_path: Path) -> None:
    config = ReproduceConfig(peer=str(tmp_path))
    assert shakespeare.prefix(config) == "nanogpt-plays"
    (tmp_path / shakespeare.INPUT).parent.mkdir(parents=True)
    (tmp_path / shakespeare.INPUT).write_text(TEXT)
    assert shakespeare.prefix(config) == "nanogpt-tiny"
    assert f"{tmp_path / shakespeare.INPUT}" in shakespeare.text_steps(config)[0].words


def test_its_settings_are_nanogpts() -> None:
    config = load_config("pretrain", list(shakespeare.our_words(ReproduceConfig(), 1)[2:]))
    assert (config.model.num_layers, config.model.num_heads, config.model.hidden_size) == (4, 4, 128)
    assert (config.data.seq_length, config.train.global_batch_size, config.train.steps) == (64, 12, 2000)
    assert (config.optimizer.lr, config.schedule.min_lr, config.schedule.warmup_steps) == (1e-3, 1e-4, 100)
    assert config.model.vocab_size == Tokenizer(characters.character_tokenizer()).vocab_size == 66


def concluded(folder: Path, ours: list[float], theirs: list[float], *, seconds: float = 0.1) -> Conclusion:
    """Conclude from losses of rounds in which nanoGPT takes 0.2 s a step; no losses of it, no peer."""
    settings: dict[str, Any] = {"seeds": len(ours)}
    (folder / "nanoGPT" / shakespeare.INPUT).parent.mkdir(parents=True)
    if theirs:
        settings["peer"] = str(folder / "nanoGPT")
        (folder / "nanoGPT" / shakespeare.INPUT).write_text(TEXT)
    results = made_results(shakespeare.EXPERIMENT, folder, **settings)
    for number, loss in enumerate(ours, 1):
        run = folder / "runs" / shakespeare.ours(results.config, number)
        write_run(run, seconds=seconds, total=2000, validation={1000: loss + 1, 2000: loss})
    for number, loss in enumerate(theirs, 1):
        told = {
            "validation_loss": loss,
            "seconds": [5.0] * 3 + [0.2] * 9,
            "estimates": [[0, 4, 4], [2000, 2, 2]],
        }
        write_result(folder / "runs" / shakespeare.theirs(results.config, number) / "result.json", told)
    return shakespeare.conclude(results)


@pytest.mark.parametrize(
    ("ours", "theirs", "seconds", "verdict"),
    [
        ([1.8, 1.81, 1.82], [1.9, 1.91, 1.92], 0.1, Verdict.AGREES),
        ([1.8, 1.81, 1.82], [1.9, 1.91, 1.92], 0.2, Verdict.PARTLY),
        ([2.0, 2.01, 2.02], [1.9, 1.91, 1.92], 0.1, Verdict.CONTRADICTS),
        ([1.8, 1.81], [1.9, 1.91], 0.1, Verdict.OPEN),
        ([1.8, 1.81, 1.82], [], 0.1, Verdict.OPEN),
    ],
    ids=["better and faster", "better, not faster", "worse", "two rounds", "another text alone"],
)
def test_it_agrees_where_no_round_of_nanogpt_is_better_or_faster(
    ours: list[float], theirs: list[float], seconds: float, verdict: Verdict, tmp_path: Path
) -> None:
    assert concluded(tmp_path, ours, theirs, seconds=seconds).verdict is verdict


def test_minutes_are_those_of_the_median_step(tmp_path: Path) -> None:
    rows = concluded(tmp_path, [1.8, 1.81, 1.82], [1.9, 1.91, 1.92]).tables[0].rows
    assert [str(row[2]).partition(" ")[0] for row in rows] == [
        f"{2000 * 0.1 / 60:.3g}",
        f"{400 / 60:.3g}",
        "about",
    ]
