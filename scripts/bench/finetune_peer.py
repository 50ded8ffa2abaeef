"""The plain loop of `transformers` that finetuning is measured against; run as a program of its own.

    python scripts/bench/finetune_peer.py SETTINGS.json RESULT.json

What its users write: AutoModelForSequenceClassification, shuffled batches padded to their longest
(DataCollatorWithPadding), fused AdamW, linear warm-up and decay, clipping at 1. The settings are a `Finetune`
(finetune_runs.py); one pass over the rows. Of `mlm` it knows nothing.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)
from transformers.utils import logging


def rows_of(path: Path, tokenizer: Any) -> list[dict[str, Any]]:
    """Tokenised rows of a JSONL file with a sentence and a label."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    texts = tokenizer([row["sentence"] for row in rows], truncation=True, max_length=512)
    return [
        {**{key: values[i] for key, values in texts.items()}, "labels": row["label"]}
        for i, row in enumerate(rows)
    ]


def optimizer_of(model: nn.Module, settings: dict[str, Any]) -> torch.optim.AdamW:
    """Fused AdamW, no decay on biases and norms."""
    groups: list[dict[str, Any]] = [
        {
            "params": [p for p in model.parameters() if p.dim() > 1],
            "weight_decay": settings["weight_decay"],
        },
        {"params": [p for p in model.parameters() if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings["lr"], fused=True)


def train(model: nn.Module, loader: DataLoader[Any], settings: dict[str, Any]) -> float:
    """One epoch; its seconds, batches made and padded included."""
    model.train()
    optimizer = optimizer_of(model, settings)
    warmup = math.ceil(settings["warmup"] * len(loader))
    schedule = get_linear_schedule_with_warmup(optimizer, warmup, len(loader))
    begin = time.perf_counter()
    for batch in loader:
        loss: Tensor = model(**batch).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
    return time.perf_counter() - begin


@torch.no_grad()
def accuracy(model: nn.Module, loader: DataLoader[Any]) -> float:
    """Share of rows that are told right."""
    model.eval()
    right = rows = 0
    for batch in loader:
        labels = batch.pop("labels")
        right += int((model(**batch).logits.argmax(-1) == labels).sum())
        rows += len(labels)
    return right / rows


def main() -> None:
    """Train, score, write."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    settings = json.loads(Path(sys.argv[1]).read_text())
    torch.manual_seed(settings["seed"])
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    model = AutoModelForSequenceClassification.from_pretrained(settings["model"], num_labels=2)
    rows, held_out = (
        rows_of(Path(settings["data"], f"{name}.jsonl"), tokenizer) for name in ("train", "validation")
    )
    collate = DataCollatorWithPadding(tokenizer)
    batches: DataLoader[Any] = DataLoader(
        rows, batch_size=settings["batch"], shuffle=True, collate_fn=collate
    )
    seconds = train(model, batches, settings)
    # sorted, so that little is padded: scoring is not timed
    held_out.sort(key=lambda row: len(row["input_ids"]))
    score = accuracy(model, DataLoader(held_out, batch_size=64, collate_fn=collate))
    Path(sys.argv[2]).write_text(json.dumps({"train_s": seconds, "rows": len(rows), "accuracy": score}))


if __name__ == "__main__":
    main()
