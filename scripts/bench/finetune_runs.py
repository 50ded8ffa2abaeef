"""One finetuning run of each side in a process of its own, and what they must have in common."""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from omegaconf import OmegaConf

from bench.machine import REPOSITORY
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import encode, frame
from mlm.inference.trained import load_tokenizer, load_trained
from mlm.models.backbone import Inputs
from mlm.models.documents import padding_spans
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError

PEER = Path(__file__).with_name("finetune_peer.py")
HIDDEN_TOLERANCE = 1e-4
"""Largest difference of a hidden state; after layer norm they are of size 1."""


@dataclass(frozen=True, kw_only=True)
class Finetune:
    """The settings that both sides share."""

    model: str
    """Folder of a BERT of `transformers`, tokenizer included."""
    data: str
    """Folder with train.jsonl and validation.jsonl of the task's schema."""
    task: str
    columns: tuple[str, ...]
    """Fields of a row: its text, or its two."""
    labels: int
    """Number of classes."""
    max_length: int
    """Tokens of a row at the most."""
    epochs: int
    batch: int
    lr: float
    warmup: float
    """Share of the steps."""
    weight_decay: float
    seed: int
    dtype: str
    """Of products: fp32, or bf16 with float32 weights."""
    threads: int


@dataclass(frozen=True)
class Outcome:
    """Results of one run."""

    train_s: float
    """Seconds of training alone: not starting, tokenising, scoring or saving."""
    rows: int
    """Examples trained on: those of every epoch."""
    accuracies: tuple[float, ...]
    """On the validation rows, after each epoch."""
    process_s: float
    """Seconds of the whole process."""
    cpu_s: float
    """Its processor time."""

    @property
    def rate(self) -> float:
        """Examples/s of training."""
        return self.rows / self.train_s

    @property
    def best(self) -> float:
        """Of the best epoch, which `mlm finetune` keeps."""
        return max(self.accuracies)

    @property
    def last(self) -> float:
        """Of the last epoch, which a plain loop keeps."""
        return self.accuracies[-1]


def task_facts(task: str) -> dict[str, Any]:
    """Those settings of `Finetune` that a task's file decides."""
    written = OmegaConf.load(REPOSITORY / "configs" / "task" / f"{task}.yaml")
    found = TaskConfig(**cast(dict[str, Any], OmegaConf.to_container(written)))
    return {
        "task": task,
        "columns": tuple(found.columns),
        "labels": len(found.labels),
        "max_length": found.max_length,
    }


def write_subset(source: Path, rows: int, seed: int, out: Path) -> None:
    """train.jsonl with so many rows, drawn at random, and validation.jsonl whole. Raises UserError."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("train", "validation"):
        path = source / f"{name}.jsonl"
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except OSError as error:
            raise UserError(f"--data {source}: {path.name}: {error.strerror}") from None
        if name == "train":
            if rows > len(lines):
                raise UserError(f"--rows {rows} is more than the {len(lines)} of {path}")
            chosen = np.sort(np.random.default_rng(seed).permutation(len(lines))[:rows])
            lines = [lines[i] for i in chosen]
        (out / path.name).write_text("".join(lines), encoding="utf-8")


def run_mlm(settings: Finetune, out: Path, overrides: Sequence[str]) -> Outcome:
    """`mlm finetune TASK` as a user types it. Raises UserError where it fails."""
    words = [
        f"ckpt={settings.model}",
        f"data.path={settings.data}",
        f"out={out}",
        f"seed={settings.seed}",
        f"train.global_batch_size={settings.batch}",
        f"train.epochs={settings.epochs}",
        f"optimizer.lr={settings.lr}",
        f"optimizer.weight_decay={settings.weight_decay}",
        f"schedule.warmup={settings.warmup}",
        f"precision={settings.dtype}",
        f"dist.threads_per_rank={settings.threads}",  # it takes all cores whatever OMP_NUM_THREADS says
        *overrides,
    ]
    times = timed_process([sys.executable, "-m", "mlm", "finetune", settings.task, *words], settings.threads)
    records = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = len(Path(settings.data, "train.jsonl").read_text(encoding="utf-8").splitlines())
    scores = tuple(record["accuracy"] for record in records if record["kind"] == "scores")
    return Outcome(seconds_of(records), settings.epochs * rows, scores, *times)


def seconds_of(records: Iterable[dict[str, object]]) -> float:
    """Seconds of training by metrics.jsonl, whose logged steps tell the mean of those since the last."""
    seconds, before = 0.0, 0
    for record in records:
        if record["kind"] == "step":
            step, each = record["step"], record["step_time_s"]
            assert isinstance(step, int)
            assert isinstance(each, float)
            seconds += (step - before) * each
            before = step
    return seconds


def run_peer(settings: Finetune, out: Path) -> Outcome:
    """The plain loop. Raises UserError where it fails."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "settings.json").write_text(json.dumps(asdict(settings)))
    command = [sys.executable, str(PEER), str(out / "settings.json"), str(out / "result.json")]
    times = timed_process(command, settings.threads)
    result = json.loads((out / "result.json").read_bytes())
    return Outcome(result["train_s"], result["rows"], tuple(result["accuracies"]), *times)


def timed_process(command: Sequence[str], threads: int) -> tuple[float, float]:
    """Run a program with so many threads; its seconds, and its processor time. Raises UserError."""
    environment = os.environ | {
        "OMP_NUM_THREADS": str(threads),
        "PYTHONPATH": str(REPOSITORY),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    begin, cpu = time.perf_counter(), children_s()
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        raise UserError(f"{' '.join(command[1:5])} … ended with {done.returncode}: {' / '.join(said)}")
    return time.perf_counter() - begin, children_s() - cpu


def children_s() -> float:
    """Processor time of all processes that were started here and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@torch.no_grad()
def hidden_difference(model: Path, texts: Sequence[str]) -> float:
    """Largest difference between the last hidden states of both sides, dropout off. Raises UserError."""
    try:
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        raise UserError("this benchmark needs `transformers`: pip install 'mlm[dev]'") from None
    device = torch.device("cpu")
    trained = load_trained(str(model), ParallelConfig(), PrecisionConfig(), ParallelContext(device=device))
    tokenizer = load_tokenizer(None, model)
    bert = frame(tokenizer, causal=False, max_length=trained.config.model.max_positions)
    ids = [bert.one(found).tokens.tolist() for found in encode(texts, tokenizer)]
    given = AutoTokenizer.from_pretrained(model)(list(texts), padding=True, return_tensors="pt")
    is_text = given["attention_mask"].bool()
    if [row[mask].tolist() for row, mask in zip(given["input_ids"], is_text, strict=True)] != ids:
        raise UserError(f"--model {model}: its tokenizer gives mlm and transformers different tokens")
    theirs = AutoModel.from_pretrained(model).eval()(**given).last_hidden_state
    lengths = torch.tensor([len(row) for row in ids])
    tokens = given["input_ids"]
    spans = padding_spans(lengths, tokens.shape[1], torch.float32, device)
    inputs = Inputs(tokens, lengths, torch.zeros_like(tokens), spans)
    ours = trained.model.chunks[0].encode(inputs).transpose(0, 1)  # [B, S, H]
    return float((ours - theirs)[is_text].abs().max())
