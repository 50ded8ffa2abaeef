"""`mlm import megatron`: a Megatron-LM checkpoint as a run directory of ours."""

from collections.abc import Callable
from pathlib import Path

from mlm.checkpoint.commands.config import ImportMegatronConfig
from mlm.checkpoint.commands.result import model_columns, show_table
from mlm.checkpoint.dcp.storage import DCPReader
from mlm.checkpoint.megatron.distributed import CoreTensors, is_distributed, open_distributed, open_moments
from mlm.checkpoint.megatron.files import RankFiles, check_records, find_files, find_step, unreadable_error
from mlm.checkpoint.megatron.merge import RankTensors, open_checkpoint
from mlm.checkpoint.megatron.model import MegatronModel
from mlm.checkpoint.native.format import JSON
from mlm.data.tokenizer import Tokenizer
from mlm.training.run_folder import out_problems, write_imported
from mlm.util.errors import UserError
from mlm.util.files import digest_file
from mlm.util.terminal import progress_bar

WEIGHTS_ONLY = "weights only: the optimizer's state is left out, a run that starts from it begins at step 0"
WEIGHTS_AND_MOMENTS = (
    "weights and Adam's moments after {} steps: a run that starts from it with optimizer.kind=adamw takes "
    "both, at step 0 of its own schedule and data"
)


def preflight(config: ImportMegatronConfig) -> list[str]:
    """Return what is wrong with the settings, the folders and the tokenizer; no tensor file is opened."""
    problems = out_problems(config.out)
    for look in (lambda: find_checkpoint(config.source), lambda: read_tokenizer(config)):
        try:
            look()
        except UserError as error:
            problems += error.problems
    return problems


def find_checkpoint(source: str) -> RankFiles | Path:
    """Return the rank files of a classic checkpoint, or the folder of a distributed one. Raises UserError."""
    step = find_step(source)
    return step if is_distributed(step) else find_files(source)


def read_tokenizer(config: ImportMegatronConfig) -> Tokenizer | None:
    """Return the tokenizer that the command names. Raises UserError if it cannot be read."""
    return None if config.tokenizer is None else Tokenizer.load(config.tokenizer)


def run(config: ImportMegatronConfig) -> None:
    """Read, check, write, publish, and print a table. Raises UserError and leaves no files."""
    tokenizer = read_tokenizer(config)
    found = find_checkpoint(config.source)
    open_one: Callable[..., MegatronModel] = open_distributed if isinstance(found, Path) else open_checkpoint
    megatron = open_one(
        found,
        vocab_size=config.vocab_size,
        known=tokenizer.vocab_size if tokenizer else None,
        num_heads=config.num_heads,
    )
    moments = open_moments(megatron)
    files = digest_files(megatron, *moments.values())
    path = write_imported(
        Path(config.out),
        megatron.model,
        megatron.read,
        source=describe_source(config, megatron, files),
        tokenizer=tokenizer,
        filled=megatron.filled,
        moments={name: opened.read for name, opened in moments.items()},
        applied_steps=megatron.iteration,
    )
    notes = remarks(megatron, tokenizer, has_moments=bool(moments))
    show(config, megatron, path, (*megatron.notes, *notes))


def digest_files(megatron: MegatronModel, *moments: MegatronModel) -> dict[str, str]:
    """Return the digest of each file by its name; its records are compared with their checksums.

    Raises CorruptFileError where one differs, UserError where a file cannot be read.
    """
    held = megatron.held
    if isinstance(held, CoreTensors):
        opened = (one.held for one in (megatron, *moments))
        return digest_dcp(*(one.reader for one in opened if isinstance(one, CoreTensors)))
    assert isinstance(held, RankTensors)
    paths, digests = list(held.files.files.values()), {}
    with progress_bar("reading", sum(path.stat().st_size for path in paths), in_bytes=True) as advance:
        for path in paths:
            try:
                check_records(path)
                digests[path.relative_to(held.path).as_posix()] = digest_file(path, advance)
            except OSError as error:
                raise unreadable_error(path, error) from error
    return digests


def digest_dcp(*readers: DCPReader) -> dict[str, str]:
    """Return the digest of each file by its name; items are compared with their checksums."""
    size = sum((reader.folder / name).stat().st_size for reader in readers for name in reader.files)
    digests: dict[str, str] = {}
    with progress_bar("reading", size, in_bytes=True) as advance:
        for reader in readers:
            digests |= reader.verify(advance)
    return digests


def describe_source(
    config: ImportMegatronConfig, megatron: MegatronModel, digests: dict[str, str]
) -> dict[str, JSON]:
    """Return the origin of the checkpoint; the folder by its last component, which names no machine."""
    return {
        "kind": "megatron",
        "name": Path(config.source).resolve().name,
        "files": digests,
        "iteration": megatron.iteration,
        **layout_of(megatron),
    }


def layout_of(megatron: MegatronModel) -> dict[str, JSON]:
    """Return the layout and the order of rows of a classic checkpoint; a distributed one has none."""
    held = megatron.held
    if not isinstance(held, RankTensors):
        return {"format": "torch_dist"}
    layout = {"tp": held.tp, "pp": held.pp, "vp": held.vp}
    return {"checkpoint_version": held.version, "layout": layout}


def show(config: ImportMegatronConfig, megatron: MegatronModel, path: Path, notes: tuple[str, ...]) -> None:
    """Print the table and notes."""
    iteration = "" if megatron.iteration is None else f" · iteration {megatron.iteration}"
    held = megatron.held
    layout = f"tp={held.tp} pp={held.pp} vp={held.vp}" if isinstance(held, RankTensors) else "torch_dist"
    title = f"import megatron · {config.source}{iteration} · {layout}"
    show_table(title, model_columns(megatron.model), notes, f"written to {path}")


def remarks(megatron: MegatronModel, tokenizer: Tokenizer | None, *, has_moments: bool) -> list[str]:
    """Return remarks on what was left out."""
    lines = [WEIGHTS_AND_MOMENTS.format(megatron.iteration) if has_moments else WEIGHTS_ONLY]
    if padding := megatron.table_rows - megatron.model.vocab_size:
        lines.append(
            f"the last {padding:,} of {megatron.table_rows:,} rows of the token table are padding: left out"
        )
    if tokenizer is None:
        lines.append("no tokenizer was named: give tokenizer=… where text is read or written")
    return lines
