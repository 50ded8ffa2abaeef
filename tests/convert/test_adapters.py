"""Adapters as `peft` loads them, merged into their base, and imported from its folders."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from mlm.api import export_hf, import_hf
from mlm.convert.source import open_source
from mlm.finetune import training
from mlm.inference.trained import load_trained
from mlm.models.backbone import Inputs
from mlm.models.config import LoraConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.convert.hf_models import import_model
from tests.convert.hf_models import our_logits as ours
from tests.convert.hf_models import their_logits as theirs
from tests.finetune.chats import chatting, write_chats, write_llama
from tests.finetune.runs import BERT, ROBERTA, finetune, finetuning, write_data, write_model


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


def write_adapter(base: Path, out: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    """Save adapters of random A and B by peft."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | settings
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = PeftConfig(init_lora_weights=False, **settings)
    get_peft_model(model, config, autocast_adapter_dtype=False).to(dtype).save_pretrained(out)


EVERY = ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"]
WRITTEN: dict[str, dict[str, Any]] = {
    "in bfloat16": {"dtype": torch.bfloat16},
    "of every layer": {"target_modules": "all-linear", "lora_dropout": 0.1},
    "with magnitudes": {"use_dora": True, "target_modules": EVERY},
    "of one layer": {"layers_to_transform": [0], "layers_pattern": "layers", "target_modules": EVERY},
}


@pytest.mark.parametrize("case", WRITTEN)
def test_adapters_that_peft_wrote_are_imported(folder: Path, tmp_path: Path, case: str) -> None:
    """The run computes what peft does, and its export too."""
    write_adapter(folder / "llama", tmp_path / "peft", **WRITTEN[case])
    want = theirs(folder / "llama", tmp_path / "peft")
    assert not torch.allclose(want, theirs(folder / "llama"), atol=1e-3)
    torch.testing.assert_close(ours(import_model(tmp_path / "peft", tmp_path / "run")), want)
    export_hf(tmp_path / "run", tmp_path / "again")
    torch.testing.assert_close(theirs(folder / "llama", tmp_path / "again"), want)


@pytest.mark.parametrize("named", [False, True])
def test_python_imports_adapters_as_the_command_does(folder: Path, tmp_path: Path, named: bool) -> None:
    base = shutil.copytree(folder / "llama", tmp_path / "base") if named else None
    run = import_hf(folder / "out-peft", tmp_path / "run", base=base)
    torch.testing.assert_close(ours(run), ours(folder / "out"))
    assert open_source(str(run)).base.path == (base or folder / "llama")


def test_adapter_of_a_fused_weight_is_imported(tmp_path: Path) -> None:
    """Phi-3's qkv_proj is two layers here, which share A."""
    write_llama(tmp_path / "llama", kind="Phi3")
    write_adapter(tmp_path / "llama", tmp_path / "peft", target_modules=["qkv_proj"], use_dora=True)
    want = theirs(tmp_path / "llama", tmp_path / "peft")
    torch.testing.assert_close(ours(import_model(tmp_path / "peft", tmp_path / "run")), want)


def test_imported_adapters_are_trained_further(folder: Path, tmp_path: Path) -> None:
    write_adapter(folder / "llama", tmp_path / "peft", target_modules="all-linear")
    copied = shutil.copytree(folder / "llama", tmp_path / "base")
    out = import_model(tmp_path / "peft", tmp_path / "run", base=str(copied))
    config = replace(chatting(folder), ckpt=str(out), out=str(tmp_path / "more"))
    training.run(replace(config, lora=LoraConfig(rank=4, alpha=8.0)), ParallelContext())
    assert not torch.allclose(ours(tmp_path / "more"), ours(out), atol=1e-3)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported; merge it"),
        ({"peft_type": "IA3"}, "peft_type=IA3 is not supported"),
        ({"scale_of_2027": 2}, "scale_of_2027=2 is not supported"),
        ({"lora_alpha": float("inf")}, "lora_alpha=Infinity, .*not above 0"),
        ({"lora_dropout": 1}, ".*lora_dropout=1: not above 0, or not from 0 to 1"),
        ({"r": 3}, r"r=3, ranks in adapter_model.safetensors are \[4\]"),
    ],
)
def test_adapters_that_ours_do_not_compute_are_rejected(
    folder: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    copy = shutil.copytree(folder / "out-peft", tmp_path / "peft")
    path = copy / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=f"adapter_config.json: {problem}") as raised:
        import_model(copy, tmp_path / "run")
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_adapters_outside_the_layers_are_named(folder: Path, tmp_path: Path, module: str) -> None:
    write_adapter(folder / "llama", tmp_path / "peft", target_modules=["q_proj", module])
    with pytest.raises(UserError, match=rf"{module}\S* is no"):
        import_model(tmp_path / "peft", tmp_path / "run")


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        ("missing", r"q_proj.lora_B.weight is missing"),
        ("not finite", "has other than finite numbers"),
        ("short", "tensors end at byte"),
        ("odd rows", r"v_proj.lora_B.weight is \[5, 4\], its base makes it .*name its base"),
        ("other base", "is .*makes it .*name its base"),
    ],
)
def test_damaged_adapters_are_rejected(folder: Path, tmp_path: Path, damage: str, problem: str) -> None:
    base = folder / "llama"
    if damage == "other base":
        base = write_llama(tmp_path / "wide", hidden_size=64)
    write_adapter(base, tmp_path / "peft")
    file = tmp_path / "peft/adapter_model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("q_proj.lora_B.weight"))
    if damage == "missing":
        del tensors[name]
    if damage == "not finite":
        tensors[name][0, 0] = torch.nan
    if damage == "odd rows":
        tensors[name.replace("q_proj", "v_proj")] = torch.ones(5, 4)
    save_file(tensors, file)
    if damage == "short":
        file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match=problem) as raised:
        import_model(tmp_path / "peft", tmp_path / "run", base=str(folder / "llama"))
    assert "\n" not in str(raised.value)
    assert not (tmp_path / "run").exists()


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
    classes = {"classification": AutoModelForSequenceClassification, "span": AutoModelForQuestionAnswering}
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
