"""The plain loop of `transformers` that finetuning is measured against; run as a program of its own.

    python scripts/bench/finetune_peer.py SETTINGS.json RESULT.json

What its users write: AutoModelForSequenceClassification, shuffled batches padded to their longest
(DataCollatorWithPadding), fused AdamW, linear warm-up and decay, clipping at 1; scored after every epoch. The
settings are a `Finetune` (finetune_runs.py). Of `mlm` it knows nothing.
"""

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    DataCollatorWithPadding,
    get_linear_schedule_with_warmup,
)
from transformers.utils import logging


def rows_of(path: Path, tokenizer: Any, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Tokenised rows of a JSONL file with one or two texts and a label."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    columns = ([row[column] for row in rows] for column in settings["columns"])
    texts = tokenizer(*columns, truncation=True, max_length=settings["max_length"])
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


def train_epoch(
    model: nn.Module,
    loader: DataLoader[Any],
    optimizer: torch.optim.Optimizer,
    schedule: LambdaLR,
    autocast: torch.autocast,
) -> float:
    """One epoch; its seconds, batches made and padded included."""
    model.train()
    begin = time.perf_counter()
    for batch in loader:
        with autocast:
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
    model = AutoModelForSequenceClassification.from_pretrained(
        settings["model"], num_labels=settings["labels"]
    )
    rows, held_out = (
        rows_of(Path(settings["data"], f"{name}.jsonl"), tokenizer, settings)
        for name in ("train", "validation")
    )
    collate = DataCollatorWithPadding(tokenizer)
    batches: DataLoader[Any] = DataLoader(
        rows, batch_size=settings["batch"], shuffle=True, collate_fn=collate
    )
    # sorted, so that little is padded: scoring is not timed
    held_out.sort(key=lambda row: len(row["input_ids"]))
    scored: DataLoader[Any] = DataLoader(held_out, batch_size=64, collate_fn=collate)
    optimizer, steps = optimizer_of(model, settings), settings["epochs"] * len(batches)
    schedule = get_linear_schedule_with_warmup(optimizer, math.ceil(settings["warmup"] * steps), steps)
    autocast = torch.autocast("cpu", torch.bfloat16, enabled=settings["dtype"] == "bf16")
    seconds, scores = 0.0, []
    for _ in range(settings["epochs"]):
        seconds += train_epoch(model, batches, optimizer, schedule, autocast)
        with autocast:
            scores.append(accuracy(model, scored))
    result = {"train_s": seconds, "rows": settings["epochs"] * len(rows), "accuracies": scores}
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()
