"""Tiny models in run directories, a task of each kind with rows, and what the commands make of them."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mlm.checkpoint.native.format import read_manifest
from mlm.checkpoint.native.run_state import TOKENIZER
from mlm.config.build import to_dict
from mlm.data.config import DataConfig
from mlm.finetune import evaluate, training
from mlm.finetune.config import (
    EvalTaskConfig,
    FinetuneConfig,
    FinetuneDataConfig,
    FinetuneScheduleConfig,
    FinetuneTrainConfig,
    TaskConfig,
    TaskDataConfig,
)
from mlm.finetune.inputs import read_start, tokenize_split
from mlm.finetune.scoring import Scorer
from mlm.finetune.splits import read_split
from mlm.finetune.task_type import Output
from mlm.inference.trained import load_trained
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.optim.config import OptimizerConfig, PrecisionConfig
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.random import init_parameters
from mlm.parallel.sharding import parameter_shards
from mlm.runs.config import PretrainConfig
from mlm.runs.tokenizer import digests_of_tokenizer
from mlm.tracking.config import LogConfig
from mlm.util.ownership import claim_folder
from tests.checkpoint.native.helpers import save
from tests.finetune.material import WORDS, bert, gpt2, pairs, roberta, shipped, write_rows
from tests.ranks import command, run_on_ranks

SHAPE = {"num_layers": 4, "hidden_size": 16, "num_heads": 2, "max_positions": 48, "vocab_size": 128}
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT = ModelConfig(**SHAPE, **NO_DROPOUT, kind="bert", token_types=2, activation="gelu", init_std=0.2)
ROBERTA = replace(
    BERT, kind="roberta", norm="post", token_types=1, vocab_size=384, options={"position_offset": 2}
)
GPT2 = replace(BERT, kind="gpt2", vocab_size=384, token_types=0, activation="gelu_tanh")
LLAMA = replace(
    GPT2, kind="llama", ffn_hidden_size=24, activation="silu", options={"num_kv_heads": 1, "window": 30}
)
EXPERTS = replace(LLAMA, options={"num_kv_heads": 1, "num_experts": 4, "balance": "global_batch"})
MODELS = {"bert": BERT, "roberta": ROBERTA, "gpt2": GPT2, "llama": LLAMA, "experts": EXPERTS}
KINDS = ("classification", "regression", "choice", "span")
CHANGES: dict[str, Any] = {"max_length": 40}


def write_model(folder: Path, model: ModelConfig = BERT, seed: int = 0, *, records: bool = False) -> Path:
    """A run directory with a pretrained model of random weights, biases and norms too, and its tokenizer.

    Its checkpoint `records` the tokenizer, as those of training and imports do.
    """
    one = Axis("tp")
    module = family_of(model.kind).model(model, tp=one)
    init_parameters(module, seed, one)
    draw = torch.Generator().manual_seed(seed)
    tensors = {
        f"model.{s.name}": s.without_padding(s.parameter.detach())
        + 0.05 * torch.randn(s.global_shape, generator=draw)
        for s in parameter_shards(module, one)
    }
    config = PretrainConfig(name="tiny", out="runs/tiny", model=model, data=DataConfig(seq_length=32))
    tokenizer = {"bert": bert, "roberta": roberta}.get(model.kind, gpt2)()
    state = {"step": 1, "weights_only": True, "config": to_dict(config)}
    if records:
        state[TOKENIZER] = digests_of_tokenizer(tokenizer).encode()
    save(claim_folder(folder, "run") / "checkpoints", 1, tensors, state=state)
    tokenizer.save(folder)
    return folder


def task_of(kind: str) -> TaskConfig:
    match kind:
        case "classification":
            return pairs(labels=["no", "yes", "maybe"], **CHANGES)
        case "regression":
            return shipped("stsb", **CHANGES)
        case "choice":
            return shipped("race", question_length=12, **CHANGES)
    return shipped("squad", doc_stride=4, **CHANGES)


def words(draw: random.Random, least: int, most: int) -> str:
    return " ".join(draw.choices(WORDS[:20], k=draw.randint(least, most)))


def record(kind: str, draw: random.Random, number: int) -> dict[str, Any]:
    """A row with content drawn at random, in the columns of the Hub's data set."""
    match kind:
        case "classification":
            texts = {"first": words(draw, 1, 9), "second": words(draw, 1, 14)}
            return {**texts, "label": draw.randrange(3), "idx": number}
        case "regression":
            texts = {"sentence1": words(draw, 1, 9), "sentence2": words(draw, 1, 9)}
            return {**texts, "label": draw.randrange(51) / 10, "idx": number}
        case "choice":
            return {
                "example_id": f"{draw.choice(['middle', 'high'])}{number}.txt",
                "article": words(draw, 4, 40),
                "question": words(draw, 1, 6) + draw.choice([" ?", " _ ."]),
                "options": [words(draw, 1, 5) for _ in range(4)],
                "answer": draw.choice("ABCD"),
            }
    context = draw.choices(WORDS[:20], k=draw.randint(8, 50))
    first = draw.randrange(len(context) - 2)
    start = len(" ".join(context[:first])) + (first > 0)
    answer = " ".join(context[first : first + 2])
    return {
        "id": f"q{number}",
        "context": " ".join(context),
        "question": words(draw, 1, 6),
        "answers": {"text": [answer], "answer_start": [start]},
    }


def write_data(folder: Path, kind: str, train: int = 11, validation: int = 9, test: int = 5) -> Path:
    """A folder of splits; that of the tests has no labels, but for choice."""
    draw = random.Random(kind)
    for name, count in {"train": train, "validation": validation, "test": test}.items():
        records = [record(kind, draw, n) for n in range(count)]
        for each in records if name == "test" else []:
            for key in ("label", "answers"):
                each.pop(key, None)
        write_rows(folder / f"{name}.jsonl", records)
    return folder


def finetuning(folder: Path, kind: str = "classification", **changes: Any) -> FinetuneConfig:
    """A run in `folder`/out from `folder`/bert on the data of a kind; float64, so that layouts compare."""
    train = {"epochs": 2, "global_batch_size": 4, "micro_batch_size": 3, "sort_batches": 2}
    train |= changes.pop("train", {})
    data = {"path": str(folder / kind)} | changes.pop("data", {})
    values: dict[str, Any] = {
        "name": "tiny",
        "out": str(folder / "out"),
        "ckpt": str(folder / "bert"),
        "task": task_of(kind),
        "optimizer": OptimizerConfig(lr=1e-3),
        "schedule": FinetuneScheduleConfig(warmup=0.2),
        "precision": PrecisionConfig(dtype="fp64"),
        "log": LogConfig(every=1),
    }
    return FinetuneConfig(
        **values | {"train": FinetuneTrainConfig(**train), "data": FinetuneDataConfig(**data)} | changes
    )


def evaluation(folder: Path, kind: str = "classification", **changes: Any) -> EvalTaskConfig:
    data = {"path": str(folder / kind)} | changes.pop("data", {})
    values: dict[str, Any] = {
        "ckpt": str(folder / "out"),
        "task": task_of(kind),
        "precision": PrecisionConfig(dtype="fp64"),
        "data": TaskDataConfig(**data),
    }
    return EvalTaskConfig(**values | changes)


def finetune(config: FinetuneConfig, ctx: ParallelContext | None = None) -> dict[str, Any]:
    """Run it after its preflight; result.json."""
    assert training.preflight(config) == []
    training.run(config, ctx or ParallelContext())
    return read(Path(config.out, "result.json"))


def run_and_look(ctx: ParallelContext, config: FinetuneConfig) -> list[Output]:
    """Run it, and what its best checkpoint then says of each validation example, split as the run was."""
    training.run(config, ctx)
    task = config.task
    saved = EvalTaskConfig(ckpt=config.out, task=task)
    start = read_start(saved)
    examples = tokenize_split(task, read_split(task, "validation", path=config.data.path), start).examples
    model = load_trained(start.source, config.parallel, config.precision, ctx).model
    return Scorer.of(model, task, batch_size=2, max_length=start.max_length).compute_outputs(examples)


def read(path: Path) -> Any:
    return json.loads(path.read_bytes())


def records(out: Path, kind: str) -> list[dict[str, Any]]:
    return [line for line in json_lines(out / "metrics.jsonl") if line["kind"] == kind]


def json_lines(path: Path) -> list[Any]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def check_layout(config: FinetuneConfig, alone: Path) -> None:
    """Run on the ranks of a layout: losses and weights, in float64, are those of a run of one process."""
    parallel, out = config.parallel, Path(config.out)
    run_on_ranks(
        command, training.run, config, tp=parallel.tp, pp=parallel.pp, dp=parallel.dp or 1, ep=parallel.ep
    )
    assert losses(out) == pytest.approx(losses(alone), abs=1e-9)
    split, whole = (weights(run / "checkpoints") for run in (out, alone))
    torch.testing.assert_close(split, whole, rtol=0, atol=1e-7)


def check_same_run(out: Path, whole: Path) -> None:
    one, other = (read(run / "result.json") for run in (out, whole))
    for key in ("scores", "best_step", "steps", "depends_on"):
        assert one[key] == other[key]
    assert losses(out) == losses(whole)
    tensors, wanted = (weights(run / "checkpoints") for run in (out, whole))
    assert all(torch.equal(tensors[name], wanted[name]) for name in wanted)


def losses(out: Path) -> list[float]:
    return [line["loss"] for line in records(out, "step")]


def weights(root: Path) -> dict[str, Tensor]:
    """The tensors of the only checkpoint in a folder, put together of the files of its ranks."""
    (path,) = root.glob("step-*")
    tensors = read_manifest(path).tensors
    files = {file.name: load_file(file) for file in path.glob("*.safetensors")}
    whole = {name: torch.zeros(entry.shape, dtype=torch.float64) for name, entry in tensors.items()}
    for name, entry in tensors.items():
        for chunk in entry.chunks:
            place = tuple(slice(o, o + n) for o, n in zip(*chunk.region, strict=True))
            whole[name][place] = files[chunk.file][name]
    return whole


def score(config: EvalTaskConfig) -> Any:
    """Evaluate after the preflight; the receipt."""
    assert evaluate.preflight(config) == []
    evaluate.run(config, ParallelContext())
    return read(Path(config.out or Path(config.ckpt, f"eval-{config.task.name}.json")))
