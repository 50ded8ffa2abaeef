"""A model of `transformers` or the Hub as a run directory.

config.json, safetensors and the tokenizer are read without `transformers`.
"""

from pathlib import Path

import torch

from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.convert.huggingface.export import NOT_COMPARED, Compare, tensor_bytes
from mlm.convert.huggingface.folder import (
    OTHER_WEIGHTS,
    SMALL_FILES,
    HFModel,
    commit_of,
    fetch,
    read_model,
)
from mlm.convert.huggingface.model_card import CARD
from mlm.convert.huggingface.tensors import HFTensors
from mlm.convert.source import ModelFolder
from mlm.convert.targets import write_native
from mlm.data.files_present import HUB_NAME
from mlm.data.tokenizer_settings import SETTINGS, read_config
from mlm.runs.folder import new_folder, out_problems
from mlm.util.errors import UserError, attempt
from mlm.util.terminal import one_line, progress_bar


def import_problems(source: str, out: str, revision: str | None = None) -> list[str]:
    """Return what is wrong with a folder or id to import, and with `out`; nothing is downloaded."""
    problems, folder = out_problems(out), Path(source)
    if not folder.exists():
        return problems + ([] if HUB_NAME.fullmatch(source) else [no_such_folder(source)])
    if revision is not None:
        problems.append(f"revision={revision} is for the Hub, source={source} is a folder: leave it")
    attempt(problems, lambda: HFTensors(read_model(folder)))
    return problems


def no_such_folder(source: str) -> str:
    return f"source={source}: no such folder. Give one with config.json and model.safetensors, or a Hub id"


def import_model(
    name: str, out: Path, *, revision: str | None, compare: Compare | None
) -> tuple[HFModel, list[str], str, str]:
    """Read, write, compare and publish; return the model, notes, and what was compared and written.

    `compare(folder, run)` raises UserError where outputs differ; None compares none. Raises UserError and
    leaves no files.
    """
    folder, commit = Path(name), None
    if not folder.exists():
        if not HUB_NAME.fullmatch(name):
            raise UserError(no_such_folder(name))
        folder = fetch(name, revision, "source")
        commit = commit_of(folder) or revision or "main"
    source = ModelFolder(folder)
    source.check()
    origin = {
        "kind": "huggingface",
        "name": folder.resolve().name if commit is None else name,
        "revision": commit,
        "files": source.digests(),
        **source.origin,
    }
    count = tensor_bytes(source, torch.float32)
    with new_folder(out, count) as run:
        with progress_bar(f"writing {out}", count, in_bytes=True) as advance:
            path = write_native(source, run, origin, advance)
        line = NOT_COMPARED if compare is None else str(compare(folder, run))
    # What the folder holds and no export of the run will hold.
    known, notes = {*SMALL_FILES, *source.hf.files, CARD}, source.conversion_notes
    names = sorted(path.name for path in folder.iterdir() if path.is_file() and path.name not in known)
    lost = [name for name in names if not name.startswith(".") and not name.endswith(OTHER_WEIGHTS)]
    if "auto_map" in read_config(folder / SETTINGS):
        lost.append(f"auto_map of {SETTINGS}")
    if lost:
        more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
        notes.append(f"not carried: {', '.join(map(one_line, lost[:5]))}{more}")
    return source.hf, notes, line, f"written to {out / CHECKPOINTS / path.name}"
