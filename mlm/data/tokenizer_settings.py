"""Declarations in the files next to a tokenizer: special tokens, and settings of encoding and generation."""

import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mlm.util.errors import CorruptFileError, reading_from
from mlm.util.files import READABLE, open_input, parse_json, write_atomic

EOD = "<|endoftext|>"
"""End of document, GPT-2's only special token."""
CONFIG, GENERATION_CONFIG, SETTINGS = "config.json", "generation_config.json", "tokenizer_config.json"
"""Files of a model folder next to its tokenizer."""
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
"""Files of older folders: special tokens by role, and added tokens."""
MAX_BYTES = 1 << 28  # 256 MiB of tokenizer.json: the largest vocabularies in use need 40
ENDOFTEXT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOD)
QWEN = {"eos_token": EOD, "unk_token": EOD, "pad_token": EOD}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
ROBERTA = {
    **{"bos_token": "<s>", "eos_token": "</s>", "cls_token": "<s>", "sep_token": "</s>"},
    **{"unk_token": "<unk>", "pad_token": "<pad>", "mask_token": "<mask>"},
}
"""Special tokens of RoBERTa, the only class with a token <mask>."""
CLASS_TOKENS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "gptneo", "gptneox", "gptj", "codegen", "phi", "opt", "bigcode"), ENDOFTEXT),
    **dict.fromkeys(("qwen2", "qwen3"), QWEN),
    **dict.fromkeys(("llama", "codellama"), LLAMA),
    **dict.fromkeys(("roberta", "xlmroberta", "camembert"), ROBERTA),
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "cohere": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
}
"""Default special tokens of tokenizer classes in `transformers`."""
NOT_CARRIED = (
    *("tokenizer_class", "chat_template", "name_or_path", "tokenizer_file", "special_tokens_map_file"),
    *("auto_map", "processor_class", "backend", "is_local", "init_inputs", "add_bos_token", "add_eos_token"),
)
"""Keys of tokenizer_config.json that are not copied: they concern its folder, class or code, or repeat
tokenizer.json; a chat template has its own file."""


@dataclass(frozen=True)
class TokenizerDeclarations:
    names: Mapping[str, str] = field(default_factory=dict)
    """Special tokens by role (bos_token, …), "" for null; see `named_tokens`."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """tokenizer_config.json without NOT_CARRIED, with special tokens of files; see `Tokenizer.settings`."""
    generation: Mapping[str, Any] = field(default_factory=dict)
    """generation_config.json; missing token ids come from config.json."""
    model_ends: tuple[int, ...] = ()
    """The eos_token_id of config.json, then of generation_config.json."""
    is_model: bool = False
    """True if there is a config.json."""

    @classmethod
    def read(cls, folder: Path) -> "TokenizerDeclarations":
        """Read the declarations in a folder, if any. Raises UserError, CorruptFileError."""
        config, generation = read_config(folder / CONFIG), read_config(folder / GENERATION_CONFIG)
        file_tokens = named_tokens(folder, of_class=False) or {}
        settings = read_config(folder / SETTINGS)
        kept_settings = {key: value for key, value in settings.items() if key not in NOT_CARRIED}
        keys = ("bos_token_id", "eos_token_id", "pad_token_id")
        ids = {key: config[key] for key in keys if config.get(key) is not None}
        return cls(
            names=named_tokens(folder) or {},
            settings=kept_settings | {name: token or None for name, token in file_tokens.items()},
            generation=ids | generation,
            model_ends=(*ids_of(config.get("eos_token_id")), *ids_of(generation.get("eos_token_id"))),
            is_model=(folder / CONFIG).is_file(),
        )

    def of_another_model(self) -> "TokenizerDeclarations":
        settings = {key: value for key, value in self.settings.items() if key != "model_max_length"}
        return TokenizerDeclarations(self.names, settings)

    def save(self, folder: Path, settings: Mapping[str, Any]) -> None:
        """Write tokenizer_config.json with `settings`, and generation_config.json. Raises OSError."""
        for file, value in ((SETTINGS, settings), (GENERATION_CONFIG, self.generation)):
            if value:
                write_atomic(folder / file, (json.dumps(value, indent=2) + "\n").encode())


def ids_of(value: Any) -> list[int]:
    """Return the token ids in a setting: one, a list, or none."""
    items = value if isinstance(value, list) else [value]
    return [id for id in items if type(id) is int and id >= 0]


def named_tokens(folder: Path, *, of_class: bool = True) -> dict[str, str] | None:
    """Return the special tokens of a folder by role (eos_token, …), with the precedence of `transformers`.

    special_tokens_map.json precedes tokenizer_config.json, unless the latter has added_tokens_decoder; with
    `of_class` the defaults of the tokenizer's class, or the type of model, follow. None without any
    declaration; null is "".
    """
    settings = read_config(folder / SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings = settings | read_config(folder / SPECIAL_MAP)
    kind = settings.get("tokenizer_class") or read_config(folder / CONFIG).get("model_type")
    kind = re.sub("[_-]", "", str(kind).lower()).partition("tokenizer")[0]
    defaults = CLASS_TOKENS.get(kind.rstrip("23") if kind.startswith("gemma") else kind)
    if not settings and defaults is None:
        return None
    extra = settings.get("extra_special_tokens")
    usual = (defaults if of_class else None) or {}
    values = {**usual, **settings, **(extra if isinstance(extra, dict) else {})}
    texts = {
        name: value.get("content") if isinstance(value, dict) else value
        for name, value in values.items()
        if name.endswith("_token")
    }
    return {name: text or "" for name, text in texts.items() if text is None or isinstance(text, str)}


def read_config(file: Path) -> dict[str, Any]:
    """Read a tokenizer_config.json; {} if there is none. Raises CorruptFileError."""
    if not file.is_file():
        return {}
    check_size(file)
    try:
        config = parse_json(file.read_bytes(), foreign=True)
    except ValueError as error:
        raise CorruptFileError(f"{file} is not JSON: replace or delete it") from error
    return config if isinstance(config, dict) else {}


def check_size(file: Path) -> None:
    """Reject a file too large for a tokenizer before it is read, or unreadable. Raises UserError."""
    with reading_from(file, READABLE), open_input(file) as f:
        size = os.fstat(f.fileno()).st_size
    if size > MAX_BYTES:
        raise CorruptFileError(f"{file}: {size} bytes, {MAX_BYTES} is the limit: replace it, or train one")
