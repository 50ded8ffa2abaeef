"""A command line whose command is known: help, version, completion, or a run.

Apart from entry.py because Hydra and pydantic take a second to import: `mlm --help` does without them.
"""

import sys

from mlm.cli.arguments import (
    COMPLETION,
    CONFIG_DIR_FLAGS,
    CONFIG_PATH_FLAGS,
    HELP,
    MULTIRUN,
    VERSION,
    check_task,
    parse,
)
from mlm.cli.command_help import command_help
from mlm.cli.commands import Command
from mlm.cli.completion import complete
from mlm.cli.dry import Dry
from mlm.cli.entry import say, version_line
from mlm.cli.hydra_app import call_hydra, without_show
from mlm.cli.overrides import prepare
from mlm.cli.reporting import OK
from mlm.cli.saved_run import take_saved, take_saved_task
from mlm.errors import ConfigError


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
    runs = not arguments.flags.keys() & {"--cfg", "-c", "--info", "-i", "--hydra-help"}
    if prepared.problems and (not runs or arguments.has(*MULTIRUN)):
        raise ConfigError(prepared.problems)
    flags = arguments.hydra_argv
    code = call_hydra(command, flags, prepared, saved, Dry(arguments.gpus) if arguments.check else None)
    if code == OK and arguments.value("--cfg", "-c") in ("job", "all") and not arguments.has(*MULTIRUN):
        sys.stdout.flush()  # the config stands above its problems
        return call_hydra(command, without_show(flags), prepared, saved, Dry(reports_absent=False))
    return code
