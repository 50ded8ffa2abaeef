"""A key that nothing reads here is an error where it is typed, also with its default."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from mlm.cli.compose.composition import load_config
from mlm.cli.compose.groups import task_names
from mlm.cli.run import unread_problems
from mlm.config.paths import CONFIG_DIR
from mlm.config.tree import flatten, leaves
from mlm.finetune.config import FinetuneConfig, TaskConfig
from mlm.runs.config import PretrainConfig
from tests.cli.doubles import Cli, make_cli, write
from tests.slow import thinned

cli = pytest.fixture(make_cli)
NONE: frozenset[str] = frozenset()
TEXTS = ("classification", "regression", "choice", "span")
CHATS = ("chat", "preferences")
KINDS = {
    **dict.fromkeys(("task.label", "task.allow_empty", "task.submission", "train.sort_batches"), TEXTS),
    **dict.fromkeys(("task.labels", "task.submit_names"), ("classification", "choice")),
    "task.label_range": ("regression",),
    "task.question_length": ("choice", "span"),
    **dict.fromkeys(("task.unanswerable", "task.doc_stride", "task.max_answer_length"), ("span",)),
    **dict.fromkeys(("task.n_best", "task.null_threshold"), ("span",)),
    "task.answers": ("chat",),
    **dict.fromkeys(("task.held_out", "task.keep_nulls", "data.chat_template"), CHATS),
    **dict.fromkeys(("task.loss", "task.beta", "task.label_smoothing", "task.margin"), ("preferences",)),
}
"""Kinds of task that read a key of `mlm finetune`; every kind reads the keys that are not here."""
WITHOUT_OTHERS = {
    *(f"lora.{name}" for name in ("alpha", "targets", "dropout", "rslora", "dora", "quantize")),  # lora.rank
    "recompute_budget",  # recompute
    "zero_reduce",  # zero
    *(key for key in leaves(FinetuneConfig) if key.startswith("optimizer.muon.")),  # optimizer.kind
    *(f"precision.{name}" for name in ("initial_loss_scale", "min_loss_scale", "loss_scale_window", "cast")),
    "incident.rewinds",  # incident.action
}
"""Keys of `mlm finetune` that its defaults of another key leave unread."""


def unread(config: Any) -> set[str]:
    """The keys of a run spec that are rejected where they are typed."""
    known = leaves(type(config)).keys()
    return {key for key in known if any(unread_problems(config, {key}, NONE))}


LOSSES = [f"preferences task.loss={loss}" for loss in ("dpo", "simpo", "orpo")]


@pytest.mark.parametrize("task", ["rte", "stsb", "race", "squad_v2", "chat", *LOSSES])
def test_keys_of_finetune_are_read_or_rejected_by_task_and_loss(task: str) -> None:
    config = load_config("finetune", [*f"task={task}".split(), "ckpt=x"])
    kind = config.task.kind
    expected = {key for key, kinds in KINDS.items() if kind not in kinds} | WITHOUT_OTHERS
    expected |= {"task.null_threshold"} if not config.task.unanswerable else NONE
    expected |= {"task.margin"} if config.task.loss != "simpo" else NONE
    expected |= {"task.label_smoothing"} if config.task.loss == "orpo" else NONE
    expected |= {"data.predict_tests"} if not config.task.tests else NONE
    assert unread(config) == expected


@pytest.mark.parametrize(
    "line, problem",
    thinned(
        [
            (
                "finetune chat ckpt=x task.loss=simpo",
                "task.loss=simpo: has no effect with task.kind=chat; remove it, or",
            ),
            ("finetune rte ckpt=x lora={alpha:16}", "lora.alpha=16.0: has no effect with lora.rank=0"),
            (
                "eval rte ckpt=x task.lr=2e-5",
                "task.lr=2e-05: has no effect without optimizer.kind; remove it",
            ),
            ("pretrain optimizer.muon.nesterov=true", "has no effect with optimizer.kind=adamw"),
            (
                "pretrain model=moe_tiny model.options.num_experts=0 model.options.z_loss=0.1",
                "z_loss=0.1: has no effect with model.options.num_experts=0",
            ),
            (
                "generate ckpt=x temperature=0 top_k=5",
                "top_k=5: has no effect with temperature=0.0; remove it",
            ),
            ("generate ckpt=x prompt=a prompts=b", "prompt=a: has no effect with prompts=b"),
            (
                "convert a b to=torch_dist max_file_gb=1",
                "max_file_gb=1.0: has no effect with to=torch_dist; remove it, or set to=hf or",
            ),
            (
                "pretrain schedule=wsd schedule.decay=cosine",
                "schedule.decay=cosine: falls to the end of the run",
            ),
            (
                "data build data=a input=b tokenizer=t out=o",
                "input=a input=b: one input is taken; remove the",
            ),
        ],
        3,
    ),
)
def test_a_key_that_nothing_reads_is_one_line(cli: Cli, line: str, problem: str) -> None:
    assert cli(f"{line} --check") == 2
    assert len([each for each in cli.err.splitlines() if problem in each]) == 1


OWN_TASK = "name: mine\nkind: chat\ncolumns: [messages]\nmetrics: [loss]\ntests: []\n"


@pytest.mark.parametrize(
    "written, words, is_rejected",
    [
        ("doc_stride: 64", "", True),
        ("doc_stride: 64", "task.kind=preferences task.columns=[a,b,c]", False),
        ("doc_stride: 128", "", False),  # as in a copy of all settings
        ("answers: last", "", False),
    ],
)
def test_a_users_yaml_counts_as_typed(
    cli: Cli, tmp_path: Path, written: str, words: str, is_rejected: bool
) -> None:
    write(tmp_path / "mine/task/mine.yaml", f"{OWN_TASK}{written}\n")
    cli(f"finetune mine --config-dir mine ckpt=x data=x {words} --check")
    assert ("has no effect" in cli.err) == is_rejected


@pytest.mark.parametrize("task", thinned(task_names(), 3))
def test_shipped_tasks_set_no_unread_key(task: str) -> None:
    values = yaml.safe_load((CONFIG_DIR / f"task/{task}.yaml").read_text())
    keys = flatten(values, "task.").keys()
    assert not [*unread_problems(load_config("finetune", [f"task={task}", "ckpt=x"]), keys, NONE)]


def test_every_condition_names_a_key() -> None:
    """A condition on a key that a run spec lacks is of the model that only a checkpoint knows."""
    for spec in (PretrainConfig, FinetuneConfig):
        known = leaves(spec)
        others = {leaf.only_if.key for leaf in known.values() if leaf.only_if}
        assert {key for key in others - known.keys() if not key.startswith("model.")} == set()
    assert {f"task.{name}" for name in TaskConfig.__dataclass_fields__} < leaves(FinetuneConfig).keys()
