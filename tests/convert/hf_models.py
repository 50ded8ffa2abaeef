"""Tiny models of `transformers` for tests, and what our commands make of them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import GPT2Config

import mlm
from mlm.cli.convert.run import preflight_export_hf, preflight_import_hf, run_export_hf, run_import_hf
from mlm.cli.convert.settings import ExportHFConfig, ImportHFConfig
from mlm.corpus.train_tokenizer import train_bpe
from mlm.models.config import ModelConfig
from tests.models.reference import randomized

SHAPE: dict[str, Any] = {
    "n_layer": 3,
    "n_embd": 24,
    "n_head": 4,
    "n_inner": 60,
    "vocab_size": 331,  # no multiple of 128
    "n_positions": 48,
    "layer_norm_epsilon": 1e-4,
    "resid_pdrop": 0.05,
    "embd_pdrop": 0.05,
    "attn_pdrop": 0.2,
    "bos_token_id": 0,
    "eos_token_id": 0,
}
MODEL = ModelConfig(
    num_layers=3,
    hidden_size=24,
    num_heads=4,
    ffn_hidden_size=60,
    max_positions=48,
    vocab_size=331,
    hidden_dropout=0.05,
    attention_dropout=0.2,
    layer_norm_eps=1e-4,
)
"""The config.json fields of SHAPE as model settings of ours."""
TOKENS = torch.arange(20)[None]
TEXT = "To be, or not to be, that is the question: whether 'tis nobler — naïve café 日本 🙂\n\n  end"


@torch.no_grad()
def their_logits(folder: Path, adapter: Path | None = None) -> Tensor:
    """Logits of TOKENS by `transformers`, with an adapter by `peft`."""
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    logits: Tensor = model(TOKENS).logits
    return logits


def our_logits(ckpt: Path) -> Tensor:
    return mlm.load(ckpt, device="cpu").logits(TOKENS)


def make_model(
    folder: Path, *, shard: int | None = None, kind: str = "GPT2LMHeadModel", **settings: Any
) -> Any:
    """Save a GPT-2 of random weights, biases and norms too; `shard`: bytes of the largest file; `kind`: its
    class."""
    torch.manual_seed(0)
    model = randomized(getattr(transformers, kind)(GPT2Config(**(SHAPE | settings))).eval())
    model.save_pretrained(folder, **({} if shard is None else {"max_shard_size": shard}))
    return model


def add_tokenizer(folder: Path) -> None:
    train_bpe([TEXT] * 5, 300).save(folder)


def edit_config(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | settings))


def edit_tensors(folder: Path, edit: Callable[[dict[str, Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path, {"format": "pt"})


def hub_cache(folder: Path) -> Path:
    """A model laid out as the Hub's cache does: snapshots/COMMIT/file -> ../../blobs/HASH."""
    root = folder.parent / "models--someone--tiny"
    snapshot, blobs = root / "snapshots" / ("ab" * 20), root / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(folder.iterdir())):
        path.rename(blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(Path("../../blobs", f"{number:064x}"))
    return snapshot


def import_model(source: Path | str, out: Path, **settings: Any) -> Path:
    """Run `mlm import hf`, checks first; return the run directory."""
    config = ImportHFConfig(source=str(source), out=str(out), **settings)
    assert preflight_import_hf(config) == []
    run_import_hf(config)
    return out


def export_model(ckpt: Path, out: Path, **settings: Any) -> Path:
    """Run `mlm export hf`, checks first; return the folder."""
    config = ExportHFConfig(ckpt=str(ckpt), out=str(out), **settings)
    assert preflight_export_hf(config) == []
    run_export_hf(config)
    return out
