"""A command line whose command is known: its help, its composed config, a check, or its jobs.

One job, or with --multirun one for each combination of values: compose, build, check, preflight, launch. All
jobs are checked before the first is launched.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import xxhash
from omegaconf import OmegaConf

from mlm.cli.command import Command
from mlm.cli.compose.arguments import Arguments, check_task, parse
from mlm.cli.compose.command_help import command_help
from mlm.cli.compose.composition import (
    COMPOSE_ERRORS,
    Composition,
    compose,
    problem_of_composing,
)
from mlm.cli.compose.groups import command_groups, own_keys
from mlm.cli.compose.overrides import Overrides, keys_of, prepare
from mlm.cli.compose.saved import SavedValues, take_saved, take_saved_task
from mlm.cli.compose.unread import unread_problems
from mlm.cli.outcome import INTERRUPTED, KILLED, OK, print_stdout, report, speaks_for_host, version_line
from mlm.config.build import build, path_problems, streams_for
from mlm.config.imports import trusting
from mlm.config.suggest import divisors
from mlm.config.tree import MISSING_VALUE, flatten, leaves
from mlm.launch.devices import first_gpu
from mlm.launch.environment import read_rank_place
from mlm.launch.rules.layout import RANKS_PER_NODE
from mlm.launch.typed import record_job
from mlm.optim.auto_precision import settle_precision
from mlm.util.errors import ConfigError, Problem, UserError, attempt
from mlm.util.ownership import STDOUT
from mlm.util.system import resolve

LAUNCH = "mlm.launch.start"
SWEEP_TABLE = "mlm.tracking.sweep"
SWEEPS = "runs/sweeps"
"""Folder for the jobs of sweeps whose `out` is not set."""
FILES = (".html", ".json", ".jsonl")  # an `out` that ends so is one file, any other a folder
LONGEST_FOLDER = 120  # characters of a sweep's job folder; file systems reject names above 255 bytes


@dataclass
class Execution:
    """One execution of a command: the only one, or one job of a sweep."""

    command: Command
    arguments: Arguments
    overrides: Overrides
    saved: SavedValues | None
    """The settings of the run that is continued, None for a new one."""
    texts: list[str]
    """Overrides to compose."""
    number: int = 0
    varied: list[str] | None = None
    """The overrides that the sweep varies; None outside a sweep."""
    placed_out: str | None = field(default=None, init=False)
    """The output of a job of a sweep, once it is placed."""
    start: Callable[[], int] = field(init=False)
    """Runs a checked job of a sweep."""


def act(command: Command, words: list[str]) -> int:
    """Obey the words that follow a command. Returns the exit code; raises UserError."""
    arguments = parse(command, words)
    if arguments.help:
        return print_stdout(command_help(command, arguments.config_dir, arguments.overrides))
    if arguments.version:
        return print_stdout(version_line())
    if arguments.config_dir is not None and not os.path.isdir(arguments.config_dir):
        folder = arguments.config_dir
        raise UserError(
            Problem.at("--config-dir", folder, "no such folder", "name one laid out like configs/")
        )
    saved = take_saved(command, arguments) or take_saved_task(command, arguments)
    if saved is None:
        check_task(command, arguments)
    overrides = prepare(
        command, arguments.overrides, config_dir=arguments.config_dir, multirun=arguments.multirun
    )
    shows = arguments.cfg or arguments.resolve
    if overrides.problems and (shows or arguments.multirun):
        raise ConfigError(overrides.problems)
    if not arguments.multirun:
        return prepare_job(Execution(command, arguments, overrides, saved, overrides.texts))()
    options = command_groups(command, arguments.config_dir)
    return sweep(
        [
            Execution(command, arguments, overrides, None, texts, number, varied)
            for number, (texts, varied) in enumerate(overrides.jobs(options))
        ]
    )


def sweep(jobs: Sequence[Execution]) -> int:
    """Check all jobs, then run those without problems one after another until one is stopped.

    Return the first exit code that is not 0. Training runs are reported as a table; jobs of other commands
    have their own results.
    """
    command, arguments = jobs[0].command, jobs[0].arguments
    is_shown = arguments.check or arguments.cfg or arguments.resolve
    has_table = command.out_is_run_folder and not is_shown
    is_rank = read_rank_place(os.environ) is not None
    rows, codes = list[dict[str, Any]](), list[int]()
    for job in jobs:
        codes.append(report(command, partial(_check, job)))
        if codes[-1] == INTERRUPTED:
            return INTERRUPTED
    is_stopped = False
    try:
        for n, job in enumerate(jobs):
            code = codes[n] or None  # None: not started
            if code is None and not is_stopped:
                code = codes[n] = report(command, job.start)
                is_stopped = code >= KILLED
            if has_table:
                out = None if code is None else job.placed_out
                rows.append(resolve(f"{SWEEP_TABLE}:run_of")(job.varied, out, code))
                # the ranks of a launcher might disagree on what files say
                is_stopped |= not is_rank and rows[-1]["state"] in ("stopped", "interrupted")
    finally:
        if rows and speaks_for_host(os.environ):
            resolve(f"{SWEEP_TABLE}:report_sweep")(rows)
    return next((code for code in codes if code), OK)


def _check(job: Execution) -> int:
    """Prepare a job of a sweep; a problem is reported below the job's name."""
    try:
        job.start = prepare_job(job)
    except UserError:
        _announce(job)
        raise
    return OK


def prepare_job(job: Execution) -> Callable[[], int]:
    """Compose and build the run spec and report every problem; return what runs it, to its exit code.

    Raises ConfigError with the problems of the typed overrides and those of the composed values.
    """
    arguments = job.arguments
    try:
        composition = compose(job.command.config, job.texts, config_dir=arguments.config_dir, saved=job.saved)
        _take_model(job, composition)
        if arguments.cfg or arguments.resolve:
            return partial(print_stdout, composition.to_yaml(resolve=arguments.resolve).rstrip("\n"))
        values = composition.resolved()
    except COMPOSE_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(job.overrides.all_problems([problem_of_composing(error)])) from None
    if (line := settle_precision(values, first_gpu)) and speaks_for_host(os.environ):
        print(f"mlm {job.command.name}: {line}", file=sys.stderr)
    _place(job, values)
    keys = {key for text in job.texts for key in keys_of(text)}
    for key, settle in job.command.settles.items():
        if key in keys and (line := resolve(settle)(values, keys)) and speaks_for_host(os.environ):
            print(f"mlm {job.command.name}: {line}", file=sys.stderr)
    typed = flatten(composition.typed_values())
    imports = [typed.get(key) for key, leaf in leaves(job.command.spec).items() if leaf.shipped is not None]
    trusted = partial(trusting, imports, job.overrides.import_paths)
    with trusted():
        written = own_keys(composition.typed.hydra.runtime.choices, arguments.config_dir)
        config = _build(job, values, keys, written)
        problems, preflight = path_problems(config), job.command.preflight
        if preflight and not problems and not arguments.check:  # which reads no file
            with streams_for(config):
                problems = resolve(preflight)(config)
        if problems:
            raise ConfigError(problems)

    def start() -> int:
        _announce(job)
        if arguments.check:
            return print_stdout(_verdict(config, arguments.gpus, on_ranks=job.command.check is not None))
        with trusted(), streams_for(config):
            return _execute(job.command, config)

    return start


def _take_model(job: Execution, composition: Composition) -> None:
    """Replace the default model by that of `ckpt`, where the command may and the user chose none."""
    command, keys = job.command, {text.partition("=")[0] for text in job.texts}
    is_chosen = any(key.split(".")[0] in ("model", "experiment") for key in keys) or job.overrides.problems
    if command.model_of_ckpt is None or job.saved is not None or is_chosen or "ckpt" not in keys:
        return
    ckpt = composition.tree.ckpt
    if model := resolve(command.model_of_ckpt)(ckpt):
        composition.tree.model = OmegaConf.create(model)
        if speaks_for_host(os.environ):
            shape = f"{model['num_layers']} layers, hidden size {model['hidden_size']}"
            line = f"model of ckpt={ckpt}: {model['kind']}, {shape}, {model['num_heads']} heads"
            print(f"mlm {command.name}: {line}", file=sys.stderr)


def _place(job: Execution, values: dict[str, Any]) -> None:
    """Give a job of a sweep its own output, below `out` or the folder of sweeps."""
    if job.varied is None or "out" not in values:
        return
    out, is_check = values["out"], job.arguments.check
    if out is None and not is_check:
        out = f"{_folder_of_sweep()}/{job.command.config}.json"
    if not isinstance(out, str) or out in ("", STDOUT, MISSING_VALUE):
        return
    varied = ",".join(job.varied)
    path, folder = Path(out), varied.replace("/", "_")[:LONGEST_FOLDER]
    if folder != varied:  # a digest keeps two jobs apart
        folder += f"-{xxhash.xxh3_64(varied.encode()).hexdigest()[:8]}"
    if path.suffix not in FILES:
        placed = path / folder
    elif is_check:  # its own folder is not made
        placed = path
    else:
        placed = path.parent / folder / path.name
        with suppress(OSError):  # which the check of the path names
            placed.parent.mkdir(parents=True, exist_ok=True)
    values["out"] = job.placed_out = str(placed)


def _announce(job: Execution) -> None:
    """Note a job's settings as they were typed, and print the output of one of a sweep."""
    folder = job.arguments.config_dir
    typed = job.arguments.overrides if job.varied is None else job.texts
    record_job([*([f"--config-dir={folder}"] if folder else []), *typed], job.varied)
    if job.placed_out is not None:
        print(f"mlm {job.command.name}: job {job.number}: out={job.placed_out}", file=sys.stderr)


@cache
def _folder_of_sweep() -> str:
    """Of all jobs, by the time of the first."""
    return f"{SWEEPS}/{time.strftime('%Y-%m-%d_%H-%M-%S')}"


def _execute(command: Command, config: Any) -> int:
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


def _ranks(config: Any) -> int:
    """Ranks of a layout: tp * cp * pp * dp, with one replica where dp is left to the launcher."""
    layout = config.parallel
    return int(layout.replica * (layout.dp or 1))


def _verdict(config: Any, gpus: int | None, *, on_ranks: bool) -> str:
    """The line that `--check` prints of settings without problems."""
    if not on_ranks:
        return "no problems; would run in this process"
    layout, size = config.parallel, gpus or _ranks(config)
    over_context = f" × cp={layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp={layout.tp}{over_context} × pp={layout.pp} × dp={size // layout.replica}"
    line = f"would start {size} rank{'s' * (size > 1)}: {sizes}{_devices_needed(config, size)}"
    if layout.dp is None and gpus is None:
        line += f"; dp takes what tp{' * cp' if layout.cp > 1 else ''} * pp leave: --check=N checks N GPUs"
    return line


def _devices_needed(config: Any, size: int) -> str:
    """Nodes of whole tp groups, and GPUs, for a number of ranks; nothing where one host's CPU will do."""
    whole = (number for number in divisors(size) if number <= RANKS_PER_NODE)
    each = max((number for number in whole if number % config.parallel.tp == 0), default=0)
    if config.dist.device == "cpu" or (config.dist.device == "auto" and size == each):
        return ""
    if not each:
        return f"; needs {size} GPUs"
    nodes, gpus = size // each, f"{each} GPU{'s' * (each > 1)}"
    return f"; needs {nodes} nodes of {gpus}" if nodes > 1 else f"; needs {gpus} on one node"


def _build(job: Execution, values: dict[str, Any], typed: set[str], written: set[str]) -> Any:
    command = job.command

    def check_on_ranks(config: Any) -> Sequence[str]:
        assert command.check is not None
        if job.arguments.check:
            return _problems_on_gpus(command, config, job.arguments.gpus)
        try:
            facts = resolve(f"{LAUNCH}:launch_facts")(config.dist)
        except UserError as error:  # check the rest as if the launch were right
            return [*error.problems, *command.check(config, world_size=_ranks(config), local_devices=1)]
        return command.check(config, world_size=facts.world_size, local_devices=facts.local_devices)

    def check(config: Any) -> Sequence[str]:
        problems = list((check_on_ranks if command.check else command.local_check)(config))
        named = {key for problem in problems for key in Problem.of(problem).keys}
        unread = attempt(problems, lambda: [*unread_problems(config, typed - named, written - named)])
        return [*problems, *(unread or ())]

    try:
        config = build(command.spec, values, check)
    except ConfigError as error:
        raise ConfigError(job.overrides.all_problems(error.problems)) from None
    if job.overrides.problems:
        raise ConfigError(job.overrides.problems)
    return config


def _problems_on_gpus(command: Command, config: Any, gpus: int | None) -> Sequence[str]:
    """Problems of a command on GPUs that are assumed to be there; None: as many as the layout needs."""
    assert command.check is not None
    if gpus is not None:
        return command.check(config, world_size=gpus, local_devices=RANKS_PER_NODE)
    one = replace(config, parallel=replace(config.parallel, dp=config.parallel.dp or 1))
    local = None if config.dist.device == "cpu" else max(_ranks(config), RANKS_PER_NODE)
    return command.check(one, world_size=None, local_devices=local)
