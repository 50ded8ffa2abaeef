"""The tasks that a model can be finetuned on, by the YAML of each: ours in configs/task, and the user's."""

import os
from collections.abc import Sequence
from pathlib import Path

from mlm.config.cli.choices import first_comment
from mlm.config.command import Command
from mlm.config.fields import expand_home
from mlm.config.paths import CONFIG_DIR

GROUP = "task"
OWN = "a task of your own needs --config-dir DIR, which holds task/NAME.yaml"


def takes_task(command: Command) -> bool:
    """True if a task is the first word after the command: `mlm finetune race`."""
    return command.positional[:1] == (GROUP,)


def task_files(config_dir: str | None = None) -> dict[str, Path]:
    """The YAML of each task by its name, sorted; those of the user's `config_dir` too."""
    roots = [CONFIG_DIR, *([Path(config_dir)] if config_dir else [])]
    return dict(sorted((path.stem, path) for root in roots for path in (root / GROUP).glob("*.yaml")))


def task_names(config_dir: str | None = None) -> list[str]:
    """Their names."""
    return list(task_files(config_dir))


def run_config(words: Sequence[str]) -> Path | None:
    """The saved settings of the run that `ckpt=` of a command line names; None without any.

    Its value is the run folder or a checkpoint in it: RUN/best/checkpoints/step-….
    """
    for n, word in enumerate(words):
        key, equals, value = word.partition("=")
        if key not in ("ckpt", "--ckpt"):
            continue
        place = Path(expand_home(value if equals else next(iter(words[n + 1 :]), "")))
        files = (folder / "config.yaml" for folder in (place, *list(place.absolute().parents)[:3]))
        return next((file for file in files if os.path.isfile(file)), None)
    return None


def task_summaries(config_dir: str | None = None) -> list[tuple[str, str]]:
    """(name, description) of each: the first comment of its YAML."""
    return [(name, first_comment(path)) for name, path in task_files(config_dir).items()]
