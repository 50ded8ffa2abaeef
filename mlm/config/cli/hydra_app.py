"""Hydra in charge of composing, showing and sweeping; mlm in charge of errors and of running."""

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra._internal.hydra import Hydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from mlm.config.cli.arguments import CONFIG_DIR_FLAGS, CONFIG_NAME_FLAGS, CONFIG_PATH_FLAGS
from mlm.config.cli.commands import Command
from mlm.config.cli.compose import register_defaults, reword
from mlm.config.cli.dry import Dry
from mlm.config.cli.foreign_yaml import check_foreign_yaml
from mlm.config.cli.overrides import Prepared, command_groups
from mlm.config.cli.rejected import rejected_override
from mlm.config.cli.reporting import report
from mlm.config.cli.run import Job, run
from mlm.config.cli.saved import Saved, unset_config
from mlm.config.cli.sweep import Sweep
from mlm.config.paths import CONFIG_DIR
from mlm.util.errors import ConfigError, Problem

CONFIG_FLAGS = {*CONFIG_DIR_FLAGS, *CONFIG_NAME_FLAGS, *CONFIG_PATH_FLAGS}
"""Flags that bring in configs of the user's own."""

UNCOMPOSED = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError)
"""Exceptions of Hydra where it cannot compose a config."""


class JobFailedError(Exception):
    """A job of a sweep ended with an exit code that is not 0; Hydra carries it past its launcher."""

    def __init__(self, code: int) -> None:
        super().__init__(code)
        self.code = code


def call_hydra(
    command: Command,
    flags: Sequence[str],
    prepared: Prepared | None = None,
    saved: Saved | None = None,
    dry: Dry | None = None,
) -> int:
    """Let Hydra act on its flags and overrides, and run the command if it calls it. Returns the exit code.

    With `saved`, Hydra composes what the command line sets, and the rest is those values. With `dry`, the
    command is checked and not run. The problems in `prepared` are reported with those of the composed config.
    Raises ConfigError for what Hydra cannot compose; exceptions of the run itself pass through.
    """
    typed = prepared or Prepared()
    config = command.config if saved is None else unset_config(command.config)
    started: list[Job] = []
    sweep = Sweep(command)

    def task(composed: DictConfig) -> None:
        about = HydraConfig.get()
        job = Job(command, typed, about if about.mode == RunMode.MULTIRUN else None, saved, dry)
        started.append(job)

        def work() -> int:
            return report(command, lambda: run(job, composed))

        if job.sweep is not None:
            if code := sweep.run(job, work):
                raise JobFailedError(code)
        elif code := work():
            sys.exit(code)

    try:
        options = _options(command, flags)
        check_foreign_yaml(
            config, flags, typed.overrides, options, lambda name, argv: _main(name, argv, task)
        )
        _main(config, [*flags, *typed.overrides], task)
    except JobFailedError as failed:
        return failed.code
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except ConfigError as error:
        raise ConfigError(typed.all_problems(error.problems)) from None
    except (
        HydraException,
        OmegaConfBaseException,
        yaml.YAMLError,
        ValueError,
        OSError,
        RecursionError,
    ) as error:
        if started:
            raise
        raise ConfigError(typed.all_problems([_explained(command, flags, typed, error)])) from None
    finally:
        sweep.report()
    return 0


def _explained(command: Command, flags: Sequence[str], typed: Prepared, error: Exception) -> Problem:
    if isinstance(error, ConfigCompositionException) and not isinstance(error, MissingConfigException):
        ours = rejected_override(command, typed.overrides, _options(command, flags), str(error))
        return ours or reword(error)
    return reword(error)


def _options(command: Command, flags: Sequence[str]) -> dict[str, list[str]]:
    """The config groups of the command and their options, those of --config-dir too."""
    at = next((n for n, flag in enumerate(flags) if flag in CONFIG_DIR_FLAGS), None)
    return command_groups(command, None if at is None else flags[at + 1])


def without_show(flags: Sequence[str]) -> list[str]:
    """Flags without those that make Hydra print the config and stop."""
    kept, words = list[str](), iter(flags)
    for word in words:
        if word in ("--cfg", "-c", "--package", "-p"):
            next(words, None)
        elif word != "--resolve":
            kept.append(word)
    return kept


def _main(config_name: str | None, argv: Sequence[str], task: Callable[[DictConfig], Any]) -> None:
    register_defaults()
    entry = hydra.main(version_base="1.3", config_path=str(CONFIG_DIR), config_name=config_name)(task)
    with _process_as_hydra_wants(argv), _reported_once(), _composed_once(argv):
        entry()


@contextmanager
def _reported_once() -> Iterator[None]:
    """Hydra precedes the exception of a sweep's job with a line: not where the job reported its error."""
    hydras: property = vars(JobReturn)["return_value"]

    def value(job: JobReturn) -> Any:
        if isinstance(job._return_value, JobFailedError):
            raise job._return_value
        return hydras.__get__(job)

    JobReturn.return_value = hydras.getter(value)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        JobReturn.return_value = hydras  # type: ignore[method-assign, assignment]


@contextmanager
def _composed_once(argv: Sequence[str]) -> Iterator[None]:
    """Hydra composes everything to read hydra.mode, and then again: not where nothing can have set it."""
    if any(word in CONFIG_FLAGS or word.partition("=")[0].strip("+~-").startswith("hydra") for word in argv):
        yield
        return
    hydras = Hydra.get_mode
    Hydra.get_mode = _no_mode  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Hydra.get_mode = hydras  # type: ignore[method-assign]


def _no_mode(hydra: Hydra, config_name: str | None, overrides: list[str]) -> None:
    """hydra.mode, where it is not set: Hydra then goes by --multirun."""


@contextmanager
def _process_as_hydra_wants(argv: Sequence[str]) -> Iterator[None]:
    """Hydra reads sys.argv, and raises instead of printing only when this variable is set."""
    before, full_error = sys.argv, os.environ.get("HYDRA_FULL_ERROR")
    sys.argv, os.environ["HYDRA_FULL_ERROR"] = ["mlm", *argv], "1"
    try:
        yield
    finally:
        sys.argv = before
        if full_error is None:
            del os.environ["HYDRA_FULL_ERROR"]
        else:
            os.environ["HYDRA_FULL_ERROR"] = full_error
