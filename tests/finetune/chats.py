"""A tiny Llama of `transformers` with a chat template, and files of conversations."""

import random
from pathlib import Path
from typing import Any

import torch
import transformers

from mlm.finetune.config import FinetuneConfig, TaskConfig
from mlm.optim.config import OptimizerConfig
from tests.data.chats import MARKED, write_tokenizer
from tests.finetune.material import WORDS, shipped, write_rows
from tests.finetune.runs import finetuning

POSITIONS = 96


def write_llama(
    folder: Path, template: str | None = MARKED, seed: int = 0, *, kind: str = "Llama", **changes: Any
) -> Path:
    """A Llama, a Mixtral or a Phi3, of random weights and the tokenizer in the style of Qwen's."""
    write_tokenizer(folder, "qwen2", template)
    torch.manual_seed(seed)
    shape: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
    }
    shape |= {"vocab_size": 340, "num_key_value_heads": 2, "max_position_embeddings": POSITIONS}
    own: dict[str, dict[str, Any]] = {"Mixtral": {"num_local_experts": 4}, "Phi3": {"pad_token_id": None}}
    shape |= own.get(kind, {}) | changes
    settings = getattr(transformers, f"{kind}Config")(
        **shape, bos_token_id=None, eos_token_id=None, initializer_range=0.1
    )
    getattr(transformers, f"{kind}ForCausalLM")(settings).save_pretrained(folder)
    return folder


def conversation(draw: random.Random) -> dict[str, Any]:
    messages = []
    for role in ("user", "assistant") * draw.randint(1, 2):
        messages.append({"role": role, "content": " ".join(draw.choices(WORDS[:20], k=draw.randint(1, 7)))})
    return {"messages": messages}


def write_chats(folder: Path, train: int = 20, validation: int = 5) -> Path:
    draw = random.Random(7)
    for name, count in (("train", train), ("validation", validation)):
        write_rows(folder / f"{name}.jsonl", [conversation(draw) for _ in range(count)])
    return folder


def chat_task(**changes: Any) -> TaskConfig:
    return shipped("chat", max_length=POSITIONS, **changes)


def chatting(folder: Path, **changes: Any) -> FinetuneConfig:
    """A run in `folder`/out from `folder`/llama on `folder`/chat."""
    task = chat_task(**changes.pop("task", {}))
    data = {"path": str(folder / "chat")} | changes.pop("data", {})
    values = {"ckpt": str(folder / "llama"), "optimizer": OptimizerConfig(lr=3e-3, weight_decay=0.0)}
    return finetuning(folder, "classification", task=task, data=data, **values | changes)
