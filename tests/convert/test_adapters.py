"""Adapters as `peft` loads them, and merged into their base."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard
from peft import PeftModel
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from mlm.api import export_hf
from mlm.cli import main
from mlm.convert.source import open_source
from mlm.finetune import training
from mlm.inference.trained import load_trained
from mlm.models.backbone import Inputs
from mlm.models.config import LoraConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.finetune.chats import chatting, write_chats, write_llama
from tests.finetune.runs import BERT, ROBERTA, finetune, finetuning, write_data, write_model

TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    write_llama(made / "llama")
    write_chats(made / "chat", train=4, validation=2)
    for name, targets in (("out", ("all-linear",)), ("qv", ("q_proj", "v_proj"))):
        lora = LoraConfig(rank=4, alpha=32.0, targets=targets, dora=name == "qv")
        config = replace(chatting(made), lora=lora)
        training.run(replace(config, out=str(made / name)), ParallelContext())
        export_hf(made / name, made / f"{name}-peft")
    return made


def ours(ckpt: Path) -> Tensor:
    model = load_trained(open_source(str(ckpt)), ParallelConfig(), PrecisionConfig(), ParallelContext()).model
    logits: Tensor = model.chunks[0].logits(TOKENS)  # type: ignore[operator]
    return logits


@torch.no_grad()
def theirs(folder: Path, adapter: Path | None = None) -> Tensor:
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = model if adapter is None else PeftModel.from_pretrained(model, adapter)
    logits: Tensor = model(TOKENS).logits
    return logits


@pytest.mark.parametrize("name", ["out", "qv"])
def test_peft_loads_what_is_exported(folder: Path, name: str) -> None:
    assert not torch.allclose(theirs(folder / "llama"), ours(folder / name), atol=1e-3)
    torch.testing.assert_close(theirs(folder / "llama", folder / f"{name}-peft"), ours(folder / name))


@pytest.mark.parametrize("name", ["out", "qv"])
def test_merged_weights_are_a_model_of_transformers(folder: Path, tmp_path: Path, name: str) -> None:
    export_hf(folder / name, tmp_path / "merged", merge=True)
    torch.testing.assert_close(theirs(tmp_path / "merged"), ours(folder / name))
    assert {"config.json", "model.safetensors", "tokenizer.json", "generation_config.json"} <= {
        file.name for file in (tmp_path / "merged").iterdir()
    }


def test_adapters_of_a_part_of_a_fused_weight_are_merged_alone(tmp_path: Path) -> None:
    """Phi-3's qkv_proj is two layers here."""
    write_llama(tmp_path / "llama", kind="Phi3")
    write_chats(tmp_path / "chat", train=4, validation=2)
    config = replace(chatting(tmp_path), lora=LoraConfig(rank=3), out=str(tmp_path / "run"))
    training.run(config, ParallelContext())
    with pytest.raises(UserError, match=r"is a part of .*qkv_proj in transformers.*merge=true"):
        export_hf(tmp_path / "run", tmp_path / "peft")
    export_hf(tmp_path / "run", tmp_path / "merged", merge=True)
    torch.testing.assert_close(theirs(tmp_path / "merged"), ours(tmp_path / "run"))


def test_the_base_of_adapters_is_named_as_it_is_on_the_hub(folder: Path, tmp_path: Path) -> None:
    words = ["export", "hf", f"ckpt={folder / 'out'}", f"out={tmp_path / 'out'}", "base=me/base"]
    assert main(words) == 0
    assert (
        json.loads((tmp_path / "out/adapter_config.json").read_text())["base_model_name_or_path"] == "me/base"
    )
    card = ModelCard.load(tmp_path / "out/README.md")
    assert (card.data.library_name, card.data.base_model) == ("peft", "me/base")


@pytest.mark.parametrize(("kind", "base"), [("classification", "roberta"), ("span", "bert")])
def test_a_head_of_a_task_is_beside_its_adapters(tmp_path: Path, kind: str, base: str) -> None:
    """peft puts it in place of a new one, and the model says what ours does."""
    write_model(tmp_path / base, {"bert": replace(BERT, norm="post"), "roberta": ROBERTA}[base])
    write_data(tmp_path / kind, kind)
    lora = LoraConfig(rank=4, alpha=32.0)
    run = finetuning(tmp_path, kind, ckpt=str(tmp_path / base), lora=lora, precision=PrecisionConfig())
    finetune(run)
    export_hf(tmp_path / base, tmp_path / "base", verify=False)
    export_hf(tmp_path / "out", tmp_path / "adapters")
    classes = {
        "classification": AutoModelForSequenceClassification,
        "span": AutoModelForQuestionAnswering,
    }
    labels = {"num_labels": 3} if kind == "classification" else {}
    loaded = classes[kind].from_pretrained(tmp_path / "base", dtype=torch.float32, **labels)
    model = PeftModel.from_pretrained(loaded, tmp_path / "adapters").eval()
    tokens = torch.arange(10, 28)[None]
    with torch.no_grad():
        found = model(tokens)
    trained = load_trained(
        open_source(str(tmp_path / "out")), ParallelConfig(), PrecisionConfig(), ParallelContext()
    )
    expected = trained.model.chunks[0].outputs(Inputs(tokens, torch.tensor([18])))
    if kind == "classification":
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-5)
    else:
        torch.testing.assert_close(found.start_logits, expected[..., 0], rtol=0, atol=1e-5)
        torch.testing.assert_close(found.end_logits, expected[..., 1], rtol=0, atol=1e-5)
