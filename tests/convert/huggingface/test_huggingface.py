"""Folders of `transformers`: which are read, and what is said about the others."""

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.parameters import parameters
from mlm.convert.huggingface.folder import read_model, weight_files
from mlm.convert.huggingface.gpt2 import locations, read_config, write_config
from mlm.convert.huggingface.mapping import Location, TokenIds
from mlm.convert.huggingface.tensors import HFTensors
from mlm.util.errors import ConfigError, UserError
from tests.convert.hf_models import MODEL, SHAPE, edit_config, edit_tensors, hub_cache, make_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A sound model."""
    make_model(tmp_path / "model")
    return tmp_path / "model"


def read(folder: Path) -> HFTensors:
    """All that is checked before a tensor is imported."""
    tensors = HFTensors(read_model(folder))
    tensors.check()
    return tensors


def test_every_parameter_has_a_location_of_its_own() -> None:
    found = dict(locations(MODEL))
    assert found.keys() == parameters(MODEL).keys()
    assert len({location.names for location in found.values()}) == len(found)


def test_qkv_is_regrouped_by_head() -> None:
    """Rows of theirs are numbered part * H + head * D + d; ours are asked for by that formula."""
    heads, dim = 3, 2
    hidden = heads * dim
    ours = Location(("c_attn.bias",), num_heads=heads).to_ours([torch.arange(3 * hidden)])
    want = [part * hidden + h * dim + d for h in range(heads) for part in range(3) for d in range(dim)]
    assert ours.tolist() == want


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("heads", [None, 4])
def test_location_is_undone_bit_for_bit(transposed: bool, heads: int | None) -> None:
    location = Location(("x",), transposed, heads)
    theirs = torch.randn(24, 24 if transposed else 5)
    assert torch.equal(location.to_theirs(location.to_ours([theirs]))[0], theirs)


def test_config_is_read(folder: Path) -> None:
    model = read_model(folder)
    assert (model.config, model.notes) == (MODEL, ())


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu2"])
def test_config_survives_both_ways(activation: Any) -> None:
    model = replace(MODEL, activation=activation)
    assert read_config(write_config(model, TokenIds(0)), "") == (model, [])


def test_missing_keys_have_the_defaults_of_transformers() -> None:
    model, _ = read_config({}, "")
    assert (model.num_layers, model.hidden_size, model.vocab_size) == (12, 768, 50257)
    assert (model.max_positions, model.hidden_dropout, model.layer_norm_eps) == (1024, 0.1, 1e-5)


def test_dropout_of_embeddings_that_differs_is_noted() -> None:
    model, notes = read_config({"embd_pdrop": 0.3, "resid_pdrop": 0.2}, "")
    assert model.hidden_dropout == 0.2
    assert "embd_pdrop=0.3" in notes[0]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("activation_function", "relu"),
        ("scale_attn_weights", False),
        ("pruned_heads", {"0": [1]}),
        ("is_causal", False),
        ("transformers_weights", "../other.safetensors"),
        ("n_layer", 10**15),
        ("n_embd", True),
        ("vocab_size", "many"),
        ("layer_norm_epsilon", float("nan")),
        ("n_head", 5),
    ],
)
def test_what_our_model_cannot_express_is_rejected_by_key_and_value(
    folder: Path, key: str, value: Any
) -> None:
    edit_config(folder, **{key: value})
    with pytest.raises(ConfigError) as caught:
        read_model(folder)
    (problem,) = caught.value.problems
    assert key in problem
    assert "config.json" in problem


Tensors = dict[str, Tensor]


def duplicate(tensors: Tensors) -> None:
    tensors["wpe.weight"] = tensors["transformer.wpe.weight"].clone()


def untie(tensors: Tensors) -> None:
    tensors["lm_head.weight"] = tensors["transformer.wte.weight"].clone()
    tensors["lm_head.weight"][330, 3] += 1


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda t: t.pop("transformer.h.1.ln_2.bias"), r"no tensor h\.1\.ln_2\.bias"),
        (lambda t: t.update({"v_head.weight": torch.ones(2, 24)}), "v_head.weight is no parameter"),
        (lambda t: t.update({"transformer.h.3.ln_1.bias": torch.ones(24)}), r"h\.3\.ln_1\.bias is no"),
        (lambda t: t.update({"transformer.wpe.weight": torch.ones(47, 24)}), r"wpe\.weight is \[47, 24\]"),
        (lambda t: t.update({"transformer.ln_f.bias": torch.ones(24).double()}), r"ln_f\.bias is F64"),
        (duplicate, r"wpe\.weight is in .* and in"),
        (untie, r"lm_head\.weight differs from wte\.weight"),
        (lambda t: t.update({"lm_head.weight": torch.ones(0, 24)}), "differs from"),
    ],
)
def test_tensors_that_are_not_the_model_are_named(
    folder: Path, edit: Callable[[Tensors], Any], said: str
) -> None:
    edit_tensors(folder, edit)
    with pytest.raises(UserError, match=said):
        read(folder)


def test_old_names_masks_and_an_equal_output_layer_are_accepted(folder: Path) -> None:
    """As in openai-community/gpt2: no prefix, and the causal masks stored."""

    def old(tensors: Tensors) -> None:
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 48, 48, dtype=torch.uint8)
        tensors["lm_head.weight"] = tensors["wte.weight"].clone()

    edit_config(folder, tie_word_embeddings=False)
    edit_tensors(folder, old)
    want = load_file(folder / "model.safetensors")["lm_head.weight"]
    assert torch.equal(read(folder).read("token.weight", Region((7, 0), (2, 24))), want[7:9])


def test_untied_output_layer_that_is_not_there_is_rejected(folder: Path) -> None:
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(UserError, match="tie_word_embeddings=false"):
        read(folder)


def test_shard_that_is_gone_is_named(tmp_path: Path) -> None:
    make_model(tmp_path, shard=20_000)
    gone = next(tmp_path.glob("model-00002-of-*.safetensors"))
    gone.unlink()
    with pytest.raises(UserError, match=f"{gone.name}: missing"):
        weight_files(tmp_path)


def test_pipe_in_place_of_a_file_does_not_block(folder: Path) -> None:
    (folder / "config.json").unlink()
    os.mkfifo(folder / "config.json")
    with pytest.raises(UserError, match="no plain file"):
        read_model(folder)


def test_snapshot_of_the_hub_links_to_its_blobs(folder: Path) -> None:
    snapshot = hub_cache(folder)
    assert (snapshot / "config.json").is_symlink()
    assert read(snapshot).model.config == MODEL


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_becomes_float32(folder: Path, dtype: torch.dtype) -> None:
    want = {}

    def halve(tensors: Tensors) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor.to(dtype)
        want["bias"] = tensors["transformer.ln_f.bias"].float()

    edit_tensors(folder, halve)
    found = read(folder).read("final_norm.bias", Region((0,), (SHAPE["n_embd"],)))
    assert found.dtype == torch.float32
    assert torch.equal(found, want["bias"])
