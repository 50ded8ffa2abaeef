"""Llama 3 and Qwen 3 as torchtitan names and orders them in a DCP folder, read and written.

Such a folder records no sizes of heads and no settings: its model comes from a config.json. A tied output
layer is stored too. Written are the names of torchtitan 0.2; the names of 2026, attention.qkv_linear.wq and
lm_head, are read. Source: pytorch/torchtitan, state_dict_adapter.py of models/llama3 and models/qwen3.
"""

from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from mlm.checkpoint.native.compare import are_equal
from mlm.checkpoint.native.slices import Read, Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.dcp.metadata import read_metadata
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.writer import DCPTensor
from mlm.convert.megatron.model import stored_parameters
from mlm.convert.row_layouts import RowLayout, RowLayouts, reorder_rows, short_name, split_layer
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import LlamaSettings, num_blocks, unusual_form
from mlm.models.shape import is_tied
from mlm.util.errors import CorruptFileError, UserError

TORCHTITAN = {
    "token.weight": "tok_embeddings.weight",
    "final_norm.weight": "norm.weight",
    "output.weight": "output.weight",
    "attention_norm.weight": "attention_norm.weight",
    "attention.q.weight": "attention.wq.weight",
    "attention.k.weight": "attention.wk.weight",
    "attention.v.weight": "attention.wv.weight",
    "attention.query_norm.weight": "attention.q_norm.weight",
    "attention.key_norm.weight": "attention.k_norm.weight",
    "attention.out.weight": "attention.wo.weight",
    "mlp_norm.weight": "ffn_norm.weight",
    "mlp.gate.weight": "feed_forward.w1.weight",
    "mlp.up.weight": "feed_forward.w3.weight",
    "mlp.down.weight": "feed_forward.w2.weight",
}
"""Names in Megatron's manner, with queries, keys, values, gates and inputs apart -> torchtitan's."""
TOKEN_TABLE = TORCHTITAN["token.weight"]
OUTPUT = TORCHTITAN["output.weight"]


def row_layouts(model: ModelConfig) -> RowLayouts:
    """Return the tensors of attention and MLP, ours and theirs.

    Its Llama rotates dimensions 2i and 2i + 1 of a head, ours i and i + D/2; its Qwen 3 is like ours.
    """
    settings = LlamaSettings.of(model)
    half, kv = settings.head_dim // 2, settings.num_kv_heads

    def halves(name: str, heads: int) -> tuple[tuple[str, int], ...]:
        return ((f"{name}.first", heads * half), (f"{name}.second", heads * half))

    def layout(name: str, heads: int) -> RowLayout:
        return RowLayout(halves(name, heads), heads if settings.qk_norm else heads * half)

    v, gate, up = ("v", kv * settings.head_dim), ("gate", model.ffn_size), ("up", model.ffn_size)
    ours = {
        "attention.query.weight": RowLayout(halves("q", model.num_heads), model.num_heads),
        "attention.kv.weight": RowLayout((*halves("k", kv), v), kv),
        "mlp.up.weight": RowLayout((gate, up), num_blocks(model)),
    }
    theirs = {
        "attention.q.weight": layout("q", model.num_heads),
        "attention.k.weight": layout("k", kv),
        "attention.v.weight": RowLayout((v,), 1),
        "mlp.gate.weight": RowLayout((gate,), 1),
        "mlp.up.weight": RowLayout((up,), 1),
    }
    return RowLayouts(ours, theirs)


def stored_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shapes of torchtitan's tensors by our names for them. Raises UserError if it has none."""
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
    return {name: entry.shape for name, entry in stored_parameters(model, row_layouts(model)).items()}


def torchtitan_name(name: str) -> str:
    layer, short = split_layer(name)
    return TORCHTITAN[short] if layer is None else f"layers.{layer}.{TORCHTITAN[short]}"


def usual_name(name: str) -> str:
    """Return the name that torchtitan 0.2 has for a stored tensor."""
    short = name.removeprefix("model.").replace(".attention.qkv_linear.", ".attention.")
    return OUTPUT if short == "lm_head.weight" else short


class TorchtitanReader:
    """Reads our parameters from a folder with torchtitan's names."""

    def __init__(self, folder: Path, model: ModelConfig) -> None:
        """Compare names and shapes. Raises UserError and CorruptFileError."""
        self.model, self.shapes, self.layouts = model, stored_shapes(model), row_layouts(model)
        others = ("optimizer.", "lr_scheduler", "dataloader", "train_state", "freqs_cis")
        tensors = read_metadata(folder, lambda name: not name.startswith(others))
        stored = {usual_name(name): name for name in tensors}
        wanted = {torchtitan_name(name): shape for name, shape in self.shapes.items()}
        if is_tied(model) and OUTPUT in stored:
            wanted[OUTPUT] = self.shapes["token.weight"]
        for theirs in sorted({*stored, *wanted}):
            held = list(tensors[stored[theirs]].shape) if theirs in stored else "missing"
            needed = list(wanted[theirs]) if theirs in wanted else "none"
            if held != needed:
                raise CorruptFileError(
                    f"{folder}: {ascii(theirs)[1:100]} is {held}, {needed} is needed: name the config of "
                    "this model, or copy the whole folder again"
                )
        self.names = {name: stored[torchtitan_name(name)] for name in self.shapes}
        self.reader = DCPReader(folder, tensors)
        if is_tied(model) and OUTPUT in stored:
            output = partial(self.reader.read, stored[OUTPUT], dtype=torch.float32)
            if not are_equal(partial(self._load, "token.weight"), output, self.shapes["token.weight"]):
                raise UserError(
                    f"{folder}: {stored[OUTPUT]} differs from the token table, to which its config "
                    "ties it: set tie_word_embeddings=false in its config.json"
                )

    def read(self, name: str, region: Region) -> Tensor:
        if short_name(name) not in self.layouts.ours:
            return self._load(name, region)

        def load(stored: str) -> Tensor:
            return self._load(stored, Region.whole(self.shapes[stored]))

        value = reorder_rows(name, self.layouts.theirs, self.layouts.ours, load)
        return value[region.within(Region.whole(value.shape))]

    def _load(self, name: str, region: Region) -> Tensor:
        return self.reader.read(self.names[name], region, torch.float32)


def torchtitan_tensors(
    model: ModelConfig, read: Read, dtype: torch.dtype
) -> tuple[dict[str, DCPTensor], Read]:
    """Return torchtitan's tensors for a DCP folder, and what computes them. Raises UserError."""
    shapes, layouts = stored_shapes(model), row_layouts(model)
    ours = {name: entry.shape for name, entry in parameters(model).items()}
    names = {torchtitan_name(name): name for name in shapes}
    if is_tied(model):
        names[OUTPUT] = "token.weight"

    def read_theirs(theirs: str, region: Region) -> Tensor:
        name = names[theirs]
        if short_name(name) not in layouts.theirs:
            return read(name, region).to(dtype)
        load = lambda part: read(part, Region.whole(ours[part]))  # noqa: E731
        return reorder_rows(name, layouts.ours, layouts.theirs, load).to(dtype)

    regions = {name: Region.whole(shape) for name, shape in shapes.items()}
    tensors = {theirs: DCPTensor(shapes[n], dtype, (regions[n],)) for theirs, n in names.items()}
    return tensors, read_theirs
