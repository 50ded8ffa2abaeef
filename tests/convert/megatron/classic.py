"""Writes full tensors in Megatron Core's names as classic files of ranks: for tests of the import.

Every rank's rows and columns are picked by the formula of the layout; nothing of mlm is used.
"""

import argparse
import random
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.convert.megatron.written import HEADS, arguments

FILE = "model_optim_rng.pt"
ROWS = (
    "embedding.word_embeddings.weight",
    "output_layer",
    "linear_qkv.weight",
    "linear_qkv.bias",
    "linear_fc1.weight",
    "linear_fc1.bias",
)
COLUMNS = "linear_proj.weight", "linear_fc2.weight"
OLD = {
    "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
    "self_attention.linear_qkv.": "self_attention.query_key_value.",
    "self_attention.linear_proj.": "self_attention.dense.",
    "mlp.linear_fc1.layer_norm_": "post_attention_layernorm.",
    "mlp.linear_fc1.": "mlp.dense_h_to_4h.",
    "mlp.linear_fc2.": "mlp.dense_4h_to_h.",
}
OF_2019 = OLD | {
    "self_attention.linear_qkv.": "attention.query_key_value.",
    "self_attention.linear_proj.": "attention.dense.",
}
OF_2023 = OLD | {
    "self_attention.linear_qkv.layer_norm_": "input_norm.",
    "mlp.linear_fc1.layer_norm_": "post_attention_norm.",
}
LAYER_NAMES = {"transformer": OF_2019, "encoder": OLD, "norm": OF_2023}


@dataclass(frozen=True)
class Layout:
    tp: int = 1
    pp: int = 1
    vp: int = 1
    version: float | None = 3.0
    """None leaves the key out, as before September 2020."""
    names: str = "encoder"
    """Generation: transformer (2019 to 2021), encoder (2021 to 2024), norm (2023 to 2024) or core."""
    is_tied: bool = True


def write_classic(
    folder: Path, state: Mapping[str, Tensor], layout: Layout, args: argparse.Namespace | None = None
) -> Path:
    """Write `state`, whose layers are stacked; return the iter folder."""
    step = folder / "iter_0000007"
    for t in range(layout.tp):
        for p in range(layout.pp):
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if layout.pp > 1 else "")
            (step / name).mkdir(parents=True)
            parts = [part_of(state, layout, t, v * layout.pp + p) for v in range(layout.vp)]
            content: dict[str, Any] = {"args": args or arguments(), "iteration": 7}
            if layout.version is not None:
                content["checkpoint_version"] = layout.version
            content |= (
                {"model": parts[0]} if layout.vp == 1 else {f"model{v}": x for v, x in enumerate(parts)}
            )
            content["optimizer"] = {"exp_avg": [torch.randn(3)]}
            content["opt_param_scheduler"] = {"max_lr": np.float64(1.5e-4), "num_steps": 17}
            content["rng_state"] = [
                {
                    "random_rng_state": random.Random(0).getstate(),
                    "np_rng_state": np.random.RandomState(0).get_state(),
                    "torch_rng_state": torch.get_rng_state(),
                }
            ]
            torch.save(content, step / name / FILE)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return step


def edit(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Load a rank file as its owner could, call `change(content)`, and write it again."""
    content = torch.load(path, weights_only=False)
    change(content)
    torch.save(content, path)


def part_of(state: Mapping[str, Tensor], layout: Layout, t: int, stage: int) -> dict[str, Any]:
    stages = layout.pp * layout.vp
    first, last = stage == 0, stage == stages - 1
    flat = dict[str, Tensor]()
    for name, value in state.items():
        if in_layer := re.fullmatch(r"(encoder|decoder)\.layers\.(.+)", name):
            for local, layer in enumerate(value.chunk(stages)[stage]):
                flat[f"{in_layer[1]}.layers.{local}.{in_layer[2]}"] = layer
        elif (first and name.startswith("embedding.")) or (last and not name.startswith("embedding.")):
            flat[name] = value
    if last and not first and "output_layer.weight" not in flat:  # the copy of the tied table
        flat["output_layer.weight"] = state["embedding.word_embeddings.weight"]
    held = {name: shard_of(name, value, layout, t).clone() for name, value in flat.items()}
    return held if layout.names == "core" else old_form(held, layout)


def shard_of(name: str, value: Tensor, layout: Layout, t: int) -> Tensor:
    if "linear_qkv." in name and "layer_norm" not in name:
        # [head][q, k, v][column] of one rank in the order of its version
        rows, version, heads = value.chunk(layout.tp)[t], layout.version or 0, HEADS // layout.tp
        if version >= 2:
            return rows
        split = rows.reshape(heads, 3, -1, *rows.shape[1:])
        return (split.transpose(0, 1) if version == 0 else split.transpose(1, 2)).reshape(rows.shape)
    if name.endswith("linear_fc1.weight") and value.shape[0] != 4 * value.shape[1]:
        # Gated: GPT-2's and BERT's are [4H, H] here; a Llama's [gate, up] is not.
        return torch.cat([half.chunk(layout.tp)[t] for half in value.chunk(2)])
    if any(end in name for end in ROWS) and "layer_norm" not in name:
        return value.chunk(layout.tp)[t]
    return value.chunk(layout.tp, 1)[t] if name.endswith(COLUMNS) else value


def old_form(held: Mapping[str, Tensor], layout: Layout) -> dict[str, Any]:
    """Nested dictionaries in the names before Megatron Core."""
    inner, outside, model = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    final = "final_norm" if layout.names == "norm" else "final_layernorm"
    norm = "norm" if layout.names == "norm" else "layernorm"
    for name, value in held.items():
        if in_layer := re.fullmatch(r"\w+\.(layers\.\d+)\.(.+)", name):
            old = next(
                old + in_layer[2].removeprefix(core)
                for core, old in LAYER_NAMES[layout.names].items()
                if in_layer[2].startswith(core)
            )
            inner[f"{in_layer[1]}.{old}"] = value
        elif ".final_layernorm." in name:
            inner[f"{final}.{name.rpartition('.')[2]}"] = value
        elif name.startswith("embedding."):
            _, table, part = name.split(".")
            outside.setdefault("embedding", {})[table] = {part: value}
        elif name.startswith("pooler."):
            outside.setdefault("pooler", {}).setdefault("dense", {})[name.rpartition(".")[2]] = value
        elif name == "output_layer.weight":
            if layout.is_tied:
                model["word_embeddings_for_head"] = {"weight": value}
            else:
                outside["output_layer"] = {"weight": value}
        elif name == "output_layer.bias":
            model.setdefault("lm_head", {})["bias"] = value
        else:
            head, _, rest = name.replace("layer_norm", norm).partition(".")
            model.setdefault(head, {})[rest] = value
    part = "transformer" if layout.names == "transformer" else "encoder"
    return {"language_model": {part: inner, **outside}, **model}
