"""Verification of a checkpoint: every byte is read and compared with the manifest."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from mlm.checkpoint.native.compare import tensors_digest
from mlm.checkpoint.native.folders import checkpoint_problem
from mlm.checkpoint.native.format import MANIFEST, RESTORE, CheckpointError, Manifest, read_manifest
from mlm.checkpoint.native.reader import CheckedFile, read_header
from mlm.checkpoint.native.run_state import TOKENIZER_FILE, check_run_tokenizer, tokenizer_path
from mlm.checkpoint.native.shard_file import Form
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import READABLE
from mlm.util.terminal import progress_bar


@dataclass(frozen=True)
class FileProblem:
    """A damaged, missing or unexpected file."""

    word: ClassVar[str] = "damaged"
    """Adjective for a checkpoint with this problem."""
    remedy: ClassVar[str] = "Restore it from a copy, or delete it"
    file: str
    why: str


class UnreadableFile(FileProblem):
    """A file that cannot be read, so that its content is unknown."""

    word = "not readable"
    remedy = "Ask its owner or the disk's for the right to read it"


@dataclass(frozen=True)
class CheckpointVerification:
    """Result of verifying one step-… directory."""

    path: Path
    manifest: Manifest | None
    """None if it cannot be read."""
    problems: tuple[FileProblem, ...]
    loads: bool
    """True if every listed file is present, bit for bit; unlisted shards do not affect loading."""
    exact: str | None = None
    """Digest of the tensors of a run with exact=N, the same at every layout (`tensors_digest`)."""

    @property
    def is_intact(self) -> bool:
        """True if every listed file is present, bit for bit, and no other shard."""
        return not self.problems


def verify_checkpoint(
    directory: Path, progress: Callable[[int], None] = lambda count: None
) -> CheckpointVerification:
    """Find all problems of a step-… directory.

    Checks the manifest (digest, coverage, names), each file (size, save id, header, tensors, digest), that no
    other shard is present, and the run's tokenizer. `progress` receives bytes of files, `shard_bytes` in all.
    Problems are returned, not raised.
    """
    try:
        manifest = read_manifest(directory)
    except (UserError, OSError) as error:
        return CheckpointVerification(directory, None, (_problem(directory / MANIFEST, error),), loads=False)
    problems: list[FileProblem] = []
    forms: dict[str, dict[str, Form]] = {name: {} for name in manifest.files}
    for name, tensor in manifest.tensors.items():
        for chunk in tensor.chunks:
            forms[chunk.file][name] = Form(tensor.dtype, chunk.region.size)
    for name in sorted(manifest.files):
        path, listed = directory / name, forms[name]
        try:
            with CheckedFile(path, manifest.files[name]) as f:
                stored = {key: tensor.form for key, tensor in read_header(f, manifest.save_id).items()}
                f.check_all(progress)
        except (UserError, OSError) as error:
            problems.append(_problem(path, error))
            continue
        if unlike := sorted(
            key for key in listed.keys() | stored.keys() if listed.get(key) != stored.get(key)
        ):
            problems.append(FileProblem(name, f"does not hold {unlike[0]} as listed"))
    loads = not problems
    for path in sorted(directory.glob("*.safetensors")):
        if path.name not in manifest.files:  # its own checkpoint may lack it
            problems.append(FileProblem(path.name, "not listed in the manifest: a shard of another save"))
    try:
        check_run_tokenizer(directory, manifest.state)
    except (UserError, OSError) as error:
        problems.append(
            FileProblem(f"../../{TOKENIZER_FILE}", _problem(tokenizer_path(directory), error).why)
        )
    config = manifest.state.get("config")
    is_exact = loads and isinstance(config, dict) and bool(config.get("exact"))
    digest = tensors_digest(directory, manifest) if is_exact else None
    return CheckpointVerification(directory, manifest, tuple(problems), loads, digest)


def check_whole(directory: Path, progress: Callable[[int], None] = lambda count: None) -> None:
    """Raise CorruptFileError for a file whose bytes differ, CheckpointError for one that is unreadable."""
    verified = verify_checkpoint(directory, progress)
    if not verified.loads:
        problem = verified.problems[0]
        if isinstance(problem, UnreadableFile):
            raise CheckpointError(f"{directory / problem.file}: {problem.why}. {READABLE}")
        raise CorruptFileError(f"{directory / problem.file}: {problem.why}. {RESTORE}")


def shard_bytes(directory: Path) -> int:
    """Return the bytes of the shard files, listed or not; 0 if the directory cannot be read."""
    try:
        return sum(path.lstat().st_size for path in directory.glob("*.safetensors"))
    except OSError:
        return 0


def _problem(path: Path, error: UserError | OSError) -> FileProblem:
    """Convert an error about `path`, without path and remedy, which are reported once for all problems."""
    if isinstance(error, OSError):
        return UnreadableFile(path.name, f"cannot be read: {error.strerror}")
    reason = str(error).removeprefix(f"{path}: ").removesuffix(f". {RESTORE}")
    return FileProblem(path.name, reason)


def content_problem(path: Path) -> str | None:
    """Return why a checkpoint is not whole, every byte read; None if it is."""
    if problem := checkpoint_problem(path):
        return problem
    try:
        with progress_bar(f"verifying {path.name}", shard_bytes(path), in_bytes=True) as advance:
            check_whole(path, advance)
    except CorruptFileError as error:
        return str(error)
    return None
