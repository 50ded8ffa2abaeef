"""Writes a `transformers` GPT-2 as Megatron-LM lays it out: for tests of the import.

Every rank's rows and columns are picked one by one from the formula of the layout; nothing of mlm is used.
"""

import argparse
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel

VOCAB, POSITIONS, HIDDEN, LAYERS, HEADS = 61, 24, 32, 4, 4
WIDTH = HIDDEN // HEADS
FILE = "model_optim_rng.pt"

Change = Callable[[dict[str, Any]], Any]
"""An edit of what a rank file holds, in place."""


@dataclass(frozen=True)
class Layout:
    """Layout and form in which a checkpoint was written."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    version: float | None = 3.0
    """None leaves the key out, as before September 2020."""
    names: str = "encoder"
    """Generation: transformer (2019 to 2021), encoder (2021 to 2024), norm (2023 to 2024) or core."""
    dtype: torch.dtype = torch.float32
    rows: int = 64
    """Of the token table, padding included."""
    args: Mapping[str, Any] = field(default_factory=dict)
    """Settings that differ from the usual; ... takes one away."""


def random_gpt2(seed: int = 0, **settings: Any) -> GPT2LMHeadModel:
    """transformers' model, every weight, bias and norm of it random."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=VOCAB,
        n_positions=POSITIONS,
        n_embd=HIDDEN,
        n_layer=LAYERS,
        n_head=HEADS,
        bos_token_id=0,
        eos_token_id=0,
        **settings,
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.2)
    return model


@cache
def same_gpt2() -> GPT2LMHeadModel:
    """`random_gpt2`, made once."""
    return random_gpt2()


def write(root: Path, model: GPT2LMHeadModel, layout: Layout, iteration: int = 1000) -> Path:
    """Write `root/iter_…/mp_rank_…/model_optim_rng.pt` and what names it; returns the iter folder."""
    folder = root / f"iter_{iteration:07d}"
    for t in range(layout.tp):
        for p in range(layout.pp):
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if layout.pp > 1 else "")
            (folder / name).mkdir(parents=True)
            save(folder / name / FILE, rank_content(model, layout, t, p, iteration))
    (root / "latest_checkpointed_iteration.txt").write_text(str(iteration))
    return folder


def written(root: Path, layout: Layout | None = None, change: Change | None = None) -> Path:
    """Write `same_gpt2`, with a change made to the content of its first rank; returns the iter folder."""
    folder = write(root / "theirs", same_gpt2(), layout or Layout())
    if change is not None:
        edit(sorted(folder.iterdir())[0] / FILE, change)
    return folder


def language_model(content: dict[str, Any]) -> dict[str, Any]:
    """The dictionaries of tensors in a rank file, where names are not Megatron Core's."""
    found: dict[str, Any] = content["model"]["language_model"]
    return found


def save(path: Path, content: Any, *, zipped: bool = True) -> None:
    """torch.save, with Megatron-LM's enumerations where Python finds classes."""
    with megatron_modules():
        torch.save(content, path, _use_new_zipfile_serialization=zipped)


def edit(path: Path, change: Change) -> None:
    """Load a rank file as its owner could, call `change(content)`, and write it again."""
    with megatron_modules():
        content = torch.load(path, weights_only=False)
        change(content)
        torch.save(content, path)


class ModelType:
    """Pickles as megatron.core.enums.ModelType: by a call of its class."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), ()


class DynamicLossScaler:
    """Pickles as megatron.fp16.loss_scaler.DynamicLossScaler: an object with a state."""

    def __init__(self) -> None:
        self.cur_scale = 2.0**16


CLASSES = {"megatron.core.enums": ModelType, "megatron.fp16.loss_scaler": DynamicLossScaler}


@contextmanager
def megatron_modules() -> Iterator[None]:
    """Within, the modules of `CLASSES` can be imported."""
    parents = {name.rsplit(".", n)[0] for name in CLASSES for n in range(name.count(".") + 1)}
    modules = {name: ModuleType(name) for name in parents}
    for name, cls in CLASSES.items():
        cls.__module__ = name
        setattr(modules[name], cls.__name__, cls)
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in modules:
            del sys.modules[name]


def rank_content(model: GPT2LMHeadModel, layout: Layout, t: int, p: int, iteration: int) -> dict[str, Any]:
    """State that Megatron-LM saves on tensor rank t of pipeline rank p, with random and optimizer state."""
    parts = [model_part(model, layout, t, v * layout.pp + p) for v in range(layout.vp)]
    content: dict[str, Any] = {"args": arguments(layout), "iteration": iteration}
    if layout.version is not None:
        content["checkpoint_version"] = layout.version
    content |= {"model": parts[0]} if layout.vp == 1 else {f"model{v}": part for v, part in enumerate(parts)}
    content["optimizer"] = {"loss_scaler": DynamicLossScaler(), "exp_avg": [torch.randn(3)]}
    content["opt_param_scheduler"] = {"max_lr": np.float64(1.5e-4), "num_steps": 17}
    content["rng_state"] = [
        {
            "random_rng_state": random.Random(0).getstate(),
            "np_rng_state": np.random.RandomState(0).get_state(),
            "torch_rng_state": torch.get_rng_state(),
        }
    ]
    return content


def arguments(layout: Layout) -> argparse.Namespace:
    """The settings of a GPT-2 run of 2022."""
    values = {
        "num_layers": LAYERS,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "ffn_hidden_size": 4 * HIDDEN,
        "max_position_embeddings": POSITIONS,
        "layernorm_epsilon": 1e-5,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "init_method_std": 0.02,
        "openai_gelu": False,
        "onnx_safe": None,
        "bias_gelu_fusion": True,
        "make_vocab_size_divisible_by": 128,
        "padded_vocab_size": layout.rows,
        "tensor_model_parallel_size": layout.tp,
        "pipeline_model_parallel_size": layout.pp,
        "params_dtype": layout.dtype,
        "model_type": ModelType(),
        "save": Path("/checkpoints"),
        "retro": SimpleNamespace(workdir=None),
    } | dict(layout.args)
    return argparse.Namespace(**{key: value for key, value in values.items() if value is not ...})


def model_part(model: GPT2LMHeadModel, layout: Layout, t: int, stage: int) -> dict[str, Any]:
    """The tensors of one stage on tensor rank t, named as in `layout.names`."""
    state = {name: value.to(layout.dtype) for name, value in model.state_dict().items()}
    stages = layout.pp * layout.vp
    each = LAYERS // stages
    table = torch.full((layout.rows, HIDDEN), 7.0, dtype=layout.dtype)  # padding is not zero in real ones
    table[:VOCAB] = state["transformer.wte.weight"]
    mine = table.chunk(layout.tp)[t].clone()
    layers = {}
    for local in range(each):
        layers |= layer_part(state, layout, t, local, stage * each + local)
    first, last = stage == 0, stage == stages - 1
    final = {f"final_layernorm.{kind}": state[f"transformer.ln_f.{kind}"] for kind in ("weight", "bias")}
    if layout.names == "norm":
        final = {name.replace("layernorm", "norm"): value for name, value in final.items()}
    inner = layers | (final if last else {})
    if layout.names == "core":
        outer = {"embedding.word_embeddings.weight": mine} if first else {}
        outer |= {"embedding.position_embeddings.weight": state["transformer.wpe.weight"]} if first else {}
        outer |= {"output_layer.weight": mine} if last and not first else {}
        return outer | {f"decoder.{name}": value for name, value in inner.items()}
    language_model: dict[str, Any] = {}
    if first:
        language_model["embedding"] = {
            "word_embeddings": {"weight": mine},
            "position_embeddings": {"weight": state["transformer.wpe.weight"]},
        }
    language_model["transformer" if layout.names == "transformer" else "encoder"] = inner
    head = {"word_embeddings_for_head": {"weight": mine}} if last and not first else {}
    return {"language_model": language_model} | head


def layer_part(
    state: Mapping[str, Tensor], layout: Layout, t: int, local: int, number: int
) -> dict[str, Any]:
    """Layer `number` on tensor rank t, as layer `local` of its stage."""
    theirs = {
        name: state[f"transformer.h.{number}.{name}"] for name in HF_LAYER
    }  # linear weights are [in, out]
    ours = slice(t * HIDDEN // layout.tp, (t + 1) * HIDDEN // layout.tp)
    wide = slice(t * 4 * HIDDEN // layout.tp, (t + 1) * 4 * HIDDEN // layout.tp)
    rows = qkv_rows(layout, t)
    tensors = {
        "norm1.weight": theirs["ln_1.weight"],
        "norm1.bias": theirs["ln_1.bias"],
        "qkv.weight": theirs["attn.c_attn.weight"][:, rows].t(),
        "qkv.bias": theirs["attn.c_attn.bias"][rows],
        "out.weight": theirs["attn.c_proj.weight"][ours].t(),
        "out.bias": theirs["attn.c_proj.bias"],
        "norm2.weight": theirs["ln_2.weight"],
        "norm2.bias": theirs["ln_2.bias"],
        "up.weight": theirs["mlp.c_fc.weight"][:, wide].t(),
        "up.bias": theirs["mlp.c_fc.bias"][wide],
        "down.weight": theirs["mlp.c_proj.weight"][wide].t(),
        "down.bias": theirs["mlp.c_proj.bias"],
    }
    out: dict[str, Any] = {}
    for name, value in tensors.items():
        module, kind = name.split(".")
        written = NAMES[layout.names][module]
        joint = "_" if written.endswith("layer_norm") else "."
        out[f"layers.{local}.{written}{joint}{kind}"] = value.contiguous()
    if layout.names == "core":
        out[f"layers.{local}.self_attention.linear_qkv._extra_state"] = None
    return out


def qkv_rows(layout: Layout, t: int) -> list[int]:
    """Columns of transformers' c_attn, ordered [q, k, v][head][column], that rank t holds, in its order."""
    heads = range(t * HEADS // layout.tp, (t + 1) * HEADS // layout.tp)
    at = {(j, n, d): (j * HEADS + n) * WIDTH + d for j in range(3) for n in heads for d in range(WIDTH)}
    version = layout.version or 0
    if version == 0:
        return [at[key] for key in sorted(at)]
    if version == 1:
        return [at[key] for key in sorted(at, key=lambda key: (key[1], key[2], key[0]))]
    return [at[key] for key in sorted(at, key=lambda key: (key[1], key[0], key[2]))]


HF_LAYER = tuple(
    f"{module}.{kind}"
    for module in ("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
    for kind in ("weight", "bias")
)
_ENCODER = {
    "norm1": "input_layernorm",
    "qkv": "self_attention.query_key_value",
    "out": "self_attention.dense",
    "norm2": "post_attention_layernorm",
    "up": "mlp.dense_h_to_4h",
    "down": "mlp.dense_4h_to_h",
}
NAMES = {
    "encoder": _ENCODER,
    "transformer": _ENCODER | {"qkv": "attention.query_key_value", "out": "attention.dense"},
    "norm": _ENCODER | {"norm1": "input_norm", "norm2": "post_attention_norm"},
    "core": {
        "norm1": "self_attention.linear_qkv.layer_norm",
        "qkv": "self_attention.linear_qkv",
        "out": "self_attention.linear_proj",
        "norm2": "mlp.linear_fc1.layer_norm",
        "up": "mlp.linear_fc1",
        "down": "mlp.linear_fc2",
    },
}
