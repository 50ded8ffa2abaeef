"""The help of one command, or of its sections and keys, with the defaults that its YAML composes."""

from collections.abc import Iterable, Sequence
from dataclasses import replace

from mlm.cli.command import Command
from mlm.cli.compose.composition import compose_values
from mlm.cli.compose.groups import (
    choice_file,
    command_groups,
    effect_of,
    first_comment,
    takes_task,
    task_names,
)
from mlm.cli.compose.help import EXIT_CODES, FLAGS, SPELLINGS, example_lines, table, tasks_block, wrap
from mlm.config.paths import CONFIG_DIR
from mlm.config.suggest import did_you_mean, foreign_option, keys_meant, plain_name
from mlm.config.tree import MISSING_VALUE, Leaf, describe_values, flatten, leaves
from mlm.util.errors import UserError, format_value


def command_help(command: Command, config_dir: str | None = None, topics: Sequence[str] = ()) -> str:
    """Help of one command, or of the sections and keys named by `topics`.

    Overrides among the topics are skipped. Raises UserError for an unknown topic.
    """
    tasks = task_names(config_dir) if takes_task(command) else []
    topics = [topic for topic in topics if "=" not in topic and topic not in tasks]
    groups = command_groups(command, config_dir)
    if topics:
        return "\n\n".join(_topic(command, topic, groups, config_dir) for topic in topics)
    composed = composed_leaves(command)
    frequent = [composed[key] for key in command.keys.split() or composed]
    rows = [(leaf.key, f"{leaf.doc} [{_default(leaf)}]") for leaf in frequent]
    if command.has_runs:
        rows.insert(0, ("resume=RUN", "continue a run with its own settings; what is typed wins over them"))
    section = next((leaf.section for leaf in composed.values() if leaf.section), "SECTION")
    more = "" if len(frequent) == len(composed) else f" (more: mlm {command.name} --help {section})"
    blocks = [f"Usage: mlm {command.usage} [key=value …]", wrap(command.about)]
    if tasks:
        blocks.append(tasks_block(config_dir))
        groups.pop("task")
    blocks.append("Examples:\n" + example_lines(command.example_pairs))
    if groups:
        options = table((group, ", ".join(names)) for group, names in groups.items())
        blocks.append(f"Groups, chosen as group=option:\n{options}")
    blocks += [
        f"Keys{more}:\n" + table(rows),
        wrap(SPELLINGS),
        "Flags:\n" + table(FLAGS),
        "Exit codes:\n" + table(EXIT_CODES),
    ]
    return "\n\n".join(blocks)


def _topic(command: Command, topic: str, groups: dict[str, list[str]], config_dir: str | None) -> str:
    composed = composed_leaves(command)
    rows = [leaf for leaf in composed.values() if topic in (leaf.key, leaf.section)]
    if not rows and topic not in groups:
        if option := foreign_option(command.spec, topic):
            line = f"{plain_name(topic)}: {option.answer_to('…')}"
            return "\n".join([line, *_tables(composed[key] for key in option.keys)])
        if keys := keys_meant(command.spec, topic):
            return "\n".join(_tables(composed[key] for key in keys))
        if (name := topic.replace("-", "_")) != topic:
            return _topic(command, name, groups, config_dir)
        sections = [leaf.section for leaf in composed.values() if leaf.section]
        hint = did_you_mean(topic, [*groups, *composed, *sections]) or "; --help lists them"
        raise UserError(f"--help {topic}: no such section or key{hint}")
    choices = []
    for name in groups.get(topic, []):
        path = choice_file(topic, name, config_dir)
        effect = effect_of(topic, path) if path and path.is_relative_to(CONFIG_DIR) else ""
        choices.append((name, " ".join(filter(None, (first_comment(path), effect)))))
    options = [f"{topic}=…:\n" + table(choices)] if choices else []
    return "\n\n".join(options + _tables(rows))


def _tables(listed: Iterable[Leaf]) -> list[str]:
    rows = []
    for leaf in listed:
        allowed = describe_values(leaf) + (f", {leaf.bound.words}" if leaf.bound else "")
        rows.append((leaf.key, f"{leaf.doc} ({allowed}) [{_default(leaf)}]"))
    return [table(rows)] if rows else []


def composed_leaves(command: Command) -> dict[str, Leaf]:
    values = flatten(compose_values(command.config, resolve=False))
    return {key: replace(leaf, default=values[key]) for key, leaf in leaves(command.spec).items()}


def _default(leaf: Leaf) -> str:
    return (
        "required" if leaf.default == MISSING_VALUE else f"default {format_value(leaf.default) or repr('')}"
    )
