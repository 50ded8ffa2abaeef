"""Checks of the paths of a run spec on disk, made for every command before anything is computed."""

import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any

from mlm.config.fields import READ, Role, split_weight
from mlm.config.tree import leaves, values_of
from mlm.util.errors import Problem
from mlm.util.ownership import STDOUT, file_type_name, kind_of_folder, rejected_place
from mlm.util.results import result_problems, results_alone_on_stdout


def path_problems(config: Any) -> list[str]:
    """Results that would replace a user's file, and folders that no command may claim.

    Names in a folder that are in the way are known to the command, which checks them itself.
    """
    problems = list[str]()
    for key, value, role in paths_of(config):
        if role is Role.RESULT:
            problems += result_problems(value, key=key, inputs=inputs_of(config))
        elif role in (Role.FOLDER, Role.CACHE):
            problems += folder_problems(key, value, protected_from(config), is_cache=role is Role.CACHE)
    return problems


def folder_problems(key: str, value: str, inputs: list[str], *, is_cache: bool = False) -> list[str]:
    """Problems of a path where the command cannot write a folder. A cache may be anywhere: it adds files."""
    what, folder = f"{key}={value}", Path(value)
    if value == STDOUT:
        return [Problem.at(key, value, "standard output cannot hold a folder", "name a folder")]
    try:
        if os.path.lexists(folder) and not folder.is_dir():
            return [Problem.at(key, value, f"{file_type_name(folder)} stands there", "name a new folder")]
        is_ours = is_cache or kind_of_folder(folder) is not None
        return [] if is_ours else rejected_place(what, folder, inputs)
    except OSError as error:
        return [Problem.at(key, value, str(error.strerror), "name another folder")]


def paths_of(config: Any) -> Iterator[tuple[str, str, Role]]:
    """(key, path, role) of every path that a run spec holds."""
    spec: type = type(config)
    values = values_of(config)
    for key, leaf in leaves(spec).items():
        if leaf.role is None:
            continue
        value = values[key]
        for item in value if isinstance(value, list | tuple) else (value,):
            if item is not None:
                yield key, split_weight(item)[1] if leaf.role is Role.BLEND else item, leaf.role


def inputs_of(config: Any) -> list[str]:
    """Every path that a command reads."""
    return [path for _, path, role in paths_of(config) if role in READ]


def protected_from(config: Any) -> list[str]:
    """The inputs that no folder to write may be or hold.

    A tokenizer may: `mlm data tokenizer out=corpus`, then `mlm data build tokenizer=corpus out=corpus`.
    """
    return [path for key, path, role in paths_of(config) if role in READ and not key.endswith("tokenizer")]


def streams_for(config: Any) -> AbstractContextManager[None]:
    """Around the work of a command: leaves standard output to its results where one is named `-`."""
    results = (Role.RESULT, Role.PLACE)
    if is_dataclass(config) and any(p == STDOUT and role in results for _, p, role in paths_of(config)):
        return results_alone_on_stdout()
    return nullcontext()
