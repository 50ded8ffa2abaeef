"""The text of `mlm --help` and of each command's help."""

import shutil
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import replace

from mlm.cli.choices import choice_rows
from mlm.cli.commands import COMMANDS, Command
from mlm.cli.compose import compose_values
from mlm.cli.overrides import command_groups
from mlm.cli.tasks import takes_task, task_names, task_summaries
from mlm.config.suggest import did_you_mean
from mlm.config.tree import MISSING_VALUE, Leaf, describe_type, flatten, leaves
from mlm.errors import UserError, show

USAGE = "mlm COMMAND [TASK] [key=value …]"
SPELLINGS = "key=value, --key=value and --key value mean the same. Values you type win over every group."
FLAGS = (
    ("--help", "this text; after it a section or key (model, tp) for all about it"),
    ("--cfg job", "print the composed config and stop; --resolve fills in its interpolations"),
    ("--multirun, -m", "run every combination of key=a,b,c, each job in its own folder"),
    ("--config-dir DIR", "add a folder of your own YAML, laid out like configs/; Hydra trusts what is in it"),
    ("--config-name NAME", "compose another primary config of DIR; one named config is read as plain data"),
    ("--info config", "the config and where it was searched; --info defaults: the files, in their order"),
    ("--hydra-help", "the rest of Hydra"),
)
EXIT_CODES = (
    ("0", "done"),
    ("1", "the run failed, or a file is damaged"),
    ("2", "a mistake in the command, its settings or its input: one line for each"),
    ("130", "interrupted"),
)


def main_help(first: str | None = None) -> str:
    """Help of `mlm`, or of the commands that begin with one word (`mlm eval --help`)."""
    listed = [c for c in COMMANDS if first in (None, c.words[0])]
    blocks = [
        "mlm: Megatron-style model parallelism, small, readable and exact.",
        f"Usage: {USAGE}",
        "Commands:\n" + _table((c.usage if takes_task(c) else c.name, c.summary) for c in listed),
        *([_tasks(None)] if first and any(map(takes_task, listed)) else []),
        "Examples:\n" + _examples([e for c in listed for e in c.examples[: 2 if first else 1]]),
        _wrap(f"Settings: {SPELLINGS} `mlm COMMAND --help` lists keys and groups."),
        'Completion in bash: eval "$(mlm -sc install=bash)"',
        "Exit codes:\n" + _table(EXIT_CODES),
    ]
    return "\n\n".join(blocks)


def command_help(command: Command, config_dir: str | None = None, topics: Sequence[str] = ()) -> str:
    """Help of one command, or of the sections and keys named by `topics`.

    Overrides among the topics are passed over. Raises UserError for a topic nobody knows.
    """
    tasks = task_names(config_dir) if takes_task(command) else []
    topics = [topic for topic in topics if "=" not in topic and topic not in tasks]
    groups = command_groups(command, config_dir)
    if topics:
        return "\n\n".join(_topic(command, topic, groups, config_dir) for topic in topics)
    known = _composed_leaves(command)
    frequent = [known[key] for key in command.keys or known]
    resume = [("resume=RUN", "continue a run with its own settings; what is typed wins over them")]
    more = "" if len(frequent) == len(known) else f" (more: mlm {command.name} --help {_a_section(command)})"
    blocks = [f"Usage: mlm {command.usage} [key=value …]", _wrap(command.about)]
    if tasks:
        blocks.append(_tasks(config_dir))
        groups.pop("task")
    if command.examples:
        blocks.append("Examples:\n" + _examples(command.examples))
    if groups:
        blocks.append(
            "Groups, chosen as group=option:\n" + _table((g, ", ".join(o)) for g, o in groups.items())
        )
    blocks += [
        f"Keys{more}:\n" + _table([*(resume if command.has_runs else []), *map(_row, frequent)]),
        _wrap(SPELLINGS),
        "Flags:\n" + _table(FLAGS),
        "Exit codes:\n" + _table(EXIT_CODES),
    ]
    return "\n\n".join(blocks)


def _topic(command: Command, topic: str, groups: dict[str, list[str]], config_dir: str | None) -> str:
    known = _composed_leaves(command)
    rows = [leaf for leaf in known.values() if leaf.key == topic or leaf.section == topic]
    if not rows and topic not in groups:
        near = did_you_mean(
            topic, [*groups, *known, *(leaf.section for leaf in known.values() if leaf.section)]
        )
        raise UserError(f"--help {topic}: no such section or key{near}")
    choices = groups.get(topic, [])
    options = [f"{topic}=…:\n" + _table(choice_rows(topic, choices, config_dir))] if choices else []
    return "\n\n".join(options + ([_table(map(_full_row, rows))] if rows else []))


def _tasks(config_dir: str | None) -> str:
    return "Tasks:\n" + _table(task_summaries(config_dir))


def _composed_leaves(command: Command) -> dict[str, Leaf]:
    """The command's keys with the defaults of its YAML."""
    values = flatten(compose_values(command.config, resolve=False))
    return {key: replace(leaf, default=values[key]) for key, leaf in leaves(command.spec).items()}


def _a_section(command: Command) -> str:
    return next((leaf.section for leaf in leaves(command.spec).values() if leaf.section), "SECTION")


def _row(leaf: Leaf) -> tuple[str, str]:
    return leaf.key, f"{leaf.doc} [{_default(leaf)}]"


def _full_row(leaf: Leaf) -> tuple[str, str]:
    """With the type, and the bounds of a number."""
    allowed = describe_type(leaf.type) + (f", {leaf.bound.words}" if leaf.bound else "")
    return leaf.key, f"{leaf.doc} ({allowed}) [{_default(leaf)}]"


def _default(leaf: Leaf) -> str:
    """The default as it would be typed."""
    if leaf.default == MISSING_VALUE:
        return "required"
    return f"default {show(leaf.default) or repr('')}"


def _examples(examples: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  # {what}\n  {line}" for what, line in examples)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns: names, and what they mean folded to the terminal."""
    listed = list(rows)
    left = max((len(name) for name, _ in listed), default=0) + 4
    lines = []
    for name, meaning in listed:
        folded = textwrap.wrap(meaning, max(_width() - left, 30), break_on_hyphens=False) or [""]
        lines.append(f"  {name:<{left - 2}}{folded[0]}".rstrip())
        lines += [" " * left + rest for rest in folded[1:]]
    return "\n".join(lines)


def _wrap(text: str) -> str:
    return textwrap.fill(text, _width(), break_on_hyphens=False)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110)
