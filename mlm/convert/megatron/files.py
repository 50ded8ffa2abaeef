"""The files of a Megatron-LM checkpoint: where they are, and reading them without running what is in them.

    latest_checkpointed_iteration.txt      an iteration, or "release"
    iter_0001000/ or release/
      mp_rank_01/model_optim_rng.pt        tensor-parallel rank 1; where there is pipeline parallelism
      mp_rank_01_002/model_optim_rng.pt    tensor-parallel rank 1 of pipeline rank 2

The distributed optimizer of 2023 puts the model into model_rng.pt, and moments into folders with one number
more.
Source: NVIDIA/Megatron-LM, megatron/checkpointing.py, get_checkpoint_name(s) from 2020 to 2023.

The files are pickles, programs that build objects. They are read as data (mlm/convert/dcp/unpickled.py): a
class or function in them is a name, which is compared with a list and never looked up or called.
"""

import io
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.convert.dcp.metadata import COPY_AGAIN
from mlm.convert.dcp.torch_file import DAMAGES, check_archive, read_archive
from mlm.convert.dcp.unpickled import NotDataError
from mlm.convert.megatron.mapping import THROUGH_HF
from mlm.util.errors import CorruptFileError, UserError, reading_from

LATEST = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
STEP_FOLDER = re.compile(r"iter_(\d{7,})|release")
DISTRIBUTED = ("metadata.json", "common.pt", "*.distcp")
"""Files of torch_dist, beside a .metadata, and of its predecessor zarr."""

RESAVE = (
    "save it again in Megatron-LM with --no-save-optim --no-save-rng, and trust no file of unknown origin"
)


@dataclass(frozen=True)
class RankFiles:
    """The files of one iteration."""

    path: Path
    """The folder that holds mp_rank_…."""
    files: Mapping[tuple[int, int], Path]
    """(tensor-parallel rank, pipeline rank) -> file; every rank of tp * pp."""
    tp: int
    pp: int


def find_files(source: str | Path) -> RankFiles:
    """The rank files of a checkpoint folder, of one iteration in it, or of a folder of mp_rank_… folders.

    Raises UserError when there are none or it is not clear which, CorruptFileError when one is missing.
    """
    with reading_from(Path(source), COPY_AGAIN):
        return _rank_files(find_step(source))


def find_step(source: str | Path) -> Path:
    """The folder of one iteration, whatever its format. Raises UserError when it is not clear which."""
    with reading_from(Path(source), COPY_AGAIN):
        return _step_folder(Path(source))


def _step_folder(source: Path) -> Path:
    if not source.is_dir():
        raise UserError(f"{source}: no such folder: name the folder that holds {LATEST}, or mp_rank_00")
    if RANK_FOLDER.fullmatch(source.name):
        raise UserError(f"{source}: one rank of a checkpoint: name its parent, {source.resolve().parent}")
    if any(RANK_FOLDER.fullmatch(path.name) for path in source.iterdir()):
        return source
    steps = sorted(path for path in source.iterdir() if STEP_FOLDER.fullmatch(path.name) and path.is_dir())
    if (source / LATEST).is_file():
        return _latest_directory(source)
    if len(steps) > 1:
        names = ", ".join(path.name for path in steps[:8])
        raise UserError(f"{source}: no {LATEST} selects one of {names}: name one, {steps[-1]}")
    return steps[0] if steps else source


def _latest_directory(source: Path) -> Path:
    file = source / LATEST
    with open(file, "rb") as f:
        iteration = f.read(64).strip().decode("ascii", "replace")
    step = source / (f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration)
    if not STEP_FOLDER.fullmatch(step.name) or step.parent != source or not step.is_dir():
        raise CorruptFileError(
            f"{file}: names {printable(iteration)!r}, which is not there: copy it too, or name another "
            f"folder in {source}"
        )
    return step


def _rank_files(step: Path) -> RankFiles:
    files: dict[tuple[int, int], Path] = {}
    for folder in sorted(step.iterdir()):
        numbers = RANK_FOLDER.fullmatch(folder.name)
        path = next((path for name in MODEL_FILES if (path := folder / name).is_file()), None)
        if not numbers or path is None:  # the moments of one data-parallel rank lie in folders of their own
            continue
        if numbers[3] is not None:
            raise UserError(f"{folder}: of one expert-parallel rank: {THROUGH_HF}")
        rank = int(numbers[1]), int(numbers[2] or 0)
        if rank in files:
            raise CorruptFileError(f"{step}: {folder.name} of two layouts: delete the older")
        files[rank] = path
    if not files and any(next(step.glob(pattern), None) for pattern in DISTRIBUTED):
        raise UserError(
            f"{step}: holds no .metadata: torch_dist without it is incomplete, and zarr is not read; copy it "
            f"again, or save it again in Megatron-LM with --ckpt-convert-format torch_dist"
        )
    if not files:
        raise UserError(f"{step}: holds no mp_rank_…/{MODEL_FILES[0]}: is it a Megatron-LM checkpoint?")
    tp, pp = (1 + max(numbers) for numbers in zip(*files, strict=True))
    for t, p in ((t, p) for t in range(tp) for p in range(pp)):
        if (t, p) not in files:
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            raise CorruptFileError(
                f"{step}: {name}/{MODEL_FILES[0]} is missing, of tp={tp} pp={pp} ranks: copy it too"
            )
    return RankFiles(step, files, tp, pp)


class TorchFile:
    """A file of torch.save, or `saved` of one: its value, whose tensors are mapped into memory, not read."""

    def __init__(self, path: Path, saved: bytes | None = None) -> None:
        """Raises CorruptFileError if the file is damaged, or names anything that is not data."""
        self.path = path
        try:
            with (
                reading_from(path, COPY_AGAIN),
                open(path, "rb") if saved is None else io.BytesIO(saved) as f,
            ):
                self._saved = read_archive(f)
                self._size = f.seek(0, os.SEEK_END)
        except NotDataError as error:
            raise CorruptFileError(
                f"{path}: {printable(str(error))}; nothing was executed: {RESAVE}"
            ) from error
        except DAMAGES as error:
            raise damaged_error(path, error) from error

    @property
    def value(self) -> Any:
        """None, bool, int, float, str, bytes, list, dict, tuple, and Record for a tensor or an object."""
        return self._saved.value

    @property
    def parts(self) -> dict[str, Any]:
        """The value as a dictionary of names. Raises CorruptFileError."""
        if type(self.value) is not dict or not all(type(key) is str for key in self.value):
            raise CorruptFileError(f"{self.path}: holds no named parts: is it a Megatron-LM checkpoint?")
        return self.value

    def tensor(self, record: Any) -> Tensor:
        """Return a contiguous tensor of the value. Raises one of DAMAGES for anything else."""
        stored = self._saved.find(record)
        content = self._mapped[stored.begin : stored.begin + stored.form.num_bytes]
        return content.view(stored.dtype).view(stored.shape)

    @cached_property
    def _mapped(self) -> Tensor:
        return torch.from_file(str(self.path), shared=False, size=self._size, dtype=torch.uint8)


def check_records(path: Path) -> None:
    """Compare every record of a file with its checksum. Raises CorruptFileError where one differs."""
    try:
        with open(path, "rb") as f:
            check_archive(f)
    except DAMAGES as error:
        raise damaged_error(path, error) from error


def printable(text: str) -> str:
    """Words of a file for a message: one line, nothing that a terminal obeys."""
    return (text if text.isprintable() else ascii(text))[:120]


def damaged_error(path: Path, error: Exception) -> CorruptFileError:
    """Return the error of a file that is damaged or of another format."""
    reason = printable(str(error)) or type(error).__name__
    return CorruptFileError(
        f"{path}: damaged, or not written by torch.save of PyTorch 1.6 or later ({reason}): copy it again, "
        "or save it again with a current PyTorch"
    )
