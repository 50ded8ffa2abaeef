"""Adapters as `peft` loads them, merged into their base, and imported again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig as PeftConfig
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
)

from mlm.api import export_hf
from mlm.cli.convert.run import preflight_import_hf, run_import_hf
from mlm.cli.convert.settings import ImportHFConfig
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


@pytest.mark.parametrize("name", ["out", "qv"])
def test_what_peft_wrote_is_imported_beside_its_base(folder: Path, tmp_path: Path, name: str) -> None:
    PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(folder / "llama"), folder / f"{name}-peft"
    ).save_pretrained(tmp_path / "theirs")
    out = tmp_path / "run"
    config = ImportHFConfig(source=str(tmp_path / "theirs"), out=str(out), base=str(folder / "llama"))
    assert preflight_import_hf(config) == []
    run_import_hf(config)
    torch.testing.assert_close(ours(out), ours(folder / name))


def write_adapter(base: Path, out: Path, dtype: torch.dtype = torch.float32, **settings: Any) -> None:
    """Save adapters of random A and B."""
    torch.manual_seed(0)
    settings = {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]} | settings
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    config = PeftConfig(init_lora_weights=False, **settings)
    get_peft_model(model, config, autocast_adapter_dtype=False).to(dtype).save_pretrained(out)


EVERY = ["q_proj", "k_proj", "v_proj", "gate_proj", "down_proj"]
RANKS = {r"^model\.layers\.0\..*[kq]_proj": 1, "layers.1.self_attn.v_proj": 7, "q_proj": 2}
ALPHAS = {".*1.*q_proj": 40, "down_proj": 3.0, "q_proj": 5}
"""In alphabetical order, in which peft saves patterns: of two that match the first counts."""
PATTERNS: dict[str, dict[str, Any]] = {
    "ranks": {"rank_pattern": RANKS},
    "scales in bfloat16": {"alpha_pattern": ALPHAS, "rank_pattern": RANKS, "dtype": torch.bfloat16},
    "by the square root": {"alpha_pattern": ALPHAS, "rank_pattern": RANKS, "use_rslora": True},
    "with magnitudes": {"alpha_pattern": ALPHAS, "rank_pattern": RANKS, "use_dora": True},
    "one layer of a list": {"layers_to_transform": [0], "layers_pattern": "layers", "target_modules": EVERY},
}


@pytest.mark.parametrize("case", PATTERNS)
def test_ranks_scales_and_layers_of_peft_are_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], case: str
) -> None:
    is_by_pattern = "layer" not in case
    settings = ({"target_modules": EVERY} if is_by_pattern else {}) | PATTERNS[case]
    write_adapter(folder / "llama", tmp_path / "peft", **settings)
    run_import_hf(ImportHFConfig(source=str(tmp_path / "peft"), out=str(tmp_path / "run")))
    said = "ranks are padded with zeros to"
    assert (said in " ".join(capsys.readouterr().out.split())) is is_by_pattern
    want = theirs(folder / "llama", tmp_path / "peft")
    assert not torch.allclose(want, theirs(folder / "llama"), atol=1e-3)
    torch.testing.assert_close(ours(tmp_path / "run"), want)
    export_hf(tmp_path / "run", tmp_path / "again")
    torch.testing.assert_close(theirs(folder / "llama", tmp_path / "again"), want)


@pytest.mark.parametrize(
    "wrapped",
    [
        "base_model.model._orig_mod.{}",
        "_orig_mod.base_model.model.{}",
        "module.base_model.model.{}",
        "base_model.model.language_model.{}",
    ],
)
def test_adapters_of_a_wrapped_model_are_read(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], wrapped: str
) -> None:
    """A pattern names modules in their wrappers too."""
    pattern = {"^language_model.model.layers.0.self_attn.q_proj": 5, "^model.layers.0.self_attn.q_proj": 5}
    write_adapter(folder / "llama", tmp_path / "peft", alpha_pattern=pattern)
    want = theirs(folder / "llama", tmp_path / "peft")
    path = tmp_path / "peft" / "adapter_model.safetensors"
    stored = load_file(path)
    save_file({wrapped.format(name.removeprefix("base_model.model.")): stored[name] for name in stored}, path)
    if "_orig_mod" in wrapped.partition("base_model.")[2]:
        pattern = {"_orig_mod.model.layers.0.self_attn.q_proj": 5}
        config = json.loads((tmp_path / "peft" / "adapter_config.json").read_text())
        (tmp_path / "peft" / "adapter_config.json").write_text(
            json.dumps(config | {"alpha_pattern": pattern})
        )
    run_import_hf(ImportHFConfig(source=str(tmp_path / "peft"), out=str(tmp_path / "run")))
    removed = wrapped.replace("base_model.model.", "").removesuffix("{}")
    assert f"note: names begin with {removed}: read without" in capsys.readouterr().out
    torch.testing.assert_close(ours(tmp_path / "run"), want)


FUSED = {
    "of all, with magnitudes": LoraConfig(rank=3, dora=True),
    "of queries, by the square root": LoraConfig(rank=3, targets=("query", "down"), rslora=True),
    "of keys and values, with magnitudes": LoraConfig(rank=3, targets=("kv",), dora=True),
}


@pytest.mark.parametrize("case", FUSED)
def test_adapters_of_parts_of_a_fused_weight_are_one_adapter_of_peft(tmp_path: Path, case: str) -> None:
    """Phi-3's qkv_proj is two layers here: their ranks are stacked, and stay so when read again."""
    write_llama(tmp_path / "llama", kind="Phi3")
    write_chats(tmp_path / "chat", train=4, validation=2)
    training.run(replace(chatting(tmp_path), lora=FUSED[case], out=str(tmp_path / "run")), ParallelContext())
    export_hf(tmp_path / "run", tmp_path / "peft")
    want = ours(tmp_path / "run")
    assert not torch.allclose(theirs(tmp_path / "llama"), want, atol=1e-3)
    torch.testing.assert_close(theirs(tmp_path / "llama", tmp_path / "peft"), want)
    run_import_hf(ImportHFConfig(source=str(tmp_path / "peft"), out=str(tmp_path / "again")))
    torch.testing.assert_close(ours(tmp_path / "again"), want)
    export_hf(tmp_path / "again", tmp_path / "peft2")
    ranks = {
        len(v) for n, v in load_file(tmp_path / "peft2" / "adapter_model.safetensors").items() if "_A" in n
    }
    assert ranks == {6 if "of all" in case else 3}
    torch.testing.assert_close(theirs(tmp_path / "llama", tmp_path / "peft2"), want)


@pytest.mark.parametrize("module", ["embed_tokens", "lm_head"])
def test_adapters_outside_the_layers_are_named(folder: Path, tmp_path: Path, module: str) -> None:
    write_adapter(folder / "llama", tmp_path / "peft", target_modules=["q_proj", module])
    config = ImportHFConfig(source=str(tmp_path / "peft"), out=str(tmp_path / "run"))
    with pytest.raises(
        UserError, match=rf"{module}\..*: adapters and copies of this module are not supported"
    ):
        run_import_hf(config)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported"),
        ({"lora_alpha": float("inf")}, "lora_alpha=Infinity must be numbers above 0"),
        ({"modules_to_save": ["lm_head"]}, r'modules_to_save=\["lm_head"\] is not supported.*Or merge it'),
        ({"alpha_pattern": {"q_proj": 0}}, "r=4, lora_alpha=0 must be numbers above 0"),
        ({"rank_pattern": {"q_proj": 1.5}}, "r=1.5, lora_alpha=32.0 must be numbers above 0"),
        ({"rank_pattern": {"(": 1}}, r"rank_pattern=.* names no modules: missing \)"),
        ({"rank_pattern": {"q_proj": 3}}, r"is \[4, 32\], r or rank_pattern gives it rank 3"),
    ],
)
def test_adapters_that_ours_do_not_compute_are_rejected(
    folder: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    copy = tmp_path / "peft"
    copy.mkdir()
    for file in (folder / "out-peft").iterdir():
        (copy / file.name).write_bytes(file.read_bytes())
    settings = json.loads((copy / "adapter_config.json").read_text())
    (copy / "adapter_config.json").write_text(json.dumps(settings | changes))
    with pytest.raises(UserError, match=f"adapter_config.json: .*{problem}"):
        run_import_hf(ImportHFConfig(source=str(copy), out=str(tmp_path / "run")))


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
