"""`mlm ckpt verify`: whether checkpoints are whole, every byte read and compared with its digest."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm.cli.command import Command, check_out_file
from mlm.config.fields import CheckpointPath, ResultFile
from mlm.util.errors import CorruptFileError

if TYPE_CHECKING:  # which needs torch
    from mlm.checkpoint.native.verify import Verified


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptVerifyConfig:
    """The run spec of `mlm ckpt verify`: whether checkpoints are whole, every byte read."""

    ckpt: CheckpointPath
    """Checkpoint (step-…), or run directory: then every checkpoint in it."""
    out: ResultFile | None = None
    """JSON file for the result; null writes none."""


def run(config: CkptVerifyConfig) -> None:
    """Verify, print a table, write out. Raises CorruptFileError for one damaged or not finite, UserError."""
    from mlm.checkpoint.native.folders import (
        BEST,
        CHECKPOINTS,
        LATEST,
        candidates,
        checkpoints,
        locate,
        read_pointer,
    )
    from mlm.checkpoint.native.format import CheckpointError
    from mlm.checkpoint.native.verify import Unreadable, shard_bytes, verify_checkpoint
    from mlm.cli.result import write_result
    from mlm.util.terminal import one_line, progress_bar

    place, alone = locate(config.ckpt)
    paths, best = [place], place.parent / BEST / CHECKPOINTS
    if not alone:
        paths = list(checkpoints(place).values())
        # a finetuned run keeps its best ones beside those that it continues from
        paths += checkpoints(best).values() if place.name == CHECKPOINTS and best.is_dir() else []
    with progress_bar("verifying", sum(map(shard_bytes, paths)), in_bytes=True) as advance:
        results = [verify_checkpoint(path, advance) for path in paths]
    sound = {each.path for each in results if each.loads}
    start = None if alone else next((path for path in candidates(place) if path in sound), None)
    if config.out is not None:
        write_result(config.out, result_of(config.ckpt, results, start))
    show(config.ckpt, results, start, in_run=not alone)
    bad = [each for each in results if not each.whole]
    if bad:
        first, verb = bad[0].problems[0], "is" if len(bad) == 1 else "are"
        kind = CheckpointError if isinstance(first, Unreadable) else CorruptFileError
        raise kind(
            f"{len(bad)} of {len(results)} checkpoints {verb} {first.word}: "
            f"{bad[0].path / one_line(first.file)}: {one_line(first.why)}. {first.remedy}"
        )
    problem = None if alone else read_pointer(place).problem
    if problem:
        raise CorruptFileError(f"{place / LATEST}: {problem}. Write the name of a step-… there, or delete it")


def result_of(ckpt: str, results: list["Verified"], start: Path | None) -> dict[str, Any]:
    """All findings, for machines."""
    return {
        "task": "ckpt verify",
        "ckpt": ckpt,
        "whole": all(each.whole for each in results),
        "continues_from": None if start is None else str(start),
        "checkpoints": [
            {
                "path": str(each.path),
                "whole": each.whole,
                "step": each.manifest and each.manifest.step,
                "files": each.manifest and len(each.manifest.files),
                "bytes": each.manifest and sum(file.bytes for file in each.manifest.files.values()),
                "digest": each.manifest and each.manifest.digest,
                "problems": [asdict(problem) for problem in each.problems],
            }
            for each in results
        ],
    }


def show(ckpt: str, results: list["Verified"], start: Path | None, *, in_run: bool) -> None:
    """Print a line per checkpoint, and one per further problem."""
    from mlm.checkpoint.native.folders import BEST
    from mlm.util.terminal import add_row, console, format_bytes, table

    made = table(f"ckpt verify · {ckpt}", "checkpoint", "step#", "files#", "size#", "")
    for each in results:
        manifest = each.manifest
        cells: tuple[object, ...] = ("", "", "")
        if manifest is not None:
            total = sum(file.bytes for file in manifest.files.values())
            cells = (manifest.step, len(manifest.files), format_bytes(total))
        first, *others = [f"{f.word}: {f.file}: {f.why}" for f in each.problems] or ["whole"]
        is_best = each.path.parent.parent.name == BEST
        add_row(made, f"{BEST}: {each.path.name}" if is_best else each.path.name, *cells, first)
        for line in others:
            add_row(made, "", "", "", "", line)
    out = console()
    out.print(made)
    if in_run:
        out.print(
            f"a run continues from {start}" if start else "a run would not start: none of them can be loaded"
        )


VERIFY = Command(
    words=("ckpt", "verify"),
    spec=CkptVerifyConfig,
    target="mlm.cli.ckpt.verify:run",
    local_check=check_out_file,
    positional=("ckpt",),
    summary="check that checkpoints are whole: every byte is read and compared with its digest",
    about="Reads every file of one checkpoint, or of all in a run. Ends with 0 if all are whole, else 1.",
    examples=(("Check every checkpoint of a run", "mlm ckpt verify runs/shakespeare"),),
)
