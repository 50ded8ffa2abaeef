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
from mlm.convert.dcp.unpickled import DAMAGES, NotDataError, check_archive, read_archive
from mlm.convert.megatron.mapping import THROUGH_HF
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.files import digest_file
from mlm.util.terminal import Advance

LATEST = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
STEP_FOLDER = re.compile(r"iter_(\d{7,})|release")
DISTRIBUTED = ("metadata.json", "common.pt", "*.distcp")
"""Files of torch_dist, which also has a .metadata, and of its predecessor zarr."""


@dataclass(frozen=True)
class RankFiles:
    """The files of one iteration."""

    path: Path
    """The folder that holds mp_rank_…."""
    files: Mapping[tuple[int, int], Path]
    """(tensor-parallel rank, pipeline rank) -> file; every rank of tp * pp."""
    tp: int
    pp: int

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.files.values())

    def verify(self, progress: Advance) -> dict[str, str]:
        """Compare every record with its checksum; return the digest of each file by its path.

        Raises CorruptFileError where a checksum differs, UserError where a file cannot be read.
        """
        digests = {}
        for path in self.files.values():
            with reading_from(path, COPY_AGAIN):
                check_records(path)
                digests[path.relative_to(self.path).as_posix()] = digest_file(path, progress)
        return digests


def find_files(source: str | Path) -> RankFiles:
    """The rank files of a checkpoint folder, of one iteration in it, or of a folder of mp_rank_… folders.

    Raises UserError when there are none or it is not clear which, CorruptFileError when one is missing.
    """
    step, files = find_step(source), dict[tuple[int, int], Path]()
    with reading_from(step, COPY_AGAIN):
        found = {
            folder: [path for name in MODEL_FILES if (path := folder / name).is_file()]
            for folder in sorted(step.iterdir())
        }
    for folder, paths in found.items():
        numbers = RANK_FOLDER.fullmatch(folder.name)
        if not numbers or not paths:  # the moments of a data-parallel rank have folders of their own
            continue
        if numbers[3] is not None:
            raise UserError(f"{folder}: of one expert-parallel rank: {THROUGH_HF}")
        rank = int(numbers[1]), int(numbers[2] or 0)
        if rank in files:
            raise CorruptFileError(f"{step}: {folder.name} of two layouts: delete the older")
        files[rank] = paths[0]
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
            name = f"{rank_folder(t, p, pp)}/{MODEL_FILES[0]}"
            raise CorruptFileError(f"{step}: {name} is missing, of tp={tp} pp={pp} ranks: copy it too")
    return RankFiles(step, files, tp, pp)


def rank_folder(t: int, p: int, pp: int) -> str:
    return f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")


def find_step(source: str | Path) -> Path:
    """The folder of one iteration, whatever its format. Raises UserError when it is not clear which."""
    source = Path(source)
    with reading_from(source, COPY_AGAIN):
        is_folder = source.is_dir()
    if not is_folder:
        raise UserError(f"{source}: no such folder: name the folder that holds {LATEST}, or mp_rank_00")
    if RANK_FOLDER.fullmatch(source.name):
        raise UserError(f"{source}: one rank of a checkpoint: name its parent, {source.resolve().parent}")
    latest = source / LATEST
    with reading_from(source, COPY_AGAIN):
        names = [path.name for path in source.iterdir() if path.is_dir()]
        iteration = ""
        if latest.is_file():
            with open(latest, "rb") as f:
                iteration = f.read(64).strip().decode("ascii", "replace")
    if any(RANK_FOLDER.fullmatch(name) for name in names):
        return source
    steps = sorted(name for name in names if STEP_FOLDER.fullmatch(name))
    if latest.is_file():
        name = f"iter_{int(iteration):07d}" if iteration.isdecimal() else iteration
        if name not in steps:
            raise CorruptFileError(
                f"{latest}: names {printable(iteration)!r}, which is not there: copy it too, or name another "
                f"folder in {source}"
            )
        return source / name
    if len(steps) > 1:
        listed = ", ".join(steps[:8])
        raise UserError(f"{source}: no {LATEST} selects one of {listed}: name one, {source / steps[-1]}")
    return source / steps[0] if steps else source


class TorchFile:
    """A file of torch.save, or its bytes: the value, whose tensors are mapped into memory, not read."""

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
                f"{path}: {printable(str(error))}; nothing was executed: save it again in Megatron-LM with "
                "--no-save-optim --no-save-rng, and trust no file of unknown origin"
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
    """Words of a file for a message: one line, without control characters."""
    return (text if text.isprintable() else ascii(text))[:120]


def damaged_error(path: Path, error: Exception) -> CorruptFileError:
    reason = printable(str(error)) or type(error).__name__
    return CorruptFileError(
        f"{path}: damaged, or not written by torch.save of PyTorch 1.6 or later ({reason}): copy it again, "
        "or save it again with a current PyTorch"
    )
