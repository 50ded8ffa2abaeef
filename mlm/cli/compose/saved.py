"""The settings of a run, read back from its config.yaml as plain data: `resume=RUN`.

People pass run folders on. Composed by Hydra, a file in one could read the environment (`${oc.env:…}`) and
unfold to any size. So it is parsed by `plain_yaml`, and has only the keys of the run's dataclass.
"""

import os
from pathlib import Path
from typing import Any

from mlm.cli.command import Command
from mlm.cli.commands import SPECS
from mlm.cli.compose.arguments import Arguments, run_config, tasks_of
from mlm.cli.compose.groups import CUSTOM_TASK, TASK, task_names
from mlm.config.fields import Role, expand_home, path_problem
from mlm.config.paths import groups
from mlm.config.plain_yaml import MAX_BYTES, parse, problem_of, read_text
from mlm.config.suggest import did_you_mean, unknown_key
from mlm.config.tree import flatten, leaves
from mlm.util.errors import ConfigError, UserError, format_value
from mlm.util.object_store import is_stored, read_object, split_step
from mlm.util.ownership import CHECKPOINTS, RUN_SETTINGS

MIRROR = "checkpoint.mirror="

SavedValues = dict[str, Any]
"""Flat settings of a run: model.num_layers → 2."""


def take_saved(command: Command, arguments: Arguments) -> SavedValues | None:
    """The settings of the run that `resume=` names, which is removed from `arguments`; None without one.

    Raises UserError.
    """
    resumes = [text for text in arguments.overrides if text.startswith("resume=") and command.has_runs]
    if not resumes:
        return None
    arguments.overrides = [text for text in arguments.overrides if text not in resumes]
    resume = arguments.resume = resumes[-1].partition("=")[2]
    url = split_step(resume)[0]
    if resume and (problem := path_problem("resume", expand_home(url), Role.STORED)):
        raise UserError(problem)
    for text in arguments.overrides if is_stored(url) else ():
        if text.startswith(MIRROR) and text.removeprefix(MIRROR).rstrip("/") != url.rstrip("/"):
            raise UserError(
                f"resume={resume} {text}: a run continues in the mirror that it is resumed from; omit that"
            )
    return read_run(resume, command.config)


def take_saved_task(command: Command, arguments: Arguments) -> SavedValues | None:
    """The settings of the typed task in the run of `ckpt=`; None if the run was not finetuned on it.

    They replace a shipped YAML: `task=` is removed from the overrides. A YAML in `--config-dir` wins.
    Raises UserError for a task that is neither the run's nor in a YAML.
    """
    task_overrides = [text for text in arguments.overrides if text.startswith(f"{TASK}=")]
    file = run_config(arguments.overrides)
    if command.config != "eval" or len(task_overrides) != 1 or file is None:
        return None
    name = task_overrides[0].partition("=")[2]
    try:
        values = read_values(file, "finetune")
    except UserError:
        values = {}  # another command wrote the run
    task = {key: value for key, value in values.items() if key.startswith(f"{TASK}.")}
    trained_on = task.get(f"{TASK}.name")
    if trained_on == name:
        if arguments.config_dir is None or name not in groups(Path(arguments.config_dir)).get(TASK, []):
            arguments.overrides = [text for text in arguments.overrides if text not in task_overrides]
        return task
    if name in task_names(arguments.config_dir):
        return None
    reason = CUSTOM_TASK if trained_on is None else f"the run was finetuned on {trained_on}"
    candidates = [*tasks_of(command.words[0], arguments.config_dir), *filter(None, [trained_on])]
    raise UserError(f"unknown task '{name}'{did_you_mean(name, candidates) or f'; {reason}'}")


def read_run(resume: str, config: str) -> SavedValues:
    """The settings of the run that `resume=` names: its folder, which becomes `out`, a file, or a mirror.

    A step-… of its checkpoints stands for the folder. `config` names the command's primary config. Raises
    UserError.
    """
    if not resume:
        raise UserError("resume=: empty; name a run folder, such as resume=runs/shakespeare")
    if is_stored(resume):
        url, step = split_step(resume)
        url = url.rstrip("/")
        stored = f"{url}/{RUN_SETTINGS}"
        try:
            content = read_object(stored, MAX_BYTES)
        except UserError as error:
            raise UserError(f"resume={error}") from None
        if content is None:
            fix = "name a prefix that a run's checkpoint.mirror=… named"
            raise UserError(f"resume={url}: holds no {RUN_SETTINGS} of a run; {fix}")
        values = _values_in(content.decode(errors="replace"), stored, config)
        # without a step from the newest good one
        keys = {"mirror": url, "from_mirror": True, "from_step": step, "resume": True}
        return {**values, **{f"checkpoint.{key}": value for key, value in keys.items()}}
    path = run_of_step(resume) or Path(expand_home(resume))
    file = path / RUN_SETTINGS if path.is_dir() else path
    if not os.path.lexists(file):
        if (path / "checkpoints").is_dir():
            raise UserError(
                f"resume={resume}: holds weights and no settings of a run to resume; begin a run with them: "
                f"ckpt={resume} out=…"
            )
        problem = f"holds no {RUN_SETTINGS}" if path.is_dir() else "no such folder"
        raise UserError(f"resume={resume}: {problem}; name the folder of a run (out=… of mlm {config})")
    values = read_values(file, config)
    if values.get("checkpoint.resume") is False:  # false: the first start required an empty folder
        values["checkpoint.resume"] = True
    return {**values, "out": str(file.parent)} if file.name == RUN_SETTINGS else values


def run_of_step(resume: str) -> Path | None:
    """The folder of the run whose checkpoint `resume` is; None for other paths."""
    path = Path(expand_home(resume))
    is_step = path.name.startswith("step-") and path.parent.name == CHECKPOINTS and path.is_dir()
    return path.parent.parent if is_step else None


def read_values(path: Path, config: str) -> SavedValues:
    """The settings in a saved file of the command whose primary config is `config`.

    Raises UserError, ConfigError with several problems.
    """
    return _values_in(read_text(path), path, config)


def _values_in(text: str, path: Path | str, config: str) -> SavedValues:
    spec = SPECS[config]
    tree = parse(text, path)
    command = tree.pop("command", config)
    if command != config:
        raise UserError(
            f"{path}: the settings of a run of mlm {format_value(command)[:40]}; use that command"
        )
    flat, schema = flatten(tree), leaves(spec)
    problems = [f"{path}: {unknown_key(spec, key)}; delete it" for key in flat if key not in schema]
    problems += [f"{path}: {key}: {why}" for key, value in flat.items() if (why := problem_of(value))]
    if problems:
        raise ConfigError(problems[:20])
    return flat
