"""Declaration of a command: the config that it composes, the function that it runs, and its help.

Targets are import strings, so that help and errors import no torch.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from textwrap import dedent
from typing import Any

from mlm.util.errors import Problem
from mlm.util.results import folder_problem


def check_out_file(config: Any) -> list[Problem]:
    """Return the problem of an `out` whose folder cannot be written."""
    problem = folder_problem(config.out)
    return [] if problem is None else [problem]


@dataclass(frozen=True, kw_only=True)
class Command:
    """One command of `mlm`."""

    name: str
    """As typed: "eval loss"."""
    spec: type
    """The dataclass that its config becomes."""
    target: str
    """module:function that does the work."""
    check: Callable[..., Sequence[str]] | None = None
    """check(config, world_size=…, local_devices=…) -> problems; a command that has one runs on ranks, as
    target(config, ctx). One without runs in this process, as target(config)."""
    local_check: Callable[[Any], Sequence[str]] = lambda config: ()
    """local_check(config) -> problems between settings, for a command that runs in this process."""
    preflight: str | None = None
    """module:function(config) -> problems in files, called if settings have none."""
    model_of_ckpt: str | None = None
    """module:function(ckpt, out) -> the setting that names a run's model, and its `model.*`, or None. Called
    if no model is chosen."""
    resolvers: Mapping[str, str] = field(default_factory=dict)
    """Typed key -> module:function(values, typed keys), which sets composed values that follow from it and
    returns a line to print, or None."""
    out_is_run_folder: bool = False
    """True if `out` is a run folder, where failing ranks may leave their logs."""
    has_runs: bool = False
    """True if it writes run folders, which `resume=` continues."""
    summary: str
    """One line for `mlm --help`."""
    about: str
    """A paragraph for the command's help."""
    examples: str
    """Lines `# what it does`, each followed by its command line, which may continue on indented lines."""
    positional: tuple[str, ...] = ()
    """Keys that words without `=` set, in this order: `mlm ckpt inspect runs/shakespeare`."""
    takes_list: bool = False
    """True if the only positional key is a list of all these words: `mlm report runs/a runs/b`."""
    aliases: Mapping[str, str] = field(default_factory=dict)
    """As typed -> key: `mlm data build data=text` means input=text."""
    fixed_choices: tuple[str, ...] = ()
    """Group choices that experiment=… does not replace; typed choices do."""
    file_groups: tuple[str, ...] = ()
    """Groups that also accept a YAML path with the keys of their section: hardware=my_cluster.yaml."""
    user_files: Mapping[str, Callable[[], Path | Problem]] = field(default_factory=dict)
    """Choices of file groups that name a user's file: {"hardware=this": function that returns its path}."""
    forecast: str | None = None
    """module:function(config, launch facts) -> lines on the resources of a run, printed before it starts;
    never raises."""
    other_names: tuple[str, ...] = ()
    """Names of the command in other programs, lower case with underscores."""
    keys: str = ""
    """Most used keys, for its help; empty means all."""

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(self.name.split())

    @property
    def config(self) -> str:
        """Name of its primary config in configs/: `eval_loss`."""
        return self.name.replace(" ", "_").replace("-", "_")

    @property
    def usage(self) -> str:
        """Name with the positional keys: `ckpt inspect CKPT`."""
        return " ".join([self.name, *map(str.upper, self.positional)]) + ("…" if self.takes_list else "")

    @property
    def example_pairs(self) -> list[tuple[str, str]]:
        lines = re.sub(r"\n +", " ", dedent(self.examples).strip()).split("\n")
        return [(aim.removeprefix("# "), line) for aim, line in zip(lines[::2], lines[1::2], strict=True)]
