"""A run directory made of another library's weights, atomically.

    out/checkpoints/step-00000000, out/checkpoints/latest, out/tokenizer.json

It is written next to `out`, checked, then renamed.
"""

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

import mlm
from mlm.checkpoint.native.folders import CHECKPOINTS
from mlm.checkpoint.native.format import JSON, TensorEntry
from mlm.checkpoint.native.run_state import TOKENIZER
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import WriteFile, derived_id, write_anew, write_streamed
from mlm.config.build import to_dict
from mlm.data.config import DataConfig
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.models.shape import build_on_meta
from mlm.parallel.mesh import Axis
from mlm.parallel.random import init_shard
from mlm.parallel.sharding import parameter_shards
from mlm.runs.config import PretrainConfig
from mlm.runs.journal import JOURNAL, Journal
from mlm.runs.tokenizer import digests_of_tokenizer
from mlm.util.errors import CheckFailedError, CorruptFileError, UserError, writing_to
from mlm.util.files import fsync_directory
from mlm.util.lock import LOCK, single_writer
from mlm.util.ownership import claim_folder, delete_owned, real_path

GB = 1e9
UNFINISHED = "unfinished"
SPARE = 64 << 20  # bytes for manifest, tokenizer and the file system itself


def initial_values(model: ModelConfig, names: Collection[str], seed: int) -> dict[str, Tensor]:
    """Return initial values of parameters by name: unsharded, float32, on the CPU."""
    values = {}
    for shard in parameter_shards(build_on_meta(model), Axis("tp")) if names else ():
        if shard.name in names:
            values[shard.name] = torch.empty(shard.global_shape)
            full = replace(shard, parameter=nn.Parameter(values[shard.name]), true_size=None)
            init_shard(full, seed)
    assert values.keys() == set(names), "no parameters of the model"
    return values


def write_run(
    run: Path,
    tensors: Mapping[str, TensorEntry],
    read: Callable[[str, Region], Tensor],
    *,
    state: Mapping[str, JSON],
    tokenizer: Tokenizer | None,
    progress: Callable[[int], None] = lambda count: None,
    write_file: WriteFile = write_anew,
) -> Path:
    """Write tensors into `run`, which `new_folder` yields, as a run directory; return its step-00000000.

    The checkpoint's state is `state` with versions and tokenizer. `read`, `progress` and `write_file`: see
    `write_streamed`.
    """
    full_state: dict[str, JSON] = {
        **state,
        "versions": {"mlm": mlm.__version__, "torch": torch.__version__},
        **({} if tokenizer is None else {TOKENIZER: digests_of_tokenizer(tokenizer).encode()}),
    }
    if tokenizer is not None:
        tokenizer.save(run)
    return write_streamed(
        run / CHECKPOINTS,
        0,
        tensors,
        read,
        save_id=derived_id({"state": full_state}),
        state=full_state,
        progress=progress,
        write_file=write_file,
    )


def run_config(name: str, model: ModelConfig) -> PretrainConfig:
    return PretrainConfig(
        name=name, out=f"runs/{name}", model=model, data=DataConfig(seq_length=model.max_positions)
    )


def imported_state(
    config: PretrainConfig, source: Mapping[str, JSON], filled: Collection[str]
) -> dict[str, JSON]:
    """Return the checkpoint state of imported weights; `filled`: parameters that the source lacks."""
    return {
        "step": 0,
        "weights_only": True,
        "config": to_dict(config),
        "source": {**source, **({"filled": sorted(filled)} if filled else {})},
    }


def out_problems(out: str | Path) -> list[str]:
    """Return problems of the new folder `out`, for a command's preflight."""
    path = Path(out)
    try:
        if path.is_dir() and not any(path.iterdir()):
            return []
    except OSError as error:
        return [f"out={out}: {error.strerror}: make it readable, or name another folder"]
    if os.path.lexists(path):
        return [f"out={out}: is there already, and nothing is overwritten; name a new folder, or delete it"]
    return []


@contextmanager
def new_folder(out: Path, count: int, kind: str = "run", journal: Journal | None = None) -> Iterator[Path]:
    """Yield an empty folder for about `count` bytes, which becomes `out` if the block succeeds.

    A failure leaves nothing; a kill leaves a hidden folder next to `out`, which the next command there
    deletes. Files in `journal` survive an interruption or a disk error, and a command with the same journal
    continues with them.

    Raises UserError if `out` is not free, if the disk is too small or not writable, and in place of an
    OSError within.
    """
    final = real_path(out)
    work = final.with_name(f".{final.name}.partial")
    with writing_to(str(out)):
        final.parent.mkdir(parents=True, exist_ok=True)
        claim_folder(work, UNFINISHED)
        with single_writer(work):
            folder, is_kept = work / final.name, (work / JOURNAL).is_file()
            try:
                if problems := out_problems(out):
                    raise UserError(problems[0])
                complete = journal.open(work, folder) if journal else 0
                is_kept = False
                check_space(final.parent, count - complete, f"out={out}")
                if not complete:
                    delete_owned(work, UNFINISHED, names=(final.name, JOURNAL), keep_folder=True)
                folder.mkdir(exist_ok=True)
                claim_folder(folder, kind)
                yield folder
                fsync_directory(folder)
                os.rename(folder, final)  # over an empty folder too
                fsync_directory(final.parent)
            except BaseException as error:
                is_damaged = isinstance(error, CheckFailedError | CorruptFileError)
                is_kept |= journal is not None and bool(journal.files) and not is_damaged
                raise
            finally:
                names = () if is_kept else (final.name, JOURNAL)
                delete_owned(work, UNFINISHED, names=(*names, LOCK), keep_folder=is_kept)


def check_space(folder: Path, count: int, setting: str) -> None:
    """Raise UserError, naming `setting`, unless `count` bytes are free where `folder` is."""
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if free < count + SPARE:
        raise UserError(
            f"{setting}: needs {(count + SPARE) / GB:.2f} GB, {free / GB:.2f} GB are free there: "
            f"free some, or name a folder on another disk"
        )
