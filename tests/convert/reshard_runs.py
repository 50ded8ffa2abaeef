"""Runs of tests that are resharded: five layers, 61 tokens, one step in."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.cli.convert.reshard import preflight, run
from mlm.cli.convert.settings import ReshardConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.training.saving import save
from tests.training.test_trainer import config, steps_of

LAYERS = 5  # uneven over two and three stages
STEP = "step-00000001"


def spec(vocab_multiple: int = 4, num_layers: int = LAYERS, **parallel: object) -> PretrainConfig:
    """61 tokens in rows of multiples: tp=4 holds 16, 16, 16 and 13 of them."""
    base = config(dtype="fp32")
    model = replace(base.model, num_layers=num_layers, vocab_multiple=vocab_multiple)
    return replace(base, model=model, parallel=ParallelConfig(**parallel))  # type: ignore[arg-type]


def trained(ctx: ParallelContext, out: Path, spec: PretrainConfig) -> None:
    trainer = Trainer(spec, ctx)
    steps_of(trainer, 1)
    save(trainer, out)


def make_source(out: Path) -> Path:
    """A run of one process, one step in, with a tokenizer."""
    trained(shape_context(), out, spec())
    (out / "tokenizer.json").write_text('{"of": "the run"}')
    return out


def to(source: Path, out: Path, tp: int = 1, pp: int = 1, vp: int = 1, *, weights_only: bool = False) -> Path:
    """Reshard through the same checks as the command; the step-… directory."""
    asked = ReshardConfig(ckpt=str(source), out=str(out), tp=tp, pp=pp, vp=vp, weights_only=weights_only)
    if problems := preflight(asked):
        raise UserError("\n".join(problems))
    run(asked)
    return out / "checkpoints" / STEP


def content(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def stored(directory: Path) -> dict[str, dict[str, Tensor]]:
    """By the safetensors library: file -> tensor name -> what is in it."""
    return {path.name: load_file(path) for path in directory.glob("*.safetensors")}


def equal(a: Mapping[str, Mapping[str, Tensor]], b: Mapping[str, Mapping[str, Tensor]]) -> bool:
    return {f: set(t) for f, t in a.items()} == {f: set(t) for f, t in b.items()} and all(
        torch.equal(x, b[file][name]) for file, tensors in a.items() for name, x in tensors.items()
    )
