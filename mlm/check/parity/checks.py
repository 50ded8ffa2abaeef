"""Checks of the settings of `mlm parity`."""

from mlm.check.parity.config import ParityConfig
from mlm.errors import Problem
from mlm.train.checks import check_pretrain


def check_parity(config: ParityConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    """Problems of a comparison: those of the pretraining run, and dropout in compiled layers.

    Arguments as of `check_pretrain`.
    """
    problems = check_pretrain(config.comparable(), world_size=world_size, local_devices=local_devices)
    if config.compile and (config.model.hidden_dropout or config.model.attention_dropout):
        problems.append(
            Problem(
                ("compile", "model.hidden_dropout", "model.attention_dropout"),
                "compile=true draws dropout masks that no run without it can repeat",
                "use compile=false, or model.hidden_dropout=0 model.attention_dropout=0",
            )
        )
    return problems
