"""`main`: from argv to an exit code."""

import sys
from collections.abc import Sequence
from importlib.metadata import version

from mlm.cli.arguments import (
    COMPLETION,
    CONFIG_DIR_FLAGS,
    CONFIG_PATH_FLAGS,
    HELP,
    MULTIRUN,
    VERSION,
    Arguments,
    check_task,
    find_command,
    parse,
    second_words,
)
from mlm.cli.commands import COMMANDS, Command
from mlm.cli.completion import complete
from mlm.cli.help import command_help, main_help
from mlm.cli.hydra_app import call_hydra
from mlm.cli.overrides import prepare
from mlm.cli.run import FAILED, MISTAKE, OK, report
from mlm.cli.saved_run import take_saved
from mlm.cli.streams import writable_streams
from mlm.errors import ConfigError, UserError


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlm` with `argv` (default: of this process) and return its exit code.

    0 done · 1 the run failed or a file is damaged · 2 a mistake in the command, its settings or its input ·
    130 interrupted.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with writable_streams() as output:
        code = _main(words)
    return FAILED if code == OK and output.has_failed else code


def _main(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = _helped(words[1:])
    if not words or words[0] in HELP:
        return _say(main_help())
    if words[0] == VERSION:
        return _say(_version())
    if words[0] in COMPLETION:
        return report(None, lambda: complete(words[1:]))
    if len(words) == 2 and words[1] in HELP and second_words(words[0]):
        return _say(main_help(words[0]))
    try:
        command, rest = find_command(words)
    except UserError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return MISTAKE
    return report(command, lambda: _act(command, parse(command, rest)))


def _helped(words: list[str]) -> list[str]:
    """`mlm help eval loss` as `mlm eval loss --help`; what follows the command may be a section or key."""
    command = next((c for c in COMMANDS if tuple(words[: len(c.words)]) == c.words), None)
    end = len(command.words) if command else len(words)
    return [*words[:end], HELP[0], *words[end:]] if words else []


def _act(command: Command, arguments: Arguments) -> int:
    if arguments.has(*HELP):
        return _say(command_help(command, arguments.value(*CONFIG_DIR_FLAGS), arguments.overrides))
    if arguments.has(VERSION):
        return _say(_version())
    if arguments.has(*COMPLETION):
        return complete(arguments.overrides)
    saved = take_saved(command, arguments)
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
    return call_hydra(command, arguments.hydra_argv, prepared, saved)


def _say(text: str) -> int:
    print(text)
    return OK


def _version() -> str:
    return f"mlm {version('mlm')} (hydra {version('hydra-core')})"
