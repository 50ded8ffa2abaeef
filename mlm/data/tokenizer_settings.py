"""Special tokens as the files beside a tokenizer declare them."""

import os
from pathlib import Path
from typing import Any

from mlm.util.errors import CorruptFileError, reading_from
from mlm.util.files import READABLE, open_input, parse_json

EOD = "<|endoftext|>"
"""End of document, GPT-2's only special token."""
CONFIG, GENERATION_CONFIG, SETTINGS = "config.json", "generation_config.json", "tokenizer_config.json"
"""Files of a model folder beside its tokenizer."""
SPECIAL_MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
"""Files of special tokens by their names, and of added tokens, that older folders have."""
MAX_BYTES = 1 << 28  # 256 MiB of tokenizer.json: the largest vocabularies in use need 40
ENDOFTEXT = dict.fromkeys(("bos_token", "eos_token", "unk_token"), EOD)
QWEN = {"eos_token": EOD, "unk_token": EOD, "pad_token": EOD}
LLAMA = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
CLASS_TOKENS: dict[str, dict[str, str]] = {
    **dict.fromkeys(("gpt2", "gptneo", "gptneox", "gptj", "codegen", "phi", "opt", "bigcode"), ENDOFTEXT),
    **dict.fromkeys(("qwen2", "qwen3"), QWEN),
    **dict.fromkeys(("llama", "codellama"), LLAMA),
    "gemma": {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"},
    "cohere": {"bos_token": "<BOS_TOKEN>", "eos_token": "<|END_OF_TURN_TOKEN|>", "pad_token": "<PAD>"},
}
"""Special tokens of classes of tokenizers in `transformers`, where no file names others."""


def named_tokens(folder: Path) -> dict[str, str] | None:
    """Return the special tokens of a folder by name (eos_token, …), in the order of `transformers`.

    special_tokens_map.json comes before tokenizer_config.json, unless that holds added_tokens_decoder; what
    neither says is the default of the tokenizer's class, or of the type of model. None if nothing says any;
    a null is "".
    """
    settings = read_config(folder / SETTINGS)
    if "added_tokens_decoder" not in settings:
        settings = settings | read_config(folder / SPECIAL_MAP)
    kind = settings.get("tokenizer_class") or read_config(folder / CONFIG).get("model_type")
    kind = str(kind).lower().replace("_", "").partition("tokenizer")[0]
    defaults = CLASS_TOKENS.get(kind.rstrip("23") if kind.startswith("gemma") else kind)
    if not settings and defaults is None:
        return None
    extra = settings.get("extra_special_tokens")
    values = {**(defaults or {}), **settings, **(extra if isinstance(extra, dict) else {})}
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
