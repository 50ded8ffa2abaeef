"""Megatron Core's own models, saved and loaded by its dist_checkpointing on CPUs: its logits equal ours."""

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import mlm
from mlm.cli.convert import run as convert
from mlm.cli.convert.run import run
from mlm.convert.config import ConvertConfig
from tests.convert.dcp import core_ranks
from tests.convert.dcp.core_ranks import TOKENS
from tests.convert.dcp.llamas import VOCAB, random_llama
from tests.megatron_core import megatron_core

pytestmark = pytest.mark.slow
LAYOUTS = [("llama", 1, 2), ("llama", 2, 1), ("gpt", 1, 2), ("gpt", 2, 1)]
ONE = [(kind, 1, 1) for kind in ("llama", "gpt")]


def on_ranks(function: Callable[..., Any], world: int, *args: Any) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    torch.multiprocessing.spawn(function, (world, port, *args), world)  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of both models at every layout, with the logits that Megatron Core computes of each."""
    megatron_core("dist_checkpointing")
    out = tmp_path_factory.mktemp("core")
    on_ranks(core_ranks.save, 2, out, LAYOUTS)
    on_ranks(core_ranks.save, 1, out, ONE)
    random_llama(vocab_size=VOCAB, max_position_embeddings=32).save_pretrained(out / "hf")
    convert.run(ConvertConfig(source=str(out / "hf"), out=str(out / "ours"), to="torch_dist"))
    made = [out / "-".join(map(str, layout)) for layout in LAYOUTS + ONE]
    on_ranks(core_ranks.load, 1, [*made, out / "ours/release"])
    return out


@pytest.mark.parametrize("layout", LAYOUTS + ONE, ids=lambda layout: "-".join(map(str, layout)))
def test_logits_of_an_import_are_those_of_megatron_core(folder: Path, layout: tuple[str, int, int]) -> None:
    """Within 1e-4 of the largest: float32 sums in another order."""
    source = folder / "-".join(map(str, layout))
    out = folder / f"run-{source.name}"
    run(ConvertConfig(source=str(source), out=str(out)))
    theirs = torch.load(source / "logits.pt")
    ours = mlm.load(str(out)).logits(TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


@torch.no_grad()
def test_megatron_core_computes_of_our_export_what_transformers_does(folder: Path) -> None:
    llama = random_llama(vocab_size=VOCAB, max_position_embeddings=32)
    wanted = llama(TOKENS % VOCAB).logits
    theirs = torch.load(folder / "ours/release/logits.pt")[..., : wanted.shape[-1]]
    torch.testing.assert_close(theirs, wanted, rtol=0, atol=1e-4 * wanted.abs().max().item())
