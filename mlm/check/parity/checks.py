"""Checks of the settings of `mlm parity`."""

from mlm.check.parity.config import ParityConfig
from mlm.errors import Problem
from mlm.train.checks import check_pretrain


def check_parity(config: ParityConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    """Problems of a comparison: those of the pretraining run. Arguments as of `check_pretrain`."""
    return check_pretrain(config.comparable(), world_size=world_size, local_devices=local_devices)
