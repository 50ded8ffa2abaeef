"""Run a parsed command: print its help or config, check it, or start its job.

Steps: compose, build, check, preflight, launch.
"""

import os
import sys
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from mlm.cli.command import Command
from mlm.cli.compose.arguments import Arguments, check_task, parse
from mlm.cli.compose.command_help import command_help
from mlm.cli.compose.composition import (
    COMPOSE_ERRORS,
    Composition,
    compose,
    plain_values,
    problem_of_composing,
)
from mlm.cli.compose.groups import user_keys
from mlm.cli.compose.overrides import Overrides, keys_of, prepare
from mlm.cli.compose.saved import SavedValues, run_of_step, take_saved, take_saved_task
from mlm.cli.outcome import OK, print_stdout, speaks_for_host
from mlm.config.build import build, path_problems, streams_for
from mlm.config.fields import OnlyIf, expand_home
from mlm.config.imports import trusting
from mlm.config.suggest import divisors
from mlm.config.tree import Leaf, flatten, leaves, values_of
from mlm.launch.command_line import record_job
from mlm.launch.devices import first_gpu
from mlm.launch.rules.layout import RANKS_PER_NODE
from mlm.launch.stop import exiting_on_signals
from mlm.models.family import family_of, option
from mlm.optim.auto_precision import settle_precision
from mlm.util.errors import ConfigError, Problem, UserError, attempt, format_value
from mlm.util.object_store import is_stored
from mlm.util.system import resolve

LAUNCH = "mlm.launch.start"


@dataclass
class Job:
    """One execution of a command."""

    command: Command
    arguments: Arguments
    overrides: Overrides
    saved: SavedValues | None
    """Settings of the run to continue; None for a new one."""

    def note(self, line: str) -> None:
        """Print a line on stderr, once per host."""
        if speaks_for_host(os.environ):
            print(f"mlm {self.command.name}: {line}", file=sys.stderr)


def run_command(command: Command, words: list[str]) -> int:
    """Run a command with its arguments and return the exit code. Raises UserError."""
    arguments = parse(command, words)
    folder = arguments.config_dir
    if arguments.help:
        return print_stdout(command_help(command, folder, arguments.overrides))
    if arguments.from_megatron is not None:
        from mlm.cli.megatron_arguments import translate_words  # needs the settings of pretraining

        return print_stdout("\n".join(translate_words(arguments.from_megatron).lines()))
    if folder is not None and not os.path.isdir(folder):
        fix = "name one laid out like configs/"
        raise UserError(Problem.at("--config-dir", folder, "no such folder", fix))
    saved = take_saved(command, arguments) or take_saved_task(command, arguments)
    if saved is None:
        check_task(command, arguments)
    overrides = prepare(command, arguments.overrides, config_dir=folder)
    if overrides.problems and (arguments.cfg or arguments.resolve):
        raise ConfigError(overrides.problems)
    return run_job(Job(command, arguments, overrides, saved))


def run_job(job: Job) -> int:
    """Compose and build the run spec, report every problem, and run it; return its exit code.

    Raises ConfigError with the problems of the typed overrides and of the composed values.
    """
    command, arguments, config_dir = job.command, job.arguments, job.arguments.config_dir
    try:
        composition = compose(command.config, job.overrides.texts, config_dir=config_dir, saved=job.saved)
        _take_model(job, composition)
        _continue_elsewhere(job, composition)
        if arguments.cfg or arguments.resolve:
            return print_stdout(composition.to_yaml(resolve=arguments.resolve).rstrip("\n"))
        values = composition.resolved()
    except COMPOSE_ERRORS as error:
        if isinstance(error, UserError):
            raise
        raise ConfigError(job.overrides.all_problems([problem_of_composing(error)])) from None
    if line := settle_precision(values, first_gpu):
        job.note(line)
    keys = {key for text in job.overrides.texts for key in keys_of(text)}
    for key, resolver in command.resolvers.items():
        if key in keys and (line := resolve(resolver)(values, keys)):
            job.note(line)
    # Only typed import paths are imported, never a saved run's.
    typed = flatten(plain_values(composition.typed, resolve=False))
    imports = [typed.get(key) for key, leaf in leaves(command.spec).items() if leaf.shipped is not None]
    trusted = partial(trusting, imports, job.overrides.import_paths)
    with trusted():
        yaml_keys = user_keys(composition.typed.hydra.runtime.choices, config_dir)
        config = _build(job, values, keys, yaml_keys)
        problems = path_problems(config)
        if command.preflight and not problems:
            with streams_for(config):
                problems = resolve(command.preflight)(config)
        if problems:
            raise ConfigError(problems)

    record_job([*([f"--config-dir={config_dir}"] if config_dir else []), *arguments.overrides])
    if arguments.check:
        return print_stdout(_verdict(command, config, arguments.gpus))
    with trusted(), streams_for(config):
        if command.check is None:
            with exiting_on_signals():
                code = resolve(command.target)(config)
            return code if isinstance(code, int) else OK  # an int: the exit code of child ranks
        if command.forecast and speaks_for_host(os.environ):
            for line in resolve(command.forecast)(config, resolve(f"{LAUNCH}:launch_facts")(config.dist)):
                job.note(line)
        out = Path(config.out) if command.out_is_run_folder else None
        return int(resolve(f"{LAUNCH}:run_job")(command.target, config, out=out))


def _take_model(job: Job, composition: Composition) -> None:
    """Replace the default model by `ckpt`'s, where the command may and the user chose none."""
    command, keys = job.command, {text.partition("=")[0] for text in job.overrides.texts}
    is_chosen = any(key.split(".")[0] in ("model", "experiment") for key in keys) or job.overrides.problems
    if command.model_of_ckpt is None or job.saved is not None or is_chosen or "ckpt" not in keys:
        return
    try:
        trained = resolve(command.model_of_ckpt)(composition.tree.ckpt, composition.tree.out)
    except UserError:
        if not (job.arguments.cfg or job.arguments.resolve):
            raise
        return  # show the config without the model
    if trained:
        name, model = trained
        composition.tree.model = OmegaConf.create(model)
        shape = f"{model['num_layers']} layers, hidden size {model['hidden_size']}"
        job.note(f"model of {name}: {model['kind']}, {shape}, {model['num_heads']} heads")


def _continue_elsewhere(job: Job, composition: Composition) -> None:
    """Let a run that `resume=` names continue in another `out`, if one is typed. Raises UserError."""
    name, saved = job.arguments.resume, job.saved or {}
    if name is None or is_stored(name) or "out" not in saved or not isinstance(composition.tree.out, str):
        return
    out: str = composition.tree.out
    run, is_step = str(saved["out"]), run_of_step(name) is not None
    if os.path.realpath(out) == os.path.realpath(run):
        if is_step:
            why = "in its own folder a run continues from its newest checkpoint"
            raise UserError(f"resume={name}: {why}; set another out=…, or go back by mlm ckpt rollback {run}")
    elif "checkpoint.from_run" not in leaves(job.command.spec):
        why = "a finetuning run continues in its own folder"
        raise UserError(f"resume={name} out={out}: {why}; omit out=, or begin another run with ckpt=…")
    else:
        composition.tree.checkpoint.from_run = expand_home(name) if is_step else run


def _verdict(command: Command, config: Any, gpus: int | None) -> str:
    if command.check is None:
        return "no problems; would run in this process"
    layout, size = config.parallel, gpus or _ranks(config)
    over_context = f" × cp={layout.cp}" if layout.cp > 1 else ""
    sizes = f"tp={layout.tp}{over_context} × pp={layout.pp} × dp={size // layout.replica}"
    line = f"would start {size} rank{'s' * (size > 1)}: {sizes}"
    # A node holds complete tp groups.
    per_node = max((n for n in divisors(size) if n <= RANKS_PER_NODE and n % layout.tp == 0), default=0)
    is_cpu_enough = config.dist.device == "cpu" or (config.dist.device == "auto" and size == per_node)
    if not is_cpu_enough and not per_node:
        line += f"; needs {size} GPUs"
    elif not is_cpu_enough:
        nodes, node = size // per_node, f"{per_node} GPU{'s' * (per_node > 1)}"
        line += f"; needs {nodes} nodes of {node}" if nodes > 1 else f"; needs {node} on one node"
    if layout.dp is None and gpus is None:
        line += f"; dp takes what tp{' * cp' if layout.cp > 1 else ''} * pp leave: --check=N checks N GPUs"
    return line


def _ranks(config: Any) -> int:
    """Ranks of a layout: tp * cp * pp * dp, with dp=null as one replica."""
    return int(config.parallel.replica * (config.parallel.dp or 1))


def _build(job: Job, values: dict[str, Any], typed_keys: set[str], yaml_keys: set[str]) -> Any:
    def check(config: Any) -> Sequence[str]:
        problems = list(_problems(job.command, job.arguments, config))
        named = {key for problem in problems for key in Problem.of(problem).keys}
        unread = attempt(problems, lambda: [*unread_problems(config, typed_keys - named, yaml_keys - named)])
        return [*problems, *(unread or ())]

    try:
        config = build(job.command.spec, values, check)
    except ConfigError as error:
        raise ConfigError(job.overrides.all_problems(error.problems)) from None
    if job.overrides.problems:
        raise ConfigError(job.overrides.problems)
    return config


def _problems(command: Command, arguments: Arguments, config: Any) -> Sequence[str]:
    """Problems that the command's check finds for the available ranks, or those that `--check` assumes."""
    if command.check is None:
        return command.local_check(config)
    if arguments.gpus is not None:
        return command.check(config, world_size=arguments.gpus, local_devices=RANKS_PER_NODE)
    if arguments.check:  # on as many GPUs as the layout needs
        config = replace(config, parallel=replace(config.parallel, dp=config.parallel.dp or 1))
        local = None if config.dist.device == "cpu" else max(_ranks(config), RANKS_PER_NODE)
        return command.check(config, world_size=None, local_devices=local)
    try:
        facts = resolve(f"{LAUNCH}:launch_facts")(config.dist)
    except UserError as error:  # check the rest as if the launch were right
        return [*error.problems, *command.check(config, world_size=_ranks(config), local_devices=1)]
    return command.check(config, world_size=facts.world_size, local_devices=facts.local_devices)


def unread_problems(config: Any, typed_keys: Set[str], yaml_keys: Set[str]) -> Iterator[Problem]:
    """Problems of keys that nothing reads, typed or written in the user's YAML."""
    spec: type = type(config)
    schema, values = dict(leaves(spec)), values_of(config)
    if "model.kind" in schema:  # the options of its family too
        prefix, family = "model.options.", family_of(config.model.kind)
        values |= {f"{prefix}{name}": option(config.model, name) for name in family.options}
        for name, leaf in leaves(family.settings).items() if family.settings else ():
            schema[prefix + name] = replace(leaf, only_if=leaf.only_if and leaf.only_if.within(prefix))
    for key in [key for key in schema if key in typed_keys or key in yaml_keys]:
        condition = _broken_condition(key, schema, values)
        if condition is None:
            continue
        parent, has_key = condition.key, condition.key in values
        # YAML may serve several commands, or hold a full configuration; typed values win over it.
        is_whole = parent in yaml_keys and values[key] == schema[key].default
        if key not in typed_keys and (not has_key or parent in typed_keys or is_whole):
            continue
        why = f"with {parent}={format_value(values[parent])}" if has_key else f"without {parent}"
        values_read = condition.values or ((True,) if values.get(parent) is False else ())
        remedy = " or ".join(f"{parent}={format_value(value)}" for value in values_read) or parent
        fix = "remove it" + f", or set {remedy}" * has_key
        yield Problem((key, parent), f"{key}={format_value(values[key])}: has no effect {why}", fix)


def _broken_condition(key: str, schema: Mapping[str, Leaf], values: Mapping[str, Any]) -> OnlyIf | None:
    """The unmet condition of a key; None if the key is read, or user code or a model may read it."""
    condition = schema[key].only_if if key in schema else None
    if condition is None:
        return None
    parent = condition.key
    if parent not in values:  # a command without model.* takes its checkpoint's model
        return None if parent.startswith("model.") and "model.kind" not in values else condition
    shipped = schema[parent].shipped if parent in schema else None
    holds = condition.holds(values[parent]) or (shipped is not None and values[parent] not in shipped)
    return _broken_condition(parent, schema, values) or (None if holds else condition)
