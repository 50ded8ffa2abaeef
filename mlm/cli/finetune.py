"""The commands `mlm finetune` and `mlm eval TASK`, and the checks of their settings."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mlm.cli.command import Command
from mlm.data import files_present as present
from mlm.data.chat_builtin import TURNS
from mlm.finetune.config import EvalTaskConfig, FinetuneConfig
from mlm.launch.rules.checks import (
    Rule,
    checked_by,
    checkpoint_exists,
    devices_exist,
    loss_scale_can_fall,
    lr_falls,
)
from mlm.launch.rules.layout import FINETUNE_LAYOUT_RULES, READER_RULES, Launch, LayoutRule
from mlm.runs.checks import SWITCH_RULES, optimizer_fits_layout, optimizer_works
from mlm.util.errors import Absent, Problem, UserError


def _rows_exist(config: Any, _: Launch) -> Problem | None:
    if isinstance(config, FinetuneConfig) and config.data.path is None and config.task.hub is None:
        why = f"task {config.task.name} has no data set on the Hub"
        return Absent.at("data.path", None, why, "give data.path=… or task.hub=…")
    return present.folder("data.path", config.data.path)


def _chat_template_exists(config: Any, _: Launch) -> Problem | None:
    key, template = "data.chat_template", config.data.chat_template
    if template not in (None, TURNS) or config.task.kind != "chat":
        return present.chat_template(key, template)
    if not Path(config.ckpt).is_dir():
        return None  # a Hub id, or missing: the preflight reports it
    from mlm.convert.source import open_source  # imports torch, which `mlm --help` does without

    try:
        return open_source(config.ckpt).template_problem(config.data.tokenizer, key=key)
    except (UserError, OSError):
        return None  # the preflight reports it


def _incidents_are_followed(config: FinetuneConfig, _: Launch) -> Problem | None:
    if config.incident.action != "rewind":
        return None
    why = "finetuning reads every row once an epoch, and leaves none out"
    return Problem.at("incident.action", "rewind", why, "use incident.action=skip, log or stop")


def _checked_by(layout_rules: Iterable[LayoutRule], rules: Iterable[Rule]) -> Callable[..., list[Problem]]:
    check = checked_by(layout_rules, rules)

    def check_all(config: FinetuneConfig | EvalTaskConfig, **launch: int | None) -> list[Problem]:
        from mlm.finetune.registry import check_task  # loads tables and metrics

        return [*check(config, **launch), *check_task(config.task)]

    return check_all


RULES = (
    *(devices_exist, loss_scale_can_fall, checkpoint_exists, _rows_exist),
    lambda config, _: present.tokenizer("data.tokenizer", config.data.tokenizer),
    _chat_template_exists,
)
check_eval_task = _checked_by(READER_RULES, RULES)
check_finetune = _checked_by(
    FINETUNE_LAYOUT_RULES,
    (
        optimizer_works,
        optimizer_fits_layout,
        *SWITCH_RULES,
        _incidents_are_followed,
        lr_falls,
        *RULES,
    ),
)

COMMANDS = (
    Command(
        name="finetune",
        other_names=("fine_tune",),
        spec=FinetuneConfig,
        target="mlm.finetune.training:run",
        check=check_finetune,
        preflight="mlm.finetune.training:preflight",
        out_is_run_folder=True,
        has_runs=True,
        positional=("task",),
        aliases={"data": "data.path"},
        summary="train a model on a task: RACE, GLUE, SQuAD, conversations, or a custom one",
        about="""Puts a new head on a pretrained model and trains both on a task, from the Hub or local files.
            On conversations it trains the model's own output layer, on the assistant's answers alone. Keeps
            the checkpoint that scores best on the validation split, and resumes when it is started again.
            Starts from checkpoints of mlm and from models of Hugging Face. Prints the scores, and saves them
            as result.json; with seeds=5 the medians over five seeds.""",
        examples="""
            # Finetune a BERT on RACE, which the Hub supplies
            mlm finetune race ckpt=runs/bert_336m
            # Files, on two ranks
            mlm finetune sst2 ckpt=runs/bert data.path=glue/sst2 tp=2
            # The median of five seeds, and predictions to hand in
            mlm finetune mnli ckpt=google-bert/bert-base-uncased seeds=5 data.predict_tests=true
            # Conversations, packed into sequences of 2,048 tokens
            mlm finetune chat data=conversations.jsonl ckpt=HuggingFaceTB/SmolLM2-135M-Instruct
            # A run that was stopped, with its own settings
            mlm finetune resume=runs/race
            # A task of your own: my_configs/task/reviews.yaml
            mlm finetune reviews --config-dir my_configs ckpt=runs/bert data.path=reviews
        """,
        keys="""
            ckpt data.path out seed seeds dropout train.epochs train.global_batch_size
            train.micro_batch_size train.patience optimizer.lr schedule.warmup
            data.predict_tests task.max_length tp pp dp sequence_parallel zero recompute dist.device
        """,
    ),
    Command(
        name="eval",
        other_names=("evaluate", "test"),
        spec=EvalTaskConfig,
        target="mlm.finetune.evaluate:run",
        check=check_eval_task,
        preflight="mlm.finetune.evaluate:preflight",
        positional=("task",),
        aliases={"data": "data.path"},
        summary="score a finetuned checkpoint on its task, or write its predictions",
        about="""Scores what `mlm finetune` wrote on a split of the task, with its official metrics, or writes
            predictions in the form that GLUE and SQuAD take. The scores do not depend on tp, pp, dp or the
            batch size. They are printed and saved as JSON.""",
        examples="""
            # Score a finetuned run on the validation split
            mlm eval race ckpt=runs/race
            # Predictions of the test split, to hand in
            mlm eval sst2 ckpt=runs/sst2 split=test predictions=submission
        """,
        keys="ckpt split predictions data.path out batch_size task.max_length tp pp dp dist.device",
    ),
)
