"""YAML of a folder that is not ours (--config-dir): checks of what Hydra is about to compose.

Who types --config-dir trusts the folder: Hydra composes it. (A run's own config.yaml is never composed:
mlm/config/cli/saved.py.) Still, an experiment is easily copied unread. Hydra calls whatever the `_target_` of
a callback, launcher or sweeper names and whatever logging handlers name, and sets environment variables;
aliases of YAML can unfold to any size. So before Hydra runs, its own part of the config is composed with and
without the folder: where something could be called, it must be what mlm ships, Hydra's default, or typed.
"""

import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob, Override

from mlm.util.errors import ConfigError

FOLDER_FLAGS = ("--config-dir", "-cd", "--config-path", "-cp", "--config-name", "-cn")
GUARDED = (
    ("callbacks",),
    ("launcher",),
    ("sweeper", "_target_"),
    ("job_logging",),
    ("hydra_logging",),
    ("job", "chdir"),
    ("job", "env_set"),
    ("job", "env_copy"),
    ("output_subdir",),
)
"""Keys below `hydra` that cause calls, or writes outside `out`."""
MAX_FILE_BYTES = 1 << 18  # 256 KiB of YAML: a run's own config is 3 kB
MAX_NODES = 100_000  # of one file, aliases followed

Print = Callable[[str | None, Sequence[str]], None]


def check_foreign_yaml(
    command_config: str,
    flags: Sequence[str],
    overrides: Sequence[str],
    options: Mapping[str, Sequence[str]],
    show: Print,
) -> None:
    """Reject a folder whose YAML would make Hydra call something, or would not fit into memory.

    `command_config` names the shipped primary config, `flags` are Hydra's as typed, `options` the choices of
    each group. `show(config, argv)` lets Hydra print, of a primary config or of none, what `--cfg` in argv
    asks for. Raises ConfigError, and whatever Hydra raises for YAML it cannot compose.
    """
    folder_flags = list(_pairs(flags))
    typed = [text for text in overrides if text.lstrip("+~").startswith("hydra")]
    elsewhere = [text for text in typed if "hydra.searchpath" in text]
    if not (folder_flags or elsewhere):
        return
    for name, value in folder_flags:
        if name not in ("--config-name", "-cn"):
            check_sizes(Path(value))
    words = [part for pair in folder_flags for part in pair]
    plain = [text for text in typed if text not in elsewhere]
    shipped, bare = (_hydra_part(show, name, plain) for name in (command_config, None))
    for chosen in _compositions(overrides, options):
        given = _hydra_part(show, command_config, [*words, *chosen])
        problems = [
            f"hydra.{'.'.join(keys)} is set by the YAML of {_where(folder_flags)}: Hydra would run what it "
            "names. Delete it there, and type it if it is meant"
            for keys in GUARDED
            if _at(given, keys) not in (_at(shipped, keys), _at(bare, keys))
        ]
        if problems:
            raise ConfigError(problems)


def _compositions(overrides: Sequence[str], options: Mapping[str, Sequence[str]]) -> Iterator[list[str]]:
    """The overrides of each combination of swept choices.

    --cfg takes no sweep. A swept value is left out: it chooses no YAML.
    """
    parsed = OverridesParser.create().parse_overrides(list(overrides))
    fixed = [override.input_line or "" for override in parsed if not override.is_sweep_override()]
    swept = [o for o in parsed if o.is_discrete_sweep() and o.key_or_group in options]
    for choices in product(*(_choices(override, options[override.key_or_group]) for override in swept)):
        yield [*fixed, *choices]


def _choices(override: Override, options: Sequence[str]) -> list[str]:
    """The overrides that a sweep over a group stands for."""
    value = override.value()
    each = value.filter(list(options)) if isinstance(value, Glob) else override.sweep_string_iterator()
    return [f"{override.get_key_element()}={choice}" for choice in each]


def _pairs(flags: Sequence[str]) -> Iterator[tuple[str, str]]:
    for name, value in pairwise(flags):
        if name in FOLDER_FLAGS:
            yield name, value


def _where(folder_flags: Sequence[tuple[str, str]]) -> str:
    return " ".join(f"{name} {value}" for name, value in folder_flags) or "hydra.searchpath"


def _hydra_part(show: Print, config_name: str | None, argv: Sequence[str]) -> Any:
    printed = io.StringIO()
    with redirect_stdout(printed):
        show(config_name, ["--cfg", "hydra", *argv])
    return yaml.safe_load(printed.getvalue())["hydra"]


def _at(tree: Any, keys: Sequence[str]) -> Any:
    for key in keys:
        tree = tree.get(key) if isinstance(tree, dict) else None
    return tree


def check_sizes(folder: Path) -> None:
    """Reject YAML of a folder laid out like configs/ that would fill the memory. Raises ConfigError."""
    for file in sorted({*folder.glob("*.yaml"), *folder.glob("*/*.yaml")}):
        if not file.is_file():
            raise ConfigError([f"{file}: a special file, no YAML can be read there: delete it"])
        if (size := file.stat().st_size) > MAX_FILE_BYTES:
            raise ConfigError([f"{file}: {size} bytes of YAML, {MAX_FILE_BYTES} is the limit: shorten it"])
        try:
            # The loader in C would overflow the stack where this one raises.
            nodes = _unfolded(yaml.compose(file.read_text("utf-8"), Loader=yaml.SafeLoader), {})
        except RecursionError:
            nodes = MAX_NODES + 1
        except UnicodeDecodeError as error:
            raise ConfigError([f"{file}: no YAML, not UTF-8 ({error.reason}): replace it"]) from None
        except yaml.YAMLError:
            continue  # Hydra reports the problem if the file is used
        if nodes > MAX_NODES:
            raise ConfigError([f"{file}: its aliases or brackets unfold to too much: write it out plainly"])


def _unfolded(node: Any, known: dict[int, int]) -> int:
    """Nodes of a YAML tree with each alias followed; a node that holds itself counts as too many."""
    if not isinstance(node, yaml.CollectionNode):
        return 1
    if id(node) not in known:
        known[id(node)] = MAX_NODES + 1  # while it is being counted
        values = node.value
        children = (
            [part for pair in values for part in pair] if isinstance(node, yaml.MappingNode) else values
        )
        known[id(node)] = 1 + sum(_unfolded(child, known) for child in children)
    return known[id(node)]
