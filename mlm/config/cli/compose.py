"""Run specs by name, and their composition by Hydra without a command line: for tests and scripts."""

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, MissingConfigException
from omegaconf import OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from mlm.config.build import build
from mlm.config.cli.commands import SPECS
from mlm.config.paths import CONFIG_DIR
from mlm.config.suggest import did_you_mean
from mlm.config.tree import defaults
from mlm.util.errors import Problem


@cache  # once a process: it takes a quarter of the time of a composition
def register_defaults() -> None:
    """Make each dataclass's defaults known to Hydra as `{name}_defaults`, so YAML need not repeat them.

    Also `${either:a,b}`, which is b where a is null.
    """
    OmegaConf.register_new_resolver("either", lambda a, b: b if a is None else a, replace=True)
    store = ConfigStore.instance()
    for name, spec in SPECS.items():
        # a plain tree: Hydra's structured configs reject Literal
        store.store(name=f"{name}_defaults", node=defaults(spec), provider="mlm")
    # Hydra copies its sources in each composition, and the store with them: half of the time
    vars(store)["__deepcopy__"] = lambda memo: store


def compose_values(name: str, overrides: Sequence[str] = (), *, resolve: bool = True) -> dict[str, Any]:
    """The composed values of a primary config; `???` where a value is required.

    `resolve=False` keeps interpolations: `out` is `runs/${name}`. Raises Hydra's and OmegaConf's errors,
    which the command line rewords.
    """
    register_defaults()
    GlobalHydra.instance().clear()
    with initialize_config_dir(config_dir=str(CONFIG_DIR), version_base="1.3"):
        composed = compose(name, overrides=list(overrides), return_hydra_config=True)
        before = HydraConfig.instance().cfg
        HydraConfig.instance().set_config(composed)  # ${hydra:…} needs it
        try:
            values = OmegaConf.to_container(composed, resolve=False)
            assert isinstance(values, dict)
            plain = OmegaConf.create({key: value for key, value in values.items() if key != "hydra"})
            return resolved(plain, resolve=resolve)
        finally:
            HydraConfig.instance().cfg = before


def resolved(composed: Any, *, resolve: bool = True) -> dict[str, Any]:
    """A composed config as plain values. Raises OmegaConf's errors for a broken interpolation."""
    values = OmegaConf.to_container(composed, resolve=resolve, throw_on_missing=False)
    assert isinstance(values, dict)
    return {str(key): value for key, value in values.items()}


def load_config(name: str, overrides: Sequence[str] = ()) -> Any:
    """The run spec of a command as its dataclass: `load_config("pretrain", ["model=gpt2_8b"])`.

    Types are checked, cross-checks are not. Raises ConfigError.
    """
    return build(SPECS[name], compose_values(name, overrides))


def reword(error: Exception) -> Problem:
    """Hydra's, OmegaConf's and YAML's errors in one line, of the key that they name."""
    if isinstance(error, yaml.YAMLError):
        return Problem((), f"cannot read YAML: {' '.join(str(error).split())}")
    if isinstance(error, RecursionError):
        return Problem((), "cannot read YAML: it nests too deeply")
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return Problem((), f"{error.filename}: {error.strerror}")
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    first = lines[0] if lines else type(error).__name__
    if isinstance(error, MissingConfigException) and error.options:
        group, _, wanted = (error.missing_cfg_file or "").rpartition("/")
        if group.startswith("hydra/"):
            fix = f"choose {', '.join(error.options)}, or leave it out"
            return Problem.at(group, wanted, "no such choice", fix)
        return Problem((), f"{first}{did_you_mean(wanted, error.options)}")
    key = getattr(error, "full_key", None)
    cause = error.__cause__
    if isinstance(error, HydraException) and isinstance(cause, OmegaConfBaseException):
        first = f"{first.rstrip('.')}: {str(cause).splitlines()[0]}"
    fix = ""
    if isinstance(error, InterpolationResolutionError):  # an unknown key, or an unset variable
        first = next(
            (str(each.args[0]) for each in _causes(error) if isinstance(each, KeyError) and each.args), first
        )
        fix = r"correct ${…}, or write \${…} for text"
    return Problem((key,), f"{key}: {first}", fix) if key else Problem((), first)


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and those that led to it: OmegaConf chains them in either way."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
