"""The words of a command line: the command, Hydra's own flags, and overrides in any of their three spellings.

`key=value`, `--key=value` and `--key value` mean the same; a bare `--key` means key=true. Some commands take
a path without its key: `mlm ckpt inspect runs/shakespeare`.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from mlm.config.cli.commands import COMMANDS, Command
from mlm.config.cli.tasks import OWN, run_config, takes_task, task_names
from mlm.config.fields import MOST, expand_home, length_problem
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.suggest import did_you_mean
from mlm.config.tree import alternatives, leaves
from mlm.util.errors import Problem, UserError

HELP = ("--help", "-h")
VERSION = ("--version", "-V")
CHECK = "--check"
CFG = ("--cfg", "-c")
MULTIRUN = ("--multirun", "-m")
COMPLETION = ("--shell-completion", "-sc")
CONFIG_DIR_FLAGS = ("--config-dir", "-cd")
CONFIG_PATH_FLAGS = ("--config-path", "-cp")
CONFIG_NAME_FLAGS = ("--config-name", "-cn")
TASK_KEYS = ("task=", "task.name=", "--task")
BARE_FLAGS = {"--hydra-help", "--resolve", "--run", "-r", *VERSION, *HELP, *MULTIRUN, *COMPLETION}
CHOICES = {
    **dict.fromkeys(CFG, ("job", "hydra", "all")),
    **dict.fromkeys(
        ("--info", "-i"), ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")
    ),
}
VALUE_FLAGS = {"--package", "-p", *CONFIG_NAME_FLAGS, *CONFIG_DIR_FLAGS, *CONFIG_PATH_FLAGS, *CHOICES}
SWITCH = re.compile(r"(?i)true|false|yes|no|on|off|0|1")
NUMBER = re.compile(r"-\.?\d")


@dataclass
class Arguments:
    """A command line after its command, taken apart."""

    flags: dict[str, str | None] = field(default_factory=dict)
    """Hydra's flags as typed, with their values."""
    overrides: list[str] = field(default_factory=list)
    """`key=value` and the like; a word without `=` is kept for the error, or names a section after --help."""
    check: bool = False
    """True if --check was typed: check, and start nothing."""
    gpus: int | None = None
    """GPUs that --check assumes; None takes what the layout needs."""

    def value(self, *names: str) -> str | None:
        """The value of the first of these flags that was typed."""
        return next((self.flags[name] for name in names if name in self.flags), None)

    def has(self, *names: str) -> bool:
        """True if one of these flags was typed."""
        return any(name in self.flags for name in names)

    @property
    def hydra_argv(self) -> list[str]:
        """The flags as Hydra wants them."""
        return [part for name, value in self.flags.items() for part in (name, value) if part is not None]


def find_command(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """The command and what follows it. Raises UserError with the nearest command."""
    for command in COMMANDS:
        if tuple(argv[: len(command.words)]) == command.words and takes(command, argv):
            return command, list(argv[len(command.words) :])
    first = argv[0]
    tasks = tasks_of(first, config_dir_of(argv))
    if not tasks:
        names = [command.words[0] for command in COMMANDS]
        ours = next((c.name for c in COMMANDS if first.lower().replace("-", "_") in c.also), None)
        hint = f"; did you mean '{ours}'?" if ours else did_you_mean(first, names)
        raise UserError(f"mlm: unknown command '{first}'{hint} (list: mlm --help)")
    if len(argv) > 1 and not argv[1].startswith("-") and "=" not in argv[1]:
        own = f"; {OWN}" if any(c.words == (first,) for c in COMMANDS) else ""
        hint = did_you_mean(argv[1], tasks) or f"; choose {', '.join(tasks)}{own}"
        raise UserError(f"mlm {first}: unknown task '{argv[1]}'{hint}")
    raise UserError(f"mlm {first}: name a task: {', '.join(tasks)}")


def takes(command: Command, argv: Sequence[str]) -> bool:
    """True if a command of one word is meant where others begin with it: `mlm eval race`."""
    if len(command.words) > 1 or not second_words(command.words[0]):
        return True
    names = task_names(config_dir_of(argv))
    if len(argv) > 1 and (argv[1] in names or any(word.startswith(TASK_KEYS) for word in argv)):
        return True
    is_word = len(argv) > 1 and not argv[1].startswith("-") and "=" not in argv[1]
    return is_word and not did_you_mean(argv[1], tasks_of(argv[0])) and run_config(argv) is not None


def second_words(word: str) -> list[str]:
    """The second words of the commands that begin with `word`: eval → loss."""
    return [c.words[1] for c in COMMANDS if c.words[0] == word and len(c.words) > 1]


def tasks_of(word: str, config_dir: str | None = None) -> list[str]:
    """Words that may follow `word`: eval → loss, …, race."""
    about_task = any(c.words == (word,) and takes_task(c) for c in COMMANDS)
    return [*second_words(word), *(task_names(config_dir) if about_task else [])]


def config_dir_of(words: Sequence[str]) -> str | None:
    """The folder of the user's own YAML, in a line that is not taken apart yet."""
    for n, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in CONFIG_DIR_FLAGS:
            return value if equals else next(iter(words[n + 1 :]), None)
    return None


def parse(command: Command, words: Sequence[str]) -> Arguments:
    """Take apart what follows the command. Raises UserError for an unknown flag or one without its value."""
    parsed, rest = Arguments(), list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if name in BARE_FLAGS and not equals:
            parsed.flags[name] = None
        elif name == CHECK:
            parsed.check = True
            parsed.gpus = _gpus(value if equals else None, rest)
        elif name in VALUE_FLAGS:
            parsed.flags[name] = _flag_value(name, value if equals else None, rest)
            if problem := _length_problem(name, parsed.flags[name] or ""):
                raise UserError(problem)
        elif name == "--experimental-rerun":
            raise UserError(
                "--experimental-rerun reads a pickle, and mlm reads none; give the overrides again"
            )
        elif word.startswith("--") and len(word) > 2:
            key = name[2:].replace("-", "_")
            if parsed.has(*HELP) and not equals:  # --help --clip-grad
                parsed.overrides.append(key)
                continue
            parsed.overrides.append(f"{key}={value if equals else _key_value(command, key, rest)}")
        elif word.startswith("-"):
            raise UserError(f"unknown flag '{word}' (list: mlm {command.name} --help)")
        else:
            parsed.overrides.append(word)
    if not parsed.has(*HELP, *COMPLETION):
        parsed.overrides = _renamed(command, _with_positional(command, parsed.overrides))
    return parsed


def _renamed(command: Command, overrides: Sequence[str]) -> list[str]:
    """Overrides of an alias as overrides of its key."""
    keys = dict(command.aliases)
    split = [text.partition("=") for text in overrides]
    return [f"{keys.get(name, name)}{equals}{value}" for name, equals, value in split]


def _with_positional(command: Command, overrides: Sequence[str]) -> list[str]:
    """Words without `=`, and paths that exist, as values of the command's positional keys while any are left.

    A sweep's folders are paths with `=`: runs/sweep/optimizer.lr=0.001.
    """
    keys = list(command.positional)
    if command.several:
        return _listed(keys[0], overrides)
    return [f"{keys.pop(0)}={text}" if keys and _is_value(text) else text for text in overrides]


def _listed(key: str, overrides: Sequence[str]) -> list[str]:
    """Words without `=`, and `key=word`, as one list."""
    words, rest = list[str](), list[str]()
    for text in overrides:
        name, _, value = text.partition("=")
        if name == key and value and not value.startswith("["):
            words.append(value)
        else:
            (words if _is_value(text) else rest).append(text)
    return [*([f"{key}=[{','.join(map(quote, words))}]"] if words else []), *rest]


def quote(value: str) -> str:
    """A text as a quoted value of Hydra's grammar.

    A backslash counts only before a quote: those, and the ones at the end, are doubled.
    """
    escaped, backslashes = "", 0
    for char in value:
        if char == "'":
            escaped += "\\" * backslashes + "\\"
        escaped += char
        backslashes = backslashes + 1 if char == "\\" else 0
    return "'" + escaped + "\\" * backslashes + "'"


def _is_value(text: str) -> bool:
    """True for a word that is no `key=value`."""
    return "=" not in text or ("/" in text.partition("=")[0] and os.path.lexists(expand_home(text)))


def check_task(command: Command, arguments: Arguments) -> None:
    """Raises UserError where a command is about a task and none is named, nor a config that may name it."""
    named = any(text.lstrip("+").startswith(TASK_KEYS) for text in arguments.overrides)
    if takes_task(command) and not named and not arguments.has(*CONFIG_NAME_FLAGS):
        raise UserError(f"name a task: {', '.join(task_names(arguments.value(*CONFIG_DIR_FLAGS)))}")


def is_flag(word: str) -> bool:
    """True if a word begins a new flag or --key; negative numbers do not."""
    return word.startswith("-") and len(word) > 1 and not NUMBER.match(word)


def _length_problem(name: str, value: str) -> Problem | None:
    """Problem of a flag's folder, or of the file that Hydra would look for."""
    if name in CONFIG_NAME_FLAGS:
        value = f"{value}.yaml"
    is_path = name in (*CONFIG_NAME_FLAGS, *CONFIG_DIR_FLAGS, *CONFIG_PATH_FLAGS)
    return length_problem(name, value) if is_path else None


def _flag_value(name: str, value: str | None, rest: list[str]) -> str | None:
    choices = CHOICES.get(name, ())
    optional = name in ("--info", "-i")
    if value is None and rest and not is_flag(rest[0]) and (rest[0] in choices or not optional):
        value = rest.pop(0)
    if value is None and optional:
        return None
    wanted = f": one of {', '.join(choices)}" if choices else ""
    if value is None:
        raise UserError(f"{name} needs a value{wanted}")
    if choices and value not in choices:
        raise UserError(
            f"{name} {value}: no such choice{did_you_mean(value, choices)} (of {', '.join(choices)})"
        )
    return value


def _key_value(command: Command, key: str, rest: list[str]) -> str:
    """The value of a bare `--key`: the next word, unless that is a flag, or the key is a switch."""
    leaf = leaves(command.spec).get(key)
    if leaf is None and not _takes_a_value(command, key):
        return _words_of_unknown(rest, several=not command.positional) or "true"
    switch = leaf is not None and bool in alternatives(leaf.type)
    if rest and not is_flag(rest[0]) and (not switch or SWITCH.fullmatch(rest[0])):
        return rest.pop(0)
    if leaf is not None and not switch:
        raise UserError(f"--{key} needs a value: {leaf.doc}")
    return "true"


def _takes_a_value(command: Command, key: str) -> bool:
    """True for what is no key but takes one value: a shipped config group, an alias, the run to resume."""
    return key == "resume" or key in dict(command.aliases) or key in groups(CONFIG_DIR)


def _words_of_unknown(rest: list[str], *, several: bool) -> str:
    """The words after a flag that is no key: its values, of which other programs may take `several`."""
    words: list[str] = []
    while rest and not is_flag(rest[0]) and "=" not in rest[0] and (several or not words):
        words.append(rest.pop(0))
    return " ".join(words)


def _gpus(value: str | None, rest: list[str]) -> int | None:
    """The number after --check, if there is one. Raises UserError for another value."""
    if value is None and rest and rest[0].isdecimal():
        value = rest.pop(0)
    if value is not None and not (value.isdecimal() and 0 < int(value[:10]) <= MOST):
        raise UserError(f"{CHECK}={value}: must be a number of GPUs, such as {CHECK}=512")
    return None if value is None else int(value)
