"""Llama 3 and Qwen 3 in a DCP folder with torchtitan's names, read and written.

Such a folder records no head sizes and no settings: the model comes from a config.json. A tied output layer
is stored too. Names of torchtitan 0.2 are written; the names of 2026, attention.qkv_linear.wq and lm_head,
are read too. Source: pytorch/torchtitan, state_dict_adapter.py of models/llama3 and models/qwen3.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.format import JSON
from mlm.checkpoint.native.slices import Read, Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.metadata import read_metadata
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.writer import DCPTensor
from mlm.convert.huggingface import llama
from mlm.convert.huggingface.llama_variants import VARIANTS
from mlm.convert.huggingface.mapping import declared_ids
from mlm.convert.locations import ForeignModel, Location, check_shapes, foreign_tensors
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, unusual_form
from mlm.models.shape import is_tied
from mlm.util.errors import UserError

TORCHTITAN = {
    "embed_tokens": "tok_embeddings",
    "norm": "norm",
    "lm_head": "output",
    "input_layernorm": "attention_norm",
    "self_attn.q_proj": "attention.wq",
    "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.q_norm": "attention.q_norm",
    "self_attn.k_norm": "attention.k_norm",
    "self_attn.o_proj": "attention.wo",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "feed_forward.w1",
    "mlp.up_proj": "feed_forward.w3",
    "mlp.down_proj": "feed_forward.w2",
}
"""Modules of `transformers`, in a layer or outside of it -> torchtitan's."""
TOKEN_TABLE, OUTPUT = "tok_embeddings.weight", "output.weight"


def locations(model: ModelConfig) -> dict[str, Location]:
    """Return the location of every parameter. Raises UserError if torchtitan has no such model.

    torchtitan's Llama rotates dimensions 2i and 2i + 1 of a head together, its Qwen 3 is like mlm.
    """
    if model.kind != "llama":
        raise UserError(f"model.kind={model.kind}: torchtitan's names are of Llama 3 and Qwen 3")
    settings = LlamaSettings.of(model)
    if settings.num_experts:
        raise UserError("torchtitan has no such model: it has experts, which are converted to hf alone")
    if settings.qkv_bias or settings.window or settings.rotary_fraction != 1:
        raise UserError(
            "torchtitan has no such model: it has biases, a window or a rotary fraction, which torchtitan's "
            "Llama 3 and Qwen 3 lack"
        )
    if form := unusual_form(settings):
        raise UserError(f"torchtitan has no such model: model.options.{form}; only hf holds it")
    row = replace(VARIANTS["llama"], rotates_neighbours=not settings.qk_norm)
    module, tensors = re.compile(r"^(layers\.\d+\.)?(.+)\."), dict[str, Location]()
    for parameter, location in llama.locations(model, row):
        names = [module.sub(lambda m: f"{m[1] or ''}{TORCHTITAN[m[2]]}.", name) for name in location.names]
        tensors[parameter] = replace(location, names=tuple(names))
    return tensors


def open_torchtitan(folder: Path, model: ModelConfig, declared: Mapping[str, JSON]) -> ForeignModel:
    """Open a folder and check names and shapes; `declared` holds token ids.

    Raises UserError and CorruptFileError.
    """
    entries, mapping = parameters(model), locations(model)
    other_prefixes = ("optimizer.", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
    tensors = read_metadata(folder, lambda name: not name.startswith(other_prefixes))
    reader, stored = DCPReader(folder, tensors), dict[str, str]()
    for name in tensors:
        short = name.removeprefix("model.").replace(".attention.qkv_linear.", ".attention.")
        stored[OUTPUT if short == "lm_head.weight" else short] = name
    expected = {name: tensor.shape for name, tensor in foreign_tensors(mapping.items(), entries).items()}
    if has_copy := is_tied(model) and OUTPUT in stored:
        expected[OUTPUT] = expected[TOKEN_TABLE]
    shapes = {name: tensors[full_name].shape for name, full_name in stored.items()}
    check_shapes(folder, shapes, expected, "name the config of this model, or copy the whole folder again")

    def load(name: str, region: Region) -> Tensor:
        return reader.read(stored[name], region, torch.float32)

    if has_copy and not are_equal(partial(load, TOKEN_TABLE), partial(load, OUTPUT), expected[OUTPUT]):
        raise UserError(
            f"{folder}: {stored[OUTPUT]} differs from the token table, to which its config ties it: set "
            "tie_word_embeddings=false in its config.json"
        )
    return ForeignModel(
        format="torchtitan",
        path=folder,
        model=model,
        files=reader,
        locations=mapping,
        shapes={name: entry.shape for name, entry in entries.items()},
        load=load,
        token_ids=declared_ids(declared, model.vocab_size),
    )


def torchtitan_tensors(
    model: ModelConfig, load: Read, dtype: torch.dtype
) -> tuple[dict[str, DCPTensor], Read]:
    """Return torchtitan's tensors for a DCP folder, and a function that computes them. Raises UserError."""
    stored = foreign_tensors(locations(model).items(), parameters(model))
    if is_tied(model):
        stored[OUTPUT] = stored[TOKEN_TABLE]
    tensors = {name: DCPTensor(x.shape, dtype, (Region.full(x.shape),)) for name, x in stored.items()}
    return tensors, lambda name, region: stored[name].compute(load).to(dtype)
