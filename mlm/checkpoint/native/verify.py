"""Verification of a checkpoint: every byte is read and compared with the manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import torch

from mlm.checkpoint.native.folders import REPLACED
from mlm.checkpoint.native.format import CHUNKS, MANIFEST, RESTORE, Manifest, read_manifest
from mlm.checkpoint.native.lineage import STEP_NAME
from mlm.checkpoint.native.norms import NormSums, describe_not_finite, first_not_finite, with_norms
from mlm.checkpoint.native.shard_file import read_header
from mlm.checkpoint.native.tokenizer_digest import TOKENIZER, check_beside, file_beside
from mlm.util.atomic import digest_file
from mlm.util.errors import CorruptFileError, UserError

Forms: TypeAlias = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Dtype and shape of each tensor in a file."""


@dataclass(frozen=True)
class FileProblem:
    """A damaged, missing or unexpected file."""

    file: str
    why: str


class NotFinite(FileProblem):
    """A file as it was saved, with a tensor that holds NaN or infinity."""


@dataclass(frozen=True)
class Verified:
    """Findings in one step-… directory."""

    path: Path
    manifest: Manifest | None
    """None when it cannot be read."""
    problems: tuple[FileProblem, ...]
    warnings: tuple[str, ...]
    """Harmless oddities, a line each."""
    loads: bool
    """True if all that is listed is present, bit for bit, and finite; other shards do not affect loading."""

    @property
    def whole(self) -> bool:
        """True if it holds what was saved, bit for bit, finite, and no other shard."""
        return not self.problems


def verify_checkpoint(directory: Path, progress: Callable[[int], None] = lambda count: None) -> Verified:
    """Find all problems of a step-… directory.

    Checks the manifest (digest, coverage, names), each file (size, save id, header, tensors, digest), that no
    other shard is present, and that the run's tokenizer is the one trained with. `progress` receives bytes of
    files, `shard_bytes` in all. Never raises for what it finds.
    """
    try:
        manifest = read_manifest(directory)
    except (UserError, OSError) as error:
        path = directory / (CHUNKS if _is_about(directory / CHUNKS, error) else MANIFEST)
        return Verified(directory, None, (_problem(path, error),), (), loads=False)
    problems: list[FileProblem] = []
    held, norms = _held(manifest), list[dict[str, float]]()
    for name in sorted(manifest.files):
        problems += _file_problems(directory / name, manifest, held[name], norms, progress)
    strays, warnings = _strays(directory, manifest)
    try:
        check_beside(directory, manifest.state)
    except (UserError, OSError) as error:
        strays.append(FileProblem(f"../../{TOKENIZER}", _problem(file_beside(directory), error).why))
    named = STEP_NAME.fullmatch(directory.name.removeprefix(REPLACED))
    if named and int(named[1]) != manifest.step:
        warnings.append(f"{directory.name} holds step {manifest.step}: it was renamed")
    bad = None if problems else first_not_finite(with_norms(manifest.tensors, norms, {}))
    if bad is not None:
        problems.append(NotFinite(next(f for f in held if bad in held[f]), describe_not_finite(bad)))
    return Verified(directory, manifest, (*problems, *strays), tuple(warnings), loads=not problems)


def check_whole(directory: Path, progress: Callable[[int], None] = lambda count: None) -> None:
    """Raise CorruptFileError for a file whose bytes are not those that were saved; strays do not matter."""
    found = verify_checkpoint(directory, progress)
    if not found.loads:
        problem = found.problems[0]
        raise CorruptFileError(f"{directory / problem.file}: {problem.why}. {RESTORE}")


def shard_bytes(directory: Path) -> int:
    """Return the bytes of the shard files, listed or not; 0 if they cannot be looked at."""
    try:
        return sum(path.lstat().st_size for path in directory.glob("*.safetensors"))
    except OSError:
        return 0


def _held(manifest: Manifest) -> dict[str, Forms]:
    """Return the tensors of each file by the manifest."""
    held: dict[str, Forms] = {name: {} for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            held[chunk.file][name] = tensor.dtype, chunk.region.size
    return held


def _file_problems(
    path: Path,
    manifest: Manifest,
    held: Forms,
    norms: list[dict[str, float]],
    progress: Callable[[int], None],
) -> list[FileProblem]:
    """Return the problems of a file, and add the norms of its tensors to `norms`."""
    entry = manifest.files[path.name]
    try:
        stored = read_header(path, entry, manifest.save_id)
        places = [(name, s.dtype, s.begin, s.begin + s.num_bytes) for name, s in stored.items()]
        sums = NormSums(places)
        digest = digest_file(path, progress, lambda start, block: sums.update(start, bytearray(block)))
        norms.append(sums.norms)
    except (UserError, OSError) as error:
        return [_problem(path, error)]
    if digest != entry.digest:
        return [FileProblem(path.name, f"its digest is {digest}, the manifest says {entry.digest}")]
    found = {name: (tensor.dtype, tensor.shape) for name, tensor in stored.items()}
    unlike = sorted(name for name in held.keys() | found.keys() if held.get(name) != found.get(name))
    return [FileProblem(path.name, f"does not hold {unlike[0]} as listed")] if unlike else []


def _strays(directory: Path, manifest: Manifest) -> tuple[list[FileProblem], list[str]]:
    """Return files that are not listed: a shard is a problem, as its own checkpoint may lack it."""
    problems, warnings = [], []
    try:
        found = sorted(path.name for path in directory.iterdir())
    except OSError as error:
        return [_problem(directory, error)], []
    for name in found:
        if name in manifest.files or name in ((MANIFEST,) if manifest.version == 1 else (MANIFEST, CHUNKS)):
            continue
        if name.endswith(".safetensors"):
            problems.append(FileProblem(name, "not listed in the manifest: a shard of another save"))
        else:
            warnings.append(f"{directory.name}/{name} is no part of the checkpoint")
    return problems, warnings


def _is_about(path: Path, error: UserError | OSError) -> bool:
    if isinstance(error, OSError):
        return str(error.filename) == str(path)
    return str(error).startswith(f"{path}: ")


def _problem(path: Path, error: UserError | OSError) -> FileProblem:
    """Return an error about `path` without its path and remedy, which are reported once for all."""
    if isinstance(error, OSError):
        return FileProblem(path.name, f"cannot be read: {error.strerror}")
    why = str(error).removeprefix(f"{path}: ").removesuffix(f". {RESTORE}")
    return FileProblem(path.name, why)
