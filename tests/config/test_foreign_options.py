"""Settings of Megatron-LM: converted, automatic or not offered; and the tutorial's table of them."""

import re
import shlex
from pathlib import Path

import pytest

from mlm.cli.commands import COMMANDS
from mlm.cli.compose.arguments import parse
from mlm.cli.compose.overrides import prepare
from mlm.cli.convert.settings import ReshardConfig
from mlm.cli.generate.settings import GenerateConfig
from mlm.config.suggest import foreign_options, keys_meant, plain_name, unknown_key
from mlm.config.tree import leaves
from mlm.plan.config import PlanLayoutsConfig
from mlm.runs.config import PretrainConfig

PRETRAIN = COMMANDS[0]
PAGE = Path(__file__).parents[2] / "scripts/docs/pages/tutorials/from-megatron.md"
ROWS = [
    (re.findall(r"`(--[^`]+)`", left), right)
    for left, right in re.findall(r"^\| (.*?`--.*?) \| (.*?) \|$", PAGE.read_text(), re.MULTILINE)
]


def answers(line: str) -> list[str]:
    """The fixes of a command line's problems of spelling."""
    arguments = parse(PRETRAIN, shlex.split(line))
    prepared = prepare(PRETRAIN, arguments.overrides)
    return [problem.fix for problem in prepared.problems]


@pytest.mark.parametrize(
    "line, fix",
    [
        ("--distributed-timeout-minutes 30", "use dist.timeout_s = 60 * 30 (seconds)"),
        (
            "--data-path 0.3 wiki 0.7 web",
            "use data.path=PREFIX, or with weights 'data.blend=[0.3 wiki,0.7 web]'",
        ),
        ("train.Recompute-Activations=true", "use recompute=selective"),
        ("use_flash_attn=true", "leave it out: automatic, or use attention=flash"),
        ("tp_comm_overlap=true", "use tp_overlap=2, a number of parts"),
    ],
)
def test_option_of_megatron_is_answered(line: str, fix: str) -> None:
    assert answers(line) == [fix]


def test_a_number_of_micro_batches_is_no_batch_size() -> None:
    (fix,) = answers("gradient_accumulation_steps=8")
    assert fix.startswith("use train.global_batch_size = 8 * train.micro_batch_size * dp")


def test_a_length_with_the_prompt_is_none_without() -> None:
    assert (
        unknown_key(GenerateConfig, "max_length").fix == "use max_new_tokens, which does not count the prompt"
    )


def test_the_ranks_of_a_plan_are_its_gpus() -> None:
    assert unknown_key(PlanLayoutsConfig, "world_size").fix.endswith("a plan's is gpus")
    assert unknown_key(ReshardConfig, "ep").fix.endswith("reads its own parts of any checkpoint")


def test_words_after_an_unknown_flag_are_its_own() -> None:
    (fix,) = answers("--lr-warmup-samples 16 16 100 tp=2")
    assert fix.startswith("use schedule.warmup_steps")


def test_bare_word_after_a_known_key_is_still_an_error() -> None:
    arguments = parse(PRETRAIN, ["--tp", "2", "4"])
    assert arguments.overrides == ["tp=2", "4"]
    assert parse(PRETRAIN, ["--model", "gpt2_8b", "4"]).overrides == ["model=gpt2_8b", "4"]


def test_entries_name_keys_that_exist_and_each_name_once() -> None:
    names = [name for entry in foreign_options() for name in entry.names]
    assert len(set(names)) == len(names)
    specs = (PretrainConfig, PlanLayoutsConfig, GenerateConfig, ReshardConfig)
    known = {key for spec in specs for key in leaves(spec)}
    assert {key for entry in foreign_options() for key in entry.keys} <= known
    same_values = {name for leaf in leaves(PretrainConfig).values() for name in leaf.aliases}
    assert same_values & set(names) == {"data_path"}  # which finetuning takes as it is


@pytest.mark.parametrize("flags, ours", ROWS, ids=lambda value: str(value)[:40])
def test_row_of_the_tutorial_is_what_the_command_answers(flags: list[str], ours: str) -> None:
    """Each key of the right column is one that the error names, or that the flag stands for."""
    named = re.findall(r"`([a-z_.]+)=?[^`]*`", ours)
    for flag in flags:
        name = flag.split()[0]
        (fix,) = answers(f"{flag} 1" if " " not in flag else flag) or [
            plain_name(name)
        ]  # or it is a key itself
        meant = " ".join((fix, *keys_meant(PretrainConfig, name)))
        assert any(key in meant for key in named) if named else fix.partition(":")[0] in ours, (flag, fix)
