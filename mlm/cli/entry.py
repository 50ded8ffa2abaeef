"""`main`: from argv to an exit code, and a user's mistake to lines on stderr.

Imports neither Hydra nor pydantic, which take a second: `mlm --help` does without them.
"""

import os
import sys
from collections.abc import Sequence
from threading import Event
from traceback import extract_tb

from mlm import __version__
from mlm.cli.commands import COMMANDS
from mlm.cli.compose.arguments import HELP, VERSION, find_command, second_words
from mlm.cli.compose.help import main_help
from mlm.cli.outcome import (
    FAILED,
    INTERRUPTED,
    MISTAKE,
    OK,
    print_stdout,
    report,
    speaks_for_host,
)
from mlm.launch.command_line import record_command_line
from mlm.launch.stop import note_interrupted_imports, note_stop_requests, unblock_stop_signals
from mlm.util.errors import UserError, printable_line
from mlm.util.system import resolve, warn_once, writable_streams


def main(argv: Sequence[str] | None = None) -> int:
    """Run `mlm` with `argv` (default: of this process) and return its exit code.

    0 done · 1 the run failed or a file is damaged · 2 a mistake in the command, its settings or its input ·
    128 + n stopped by signal n. `mlm.cli.compose.help.EXIT_CODES` has the details.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    is_training = words[:1] in (["pretrain"], ["finetune"])  # which save before they stop
    interrupted = Event()
    imports = note_interrupted_imports(interrupted)
    noting = note_stop_requests(ends_process=argv is None) if is_training else imports
    with noting, record_command_line(words):
        try:
            unblock_stop_signals()  # deliver signals that waited for the handlers
            warn_once(is_heard=speaks_for_host(os.environ))
            with writable_streams() as output:
                code = _main(words)
            if code in (FAILED, MISTAKE) and interrupted.is_set():
                # An import swallowed it, and what failed later was taken for the user's mistake.
                print("mlm: Ctrl-C during an import; what failed may follow from it", file=sys.stderr)
                return INTERRUPTED
        except KeyboardInterrupt:
            return INTERRUPTED
        except Exception as error:
            if not interrupted.is_set():
                raise
            # An import caught Ctrl-C and failed later; report that error too.
            place = extract_tb(error.__traceback__)[-1]
            message = f"{type(error).__name__}: {error} ({place.filename}:{place.lineno})"
            print(f"mlm: Ctrl-C during an import, then {printable_line(message)}", file=sys.stderr)
            return INTERRUPTED
    return FAILED if code == OK and output.has_failed else code


def _main(words: list[str]) -> int:
    if words[:1] == ["help"] and (words := words[1:]):
        # `help eval loss` is `eval loss --help`; what follows the command may be a section or key
        cut = next((len(c.words) for c in COMMANDS if tuple(words[: len(c.words)]) == c.words), len(words))
        words = [*words[:cut], HELP[0], *words[cut:]]
    if not words or words[0] in HELP:
        return print_stdout(main_help())
    if words[0] in VERSION or words[-1] in VERSION or words == ["version"]:
        hydra = resolve("importlib.metadata:version")("hydra-core")
        return print_stdout(f"mlm {__version__} (hydra {hydra})")
    if len(words) == 2 and words[1] in HELP and second_words(words[0]):
        return print_stdout(main_help(words[0]))
    try:
        command, arguments = find_command(words)
    except UserError as error:
        print("\n".join(error.lines()), file=sys.stderr)
        return MISTAKE
    return report(command, lambda: int(resolve("mlm.cli.run:run_command")(command, arguments)))
