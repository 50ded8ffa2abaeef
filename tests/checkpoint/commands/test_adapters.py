"""Adapters as `peft` loads them, merged into their base, and imported again."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor
from transformers import AutoModelForCausalLM

from mlm.checkpoint.commands import import_hf
from mlm.checkpoint.commands.config import ImportHFConfig
from mlm.checkpoint.commands.export_hf import export_hf
from mlm.finetune import run
from mlm.inference.trained import load_trained
from mlm.models.config import LoraConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from tests.finetune.chats import chatting, write_chats, write_llama

TOKENS = torch.arange(20)[None]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    write_llama(made / "llama")
    write_chats(made / "chat", train=4, validation=2)
    for name, targets in (("out", ("all-linear",)), ("qv", ("q_proj", "v_proj"))):
        lora = LoraConfig(rank=4, alpha=32.0, targets=targets, dora=name == "qv")
        config = replace(chatting(made), lora=lora)
        run.run(replace(config, out=str(made / name)), ParallelContext())
        export_hf(made / name, made / f"{name}-peft")
    return made


def ours(ckpt: Path) -> Tensor:
    model = load_trained(str(ckpt), ParallelConfig(), PrecisionConfig(), ParallelContext()).model
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
    assert import_hf.preflight(config) == []
    import_hf.run(config)
    torch.testing.assert_close(ours(out), ours(folder / name))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"bias": "all"}, "bias=all is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights=pissa is not supported"),
        ({"lora_alpha": float("inf")}, "lora_alpha=Infinity must be numbers above 0"),
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
        import_hf.run(ImportHFConfig(source=str(copy), out=str(tmp_path / "run")))
