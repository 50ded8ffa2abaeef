"""The run that a command line continues: `resume=RUN`, or `--config-dir RUN --config-name config`."""

from pathlib import Path

from mlm.config.cli.arguments import (
    CONFIG_DIR_FLAGS,
    CONFIG_NAME_FLAGS,
    CONFIG_PATH_FLAGS,
    MULTIRUN,
    Arguments,
)
from mlm.config.cli.commands import Command
from mlm.config.cli.saved import CONFIG, CONFIG_NAMES, Saved, read_run, read_values
from mlm.config.cli.tasks import GROUP, OWN, run_config, task_names
from mlm.config.fields import expand_home, length_problem, permission_problem
from mlm.config.suggest import did_you_mean
from mlm.util.errors import UserError

RESUME = "resume"
SWEEPS = "hydra.mode="


def take_saved(command: Command, arguments: Arguments) -> Saved | None:
    """The saved settings that the command line names; what names them is removed from `arguments`.

    None if it names none: Hydra composes all. Raises UserError.
    """
    file, resume = take_file(arguments), take_resume(command, arguments)
    if resume is None:
        return None if file is None else Saved(read_values(file, command.config))
    if problem := length_problem(RESUME, resume) or permission_problem(RESUME, expand_home(resume)):
        raise UserError(problem)
    if file is not None or arguments.has(*CONFIG_NAME_FLAGS):
        raise UserError(f"resume={resume}: the run's own settings are read; leave --config-name out")
    if arguments.has(*MULTIRUN) or any(text.startswith(SWEEPS) for text in arguments.overrides):
        raise UserError(
            f"resume={resume}: a run continues in one folder, not as a sweep; leave --multirun out, or type "
            f"its settings with ckpt={resume} and another out=…"
        )
    return read_run(resume, command.config)


def take_saved_task(command: Command, arguments: Arguments) -> Saved | None:
    """The task that the run of `ckpt=` was trained on, where no YAML has the one that is typed; else None.

    `task=` is removed from the overrides then. Raises UserError for a task that is not the run's either.
    """
    typed = [text for text in arguments.overrides if text.startswith(f"{GROUP}=")]
    file = run_config(arguments.overrides)
    if command.config != "eval_task" or len(typed) != 1 or file is None or arguments.has(*MULTIRUN):
        return None
    name, known = typed[0].partition("=")[2], task_names(arguments.value(*CONFIG_DIR_FLAGS))
    if name in known or arguments.has(*CONFIG_NAME_FLAGS, *CONFIG_PATH_FLAGS):
        return None
    try:
        values = read_values(file, "finetune")
    except UserError:
        values = {}  # of a run of another command
    task = {key: value for key, value in values.items() if key.startswith(f"{GROUP}.")}
    trained_on = task.get(f"{GROUP}.name")
    if trained_on != name:
        own = OWN if trained_on is None else f"the run was finetuned on {trained_on}"
        raise UserError(f"unknown task '{name}'{did_you_mean(name, known)}; {own}")
    arguments.overrides = [text for text in arguments.overrides if text not in typed]
    return Saved(task)


def take_resume(command: Command, arguments: Arguments) -> str | None:
    """The value of `resume=`, removed from the overrides, if the command has runs."""
    named = [text for text in arguments.overrides if text.startswith(f"{RESUME}=") and command.has_runs]
    arguments.overrides = [text for text in arguments.overrides if text not in named]
    return named[-1].partition("=")[2] if named else None


def take_file(arguments: Arguments) -> Path | None:
    """The saved file that --config-name names, its flags removed: one named as a run names its own.

    It may come from anyone, so Hydra never sees it. Any other name is a primary config that the user wrote.
    """
    name = arguments.value(*CONFIG_NAME_FLAGS)
    folder = arguments.value(*CONFIG_DIR_FLAGS) or arguments.value(*CONFIG_PATH_FLAGS)
    if name is None or folder is None or Path(name).name not in CONFIG_NAMES:
        return None
    for flag in (*CONFIG_NAME_FLAGS, *CONFIG_DIR_FLAGS, *CONFIG_PATH_FLAGS):
        arguments.flags.pop(flag, None)
    file = Path(expand_home(folder)) / name
    return file if file.suffix else file.with_name(CONFIG)
