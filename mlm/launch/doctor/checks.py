"""Checks of the settings of `mlm doctor`."""

from mlm.launch.checks import devices_exist, problems_of
from mlm.launch.doctor.config import DoctorConfig
from mlm.parallel.layout_checks import RANK_RULES, Launch
from mlm.util.errors import Problem
from mlm.util.results import folder_problem


def check_doctor(config: DoctorConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    """Problems of the settings. Arguments as of `check_pretrain`."""
    return problems_of(config, Launch(world_size, local_devices), RANK_RULES, (devices_exist, _out_exists))


def _out_exists(config: DoctorConfig, _: Launch) -> Problem | None:
    return folder_problem(config.out)
