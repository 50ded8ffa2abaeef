"""`mlm export gguf`: a Llama, Mistral or Qwen as one file for llama.cpp and what is built on it.

Keys and names of tensors are those of the `gguf` package, what they hold is what llama.cpp's converter
writes. Matrices are of the chosen type, norms and biases float32.
"""

import json
import re
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mlm.checkpoint.commands.config import ExportGGUFConfig
from mlm.checkpoint.commands.conversion_sources import Source, native_source
from mlm.checkpoint.commands.huggingface_target import hf_mapping, token_ids
from mlm.checkpoint.commands.result import show_table
from mlm.data.tokenizer import Tokenizer, merges_of
from mlm.models.llama.huggingface import model_type
from mlm.models.llama.rope import frequencies
from mlm.models.llama.settings import LlamaSettings
from mlm.training.run_folder import GB
from mlm.util.errors import UserError
from mlm.util.extras import load_extra
from mlm.util.results import CREATOR, result_problems, target_name, write_result

EXTRA = "gguf"
ARCHITECTURES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}
FILE_TYPES = {"f32": "ALL_F32", "f16": "MOSTLY_F16", "bf16": "MOSTLY_BF16", "q8_0": "MOSTLY_Q8_0"}
BLOCK = 32
"""Columns of a block of Q8_0, which share a scale."""
PRE_TOKENIZERS = {
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+": "gpt-2",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "llama-bpe",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+": "qwen2",
}
"""Pattern that a tokenizer splits text by -> llama.cpp's name for it."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""llama.cpp's types of tokens."""


@dataclass(frozen=True)
class Vocabulary:
    """A byte-level tokenizer as GGUF holds it."""

    pre: str
    tokens: list[str]
    types: list[int]
    merges: list[str]


def preflight(config: ExportGGUFConfig) -> list[str]:
    """Return what is wrong with the checkpoint and `out`; no tensor is read."""
    try:
        load_extra("gguf", "mlm export gguf", EXTRA)
        source = native_source(config.ckpt)
        hf_mapping(source)
        if problem := model_problem(source):
            return [f"{source.path}: {problem}"]
        if source.tokenizer is not None:
            vocabulary(source.tokenizer, source.model.vocab_size)
    except UserError as error:
        return list(error.problems)
    return result_problems(config.out)


def model_problem(source: Source) -> str | None:
    """Return why llama.cpp has no such model."""
    model = source.model
    if model.kind != "llama" or model.head != "language_model" or model.architecture.experts:
        return f"model.kind={model.kind} head={model.head}: supported are dense Llama, Mistral and Qwen"
    if LlamaSettings.of(model).rope_scaling not in ("default", "llama3"):
        return "its model.options.rope_scaling is not supported; supported: default, llama3"
    if model.activation != "silu":
        return f"model.activation={model.activation} is not supported; supported: silu"
    return None


def run(config: ExportGGUFConfig) -> None:
    """Write the file, read it back and print a table. Raises UserError."""
    gguf: Any = load_extra("gguf", "mlm export gguf", EXTRA)
    source = native_source(config.ckpt)
    source.digests()
    writer = prepare(gguf, source, config.type)
    write_result(config.out, partial(write, gguf, writer))
    size = sum(tensor.nbytes for tensors in writer.tensors for tensor in tensors.values())
    columns: dict[str, object] = {
        "architecture#": writer.arch,
        "type#": config.type,
        "GB#": f"{size / GB:.3g}",
    }
    notes = [] if source.tokenizer else [f"no tokenizer: {source.path} has none"]
    show_table(f"export gguf · {source.path}", columns, notes, f"written to {target_name(config.out)}")


def prepare(gguf: Any, source: Source, kind: str) -> Any:
    """Return a writer that holds all keys and tensors."""
    architecture = ARCHITECTURES[model_type(source.model)]
    writer = gguf.GGUFWriter(None, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[architecture]])
    writer.add_quantized_by(CREATOR)  # by which a later export knows the file
    add_settings(gguf, writer, source, kind)
    if source.tokenizer is not None:
        add_tokenizer(gguf, writer, source, source.tokenizer)
    mapping = hf_mapping(source)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[architecture], source.model.num_layers)
    settings = LlamaSettings.of(source.model)
    if settings.rope_scaling == "llama3":
        writer.add_tensor(names.get_name("rope_freqs") + ".weight", rope_factors(source))
    for ours, location in mapping.locations(source.model):
        for theirs, value in zip(location.names, location.to_theirs(source.whole(ours)), strict=True):
            stored = mapping.stored_name(theirs, source.model.head)
            name = names.get_name(stored, try_suffixes=(".weight", ".bias"))
            heads = {"q_proj": source.model.num_heads, "k_proj": settings.num_kv_heads}
            module = theirs.split(".")[-2]
            if architecture == "LLAMA" and module in heads:
                value = interleave(value, heads[module])
            data, dtype = encoded(gguf, value, kind)
            writer.add_tensor(name, data, raw_dtype=dtype)
    return writer


def write(gguf: Any, writer: Any, file: BinaryIO) -> None:
    """Write a prepared file to one that is open. Raises OSError; a pipe has no position to align tensors."""
    writer.fout, writer.state = [file], gguf.gguf_writer.WriterState.EMPTY
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()


def interleave(value: Tensor, heads: int) -> Tensor:
    """Reorder the rows of a head from halves to pairs: llama.cpp turns neighbours for this architecture."""
    turned: Tensor = value.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
    return turned


def encoded(gguf: Any, value: Tensor, kind: str) -> tuple[NDArray[Any], Any]:
    """Return a tensor's numbers as stored, and their type. Vectors are float32."""
    numbers, types = value.float().contiguous().numpy(), gguf.GGMLQuantizationType
    if kind == "f32" or value.ndim == 1:
        return numbers, types.F32
    if kind == "q8_0" and value.shape[-1] % BLOCK:
        return gguf.quants.quantize(numbers, types.F16), types.F16
    return gguf.quants.quantize(numbers, types[kind.upper()]), types[kind.upper()]


def add_settings(gguf: Any, writer: Any, source: Source, kind: str) -> None:
    """Add the model's name, shape and rotary positions."""
    model, settings = source.model, LlamaSettings.of(source.model)
    writer.add_type("model")
    writer.add_name(str(source.manifest.state["config"]["name"]))
    writer.add_file_type(gguf.LlamaFileType[FILE_TYPES[kind]])
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_vocab_size(model.vocab_size)
    writer.add_context_length(model.max_positions)
    writer.add_embedding_length(model.hidden_size)
    writer.add_block_count(model.num_layers)
    writer.add_feed_forward_length(model.ffn_size)
    writer.add_head_count(model.num_heads)
    writer.add_head_count_kv(settings.num_kv_heads)
    writer.add_layer_norm_rms_eps(model.layer_norm_eps)
    writer.add_key_length(settings.head_dim)
    writer.add_value_length(settings.head_dim)
    writer.add_rope_dimension_count(settings.head_dim)
    writer.add_rope_freq_base(settings.rope_theta)
    if settings.window:
        writer.add_sliding_window(settings.window)


def rope_factors(source: Source) -> NDArray[np.float32]:
    """Return what llama.cpp divides each frequency by, for Llama 3's long contexts."""
    settings, device = LlamaSettings.of(source.model), torch.device("cpu")
    scaled = frequencies(settings, torch.float64, device)[0]
    plain = frequencies(replace(settings, rope_scaling="default"), torch.float64, device)[0]
    found: NDArray[np.float32] = (plain / scaled).float().numpy()
    return found


def add_tokenizer(gguf: Any, writer: Any, source: Source, tokenizer: Tokenizer) -> None:
    """Add tokens, their types, merges, special tokens and the chat template."""
    found, ids = vocabulary(tokenizer, source.model.vocab_size), token_ids(source)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(found.pre)
    writer.add_token_list(found.tokens)
    writer.add_token_types(found.types)
    writer.add_token_merges(found.merges)
    for add, id in (
        (writer.add_bos_token_id, ids.bos),
        (writer.add_eos_token_id, ids.eod),
        (writer.add_pad_token_id, ids.pad),
    ):
        if id is not None:
            add(id)
    writer.add_add_bos_token(False)
    if tokenizer.chat_template is not None:
        writer.add_chat_template(tokenizer.chat_template.source)


def vocabulary(tokenizer: Tokenizer, size: int) -> Vocabulary:
    """Return a tokenizer's tokens, padded to the model's vocabulary.

    Raises UserError if it is not byte-level.
    """
    content = json.loads(tokenizer.content)
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or model.get("byte_fallback") or "merges" not in model:
        raise UserError("tokenizer: only byte-level BPE tokenizers are exported to GGUF")
    pre = pre_tokenizer(content.get("pre_tokenizer"))
    if pre is None:
        raise UserError("tokenizer: llama.cpp has no name for how this tokenizer splits text")
    tokens = [f"[PAD{id}]" for id in range(size)]
    types = [UNUSED] * size
    for token, id in model["vocab"].items():
        tokens[id], types[id] = token, NORMAL
    for added in content.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = CONTROL if added["special"] else USER_DEFINED
    merges = [" ".join(re.sub(" ", "\u0120", part) for part in pair) for pair in merges_of(model)]
    return Vocabulary(pre, tokens, types, merges)


def pre_tokenizer(content: Any) -> str | None:
    """Return llama.cpp's name for a pre-tokenizer of `tokenizers`; None if it has none."""
    steps = content.get("pretokenizers", [content]) if isinstance(content, dict) else []
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits"):
        return "smollm" if steps[1].get("use_regex", True) else None
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return PRE_TOKENIZERS.get(str(steps[0].get("pattern", {}).get("Regex")))
    return None
