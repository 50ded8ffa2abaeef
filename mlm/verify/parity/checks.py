"""Checks of the settings of `mlm parity`."""

from mlm.training.checks import check_pretrain
from mlm.util.errors import Problem
from mlm.verify.parity.config import ParityConfig


def check_parity(config: ParityConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    """Problems of a comparison: those of the pretraining run. Arguments as of `check_pretrain`."""
    found = check_pretrain(config.comparable(), world_size=world_size, local_devices=local_devices)
    return found or _mask_problems(config, local_devices)


def _mask_problems(config: ParityConfig, local_devices: int | None) -> list[Problem]:
    """Fused attention on one GPU draws masks of its own, attention over cp ranks those of their places."""
    p, cp = config.model.attention_dropout, config.parallel.cp
    if local_devices is None or not p or cp == 1:
        return []
    problem = f"model.attention_dropout={p:g} on a GPU draws other masks at cp={cp} than on one process"
    return [Problem(("model.attention_dropout", "cp"), problem, "use model.attention_dropout=0")]
