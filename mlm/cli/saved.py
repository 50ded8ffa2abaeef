"""The settings of a run, read back from its config.yaml as plain data.

People pass run folders on. Composed by Hydra, a file in one could import modules (`hydra.searchpath`), read
the environment (`${oc.env:…}`) and unfold to any size. So it is parsed by a safe loader: bounded, each key
once, no aliases, no tags, no interpolation, and only the keys of the run's dataclass.
"""

import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from mlm.cli.commands import SPECS
from mlm.cli.compose import register_defaults, resolved
from mlm.config.paths import CONFIG_DIR
from mlm.config.suggest import unknown_key
from mlm.config.tree import MISSING_VALUE, flatten, leaves
from mlm.errors import ConfigError, UserError, has_controls, show, visible

CONFIG = "config.yaml"
CONFIG_NAMES = ("config", CONFIG, "config.yml")
"""Names of a primary config that are a run's own file, whatever folder it is in."""
MAX_BYTES = 1 << 18  # 256 KiB: a run's config is 3 kB
MAX_DEPTH = 12
MAX_NODES = 20_000
MAX_TEXT = 10_000  # characters of one value: reading a number takes time quadratic in its digits
FLOAT = re.compile(
    r"[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+"
    r"|\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
)
RENAME = "delete it, or, for a config of your own that Hydra should compose, give the file another name"


class Loader(yaml.SafeLoader):
    """YAML as Hydra reads it: 1e-4 is a number, a date is text."""


Loader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if not pair[0].endswith((":float", ":timestamp", ":merge", ":value"))]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Loader.add_implicit_resolver("tag:yaml.org,2002:float", FLOAT, list("-+0123456789."))


@dataclass(frozen=True)
class Saved:
    """The settings that a run was started with, and where it continues."""

    values: dict[str, Any]
    """Flat: model.num_layers → 2."""
    out: str | None = None
    """The run folder, which `out` is unless typed; None keeps the saved `out`."""

    def overlaid(self, typed: DictConfig) -> dict[str, Any]:
        """These values with those that the command line sets, of a config composed from `unset_config`.

        Interpolations in shipped and typed values see the saved ones. Raises OmegaConf's errors for a broken
        one.
        """
        tree = OmegaConf.to_container(typed, resolve=False, throw_on_missing=False)
        assert isinstance(tree, dict)
        typed_values = flatten({str(key): value for key, value in tree.items()})
        chosen = {key: value for key, value in typed_values.items() if value != MISSING_VALUE}
        moved = {} if self.out is None else {"out": self.out}
        nested: dict[str, Any] = {}
        for key, value in {**self.values, **moved, **chosen}.items():
            place = nested
            *path, name = key.split(".")
            for part in path:
                if not isinstance(place.get(part), dict):
                    place[part] = {}
                place = place[part]
            place[name] = value
        return resolved(OmegaConf.create(nested))


def read_run(resume: str, config: str) -> Saved:
    """The settings of the run that `resume=` names: its folder, or a file of settings.

    `config` names the command's primary config. Raises UserError.
    """
    if not resume:
        raise UserError("resume=: empty; name a run folder, such as resume=runs/shakespeare")
    place = Path(resume).expanduser()
    file = place / CONFIG if place.is_dir() else place
    if not os.path.lexists(file):
        if (place / "checkpoints").is_dir():
            raise UserError(
                f"resume={resume}: holds weights and no settings of a run to resume; begin a run with them: "
                f"ckpt={resume} out=…"
            )
        what = f"holds no {CONFIG}" if place.is_dir() else "no such folder"
        raise UserError(f"resume={resume}: {what}; name the folder of a run (out=… of mlm {config})")
    values = read_values(file, config)
    if values.get("checkpoint.resume") is False:  # it was to find no checkpoint; now it is told to resume
        values["checkpoint.resume"] = True
    return Saved(values, str(file.parent) if file.name == CONFIG else None)


def read_values(path: Path, config: str) -> dict[str, Any]:
    """The flat values in a saved config file of the command whose primary config is `config`.

    Raises UserError, ConfigError with several problems.
    """
    spec = SPECS[config]
    tree = parse(read_text(path), path)
    defaults = tree.pop("defaults", None)
    if defaults not in (None, ["hydra_quiet", f"{config}_defaults", "_self_"]):
        raise UserError(f"{path}: defaults={show(defaults)[:80]} is not what a run saves; {RENAME}")
    flat, known = flatten(tree), leaves(spec)
    problems = [f"{path}: {unknown_key(spec, key)}; {RENAME}" for key in flat if key not in known]
    problems += [f"{path}: {key}: {why}" for key, value in flat.items() if (why := problem_of(value))]
    if problems:
        raise ConfigError(problems[:20])
    return flat


def read_text(path: Path) -> str:
    """The text of a regular file of bounded size, no link. Raises UserError."""
    try:
        # a FIFO would block, a link may lead to a file that is not the run's
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
        with open(descriptor, "rb") as f:
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise UserError(f"{path}: is a special file; delete it")
            if found.st_size > MAX_BYTES:
                raise UserError(f"{path}: {found.st_size} bytes, {MAX_BYTES} is the limit; shorten it")
            return f.read(MAX_BYTES + 1).decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{path}: not UTF-8 ({error.reason}); restore it from a copy") from error
    except OSError as error:
        raise UserError(
            f"{path}: cannot be read ({error.strerror}); make it a readable plain file"
        ) from error


def parse(text: str, path: Path) -> dict[str, Any]:
    """YAML as nested dicts of plain values. Raises UserError."""
    try:
        check_events(text)
        node = yaml.compose(text, Loader=Loader)
        check_keys(node)
        found = Loader("").construct_document(node) if node is not None else None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: {' '.join(str(error).split())[:200]}; restore it from a copy") from error
    if not isinstance(found, dict):
        raise UserError(f"{path}: holds no settings; restore it from a copy")
    return found


def check_events(text: str) -> None:
    """Raise ValueError for what no saved config has, before anything is built of it."""
    depth = nodes = 0
    for event in yaml.parse(text, Loader=Loader):
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError("anchors and aliases are not supported")
        if isinstance(event, yaml.NodeEvent):
            nodes += 1
            if event.tag is not None:
                raise ValueError(f"the tag {event.tag[:60]} is not supported")
        if isinstance(event, yaml.ScalarEvent) and len(event.value) > MAX_TEXT:
            raise ValueError(f"a value of {len(event.value)} characters; {MAX_TEXT} is the limit")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or nodes > MAX_NODES:
            raise ValueError("it nests too deeply, or holds too many values")


def check_keys(node: Any) -> None:
    """Raise ValueError for a key that is not a string, or a duplicate."""
    if isinstance(node, yaml.SequenceNode):
        for child in node.value:
            check_keys(child)
    if isinstance(node, yaml.MappingNode):
        keys = [key.value for key, _ in node.value]
        if not all(isinstance(key, str) for key in keys):
            raise ValueError("a key is no text")
        if len(set(keys)) < len(keys):
            raise ValueError("a key occurs twice")
        if not all(key.tag == "tag:yaml.org,2002:str" for key, _ in node.value):
            raise ValueError("a key is no text")
        for _, child in node.value:
            check_keys(child)


def problem_of(value: Any) -> str | None:
    """The reason why a run saves no such value: an interpolation or a missing value, in a list too."""
    if isinstance(value, list | dict):
        each_value = value.values() if isinstance(value, dict) else value
        return next((why for each in each_value if (why := problem_of(each))), None)
    if isinstance(value, str) and "${" in value:
        return "an interpolation (${…}) is not resolved here; write the value itself"
    if isinstance(value, str) and value == MISSING_VALUE:
        return f"{MISSING_VALUE} is no value; write one"
    if isinstance(value, str) and has_controls(value):
        return f"{visible(value)[:60]} holds control characters; write it without"
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return "the number is too large; write a smaller one"
    if isinstance(value, dict) or not isinstance(value, str | int | float | bool | None):
        return "must be text, a number, true, false, null or a list of them"
    return None


def unset_config(config: str) -> str:
    """The name of a primary config like `config`, in which every key is missing and no group is chosen.

    What it is composed to holds what the command line sets, and nothing else.
    """
    register_defaults()
    name = f"{config}_typed"
    primary = OmegaConf.to_container(OmegaConf.load(CONFIG_DIR / f"{config}.yaml"))
    assert isinstance(primary, dict)
    groups = [{group: None} for entry in primary["defaults"] if isinstance(entry, dict) for group in entry]
    tree: dict[str, Any] = {}
    for key in leaves(SPECS[config]):
        place = tree
        *path, last = key.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[last] = MISSING_VALUE
    node = {"defaults": ["hydra_quiet", "_self_", *groups], **tree}
    ConfigStore.instance().store(name=name, node=node, provider="mlm")
    return name
