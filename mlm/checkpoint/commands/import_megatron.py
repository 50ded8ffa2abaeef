"""`mlm import megatron`: a Megatron-LM checkpoint as a run directory of ours."""

from pathlib import Path

from mlm.checkpoint.commands.config import ImportMegatronConfig
from mlm.checkpoint.commands.result import model_columns, show_table
from mlm.checkpoint.megatron.files import RankFiles, check_records, find_files, unreadable_error
from mlm.checkpoint.megatron.merge import MegatronModel, open_checkpoint
from mlm.checkpoint.native.format import JSON
from mlm.data.tokenizer import Tokenizer
from mlm.training.run_folder import out_problems, write_imported
from mlm.util.errors import UserError
from mlm.util.files import digest_file
from mlm.util.terminal import progress_bar


def preflight(config: ImportMegatronConfig) -> list[str]:
    """Return what is wrong with the settings, the folders and the tokenizer; no tensor file is opened."""
    problems = out_problems(config.out)
    for look in (lambda: find_files(config.source), lambda: read_tokenizer(config)):
        try:
            look()
        except UserError as error:
            problems += error.problems
    return problems


def read_tokenizer(config: ImportMegatronConfig) -> Tokenizer | None:
    """Return the tokenizer that the command names. Raises UserError if it cannot be read."""
    return None if config.tokenizer is None else Tokenizer.load(config.tokenizer)


def run(config: ImportMegatronConfig) -> None:
    """Read, check, write, publish, and print a table. Raises UserError and leaves no files."""
    tokenizer = read_tokenizer(config)
    files = find_files(config.source)
    megatron = open_checkpoint(
        files,
        vocab_size=config.vocab_size,
        known=tokenizer.vocab_size if tokenizer else None,
        num_heads=config.num_heads,
    )
    source = describe_source(config, megatron, digest_files(files))
    path = write_imported(
        Path(config.out),
        megatron.model,
        megatron.read,
        source=source,
        tokenizer=tokenizer,
        filled=megatron.filled,
    )
    show(config, megatron, path, tokenizer)


def digest_files(files: RankFiles) -> dict[str, str]:
    """Return the digest of each rank file by its name; its records are compared with their checksums.

    Raises CorruptFileError where one differs, UserError where a file cannot be read.
    """
    paths = files.files.values()
    digests = {}
    with progress_bar("reading", sum(path.stat().st_size for path in paths), in_bytes=True) as advance:
        for path in paths:
            try:
                check_records(path)
                digests[path.relative_to(files.path).as_posix()] = digest_file(path, advance)
            except OSError as error:
                raise unreadable_error(path, error) from error
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
        "checkpoint_version": megatron.version,
        "layout": {"tp": megatron.files.tp, "pp": megatron.files.pp, "vp": megatron.vp},
    }


def show(
    config: ImportMegatronConfig, megatron: MegatronModel, path: Path, tokenizer: Tokenizer | None
) -> None:
    """Print the table and notes."""
    iteration = "" if megatron.iteration is None else f" · iteration {megatron.iteration}"
    layout = f"tp={megatron.files.tp} pp={megatron.files.pp} vp={megatron.vp}"
    title = f"import megatron · {config.source}{iteration} · {layout}"
    notes = (*megatron.notes, *remarks(megatron, tokenizer))
    show_table(title, model_columns(megatron.model), notes, f"written to {path}")


def remarks(megatron: MegatronModel, tokenizer: Tokenizer | None) -> list[str]:
    """Return remarks on what was left out."""
    lines = ["weights only: the optimizer's state is left out, a run that starts from it begins at step 0"]
    if padding := megatron.table_rows - megatron.model.vocab_size:
        lines.append(
            f"the last {padding:,} of {megatron.table_rows:,} rows of the token table are padding: left out"
        )
    if tokenizer is None:
        lines.append("no tokenizer was named: give tokenizer=… where text is read or written")
    return lines
