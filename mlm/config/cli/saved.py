"""The settings of a run, read back from its config.yaml as plain data.

People pass run folders on. Composed by Hydra, a file in one could import modules (`hydra.searchpath`), read
the environment (`${oc.env:…}`) and unfold to any size. So it is parsed by `plain_yaml`, and has only the keys
of the run's dataclass.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import DictConfig, OmegaConf

from mlm.config.cli.commands import SPECS
from mlm.config.cli.compose import register_defaults, resolved
from mlm.config.fields import expand_home
from mlm.config.paths import CONFIG_DIR
from mlm.config.plain_yaml import parse, problem_of, read_text
from mlm.config.suggest import unknown_key
from mlm.config.tree import MISSING_VALUE, flatten, leaves
from mlm.util.errors import ConfigError, UserError, show

CONFIG = "config.yaml"
CONFIG_NAMES = ("config", CONFIG, "config.yml")
"""Names of a primary config that are a run's own file, whatever folder it is in."""
RENAME = "delete it, or, for a config of your own that Hydra should compose, give the file another name"


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
    place = Path(expand_home(resume))
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
