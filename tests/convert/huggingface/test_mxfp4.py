"""Experts of gpt-oss in MXFP4: read as `transformers` dequantises them, and rejected where damaged."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import mlm
from mlm.convert.locations import dequantise_mxfp4
from mlm.util.errors import UserError
from tests.convert.hf_models import edit_config, edit_tensors, export_model, import_model

EXPERTS, HIDDEN, FFN, LAYERS = 3, 64, 32, 2
WEIGHTS = {"gate_up_proj": (2 * FFN, HIDDEN), "down_proj": (HIDDEN, FFN)}
"""Rows and columns of an expert's weights."""


def quantised_folder(folder: Path) -> None:
    """Save a tiny gpt-oss whose experts have random codes and scales from 1/8 to 1/64."""
    torch.manual_seed(0)
    config = transformers.GptOssConfig(
        **{"vocab_size": 97, "hidden_size": HIDDEN, "intermediate_size": FFN, "num_hidden_layers": LAYERS},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "num_local_experts": EXPERTS},
        **{"num_experts_per_tok": 2, "max_position_embeddings": 64, "sliding_window": 5},
    )
    transformers.GptOssForCausalLM(config).save_pretrained(folder)
    edit_config(folder, quantization_config={"quant_method": "mxfp4"})

    def quantise(tensors: dict[str, Tensor]) -> None:
        for layer in range(LAYERS):
            for name, (rows, columns) in WEIGHTS.items():
                stored = f"model.layers.{layer}.mlp.experts.{name}"
                del tensors[stored]
                sizes = (EXPERTS, rows, columns // 32)
                tensors[f"{stored}_blocks"] = torch.randint(256, (*sizes, 16), dtype=torch.uint8)
                tensors[f"{stored}_scales"] = torch.randint(121, 125, sizes, dtype=torch.uint8)

    edit_tensors(folder, quantise)


def test_every_code_and_exponent_is_the_number_of_transformers() -> None:
    """Exponents up to the one of which the largest code is no float32 any more."""
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 1, 16).repeat(1, 1, 253, 1)
    scales = torch.arange(253, dtype=torch.uint8).view(1, 1, 253).repeat(1, 16, 1)
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2)
    assert torch.equal(dequantise_mxfp4(blocks, scales), theirs)


def test_a_quantised_folder_has_the_logits_of_transformers_and_is_imported(tmp_path: Path) -> None:
    """The import compares logits itself; its export holds the numbers, which transformers loads."""
    source, tokens = tmp_path / "model", torch.arange(30)[None]
    quantised_folder(source)
    settings: dict[str, Any] = {"quantization_config": transformers.Mxfp4Config(dequantize=True)}
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **settings)
    want = theirs(tokens).logits
    assert (mlm.load(source, device="cpu").logits(tokens) - want).abs().max() <= 1e-5
    out = export_model(import_model(source, tmp_path / "run"), tmp_path / "out")
    again = transformers.AutoModelForCausalLM.from_pretrained(out)
    torch.testing.assert_close(again(tokens).logits, want, rtol=0, atol=1e-6)
    held, stored = load_file(source / "model.safetensors"), load_file(out / "model.safetensors")
    name = "model.layers.1.mlp.experts.down_proj"
    numbers = dequantise_mxfp4(held[f"{name}_blocks"], held[f"{name}_scales"])
    assert torch.equal(stored[name], numbers.transpose(1, 2))


SCALES = "model.layers.0.mlp.experts.down_proj_scales"
DAMAGES: dict[str, tuple[Any, str]] = {
    "no scales": (
        lambda tensors: tensors.pop(SCALES),
        "holds no tensor layers.0.mlp.experts.down_proj_scales",
    ),
    "an exponent of NaN": (lambda tensors: tensors[SCALES].fill_(255), "down_proj_scales is not finite"),
    "scales of another shape": (
        lambda tensors: tensors.update({SCALES: tensors[SCALES][:, :8]}),
        "down_proj_scales is [3, 8, 1], config.json makes it [3, 64, 1]",
    ),
}


@pytest.mark.parametrize("case", DAMAGES)
def test_damaged_weights_are_rejected_in_one_line(tmp_path: Path, case: str) -> None:
    damage, said = DAMAGES[case]
    quantised_folder(tmp_path)
    edit_tensors(tmp_path, damage)
    with pytest.raises(UserError, match=re.escape(said)) as caught:
        mlm.load(tmp_path, device="cpu")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("changed", [{"quantization_config": {"quant_method": "fp8"}}, {"swiglu_limit": 0.0}])
def test_other_forms_of_gpt_oss_are_rejected(tmp_path: Path, changed: dict[str, Any]) -> None:
    quantised_folder(tmp_path)
    edit_config(tmp_path, **changed)
    with pytest.raises(UserError, match=next(iter(changed))):
        mlm.load(tmp_path, device="cpu")
