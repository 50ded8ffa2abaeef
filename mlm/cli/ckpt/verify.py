"""`mlm ckpt verify`: whether checkpoints are whole, every byte read and compared with its digest."""

from dataclasses import asdict

from mlm.checkpoint.native.folders import (
    BEST,
    CHECKPOINTS,
    candidates,
    checkpoints,
    locate,
    pointer_problem,
)
from mlm.checkpoint.native.format import CheckpointError
from mlm.checkpoint.native.verify import (
    CheckpointVerification,
    UnreadableFile,
    shard_bytes,
    verify_checkpoint,
)
from mlm.cli.ckpt.rollback import continuation
from mlm.cli.ckpt.settings import CkptVerifyConfig
from mlm.cli.result import write_result
from mlm.util.errors import CorruptFileError
from mlm.util.terminal import add_row, console, format_bytes, one_line, progress_bar, table


def run(config: CkptVerifyConfig) -> None:
    """Verify, print a table, write out. Raises CorruptFileError for a damaged one, UserError."""
    root, is_single = locate(config.ckpt)
    # train.keep_best keeps further checkpoints in out/best.
    folders = [root, root.parent / BEST / CHECKPOINTS][: 1 + (root.name == CHECKPOINTS)]
    paths = [root] if is_single else [path for folder in folders for path in checkpoints(folder).values()]
    with progress_bar("verifying", sum(map(shard_bytes, paths)), in_bytes=True) as advance:
        results = [verify_checkpoint(path, advance) for path in paths]
    loadable = {result.path for result in results if result.loads}
    start = None if is_single else next((path for path in candidates(root) if path in loadable), None)
    pointers = [] if is_single else [*filter(None, map(pointer_problem, folders))]
    if config.out is not None:
        records = [
            {
                "path": str(result.path),
                "whole": result.is_intact,
                "step": manifest and manifest.step,
                "files": manifest and len(manifest.files),
                "bytes": manifest and sum(file.bytes for file in manifest.files.values()),
                "digest": manifest and manifest.digest,
                "exact": result.exact,
                "problems": [asdict(problem) for problem in result.problems],
            }
            for result in results
            for manifest in (result.manifest,)
        ]
        content = {
            "task": "ckpt verify",
            "ckpt": config.ckpt,
            "whole": all(result.is_intact for result in results) and not pointers,
            "continues_from": None if start is None else str(start),
            "checkpoints": records,
        }
        write_result(config.out, content)
    print_results(config.ckpt, results)
    if not is_single:
        no_start = "a run would not start: none of them can be loaded"
        console().print(continuation(root, start) if start else no_start)
    damaged = [result for result in results if not result.is_intact]
    if damaged:
        problem, verb = damaged[0].problems[0], "is" if len(damaged) == 1 else "are"
        kind = CheckpointError if isinstance(problem, UnreadableFile) else CorruptFileError
        raise kind(
            f"{len(damaged)} of {len(results)} checkpoints {verb} {problem.word}: "
            f"{damaged[0].path / one_line(problem.file)}: {one_line(problem.why)}. {problem.remedy}"
        )
    if pointers:
        raise CorruptFileError(f"{one_line(pointers[0])}. Write the name of a step-… there, or delete it")


def print_results(ckpt: str, results: list[CheckpointVerification]) -> None:
    rows = table(f"ckpt verify · {ckpt}", "checkpoint", "step#", "files#", "size#", "")
    for result in results:
        manifest = result.manifest
        cells: tuple[object, ...] = ("", "", "")
        if manifest is not None:
            total = sum(file.bytes for file in manifest.files.values())
            cells = (manifest.step, len(manifest.files), format_bytes(total))
        head, *tail = [f"{f.word}: {f.file}: {f.why}" for f in result.problems] or ["whole"]
        is_best = result.path.parent.parent.name == BEST
        add_row(rows, f"{BEST}: {result.path.name}" if is_best else result.path.name, *cells, head)
        for line in tail:
            add_row(rows, "", "", "", "", line)
    console().print(rows)
    for result in results:
        if result.exact is not None:
            console().print(one_line(f"{result.path.name} {result.exact}"), soft_wrap=True)
