"""The words of a command line: the command, its flags, and settings in any of their three spellings.

`key=value`, `--key=value` and `--key value` mean the same; a bare `--key` means key=true. Some commands take
a path without its key: `mlm ckpt inspect runs/shakespeare`.
"""

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from mlm.cli.command import Command
from mlm.cli.commands import COMMANDS
from mlm.cli.compose.groups import CUSTOM_TASK, takes_task, task_names
from mlm.config.fields import MOST, expand_home
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.suggest import did_you_mean
from mlm.config.tree import alternatives, choices, leaves
from mlm.util.errors import Problem, UserError
from mlm.util.ownership import RUN_SETTINGS

HELP = ("--help", "-h")
VERSION = ("--version", "-V")
CONFIG_DIR_FLAGS = ("--config-dir", "-cd")
TASK_KEYS = ("task=", "task.name=", "--task")


@dataclass
class Arguments:
    """Parsed arguments of a command."""

    overrides: list[str] = field(default_factory=list)
    """`key=value` settings; a word without `=` is an error, or names a section after --help."""
    help: bool = False
    resolve: bool = False
    """Print the config with its interpolations filled in."""
    cfg: str | None = None
    """"job": print the config."""
    config_dir: str | None = None
    """Folder of the user's own YAML."""
    check: bool = False
    """Check, and start nothing."""
    gpus: int | None = None
    """GPUs that --check assumes; None: as many as the layout needs."""
    resume: str | None = None
    """Value of `resume=`, removed from the overrides."""
    from_megatron: list[str] | None = None
    """A script of Megatron-LM, or its flags, to be translated."""


def find_command(argv: Sequence[str]) -> tuple[Command, list[str]]:
    """Return the command and its arguments. Raises UserError with the nearest command."""
    first, config_dir = argv[0], _typed_value(argv, CONFIG_DIR_FLAGS)
    has_word = len(argv) > 1 and not argv[1].startswith("-") and "=" not in argv[1]
    for command in COMMANDS:
        if tuple(argv[: len(command.words)]) != command.words:
            continue
        # `mlm eval race` is the command `eval`; `mlm eval loss` is another
        is_meant = len(command.words) > 1 or not second_words(first)
        if not is_meant and len(argv) > 1:
            is_meant = argv[1] in task_names(config_dir) or any(w.startswith(TASK_KEYS) for w in argv)
        if is_meant or (has_word and run_config(argv) is not None):
            return command, list(argv[len(command.words) :])
    tasks = tasks_of(first, config_dir)
    if not tasks:
        name = _command_called(first)
        hint = f"; did you mean '{name}'?" if name else did_you_mean(first, [c.words[0] for c in COMMANDS])
        raise UserError(f"mlm: unknown command '{first}'{hint} (list: mlm --help)")
    if has_word:
        custom = f"; {CUSTOM_TASK}" if any(c.words == (first,) for c in COMMANDS) else ""
        name = _command_called(f"{first} {argv[1]}")
        nearest = f"; did you mean 'mlm {name}'?" if name else did_you_mean(argv[1], tasks)
        hint = nearest or f"; choose {', '.join(tasks)}{custom}"
        raise UserError(f"mlm {first}: unknown task '{argv[1]}'{hint}")
    raise UserError(f"mlm {first}: name a task: {', '.join(tasks)}")


def _command_called(words: str) -> str | None:
    """Name of the command that other programs call `words`."""
    name = re.sub("[- ]", "_", words.lower())
    return next((command.name for command in COMMANDS if name in command.other_names), None)


def second_words(word: str) -> list[str]:
    """The second words of the commands that begin with `word`: eval → loss."""
    return [c.words[1] for c in COMMANDS if c.words[0] == word and len(c.words) > 1]


def tasks_of(word: str, config_dir: str | None = None) -> list[str]:
    """Words that may follow `word`: eval → loss, …, race."""
    about_task = any(c.words == (word,) and takes_task(c) for c in COMMANDS)
    return [*second_words(word), *(task_names(config_dir) if about_task else [])]


def run_config(words: Sequence[str]) -> Path | None:
    """Path of the saved settings of the run that `ckpt=` names; None without any.

    The value is a run folder or a checkpoint in it: RUN/best/checkpoints/step-….
    """
    ckpt = _typed_value(words, ("ckpt", "--ckpt"))
    if ckpt is None:
        return None
    path = Path(expand_home(ckpt))
    files = (folder / RUN_SETTINGS for folder in (path, *list(path.absolute().parents)[:3]))
    return next((file for file in files if os.path.isfile(file)), None)


def _typed_value(words: Sequence[str], names: Collection[str]) -> str | None:
    """The value of a flag or key in either spelling, in an unparsed command line."""
    for index, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name in names:
            return value if equals else next(iter(words[index + 1 :]), None)
    return None


def parse(command: Command, words: Sequence[str]) -> Arguments:
    """Parse the arguments of a command. Raises UserError for an unknown flag or one without its value."""
    parsed, queue = Arguments(), list(words)
    while queue:
        word = queue.pop(0)
        name, equals, value = word.partition("=")
        text = value if equals else None
        if word in HELP:
            parsed.help = True
        elif word == "--resolve":
            parsed.resolve = True
        elif name == "--check":
            if text is None and queue and queue[0].isdecimal():
                text = queue.pop(0)
            if text is not None and not (text.isdecimal() and 0 < int(text[:10]) <= MOST):
                raise UserError(f"--check={text}: must be a number of GPUs, such as --check=512")
            parsed.check, parsed.gpus = True, None if text is None else int(text)
        elif name == "--from-megatron" and command.name == "pretrain":
            parsed.from_megatron, queue = [*filter(None, [text]), *queue], []
        elif name in ("--cfg", "-c"):
            parsed.cfg = _flag_value(name, text, queue, ": job")
            if parsed.cfg != "job":
                hint = did_you_mean(parsed.cfg, ("job",)) or "; use job"
                raise UserError(f"{name} {parsed.cfg}: no such choice{hint}")
        elif name in CONFIG_DIR_FLAGS:
            parsed.config_dir = _flag_value(name, text, queue)
        elif word.startswith("--") and len(word) > 2:
            key = name[2:].replace("-", "_")
            if parsed.help and not equals:  # --help --clip-grad
                parsed.overrides.append(key)
            else:
                parsed.overrides.append(f"{key}={value if equals else _key_value(command, key, queue)}")
        elif word.startswith("-"):
            raise UserError(f"unknown flag '{word}' (list: mlm {command.name} --help)")
        else:
            parsed.overrides.append(word)
    if not parsed.help:
        parsed.overrides = _with_keys(command, parsed.overrides)
    return parsed


def _flag_value(flag: str, value: str | None, queue: list[str], allowed: str = "") -> str:
    """The value of a flag, which may be the next word. Raises UserError."""
    if value is None and queue and not is_flag(queue[0]):
        value = queue.pop(0)
    if not value:
        raise UserError(f"{flag} needs a value{allowed}")
    return value


def _key_value(command: Command, key: str, queue: list[str]) -> str:
    """The value of a bare `--key`: the next word, unless that is a flag, or the key is a switch."""
    leaf = leaves(command.spec).get(key)
    takes_value = key == "resume" or key in command.aliases or key in groups(CONFIG_DIR)
    if leaf is None and not takes_value:
        words: list[str] = []  # flags of other programs may take several
        while queue and not is_flag(queue[0]) and "=" not in queue[0] and not (words and command.positional):
            words.append(queue.pop(0))
        return " ".join(words) or "true"
    is_switch = leaf is not None and bool in alternatives(leaf.type)
    literals = choices(leaf.type) if leaf is not None else []  # cuda_graphs=stack
    is_switch_value = queue and (
        queue[0] in literals or re.fullmatch(r"(?i)true|false|yes|no|on|off|0|1", queue[0])
    )
    if queue and not is_flag(queue[0]) and (not is_switch or is_switch_value):
        return queue.pop(0)
    if leaf is not None and not is_switch:
        raise UserError(f"--{key} needs a value: {leaf.doc}")
    return "true"


def is_flag(word: str) -> bool:
    """True if a word begins a new flag or --key; negative numbers do not."""
    return word.startswith("-") and len(word) > 1 and not re.match(r"-\.?\d", word)


def _with_keys(command: Command, texts: Sequence[str]) -> list[str]:
    """Overrides with the keys of positional words and aliases. Raises UserError for a key set twice.

    Positional: words without `=`, and existing paths, whose names may have one (runs/lr=0.001).
    """
    keys, words, named = list(command.positional), list[str](), list[str]()
    for text in texts:
        is_value = "=" not in text or ("/" in text.partition("=")[0] and os.path.lexists(expand_home(text)))
        name, _, value = text.partition("=")
        if command.takes_list and (is_value or (name == keys[0] and value and not value.startswith("["))):
            words.append(text if is_value else value)
        else:
            named.append(f"{keys.pop(0)}={text}" if is_value and keys else text)
    if words:
        named.insert(0, f"{keys[0]}=[{','.join(map(quote, words))}]")
    split = [text.partition("=") for text in named]
    overrides = [f"{command.aliases.get(name, name)}{equals}{value}" for name, equals, value in split]
    for text in {*overrides} - {*texts}:
        key = text.partition("=")[0]
        repeats = [other for other in overrides if other.startswith(f"{key}=")]
        if len(repeats) > 1:
            raise UserError(Problem((key,), f"{' '.join(repeats)}: one {key} is taken", "remove the other"))
    return overrides


def quote(value: str) -> str:
    """Quote a text in Hydra's grammar.

    Hydra reads a backslash only before a quote: double those, and any at the end.
    """
    escaped = re.sub(r"(\\*)'", lambda match: f"{match[1] * 2}\\'", value)
    trailing = len(escaped) - len(escaped.rstrip("\\"))
    return f"'{escaped}{chr(92) * trailing}'"


def check_task(command: Command, arguments: Arguments) -> None:
    """Raise UserError if a command takes a task and none is named."""
    is_named = any(text.startswith(TASK_KEYS) for text in arguments.overrides)
    if takes_task(command) and not is_named:
        raise UserError(f"name a task: {', '.join(task_names(arguments.config_dir))}")
