"""A command line whose command is known: help, version, completion, or a run.

Apart from entry.py because Hydra and pydantic take a second to import: `mlm --help` does without them.
"""

import sys
from dataclasses import replace
from typing import Literal

from mlm.config.cli.arguments import (
    CFG,
    COMPLETION,
    CONFIG_DIR_FLAGS,
    CONFIG_NAME_FLAGS,
    CONFIG_PATH_FLAGS,
    HELP,
    MULTIRUN,
    VERSION,
    Arguments,
    check_task,
    parse,
)
from mlm.config.cli.command_help import command_help
from mlm.config.cli.commands import Command
from mlm.config.cli.completion import complete
from mlm.config.cli.dry import Dry
from mlm.config.cli.entry import say, version_line
from mlm.config.cli.hydra_app import call_hydra, without_show
from mlm.config.cli.overrides import prepare
from mlm.config.cli.reporting import OK
from mlm.config.cli.saved_run import take_saved, take_saved_task
from mlm.util.errors import ConfigError


def act(command: Command, words: list[str]) -> int:
    """Obey the words that follow a command. Returns the exit code; raises UserError."""
    arguments = parse(command, words)
    if arguments.has(*HELP):
        return say(command_help(command, arguments.value(*CONFIG_DIR_FLAGS), arguments.overrides))
    if arguments.has(*VERSION):
        return say(version_line())
    if arguments.has(*COMPLETION):
        return complete(arguments.overrides)
    saved = take_saved(command, arguments) or take_saved_task(command, arguments)
    if saved is None:
        check_task(command, arguments)
    prepared = prepare(
        command,
        arguments.overrides,
        config_dir=arguments.value(*CONFIG_DIR_FLAGS),
        multirun=arguments.has(*MULTIRUN),
        own_path=arguments.has(*CONFIG_PATH_FLAGS),
    )
    runs = not arguments.flags.keys() & {*CFG, "--info", "-i", "--hydra-help"}
    if prepared.problems and (not runs or arguments.has(*MULTIRUN)):
        raise ConfigError(prepared.problems)
    flags, below = arguments.hydra_argv, Dry(reports_absent=False)
    if shows_job(arguments) or (saved is not None and arguments.value(*CFG) in ("job", "all")):
        shows: Literal["composed", "resolved"] = "resolved" if arguments.has("--resolve") else "composed"
        return call_hydra(command, without_show(flags), prepared, saved, replace(below, shows=shows))
    code = call_hydra(command, flags, prepared, saved, Dry(arguments.gpus) if arguments.check else None)
    if code == OK and arguments.value(*CFG) in ("job", "all") and not arguments.has(*MULTIRUN):
        sys.stdout.flush()  # the config stands above its problems
        return call_hydra(command, without_show(flags), prepared, saved, below)
    return code


def shows_job(arguments: Arguments) -> bool:
    """True if the config is to be printed and nothing else is asked of Hydra."""
    asked = arguments.flags.keys() - {*CONFIG_DIR_FLAGS, *CONFIG_PATH_FLAGS, *CONFIG_NAME_FLAGS, "--resolve"}
    return len(asked) == 1 and arguments.value(*CFG) == "job"
