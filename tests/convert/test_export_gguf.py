"""GGUF files, read back by the reader of the `gguf` package."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from transformers import AutoTokenizer

from mlm.api import export_hf, import_hf
from mlm.cli.convert.run import preflight_export_gguf, run_export_gguf
from mlm.cli.convert.settings import ExportGGUFConfig
from mlm.convert.source import open_checkpoint
from mlm.util.errors import UserError
from tests.finetune.chats import write_llama
from tests.finetune.runs import write_model

ERRORS = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127}
"""Rounding, of the largest number of a row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    write_llama(made / "llama")
    import_hf(made / "llama", made / "run", verify=False)
    return made


def read(folder: Path, kind: str, out: Path) -> GGUFReader:
    config = ExportGGUFConfig(ckpt=str(folder / "run"), out=str(out), type=kind)  # type: ignore[arg-type]
    assert preflight_export_gguf(config) == []
    run_export_gguf(config)
    return GGUFReader(out)


def field(reader: GGUFReader, name: str) -> Any:
    return reader.fields[name].contents()


@pytest.mark.parametrize("kind", ERRORS)
def test_tensors_are_those_of_the_model(folder: Path, tmp_path: Path, kind: str) -> None:
    reader = read(folder, kind, tmp_path / "model.gguf")
    stored = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
    whole = open_checkpoint(str(folder / "run")).whole
    up = whole("layers.1.mlp.up.weight").unflatten(0, (-1, 2, 12))
    want = {
        "token_embd.weight": whole("token.weight"),
        "output.weight": whole("output.weight"),
        "blk.1.ffn_gate.weight": up[:, 0].flatten(0, 1),
        "blk.1.ffn_down.weight": whole("layers.1.mlp.down.weight"),
        "blk.0.attn_norm.weight": whole("layers.0.attention_norm.weight"),
        # llama.cpp's converter: halves of a head become neighbours
        "blk.0.attn_q.weight": whole("layers.0.attention.query.weight")
        .view(4, 2, 4, 32)
        .transpose(1, 2)
        .reshape(32, 32),
    }
    for name, value in want.items():
        assert shapes[name] == tuple(value.shape)
        limit = ERRORS[kind] * value.abs().max().item()
        torch.testing.assert_close(stored[name].view_as(value), value, rtol=0, atol=limit + 1e-9)
    assert len(stored) == 3 + 2 * 9


def test_settings_and_tokenizer_are_in_it(folder: Path, tmp_path: Path) -> None:
    reader = read(folder, "f16", tmp_path / "model.gguf")
    assert field(reader, "general.architecture") == "llama"
    assert field(reader, "llama.attention.head_count_kv") == 2
    assert field(reader, "llama.rope.freq_base") == 10000.0
    theirs = AutoTokenizer.from_pretrained(folder / "llama")
    tokens = field(reader, "tokenizer.ggml.tokens")
    assert tokens[: len(theirs)] == theirs.convert_ids_to_tokens(list(range(len(theirs))))
    assert len(tokens) == 340
    content = json.loads((folder / "llama" / "tokenizer.json").read_text())
    assert field(reader, "tokenizer.ggml.merges") == [
        merge if isinstance(merge, str) else " ".join(merge) for merge in content["model"]["merges"]
    ]
    types = np.array(field(reader, "tokenizer.ggml.token_type"))
    assert (types[theirs.all_special_ids] == 3).all()
    assert tokens[field(reader, "tokenizer.ggml.eos_token_id")] == theirs.eos_token
    assert field(reader, "tokenizer.ggml.pre") == "qwen2"
    assert field(reader, "tokenizer.chat_template") == theirs.chat_template


def test_a_model_that_llama_cpp_has_not_is_one_line(tmp_path: Path) -> None:
    write_model(tmp_path / "run")
    (problem,) = preflight_export_gguf(ExportGGUFConfig(ckpt=str(tmp_path / "run"), out=str(tmp_path / "x")))
    assert "bert with head=language_model is not supported; supported: llama, mistral, " in problem


def test_the_export_for_transformers_has_what_vllm_and_sglang_read(folder: Path, tmp_path: Path) -> None:
    """They read config.json (architectures, dtype), safetensors, and a tokenizer with its template."""
    out = export_hf(folder / "run", tmp_path / "hf", verify=False)
    names = {file.name for file in out.iterdir()}
    assert {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json"} <= names
    assert {"tokenizer_config.json", "chat_template.jinja"} <= names
    config = json.loads((out / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert {"model_type", "dtype", "eos_token_id", "vocab_size", "max_position_embeddings"} <= config.keys()


def test_a_device_is_written_to_and_stays(folder: Path, tmp_path: Path) -> None:
    full = tmp_path / "full"
    try:
        os.mknod(full, 0o666 | stat.S_IFCHR, os.makedev(1, 7))
        full.stat()
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    with pytest.raises(UserError, match=r"out=.*full: No space left on device"):
        read(folder, "f16", full)
    assert stat.S_ISCHR(full.lstat().st_mode)
