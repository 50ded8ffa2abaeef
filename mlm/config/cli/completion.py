"""Shell completion: `eval "$(mlm -sc install=bash)"`, then `mlm pretrain mod<TAB>`.

Hydra's plugins complete overrides of one config. Here the command is taken out of the line first, and the
`--key` and `--key value` spellings are put into Hydra's and back.
"""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout

from mlm.config.cli.arguments import (
    BARE_FLAGS,
    CONFIG_DIR_FLAGS,
    CONFIG_NAME_FLAGS,
    CONFIG_PATH_FLAGS,
    VALUE_FLAGS,
    Arguments,
    is_flag,
    parse,
    second_words,
    tasks_of,
)
from mlm.config.cli.commands import COMMANDS, Command
from mlm.config.cli.hydra_app import call_hydra
from mlm.config.cli.overrides import command_groups
from mlm.config.cli.saved_run import take_file, take_resume
from mlm.config.cli.tasks import takes_task, task_names
from mlm.config.tree import leaves
from mlm.util.errors import UserError

ACTIONS = ("install", "uninstall", "query")
WHERE = (*CONFIG_DIR_FLAGS, *CONFIG_PATH_FLAGS, *CONFIG_NAME_FLAGS)
"""Flags that locate configs: Hydra wants them beside the query, not in the line."""


def complete(request: Sequence[str]) -> int:
    """Answer `install=SHELL`, `uninstall=SHELL` or `query=SHELL` and return the exit code.

    A query reads the typed line from COMP_LINE, as the shells' scripts set it.
    """
    line = os.environ.get("COMP_LINE")
    if not any(word.partition("=")[0] in ACTIONS for word in request):
        raise UserError("-sc needs an action: use -sc install=bash (or zsh, fish), or uninstall=bash")
    if line is None or not any(word.startswith("query=") for word in request):
        return call_hydra(COMMANDS[0], ["-sc", *request])
    words = line.split()[1:]
    if not words or line[-1].isspace():
        words.append("")
    command = next((c for c in COMMANDS if tuple(words[: len(c.words)]) == c.words), None)
    is_second = len(words) == 2 and second_words(words[0])
    if command is None or len(words) == len(command.words) or is_second:
        print(" ".join(next_words(words)))
        return 0
    print(" ".join(_overrides(command, words[len(command.words) :], request)))
    return 0


def next_words(words: Sequence[str]) -> list[str]:
    """Command words that could stand where the last of `words` is being typed."""
    *before, last = words
    depth = len(before)
    fitting = [c.words for c in COMMANDS if len(c.words) > depth and c.words[:depth] == tuple(before)]
    known = {chain[depth] for chain in fitting} | {*(tasks_of(before[0]) if depth == 1 else [])}
    return sorted(word for word in known if word.startswith(last))


def _overrides(command: Command, words: list[str], request: Sequence[str]) -> list[str]:
    *before, last = words
    known = {f"--{key}" for key in (*leaves(command.spec), *command_groups(command))}
    prefix = cut = ""
    if last.startswith("-") and "=" not in last and (flags := _flags(last)):
        return flags
    if last.startswith("--"):
        prefix, last = "--", last[2:]
    elif before and before[-1] in known and not is_flag(last):  # --model gpt
        cut = f"{before.pop()[2:]}="
        last = cut + last
    try:
        settled = parse(command, before)
    except UserError:
        return []
    tasks = [] if prefix or cut else _tasks(command, settled, last)
    if tasks and not last:
        return tasks
    found = _ask_hydra(command, settled, last, request)
    return [*tasks, *(prefix + match.removeprefix(cut) for match in found)]


def _tasks(command: Command, settled: Arguments, last: str) -> list[str]:
    """The tasks that `last` may be the beginning of, if a command takes one and has none yet."""
    if not takes_task(command) or any(text.startswith("task=") for text in settled.overrides):
        return []
    return [name for name in task_names(settled.value(*CONFIG_DIR_FLAGS)) if name.startswith(last)]


def _flags(last: str) -> list[str]:
    return sorted(f for f in BARE_FLAGS | VALUE_FLAGS if f.startswith("--") and f.startswith(last))


def _ask_hydra(command: Command, settled: Arguments, last: str, request: Sequence[str]) -> list[str]:
    """Hydra's completions of the word `last` after the arguments already settled."""
    take_file(settled)  # a run's file is not Hydra's
    take_resume(command, settled)
    line = " ".join(["mlm", *settled.hydra_argv, *settled.overrides, last])
    where = [part for name in WHERE if (value := settled.value(name)) for part in (name, value)]
    answer = io.StringIO()
    with _line(line), redirect_stdout(answer):
        try:
            call_hydra(command, [*where, "-sc", *request])
        except UserError as error:
            print(error, file=sys.stderr)
    return answer.getvalue().split()


@contextmanager
def _line(line: str) -> Iterator[None]:
    before = os.environ["COMP_LINE"]
    os.environ["COMP_LINE"] = line
    try:
        yield
    finally:
        os.environ["COMP_LINE"] = before
