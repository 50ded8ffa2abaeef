"""Checks that the files named by a run spec exist. Nothing is read."""

import re
from pathlib import Path

from mlm.data.chat_builtin import BUILT_IN, TURNS
from mlm.data.config import DataConfig
from mlm.util.errors import Absent, Problem, UserError
from mlm.util.object_store import is_stored
from mlm.util.ownership import HUB
from mlm.util.system import resolve

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
WRITE_ONE = "write one with `mlm data build` (see mlm data build --help)"


def corpus(data: DataConfig) -> Problem | None:
    """Return the problem of the training corpus, data.train or train below data.path, or None.

    blend_checks.py checks data.blend.
    """
    # The tokenizer of data.path is read with data.train and for synthetic data too.
    if is_stored(data.path) and (problem := cache_problem(data, "data.path")):
        return problem
    if data.kind != "indexed" or data.blend:
        return None
    if data.train is not None:
        return stored_or_indexed(data, "data.train", data.train)
    if data.path is None:
        return Absent(
            ("data.path", "data.train", "data.blend"),
            f"data.path is not set: give a corpus folder, {WRITE_ONE}, or take data=synthetic",
        )
    if is_stored(data.path):
        return None
    if not Path(data.path).is_dir():
        missing = indexed("data.path", data.path)
        if missing is None or len(missing_pair(data.path)) == 1 or not missing_pair(_stem(data.path)):
            return missing
        return Absent.at("data.path", data.path, "no such folder", WRITE_ONE)
    if not (missing_files := missing_pair(str(training_prefix(data)))):
        return None
    return Absent.at("data.path", data.path, f"{' and '.join(missing_files)}: not there", WRITE_ONE)


def training_prefix(data: DataConfig, path: str | None = None) -> Path:
    """Return the prefix of the training .bin/.idx at `path`, or data.path: `train` in a folder, or itself.

    A corpus in a store is copied locally first. Raises UserError, OSError.
    """
    path = path or data.path
    assert path is not None
    if is_stored(path):
        assert data.cache is not None, "checked with the configuration"
        copy_locally = resolve("mlm.data.stored_corpus:copy_locally")  # takes NumPy, not for help
        return Path(copy_locally(path, data.cache, int(data.cache_gb * 1e9)))
    return Path(path, "train") if Path(path).is_dir() or missing_pair(path) else Path(path)


def pair_prefix(data: DataConfig, key: str, path: str) -> Path:
    """Like `training_prefix`, for a key whose value must be the prefix of a pair."""
    if not is_stored(path):
        return Path(path)
    if (prefix := training_prefix(data, path)).name == path.rpartition("/")[2]:
        return prefix
    raise UserError(f"{key}={path}: a folder; give the prefix of .bin and .idx, such as {key}={path}/train")


def cache_problem(data: DataConfig, key: str) -> Problem | None:
    """Return the problem of a corpus in a store without a local folder, or None."""
    if data.cache is not None:
        return None
    problem = "data.cache is not set: a corpus in a store is read by way of a local folder"
    return Problem(("data.cache", key), problem, "give one on a local disk: data.cache=FOLDER")


def stored_or_indexed(data: DataConfig, key: str, prefix: str | None) -> Problem | None:
    """Like `indexed`, for a key that accepts a URL too."""
    return cache_problem(data, key) if is_stored(prefix) else indexed(key, prefix)


def corpus_extras(data: DataConfig) -> Problem | None:
    """Return the problem of data.validation or data.tokenizer, or None."""
    if data.kind != "indexed":
        return None
    problem = stored_or_indexed(data, "data.validation", data.validation)
    return problem or tokenizer("data.tokenizer", data.tokenizer)


def indexed(key: str, prefix: str | None) -> Problem | None:
    if prefix is None or not (missing := missing_pair(prefix)):
        return None
    if (stem := _stem(prefix)) != prefix and not missing_pair(stem):
        return Absent.at(key, prefix, "give the prefix of .bin and .idx", f"use {key}={stem}")
    pairs = [str(path.with_suffix("")) for path in sorted(Path(prefix).glob("*.idx"))]
    if parts := [pair for pair in pairs if not missing_pair(pair)]:
        choices = " or ".join(f"{key}={part}" for part in parts[:3])
        return Absent.at(key, prefix, "a folder", f"use {choices}")
    return Absent.at(key, prefix, f"{' and '.join(missing)}: not there", WRITE_ONE)


def _stem(prefix: str) -> str:
    return prefix.removesuffix(".bin").removesuffix(".idx")


def file(key: str, path: str | None) -> Problem | None:
    if path is None or Path(path).is_file():
        return None
    if Path(path).is_dir():
        return Absent((key,), f"{key}={path} is a folder", "name a file in it")
    return Absent.at(key, path, "no such file", f"correct the path, or {key}=null")


def folder(key: str, path: str | None) -> Problem | None:
    if path is None or Path(path).exists():
        return None
    return Absent.at(key, path, "no such folder", "correct the path")


def chat_template(key: str, path: str | None) -> Problem | None:
    return None if path in (*BUILT_IN, TURNS) else file(key, path)


def tokenizer(key: str, path: str | None) -> Problem | None:
    return None if path is not None and Path(path).is_dir() else file(key, path)


def checkpoint(path: str | None) -> Problem | None:
    if path is None or Path(path).is_dir():
        return None if path is None else _megatron_problem(path)
    fix = "give a run folder (runs/…) or one of its checkpoints (…/step-00001000)"
    return Absent.at("ckpt", path, "no such folder", fix)


def model(path: str | None) -> Problem | None:
    """Return the problem of a path other than a run, a checkpoint, a model folder or an id of the Hub."""
    if path is not None and Path(path).is_dir():
        return _megatron_problem(path)
    if path is None or hub_id(path):
        return None
    return Absent.at(
        "ckpt",
        path,
        "no such folder",
        "give a run folder (runs/…), one of its checkpoints (…/step-00001000), a model folder of "
        "transformers, or a model's id on the Hub (OWNER/NAME or hub:NAME)",
    )


def _megatron_problem(folder: str) -> Problem | None:
    # Only checkpoint folders of Megatron-LM contain these files and folders.
    names = ("latest_checkpointed_iteration.txt", "mp_rank_*", "*/mp_rank_*")
    if not any(next(Path(folder).glob(name), None) for name in names):
        return None
    fix = f"run `mlm convert {folder} runs/NAME`, then set ckpt=runs/NAME"
    return Absent.at("ckpt", folder, "a Megatron-LM checkpoint", fix)


def hub_id(path: str) -> str | None:
    """Return the id of a model on the Hub, or None for a path.

    An id begins with hub:, or is OWNER/NAME where OWNER is neither an existing folder nor "runs", so that a
    misspelled path is not taken for an id.
    """
    name = path.removeprefix(HUB)
    if not HUB_NAME.fullmatch(name):
        return None
    owner, slash, _ = name.partition("/")
    if name == path and (not slash or owner == "runs" or Path(owner).exists()):
        return None
    return name


def missing_pair(prefix: str) -> list[str]:
    return [f"{prefix}{end}" for end in (".bin", ".idx") if not Path(f"{prefix}{end}").is_file()]
