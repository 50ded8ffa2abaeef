"""The files of a Megatron-LM checkpoint: where they are, and reading them without running what is in them.

    latest_checkpointed_iteration.txt      an iteration, or "release"
    iter_0001000/ or release/
      mp_rank_01/model_optim_rng.pt        tensor-parallel rank 1; where there is pipeline parallelism
      mp_rank_01_002/model_optim_rng.pt    tensor-parallel rank 1 of pipeline rank 2

The distributed optimizer of 2023 puts the model into model_rng.pt, and moments into folders with one number
more.
Source: NVIDIA/Megatron-LM, megatron/checkpointing.py, get_checkpoint_name(s) from 2020 to 2023.

The files are pickles, programs that build objects. They are read by torch's weights-only unpickler, which
builds tensors and plain containers. Beside these it is given `argparse.Namespace`, and for the classes of
`IGNORED_GLOBALS` a stub that keeps nothing: no function of these files is ever looked up or called.
"""

import argparse
import io
import re
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import serialization

from mlm.models.megatron import THROUGH_HF
from mlm.util.errors import CorruptFileError, UserError

LATEST = "latest_checkpointed_iteration.txt"
MODEL_FILES = ("model_optim_rng.pt", "model_rng.pt")
RANK_FOLDER = re.compile(r"mp_rank_(\d{2,})(?:_(\d{3,}))?(?:_(\d{3,}))?")
STEP_FOLDER = re.compile(r"iter_(\d{7,})|release")
DISTRIBUTED = ("metadata.json", "common.pt", "*.distcp")
"""Files of torch_dist, beside a .metadata, and of its predecessor zarr."""
ZIP_MAGIC = b"PK\x03\x04"

IGNORED_GLOBALS = (
    # the state of numpy's generator, and numpy numbers in schedules
    "numpy.core.multiarray._reconstruct",
    "numpy._core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy._core.multiarray.scalar",
    "numpy.ndarray",
    "numpy.dtype",
    "numpy.dtypes.UInt32DType",
    # values of args
    "types.SimpleNamespace",
    "pathlib.PosixPath",
    "pathlib._local.PosixPath",
    "signal.Signals",
    "megatron.core.enums.ModelType",
    "megatron.core.transformer.enums.AttnBackend",
    "megatron.core.transformer.enums.CudaGraphScope",
    "megatron.core.optimizer.optimizer_config.OptimizerConfig",
    *(
        f"megatron.{module}.enums.{name}"
        for module in ("model", "legacy.model", "core.transformer")
        for name in ("ModelType", "LayerType", "AttnType", "AttnMaskType")
    ),
    # the fp16 optimizer of 2019 and 2020 saved its loss scaler as an object
    *(
        f"{module}.loss_scaler.{name}"
        for module in ("fp16", "megatron.fp16", "megatron.fp16_deprecated")
        for name in ("LossScaler", "DynamicLossScaler")
    ),
    # the re-run state of 2025
    *(
        f"megatron.core.rerun_state_machine.{name}"
        for name in ("RerunDiagnostic", "RerunMode", "RerunState", "RerunValidationStatus")
    ),
    # extra state of Transformer Engine's modules
    "_io.BytesIO",
    "io.BytesIO",
    "builtins.bytes",
)
"""Classes and functions that such files name and that hold nothing of the model. Of the newer ones
Megatron-LM keeps a list itself: megatron/core/safe_globals.py."""

RESAVE = (
    "save it again in Megatron-LM with --no-save-optim --no-save-rng, and trust no file of unknown origin"
)


class IgnoredGlobal:
    """Stub for the classes and functions of `IGNORED_GLOBALS`: takes anything, keeps nothing."""

    def __new__(cls, *args: Any, **kwargs: Any) -> "IgnoredGlobal":
        """Ignore the arguments."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __setstate__(self, state: Any) -> None:
        """Ignore the state."""


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
    try:
        return _rank_files(find_step(source))
    except OSError as error:
        raise unreadable_error(Path(error.filename or source), error) from error


def find_step(source: str | Path) -> Path:
    """The folder of one iteration, whatever its format. Raises UserError when it is not clear which."""
    try:
        return _step_folder(Path(source))
    except OSError as error:
        raise unreadable_error(Path(error.filename or source), error) from error


def unreadable_error(path: Path, error: OSError) -> UserError:
    """Return the error of a file that cannot be read."""
    return UserError(f"{path}: {error.strerror or error}: make it readable, or copy it to where it is")


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
    if not files:
        raise _nothing_found(step)
    tp, pp = (1 + max(numbers) for numbers in zip(*files, strict=True))
    for t, p in ((t, p) for t in range(tp) for p in range(pp)):
        if (t, p) not in files:
            name = f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else "")
            raise CorruptFileError(
                f"{step}: {name}/{MODEL_FILES[0]} is missing, of tp={tp} pp={pp} ranks: copy it too"
            )
    return RankFiles(step, files, tp, pp)


def _nothing_found(step: Path) -> UserError:
    if any(next(step.glob(pattern), None) for pattern in DISTRIBUTED):
        return UserError(
            f"{step}: holds no .metadata: torch_dist without it is incomplete, and zarr is not read; copy it "
            f"again, or save it again in Megatron-LM with --ckpt-convert-format torch_dist"
        )
    return UserError(f"{step}: holds no mp_rank_…/{MODEL_FILES[0]}: is it a Megatron-LM checkpoint?")


def is_zip(path: Path) -> bool:
    """Return True for torch's format since 1.6; the one before cannot be mapped into memory."""
    with open(path, "rb") as f:
        return f.read(len(ZIP_MAGIC)) == ZIP_MAGIC


def check_records(path: Path) -> None:
    """Compare every record of a file with its checksum; the old format has none. Reads all of it.

    Raises CorruptFileError where one differs.
    """
    if not is_zip(path):
        return
    try:
        with zipfile.ZipFile(path) as records:
            damaged = records.testzip()
    # a RuntimeError, or a kind of it, is zipfile's word for an encrypted record and for an unknown method
    except (zipfile.BadZipFile, EOFError, RuntimeError) as error:
        raise damaged_error(path, error) from error
    if damaged is not None:
        raise damaged_error(path, ValueError(f"bad CRC of {damaged}"))


def read_file(path: Path) -> dict[str, Any]:
    """Return the content of a rank file; tensors of torch's present format are mapped into memory, not read.

    Raises CorruptFileError when it is damaged, or names anything that is not data: nothing in it is run.
    """
    content = read_value(path)
    if type(content) is not dict or not all(type(key) is str for key in content):
        raise CorruptFileError(f"{path}: holds no named parts: is it a Megatron-LM checkpoint?")
    return content


def read_value(path: Path, saved: bytes | None = None) -> Any:
    """Return what torch.save wrote to a file, or `saved` of it. Raises as `read_file`."""

    def source() -> Any:
        return path if saved is None else io.BytesIO(saved)

    try:
        has_records = saved is not None or is_zip(path)
        if has_records:
            _check_stored(path, source())
        with _restricted_globals(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the age of the format
            if has_records and (named := serialization.get_unsafe_globals_in_checkpoint(source())):
                raise rejected_error(path, ", ".join(sorted(named)[:3]))
            mapped = has_records and saved is None
            return torch.load(source(), map_location="cpu", weights_only=True, mmap=mapped)
    except UserError:
        raise
    except OSError as error:
        raise unreadable_error(path, error) from error
    except Exception as error:  # what a damaged or hostile file can raise has no end
        if named_one := re.search(r"GLOBAL (\S+)", str(error)):
            raise rejected_error(path, named_one[1]) from None
        raise damaged_error(path, error) from error


def _check_stored(path: Path, source: Any) -> None:
    """Reject compression, which torch never uses: it could unpack to any size, and cannot be mapped."""
    with zipfile.ZipFile(source) as records:
        if any(info.compress_type != zipfile.ZIP_STORED for info in records.infolist()):
            raise CorruptFileError(f"{path}: is compressed, which torch.save never does: copy the original")


@contextmanager
def _restricted_globals() -> Iterator[None]:
    """Limit torch's unpickler to its own names, Namespace and the stubs.

    Libraries add their classes when they are imported.
    """
    others = serialization.get_safe_globals()
    serialization.clear_safe_globals()
    try:
        serialization.add_safe_globals(
            [argparse.Namespace, *((IgnoredGlobal, name) for name in IGNORED_GLOBALS)]
        )
        yield
    finally:
        serialization.clear_safe_globals()
        serialization.add_safe_globals(others)


def printable(text: str) -> str:
    """Words of a file for a message: one line, nothing that a terminal obeys."""
    return (text if text.isprintable() else ascii(text))[:120]


def rejected_error(path: Path, name: str) -> CorruptFileError:
    """Return the error of a file that names a class or function it does not need."""
    return CorruptFileError(
        f"{path}: refers to {printable(name)}, which is not data; nothing was executed: {RESAVE}"
    )


def damaged_error(path: Path, error: Exception) -> CorruptFileError:
    """Return the error of a file that is damaged or of another format."""
    lines = str(error).split("WeightsUnpickler error: ")[-1].strip().splitlines()
    reason = printable(lines[0].split(". In PyTorch")[0]) if lines else type(error).__name__
    return CorruptFileError(f"{path}: damaged, or not written by torch.save ({reason}): copy it again")
