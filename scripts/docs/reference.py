"""The reference's pages, generated from the code: each command's keys, each config group's choices.

`pages()` maps paths on the site to Markdown, `NAV` is their part of the navigation. No MkDocs is needed here.
"""

import re
from collections.abc import Iterable
from functools import cache
from typing import Any

import yaml

from mlm.cli.command import Command
from mlm.cli.commands import COMMANDS
from mlm.cli.compose.command_help import composed_leaves
from mlm.cli.compose.groups import command_groups, effect_of, takes_task
from mlm.cli.compose.help import EXIT_CODES, FLAGS, SPELLINGS
from mlm.config.fields import Role
from mlm.config.paths import CONFIG_DIR
from mlm.config.tree import MISSING_VALUE, Leaf, choices, describe_values
from mlm.convert.huggingface.llama_variants import VARIANTS, model_type
from mlm.convert.huggingface.variant import Variant
from mlm.models.config import ModelConfig
from mlm.models.llama.settings import DEFAULTS
from mlm.util.errors import format_value

GROUPS = sorted(path.name for path in CONFIG_DIR.iterdir() if path.is_dir())


def command_uri(command: Command) -> str:
    return f"reference/commands/{'-'.join(command.words)}.md"


def group_uri(group: str) -> str:
    return f"reference/groups/{group}.md"


def command_page(command: Command) -> str:
    known = composed_leaves(command)
    examples = "\n".join(f"# {what}\n{line}" for what, line in command.example_pairs)
    groups = command_groups(command)
    blocks = [
        f"# mlm {command.name}",
        f"`mlm {command.usage}{' TASK' if takes_task(command) else ''} [key=value …]`",
        text(command.about),
        f"## Examples\n\n```sh\n{examples}\n```",
    ]
    if groups:
        chosen = ((f"[`{name}`](../groups/{name}.md)", listed(options)) for name, options in groups.items())
        blocks.append("## Groups\n\nChosen as `group=option`.\n\n" + table(("group", "options"), chosen))
    sections: dict[str, list[Leaf]] = {"": []}  # top-level keys first, else in declared order
    for leaf in known.values():
        sections.setdefault(leaf.section, []).append(leaf)
    for section, leaves in sections.items():
        rows = []
        for leaf in leaves:
            anchor, value = f"key-{leaf.key}", format_value(leaf.default)
            default = "required" if leaf.default == MISSING_VALUE else f"`{value}`" if value else "empty"
            key = f"[`{leaf.key}`](#{anchor}){{ #{anchor} }}"
            rows.append((key, default, f"{text(leaf.doc)} {allowed(leaf)}"))
        title = f"`{section}`" if section else "Top-level keys"
        if rows:
            blocks.append(f"## {title}\n\n" + table(("key", "default", "meaning"), rows))
    return "\n\n".join(blocks) + "\n"


def allowed(leaf: Leaf) -> str:
    """Values that a key takes, and the names that other programs have for it."""
    named = choices(leaf.type)
    words = describe_values(leaf)
    if named:
        rest = [word for word in ("null",) if words.endswith("null")]
        words = " · ".join([*(f"`{choice}`" for choice in named), *(f"`{word}`" for word in rest)])
    if leaf.role:
        words = f"a path: {leaf.role.value}" + (", or null" if words.endswith("null") else "")
        words = words.replace("a path: a ", "a ") if leaf.role is not Role.INPUT else words
    if leaf.bound:
        words += f", {leaf.bound.words}"
    also = f"<br>Elsewhere: {', '.join(f'`{name}`' for name in leaf.aliases)}" if leaf.aliases else ""
    return f"<br>*{text(words)}*{also}"


def group_page(group: str) -> str:
    names = sorted(path.stem for path in (CONFIG_DIR / group).glob("*.yaml"))
    users = [
        f"[`mlm {c.name}`](../commands/{'-'.join(c.words)}.md)"
        for c in COMMANDS
        if group in command_groups(c)
    ]
    blocks = [f"# {group}=…", f"For {', '.join(users)}." if users else ""]
    for name in names:
        path = CONFIG_DIR / group / f"{name}.yaml"
        size = effect_of(group, path).strip("[]") + "." if group == "model" else ""
        yaml = path.read_text("utf-8").rstrip()
        blocks.append(f"## {name}\n\n{size}\n\n```yaml\n{yaml}\n```")
    return "\n\n".join(filter(None, blocks)) + "\n"


def index_page() -> str:
    """All commands, the spellings of settings, flags and exit codes."""
    rows = [(f"[`mlm {c.name}`](commands/{'-'.join(c.words)}.md)", text(c.summary)) for c in COMMANDS]
    return "\n\n".join(
        (
            "# Reference",
            "Generated from the code. `mlm --help` and `mlm COMMAND --help KEY` show it in a terminal.",
            "## Commands\n\n" + table(("command", "purpose"), rows),
            f"## Settings\n\n{text(SPELLINGS)} [Config groups](groups/index.md) set many keys at once.",
            "## Flags\n\n" + table(("flag", "effect"), ((f"`{name}`", text(what)) for name, what in FLAGS)),
            "## Exit codes\n\n" + table(("code", "meaning"), EXIT_CODES),
        )
    )


def groups_index_page(groups: Iterable[str]) -> str:
    rows = [
        (f"[`{group}`]({group}.md)", listed(sorted(p.stem for p in (CONFIG_DIR / group).glob("*.yaml"))))
        for group in groups
    ]
    return (
        "# Config groups\n\nA group is a folder of `configs/`; `group=choice` takes the keys of a file, and "
        "typed keys win over it. `--config-dir DIR` adds your choices.\n\n"
        + table(("group", "choices"), rows)
    )


def families_page() -> str:
    """Models of `transformers` that model.kind=llama computes, from the table of its variants."""
    presets: dict[str, list[str]] = {kind: [] for kind in VARIANTS}
    folder = CONFIG_DIR / "model"
    base = yaml.safe_load((folder / "llama.yaml").read_text("utf-8"))
    for path in sorted(folder.glob("*.yaml")):
        keys = yaml.safe_load(path.read_text("utf-8"))
        if "llama" in keys.pop("defaults", []):
            presets[model_type(ModelConfig(**(base | keys)))].append(path.stem)
    rows = (
        (f"`{kind}`", f"{row.classes}ForCausalLM", needs(row), listed(presets[kind]))
        for kind, row in VARIANTS.items()
    )
    return (
        "# Model families\n\nModels of `transformers` that `model.kind=llama` computes, generated from the "
        "table that reads and writes them. Settings are `model.options.NAME`. Yi, TinyLlama, SmolLM 2, "
        "Falcon 3 and other Llamas by another name declare `model_type=llama`.\n\n"
        + table(("model_type", "class", "settings beyond a Llama's", "presets"), rows)
        + "\n"
    )


def needs(row: Variant) -> str:
    """Options of a variant, and how its tensors lie otherwise."""
    fields = (ours for ours, _ in row.fields.values() if ours in DEFAULTS)
    layers = ("window_layers",) if row.sliding_layers or "layer_types" in row.layer_keys else ()
    options = dict.fromkeys(
        (
            *(name for name, value in row.options.items() if value != DEFAULTS[name]),
            *fields,
            *(("window",) if row.window_keys else ()),
            *layers,
            *(("rotary_fraction",) if row.defaults.rotary_fraction is not None else ()),
            *(("embedding_multiplier",) if row.scales_embedding else ()),
            *(("tied",) if row.tied else ()),
        )
    )
    stored = (
        (row.rotates_neighbours, "rows of heads reordered, as neighbours turn together"),
        (row.fuses_qkv or row.fuses_gate, "fused projections split"),
    )
    return "; ".join(filter(None, (listed(options), *(words for is_so, words in stored if is_so))))


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, ("---",) * len(head), *rows]
    cells = [[cell.replace("|", r"\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in cells)


def text(words: Any) -> str:
    """Prose of the code as Markdown: nothing in it is markup but code in backquotes."""
    parts = re.split(r"(`[^`]*`)", str(words))
    parts[::2] = [re.sub(r"([*_\[\]<>{}#])", r"\\\1", part) for part in parts[::2]]
    return "".join(parts)


@cache
def pages() -> dict[str, str]:
    """Every page of the reference; composing all commands takes seconds."""
    return {
        "reference/index.md": index_page(),
        "reference/families.md": families_page(),
        **{command_uri(command): command_page(command) for command in COMMANDS},
        "reference/groups/index.md": groups_index_page(GROUPS),
        **{group_uri(group): group_page(group) for group in GROUPS},
    }


NAV: list[Any] = [
    "reference/index.md",
    {"Model families": "reference/families.md"},
    {"Commands": [{f"mlm {command.name}": command_uri(command)} for command in COMMANDS]},
    {
        "Config groups": [
            "reference/groups/index.md",
            *({group: group_uri(group)} for group in GROUPS),
        ]
    },
]
