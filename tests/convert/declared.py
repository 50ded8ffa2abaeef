"""Tiny Llamas with what released models declare beside their weights: special tokens, generation, a card."""

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend

from tests.convert.hf_models import TEXT

CARD = """---
license: apache-2.0
language:
- en
- de
base_model: acme/tiny
tags:
- text-generation
---

# Tiny
"""
STYLES: dict[str, dict[str, Any]] = {
    # <s> is an ordinary piece; config.json begins a sequence as it ends a document, the tokenizer does not
    "qwen": {
        "special": ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        "config": {"bos_token_id": "<|endoftext|>", "eos_token_id": "<|endoftext|>"},
        "generation": {"eos_token_id": ["<|im_end|>", "<|endoftext|>"], "repetition_penalty": 1.3},
        "tokenizer": {
            "bos_token": None,
            "eos_token": "<|endoftext|>",
            "pad_token": "<|endoftext|>",
            "padding_side": "left",
            "model_max_length": 32768,
        },
        "pieces": ["<s>"],
    },
    # the tokenizer puts a first token before each text; three tokens end one
    "llama3": {
        "special": ["<|begin_of_text|>", "<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        "config": {
            "bos_token_id": "<|begin_of_text|>",
            "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
        },
        "generation": {
            "eos_token_id": ["<|end_of_text|>", "<|eom_id|>", "<|eot_id|>"],
            "do_sample": True,
            "temperature": 0.6,
            "top_p": 0.9,
        },
        "tokenizer": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "first": "<|begin_of_text|>",
    },
}


def byte_level(style: dict[str, Any]) -> Backend:
    backend = Backend(models.BPE())
    split = pre_tokenizers.Split(Regex(r"<s>| ?[^\s<]+|<|\s+"), "isolated")
    letters = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([split, letters])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [TEXT, *(style.get("pieces", []) * 20)]
    backend.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=320, initial_alphabet=alphabet))
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False) for name in style["special"]]
    )
    if first := style.get("first"):
        backend.post_processor = processors.TemplateProcessing(
            single=f"{first} $A", special_tokens=[(first, backend.token_to_id(first))]
        )
    return backend


def write_declared(folder: Path, name: str) -> Path:
    """A Llama of random weights in the style; token ids are named above."""
    style = STYLES[name]
    backend = byte_level(style)

    def ids(values: dict[str, Any]) -> dict[str, Any]:
        def of(value: Any) -> Any:
            return [of(each) for each in value] if isinstance(value, list) else backend.token_to_id(value)

        return {key: of(value) if key.endswith("_id") else value for key, value in values.items()}

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": backend.get_vocab_size() + 3,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
    }
    config = transformers.LlamaConfig(**shape, **ids(style["config"]))
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    backend.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **style["tokenizer"]}
    templates = [{"name": "default", "template": "{{ messages }}"}, {"name": "rag", "template": "r"}]
    if name == "qwen":
        settings["chat_template"] = templates
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "generation_config.json").write_text(json.dumps(ids(style["generation"])))
    (folder / "README.md").write_text(CARD)
    return folder
