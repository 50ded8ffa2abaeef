"""Tiny models of the families that mlm reads, of random weights, and the other files of their folders."""

import json
import re
from pathlib import Path
from typing import Any

import torch
import transformers
import yaml
from transformers import AutoTokenizer

from conversions.styles import write_tokenizer

TABLE: dict[str, Any] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text("utf-8"))
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    name: (kind, settings) for name, (kind, settings) in TABLE["models"].items()
}
"""Name -> class of `transformers` and settings."""
STYLE = {"GPT": "GPT-2", "Ber": "BERT", "Meg": "BERT", "Mis": "Llama 2", "Mix": "Llama 2", "Qwe": "Qwen 2"}
STYLE |= {"Dee": "DeepSeek-V3"}
"""First letters of a class -> its tokenizer; else Llama 3's."""


def write_model(folder: Path, kind: str, settings: dict[str, Any], style: str | None = None) -> None:
    """Write a model of random weights, biases and norms too, its tokenizer and generation_config.json.

    `style`: the tokenizer, in place of the class's.
    """
    folder.mkdir()
    style = style or STYLE.get(kind[:3], "Llama 3")
    size = write_tokenizer(folder, style)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = {f"{role}_token_id": getattr(tokenizer, f"{role}_token_id") for role in ("bos", "eos", "pad")}
    config = getattr(transformers, f"{re.sub('For.*|LMHead.*', '', kind)}Config")(
        **{**TABLE["gpt2" if kind[:3] == "GPT" else "others"], **ids, "vocab_size": size + 3, **settings}
    )
    torch.manual_seed(0)
    model = getattr(transformers, kind)(config)
    with torch.no_grad():
        buffers = (value for name, value in model.named_buffers() if name.endswith("correction_bias"))
        for value in (*model.parameters(), *buffers):
            value.add_(torch.randn_like(value) * 0.1)
    model.to(getattr(torch, settings.get("dtype", "float32"))).save_pretrained(
        folder, max_shard_size=settings.get("max_shard_size", "1GB")
    )
    declared = {"do_sample": False, "eos_token_id": ids["eos_token_id"], "bos_token_id": ids["bos_token_id"]}
    if kind[:3] in ("Qwe", "GPT"):
        declared["repetition_penalty"] = 1.2
    (folder / "generation_config.json").write_text(json.dumps(declared))
