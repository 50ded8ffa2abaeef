"""Checks of the settings of `mlm reproduce` that need no experiment: help and completion read this module."""

import os

from mlm.reproduce.config import ReproduceConfig
from mlm.util.errors import Problem


def check_reproduce(config: ReproduceConfig) -> list[Problem]:
    """Problems of the settings."""
    here = len(os.sched_getaffinity(0))
    if config.cores is None or config.cores <= here:
        return []
    return [Problem.at("cores", config.cores, f"this process may use {here}", f"use cores={here} or less")]
