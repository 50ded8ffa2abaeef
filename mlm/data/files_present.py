"""Checks that the files named by a run spec exist. Nothing is read."""

import re
from pathlib import Path

from mlm.data.config import DataConfig
from mlm.errors import Problem

HUB = "hub:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WRITE_ONE = "write one with `mlm data build` (see mlm data build --help)"


def corpus(data: DataConfig) -> Problem | None:
    """The training corpus: data.train, or train below data.path. blend_checks.py looks at data.blend."""
    if data.kind != "indexed" or data.blend:
        return None
    if data.train is not None:
        return indexed("data.train", data.train)
    if data.path is None:
        return Problem(
            ("data.path",),
            f"data.path is not set: give a corpus folder, {WRITE_ONE}, or take data=synthetic",
        )
    if not Path(data.path).is_dir():
        return Problem.at("data.path", data.path, "no such folder", WRITE_ONE)
    missing = " and ".join(absent(str(Path(data.path, "train"))))
    return Problem.at("data.path", data.path, f"{missing} is not there", WRITE_ONE) if missing else None


def corpus_extras(data: DataConfig) -> Problem | None:
    """data.validation and data.tokenizer, where they are given."""
    if data.kind != "indexed":
        return None
    return indexed("data.validation", data.validation) or tokenizer("data.tokenizer", data.tokenizer)


def indexed(key: str, prefix: str | None) -> Problem | None:
    """Both files of an indexed corpus, .bin and .idx."""
    if prefix is None or not (missing := absent(prefix)):
        return None
    stem, dot, suffix = prefix.rpartition(".")
    if dot and suffix in ("bin", "idx") and not absent(stem):
        return Problem.at(key, prefix, "give the prefix of .bin and .idx", f"use {key}={stem}")
    return Problem.at(key, prefix, f"{' and '.join(missing)} is not there", WRITE_ONE)


def file(key: str, path: str | None) -> Problem | None:
    """One plain file."""
    if path is None or Path(path).is_file():
        return None
    if Path(path).is_dir():
        inside = f"name a file in it: {key}={Path(path, _a_file_in(path))}"
        return Problem((key,), f"{key}={path} is a folder", inside)
    return Problem.at(key, path, "no such file", f"correct the path, or {key}=null")


def _a_file_in(folder: str) -> str:
    try:
        return next((each.name for each in sorted(Path(folder).iterdir()) if each.is_file()), "FILE")
    except OSError:
        return "FILE"


def folder(key: str, path: str | None) -> Problem | None:
    """A folder, or a file in place of one."""
    if path is None or Path(path).exists():
        return None
    return Problem.at(key, path, "no such folder", "correct the path")


def tokenizer(key: str, path: str | None) -> Problem | None:
    """A tokenizer's file, or the folder it is in."""
    return None if path is not None and Path(path).is_dir() else file(key, path)


def checkpoint(path: str | None) -> Problem | None:
    """A checkpoint folder or a run folder."""
    if path is None or Path(path).is_dir():
        return None
    fix = "give a run folder (runs/…) or one of its checkpoints (…/step-00001000)"
    return Problem.at("ckpt", path, "no such folder", fix)


def model(path: str | None) -> Problem | None:
    """A checkpoint or run folder, a model folder of `transformers`, or an id of the Hub."""
    if path is None or Path(path).is_dir() or hub_id(path):
        return None
    return Problem.at(
        "ckpt",
        path,
        "no such folder",
        "give a run folder (runs/…), one of its checkpoints (…/step-00001000), a model folder of "
        "transformers, or a model's id on the Hub (OWNER/NAME or hub:NAME)",
    )


def hub_id(path: str) -> str | None:
    """The id of a model on the Hub, or None.

    Behind hub:, or OWNER/NAME where OWNER is neither a folder here nor runs: a misspelled path stays one.
    """
    name = path.removeprefix(HUB)
    if not HUB_NAME.fullmatch(name):
        return None
    owner, slash, _ = name.partition("/")
    if name == path and (not slash or owner == "runs" or Path(owner).exists()):
        return None
    return name


def absent(prefix: str) -> list[str]:
    """The files of an indexed corpus that do not exist."""
    return [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
