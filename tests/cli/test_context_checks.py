"""Sequences that ranks split: commands, models and settings that do not take them, each named in one line."""

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.evaluate import check_eval_loss
from mlm.cli.generate import check_generate
from mlm.cli.plan import check_plan_dry_run, check_plan_memory
from mlm.cli.verify import check_parity
from mlm.launch.rules.checks import problems_of
from mlm.launch.rules.layout import FINETUNE_LAYOUT_RULES, Launch
from mlm.verify.config import ParityConfig
from tests.cli.doubles import Cli, make_cli

cli = pytest.fixture(make_cli)

HERE = {"world_size": 8, "local_devices": None}
TINY = ["model=gpt2_tiny", "data=synthetic", "cp=2"]


def test_other_readers_of_a_model_take_whole_sequences() -> None:
    """Their rules are the same: a layout with cp=2 on as many ranks as it needs has this one problem."""
    expected = "cp=2 splits the sequences of pretraining and `mlm eval loss` alone; use cp=1"
    generate = load_config("generate", ["ckpt=x", "cp=2"])
    assert expected in check_generate(generate, **HERE)
    assert problems_of(generate, Launch(8, None), FINETUNE_LAYOUT_RULES[:-2], ()) == [expected]
    eval_loss = load_config("eval_loss", ["ckpt=x", "path=y", "cp=2"])
    assert not any("cp" in problem for problem in check_eval_loss(eval_loss, **HERE))


@pytest.mark.parametrize(
    "words", ["finetune chat data=.", "eval chat", "eval rte", "eval wikitext103", "generate"]
)
def test_commands_reject_what_they_cannot_split(cli: Cli, words: str) -> None:
    """Before a rank starts and a file is read."""
    assert cli(f"{words} ckpt=. cp=2 dist.device=cpu") == 2
    assert "cp=2 splits the sequences of pretraining and `mlm eval loss` alone; use cp=1" in cli.err


def test_plans_take_split_sequences() -> None:
    assert check_plan_memory(load_config("plan_memory", ["model=gpt2_tiny", "cp=2"])) == []
    assert check_plan_dry_run(load_config("plan_dry_run", TINY)) == []


def test_masks_that_a_gpu_draws_are_not_compared_with_masks_of_places() -> None:
    dropout = ["model.attention_dropout=0.1", "dist.device=cuda"]
    parity = load_config("parity", [*TINY, *dropout])
    assert isinstance(parity, ParityConfig)
    expected = "model.attention_dropout=0.1 on a GPU draws other masks at cp=2 than on one process"
    assert check_parity(parity, world_size=None, local_devices=8) == [
        f"{expected}; use model.attention_dropout=0"
    ]
