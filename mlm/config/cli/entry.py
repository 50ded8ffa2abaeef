"""`main`: from argv to an exit code."""

import sys
from collections.abc import Sequence
from importlib import import_module

from mlm import __version__
from mlm.config.cli.arguments import COMPLETION, HELP, VERSION, find_command, second_words
from mlm.config.cli.commands import COMMANDS, resolve
from mlm.config.cli.help import main_help
from mlm.config.cli.reporting import FAILED, MISTAKE, OK, report
from mlm.util.errors import UserError
from mlm.util.system import writable_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlm` with `argv` (default: of this process) and return its exit code.

    0 done · 1 the run failed or a file is damaged · 2 a mistake in the command, its settings or its input ·
    128 + n stopped by signal n. `mlm.config.cli.help.EXIT_CODES` has the details.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    with writable_streams() as output:
        code = _main(words)
    return FAILED if code == OK and output.has_failed else code


def _main(words: list[str]) -> int:
    if words[:1] == ["help"]:
        words = _helped(words[1:])
    if not words or words[0] in HELP:
        return say(main_help())
    if words[0] in VERSION or words == ["version"]:
        return say(version_line())
    if words[0] in COMPLETION:
        return report(None, lambda: int(resolve("mlm.config.cli.completion:complete")(words[1:])))
    if len(words) == 2 and words[1] in HELP and second_words(words[0]):
        return say(main_help(words[0]))
    try:
        command, rest = find_command(words)
    except UserError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return MISTAKE
    return report(command, lambda: int(resolve("mlm.config.cli.act:act")(command, rest)))


def _helped(words: list[str]) -> list[str]:
    """`mlm help eval loss` as `mlm eval loss --help`; what follows the command may be a section or key."""
    command = next((c for c in COMMANDS if tuple(words[: len(c.words)]) == c.words), None)
    end = len(command.words) if command else len(words)
    return [*words[:end], HELP[0], *words[end:]] if words else []


def say(text: str) -> int:
    """Print a text and return the exit code of success."""
    print(text)
    return OK


def version_line() -> str:
    """The answer to `mlm --version`."""
    version = import_module("importlib.metadata").version
    return f"mlm {__version__} (hydra {version('hydra-core')})"
