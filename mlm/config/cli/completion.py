"""Shell completion: `eval "$(mlm -sc install=bash)"`, then `mlm pretrain mod<TAB>`.

The scripts for the shells are those of Hydra's completion plugins. They ask `mlm -sc query=SHELL` with the
typed line in COMP_LINE; the answer comes from our commands, flags, keys and config groups.
"""

import os
from collections.abc import Sequence
from glob import escape, glob

from hydra.core.plugins import Plugins
from hydra.plugins.completion_plugin import CompletionPlugin

from mlm.config.cli.arguments import (
    FLAGS,
    config_dir_of,
    is_flag,
    second_words,
    tasks_of,
)
from mlm.config.cli.commands import COMMANDS, Command
from mlm.config.cli.groups import command_groups, takes_task, task_names
from mlm.config.tree import choices, leaves
from mlm.util.errors import UserError


def complete(request: Sequence[str]) -> int:
    """Answer `install=SHELL`, `uninstall=SHELL` or `query=SHELL`. Raises UserError for another request."""
    action, _, shell = next(iter(request), "").partition("=")
    if action == "query" and "COMP_LINE" in os.environ:
        print(" ".join(completions(os.environ["COMP_LINE"])))
        return 0
    plugins = {
        plugin.provides(): plugin
        for plugin in Plugins.instance().discover(CompletionPlugin)
        if issubclass(plugin, CompletionPlugin)
    }
    if action not in ("install", "uninstall") or shell not in plugins:
        raise UserError("-sc needs an action: use -sc install=bash (or zsh, fish), or uninstall=bash")
    plugin = plugins[shell](None)  # type: ignore[arg-type]  # its loader of configs is for queries
    (plugin.install if action == "install" else plugin.uninstall)()
    return 0


def completions(line: str) -> list[str]:
    """Words that the last of a command line may become."""
    words = line.split()[1:]
    if not words or line[-1].isspace():
        words.append("")
    command = next((c for c in COMMANDS if tuple(words[: len(c.words)]) == c.words), None)
    is_second = len(words) == 2 and second_words(words[0])
    if command is None or len(words) == len(command.words) or is_second:
        return _command_words(words)
    return _arguments(command, words[len(command.words) : -1], words[-1])


def _command_words(words: Sequence[str]) -> list[str]:
    """Command words that could stand where the last of `words` is being typed."""
    *before, last = words
    depth = len(before)
    fitting = [c.words for c in COMMANDS if len(c.words) > depth and c.words[:depth] == tuple(before)]
    known = {chain[depth] for chain in fitting} | {*(tasks_of(before[0]) if depth == 1 else [])}
    return sorted(word for word in known if word.startswith(last))


def _arguments(command: Command, before: Sequence[str], last: str) -> list[str]:
    """Flags, tasks and settings that the word `last` may become."""
    if last.startswith("-") and "=" not in last:
        flags = sorted(flag for flag in FLAGS if flag.startswith("--") and flag.startswith(last))
        if flags:
            return flags
    folder = config_dir_of(before)
    if last.startswith("--"):
        return [f"--{word}" for word in _settings(command, folder, last[2:])]
    key = before[-1][2:] if before and before[-1].startswith("--") else None
    if key in {*leaves(command.spec), *command_groups(command, folder)} and not is_flag(last):
        return [word.partition("=")[2] for word in _settings(command, folder, f"{key}={last}")]
    tasks = task_names(folder) if takes_task(command) else []
    names_task = any(word in tasks or word.startswith("task=") for word in before)
    fitting = [] if names_task else [name for name in tasks if name.startswith(last)]
    return fitting if fitting and not last else [*fitting, *_settings(command, folder, last)]


def _settings(command: Command, config_dir: str | None, last: str) -> list[str]:
    """`key=`, `section.`, `key=value` and `group=choice` that begin with `last`."""
    key, equals, value = last.partition("=")
    known, groups = leaves(command.spec), command_groups(command, config_dir)
    if not equals:
        end = len(key.rpartition(".")[0]) + 1 if "." in key else 0  # the sections that are typed already
        names = [f"{name}=" for name in (*groups, *known) if name.startswith(key)]
        return sorted({f"{name[:end]}{_next_part(name[end:])}" for name in names})
    if key in groups:
        values = groups[key]
    elif key in known and known[key].role is not None:
        values = glob(f"{escape(value)}*")
    else:
        values = [str(choice) for choice in choices(known[key].type)] if key in known else []
    return sorted(f"{key}={each}" for each in values if each.startswith(value))


def _next_part(name: str) -> str:
    """`model.` of model.num_layers=, and tp= of itself."""
    first, dot, _ = name.partition(".")
    return f"{first}." if dot else name
