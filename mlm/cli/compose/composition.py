"""Settings composed by Hydra's Compose API.

The lowest layer is the defaults of the command's dataclass or, where a run is continued, its saved settings.
Hydra composes the layers above: the YAML of configs/ and --config-dir, and the typed overrides. It never
reads a saved run, and calls nothing that YAML names.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose as hydra_compose
from hydra import initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from mlm.cli.commands import SPECS
from mlm.cli.compose.arguments import quote
from mlm.cli.compose.groups import chosen_groups
from mlm.config.build import build
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.suggest import did_you_mean
from mlm.config.tree import defaults, nested
from mlm.launch.devices import first_gpu
from mlm.launch.stop import interrupt_held
from mlm.optim.auto_precision import settle_precision
from mlm.util.errors import Problem

COMPOSE_ERRORS = (HydraException, OmegaConfBaseException, yaml.YAMLError, ValueError, OSError, RecursionError)
"""Exceptions of Hydra where it cannot compose a config, or OmegaConf resolve it."""


@dataclass
class Composition:
    """Composed settings with their interpolations."""

    typed: DictConfig
    """Settings of the command line and of the YAML that it chooses, with Hydra's section `hydra`."""
    tree: DictConfig
    """All settings."""

    @interrupt_held()
    def resolved(self) -> dict[str, Any]:
        """All settings as plain values. Raises OmegaConf's errors for a broken interpolation."""
        HydraConfig.instance().set_config(self.typed)  # ${hydra:runtime.choices.model}
        return plain_values(self.tree, resolve=True)

    def to_yaml(self, *, resolve: bool) -> str:
        """All settings as YAML. Raises OmegaConf's errors for a broken interpolation."""
        return OmegaConf.to_yaml(self.resolved() if resolve else self.tree)


@interrupt_held()
def compose(
    config: str,
    overrides: Sequence[str] = (),
    *,
    config_dir: str | None = None,
    saved: Mapping[str, Any] | None = None,
) -> Composition:
    """Compose a primary config with overrides `key=value`, `group=choice`, and `~group` for no choice.

    With `saved`, the flat settings of a run, overrides alone choose groups. Raises COMPOSE_ERRORS.
    """
    has_yaml = (CONFIG_DIR / f"{config}.yaml").is_file()  # else the dataclass has all defaults
    lowest, name = [defaults(SPECS[config])], config if has_yaml else None
    if saved is not None:
        lowest.append(nested(saved))
        name = f"{config}_saved"
        choices: list[Any] = ["_self_", *({group: None} for group in chosen_groups(config))]
        ConfigStore.instance().store(name=name, node={"defaults": choices})
    # Hydra's grammar adds keys that the primary config lacks with + or ++.
    primary_groups, words = chosen_groups(config), list[str]()
    user_groups = groups(Path(config_dir)) if config_dir else {}
    if config_dir is not None:
        words.append(f"hydra.searchpath=[{quote(f'file://{Path(config_dir).absolute()}')}]")
    for text in overrides:
        group, _, value = text.partition("=")
        is_choice = group.lstrip("~") in {*primary_groups, *user_groups} and not value.startswith("{")
        prefix = "+" if group in user_groups and group not in primary_groups else ""
        words.append(f"{prefix if is_choice else '++'}{text}")
    # ${either:a,b}: b where a is null
    OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)
    # with adapters ten times a task's learning rate, as is usual (arXiv:2305.14314, table 9)
    OmegaConf.register_new_resolver(
        "adapters_lr",
        lambda lr, rank: 10 * lr if rank and isinstance(lr, float | int) else lr,
        replace=True,
    )
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
        typed = hydra_compose(name, words, return_hydra_config=True)
    overlay = OmegaConf.masked_copy(typed, [str(key) for key in typed if key != "hydra"])
    tree = OmegaConf.merge(*lowest, overlay)
    assert isinstance(tree, DictConfig)
    HydraConfig.instance().set_config(typed)  # to resolve a single key
    return Composition(typed, tree)


def plain_values(composed: Any, *, resolve: bool) -> dict[str, Any]:
    values = OmegaConf.to_container(composed, resolve=resolve, throw_on_missing=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def compose_values(name: str, overrides: Sequence[str] = (), *, resolve: bool = True) -> dict[str, Any]:
    """The composed values of a primary config; `???` where a value is required.

    `resolve=False` keeps interpolations, `out` is `runs/${name}`, and precisions that a device decides.
    Raises COMPOSE_ERRORS.
    """
    composition = compose(name, overrides)
    if not resolve:
        return plain_values(composition.tree, resolve=False)
    values = composition.resolved()
    settle_precision(values, first_gpu)
    return values


def load_config(name: str, overrides: Sequence[str] = ()) -> Any:
    """The run spec of a command as its dataclass: `load_config("pretrain", ["model=gpt2_8b"])`.

    Types are checked, cross-checks are not. Raises ConfigError.
    """
    return build(SPECS[name], compose_values(name, overrides))


def problem_of_composing(error: Exception) -> Problem:
    """A Hydra, OmegaConf or YAML error as one line, with the key that it names."""
    if isinstance(error, yaml.YAMLError):
        return Problem((), f"cannot read YAML: {' '.join(str(error).split())}")
    if isinstance(error, RecursionError):
        return Problem((), "cannot read YAML: it nests too deeply")
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return Problem((), f"{error.filename}: {error.strerror}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    message = lines[0] if lines else type(error).__name__
    if isinstance(error, MissingConfigException) and error.options:
        missing_name = (error.missing_cfg_file or "").rpartition("/")[2]
        return Problem((), f"{message}{did_you_mean(missing_name, error.options)}")
    key, fix = getattr(error, "full_key", None), ""
    if isinstance(error, HydraException) and isinstance(error.__cause__, OmegaConfBaseException):
        message = f"{message.rstrip('.')}: {str(error.__cause__).splitlines()[0]}"
    if isinstance(error, InterpolationResolutionError):  # an unknown key, or an unset variable
        fix = r"correct ${…}, or write \${…} for text"
        cause: BaseException | None = error
        while cause is not None and not isinstance(cause, KeyError):  # OmegaConf chains them in either way
            cause = cause.__cause__ or cause.__context__
        message = str(cause.args[0]) if cause is not None and cause.args else message
    return Problem((key,), f"{key}: {message}", fix) if key else Problem((), message)
