"""Checks of the settings of `mlm doctor`."""

from mlm.doctor.config import DoctorConfig
from mlm.errors import Problem
from mlm.files.results import folder_problem
from mlm.launch.checks import devices_exist, problems_of
from mlm.parallel.layout_checks import RANK_RULES, Launch


def check_doctor(config: DoctorConfig, *, world_size: int | None, local_devices: int | None) -> list[Problem]:
    """Problems of the settings. Arguments as of `check_pretrain`."""
    return problems_of(config, Launch(world_size, local_devices), RANK_RULES, (devices_exist, _out_exists))


def _out_exists(config: DoctorConfig, _: Launch) -> Problem | None:
    return folder_problem(config.out)
