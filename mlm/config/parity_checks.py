"""What must hold between the settings of `mlm parity`."""

from mlm.config.checks import check_pretrain
from mlm.config.parity_schema import ParityConfig


def check_parity(config: ParityConfig, *, world_size: int | None, local_devices: int | None) -> list[str]:
    """Faults of a comparison: those the pretraining run would have. Arguments as of `check_pretrain`."""
    return check_pretrain(config.comparable(), world_size=world_size, local_devices=local_devices)
