"""Whether the files that a run spec names exist: each fault with the remedy. Nothing is read."""

import re
from pathlib import Path

from mlm.data.config import DataConfig

HUB = "hub:"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WRITE_ONE = "write one with `mlm data build` (see mlm data build --help)"


def corpus(data: DataConfig) -> str | None:
    """The training corpus: data.train, or train below data.path. blend.py looks at data.blend."""
    if data.kind != "indexed" or data.blend:
        return None
    if data.train is not None:
        return indexed("data.train", data.train)
    if data.path is None:
        return f"data.path is not set: give a corpus folder, {WRITE_ONE}, or take data=synthetic"
    if not Path(data.path).is_dir():
        return f"data.path={data.path}: no such folder; {WRITE_ONE}"
    missing = " and ".join(absent(str(Path(data.path, "train"))))
    return f"data.path={data.path}: {missing} is not there; {WRITE_ONE}" if missing else None


def corpus_extras(data: DataConfig) -> str | None:
    """data.validation and data.tokenizer, where they are given."""
    if data.kind != "indexed":
        return None
    return indexed("data.validation", data.validation) or tokenizer("data.tokenizer", data.tokenizer)


def indexed(key: str, prefix: str | None) -> str | None:
    """Both files of an indexed corpus, .bin and .idx."""
    if prefix is None or not (missing := absent(prefix)):
        return None
    stem, dot, suffix = prefix.rpartition(".")
    if dot and suffix in ("bin", "idx") and not absent(stem):
        return f"{key}={prefix}: give the prefix of .bin and .idx; use {key}={stem}"
    return f"{key}={prefix}: {' and '.join(missing)} is not there; {WRITE_ONE}"


def file(key: str, path: str | None) -> str | None:
    """One plain file."""
    if path is None or Path(path).is_file():
        return None
    if Path(path).is_dir():
        return f"{key}={path} is a folder; name a file in it: {key}={Path(path, _a_file_in(path))}"
    return f"{key}={path}: no such file; correct the path, or {key}=null"


def _a_file_in(folder: str) -> str:
    try:
        return next((each.name for each in sorted(Path(folder).iterdir()) if each.is_file()), "FILE")
    except OSError:
        return "FILE"


def folder(key: str, path: str | None) -> str | None:
    """A folder, or a file in the place of one."""
    if path is None or Path(path).exists():
        return None
    return f"{key}={path}: no such folder; correct the path"


def tokenizer(key: str, path: str | None) -> str | None:
    """A tokenizer's file, or the folder it is in."""
    return None if path is not None and Path(path).is_dir() else file(key, path)


def checkpoint(path: str | None) -> str | None:
    """A checkpoint folder or a run folder."""
    if path is None or Path(path).is_dir():
        return None
    return (
        f"ckpt={path}: no such folder; give a run folder (runs/…) or one of its checkpoints (…/step-00001000)"
    )


def model(path: str | None) -> str | None:
    """A checkpoint or run folder, a model folder of `transformers`, or an id of the Hub."""
    if path is None or Path(path).is_dir() or hub_id(path):
        return None
    return (
        f"ckpt={path}: no such folder; give a run folder (runs/…), one of its checkpoints (…/step-00001000), "
        f"a model folder of transformers, or a model's id on the Hub (OWNER/NAME or hub:NAME)"
    )


def hub_id(path: str) -> str | None:
    """The id of a model on the Hub: behind hub:, or OWNER/NAME where OWNER is neither a folder here nor
    runs, so that a misspelled path stays one. None for all else."""
    name = path.removeprefix(HUB)
    if not HUB_NAME.fullmatch(name):
        return None
    owner, slash, _ = name.partition("/")
    if name == path and (not slash or owner == "runs" or Path(owner).exists()):
        return None
    return name


def absent(prefix: str) -> list[str]:
    """Which of the two files of an indexed corpus are not there."""
    return [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
