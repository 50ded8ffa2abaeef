"""From a composed config to a running command: build, check, preflight, launch, exit code."""

import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import xxhash
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from mlm.config.build import build
from mlm.config.cli.commands import COMMANDS, Command, resolve
from mlm.config.cli.compose import resolved, reword
from mlm.config.cli.dry import Dry, verdict
from mlm.config.cli.overrides import Prepared, command_groups
from mlm.config.cli.reporting import OK, speaks_for_host
from mlm.config.cli.saved import Saved
from mlm.config.imports import is_path, trusting
from mlm.config.path_errors import path_problems, streams_for
from mlm.config.tree import MISSING_VALUE, flatten, leaves, sections
from mlm.launch.typed import note_job
from mlm.util.errors import ConfigError, Problem, TooManyRanks, UserError
from mlm.util.ownership import STDOUT

LAUNCH = "mlm.launch.start"
FILES = (".html", ".json", ".jsonl", ".svg", ".png")  # an `out` that ends so is one file, any other a folder
LONGEST_FOLDER = 120  # characters of a sweep's job folder; file systems reject names above 255 bytes


@dataclass(frozen=True)
class Job:
    """One execution of a command: the only one, or one job of a sweep."""

    command: Command
    typed: Prepared
    """The overrides, with the problems found before composing."""
    sweep: Any = None
    """Hydra's own config in a job of a sweep, None outside one."""
    saved: Saved | None = None
    """The settings of the run that is continued, None for a new one."""
    dry: Dry | None = None
    """Extent of the check, for one that is to start nothing."""
    outs: list[str] = field(default_factory=list)
    """The output of a job of a sweep, once it is placed."""

    @property
    def varied(self) -> list[str]:
        """The overrides of this job that the sweep varies."""
        return self.typed.swept(self.sweep.overrides.task)

    def values(self, composed: DictConfig) -> dict[str, Any]:
        """All values of the command. Raises ConfigError for a broken interpolation."""
        try:
            return resolved(composed) if self.saved is None else self.saved.overlaid(composed)
        except OmegaConfBaseException as error:
            raise ConfigError(self.typed.all_problems([reword(error)])) from None

    def typed_imports(self, composed: DictConfig) -> list[Any]:
        """Values, of the command line and the YAML it chooses alone, that may be import paths."""
        typed = flatten(resolved(composed, resolve=False))
        return [typed.get(key) for key, leaf in leaves(self.command.spec).items() if leaf.shipped]

    def place(self, values: dict[str, Any]) -> None:
        """Give a job of a sweep its own output, below `out` or the sweep's folder."""
        if self.sweep is None or "out" not in values:
            return
        out = values["out"]
        if out is None:
            out = f"{self.sweep.sweep.dir}/{self.command.config}.json"
        if not isinstance(out, str) or out in ("", STDOUT, MISSING_VALUE):
            return
        varied = ",".join(self.varied)
        place, folder = Path(out), folder_name(varied)
        values["out"] = str(place.parent / folder / place.name if place.suffix in FILES else place / folder)
        print(f"mlm {self.command.name}: job {self.sweep.job.num}: out={values['out']}", file=sys.stderr)
        note_job(varied)
        self.outs.append(values["out"])


def folder_name(overrides: str) -> str:
    """A folder for the overrides of a job; a digest keeps two jobs apart where the name had to change."""
    plain = overrides.replace("/", "_")[:LONGEST_FOLDER]
    return plain if plain == overrides else f"{plain}-{xxhash.xxh3_64(overrides.encode()).hexdigest()[:8]}"


def run(job: Job, composed: DictConfig) -> int:
    """Build the run spec, report every problem, and run the command. Returns its exit code.

    Raises ConfigError with the problems of the typed overrides and those of the composed values.
    """
    command = job.command
    if job.dry is not None and job.dry.shows:
        show(job, composed, resolve=job.dry.shows == "resolved")
    _take_model(job, composed)
    values = job.values(composed)
    job.place(values)
    with trusting(job.typed_imports(composed), job.typed.paths_of_run):
        if job.dry is not None:
            return _check(job, job.dry, values)
        config = _build(job, values)
        with streams_for(config):
            return _execute(command, config)


def _take_model(job: Job, composed: DictConfig) -> None:
    """Replace the default model by that of `ckpt`, where the command may and the user chose none."""
    command, keys = job.command, {text.partition("=")[0].lstrip("+~") for text in job.typed.overrides}
    chosen = any(key.split(".")[0] in ("model", "experiment") for key in keys) or job.typed.problems
    if command.model_of_ckpt is None or job.saved is not None or chosen or "ckpt" not in keys:
        return
    if HydraConfig.get().job.config_name != command.config:  # a primary config of the user's chooses one
        return
    if model := resolve(command.model_of_ckpt)(composed.ckpt):
        composed.model = model
        if speaks_for_host(os.environ):
            shape = f"{model['num_layers']} layers, hidden size {model['hidden_size']}"
            line = f"model of ckpt={composed.ckpt}: {model['kind']}, {shape}, {model['num_heads']} heads"
            print(f"mlm {command.name}: {line}", file=sys.stderr)


def _execute(command: Command, config: Any) -> int:
    if found := path_problems(config):
        raise ConfigError(found)
    if command.preflight and (found := resolve(command.preflight)(config)):
        raise ConfigError(found)
    if command.check is None:
        code = resolve(command.target)(config)
        return code if isinstance(code, int) else OK  # an int: of ranks that the command started
    out = Path(config.out) if command.out_is_run_folder else None
    if command.forecast and speaks_for_host(os.environ):
        for line in resolve(command.forecast)(config, resolve(f"{LAUNCH}:launch_facts")(config.dist)):
            print(f"mlm {command.name}: {line}", file=sys.stderr)
    try:
        return int(resolve(f"{LAUNCH}:run_job")(command.target, config, out=out))
    finally:
        if command.tidy:
            resolve(command.tidy)(config)


def _check(job: Job, dry: Dry, values: dict[str, Any]) -> int:
    """Report the problems of a run that is not started. Raises ConfigError."""
    try:
        config = _build(job, values)
        if dry.reports_absent and (found := path_problems(config)):
            raise ConfigError(found)
    except ConfigError as error:
        if rest := dry.error(error):
            raise rest from None
    else:
        if dry.reports_absent:
            print(verdict(config, dry, on_ranks=job.command.check is not None))
    return OK


def show(job: Job, composed: DictConfig, *, resolve: bool) -> None:
    """Print the config, as Hydra does for `--cfg job`; of a run that is continued, with the saved values."""
    try:
        shown = composed if job.saved is None else job.values(composed)
        print(OmegaConf.to_yaml(shown, resolve=resolve), end="", flush=True)  # above its problems
    except OmegaConfBaseException as error:
        raise ConfigError([reword(error)]) from None


def _build(job: Job, values: dict[str, Any]) -> Any:
    command = job.command

    def check(config: Any) -> Sequence[str]:
        assert command.check is not None
        if job.dry is not None:
            return job.dry.problems(command, config)
        try:
            facts = resolve(f"{LAUNCH}:launch_facts")(config.dist)
        except UserError as error:  # check the rest as if the launch were right
            ranks = config.parallel.replica * (config.parallel.dp or 1)
            return [*error.problems, *command.check(config, world_size=ranks, local_devices=1)]
        return command.check(config, world_size=facts.world_size, local_devices=facts.local_devices)

    try:
        config = build(command.spec, values, check if command.check else command.local_check)
    except ConfigError as error:
        found = job.typed.all_problems(error.problems)
        kind = values.get("model", {}).get("kind")
        raise ConfigError([_with_plan(job, problem, kind) for problem in found]) from None
    if job.typed.problems:
        raise ConfigError(job.typed.problems)
    return config


def _with_plan(job: Job, problem: Problem, kind: object) -> Problem:
    """A problem of too few devices here, with the plan that shows what the layout needs."""
    has_model = "model" in sections(job.command.spec)
    if not isinstance(problem, TooManyRanks) or job.command.forecast is None or not has_model:
        return problem
    memory = next(command for command in COMMANDS if command.words == ("plan", "memory"))
    known = {*leaves(memory.spec), *command_groups(memory)} - {"name", "out"}
    typed = {text: text.partition("=")[0] for text in job.typed.overrides}
    words = ["memory", *(text for text, key in typed.items() if key in known)]
    if "experiment" in typed.values() or is_path(kind):  # of which `mlm plan memory` knows nothing
        words = ["dry-run", *(text for text, key in typed.items() if key in known | {"experiment"})]
    line = shlex.join(["mlm", "plan", *words])
    return TooManyRanks(problem.keys, problem.problem, f"{problem.fix}; `{line}` shows what it needs")
