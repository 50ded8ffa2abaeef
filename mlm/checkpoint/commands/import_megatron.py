"""`mlm import megatron`: a Megatron-LM checkpoint as a run directory of ours."""

from pathlib import Path

from rich.table import Table

from mlm.checkpoint.commands.config import ImportMegatronConfig
from mlm.checkpoint.megatron.files import RankFiles, check_records, find_files, is_zip, unreadable
from mlm.checkpoint.megatron.merge import MegatronModel, open_checkpoint
from mlm.checkpoint.native.format import JSON
from mlm.data.tokenizer import Tokenizer
from mlm.training.run_folder import out_problems, write_imported
from mlm.util.atomic import digest_file
from mlm.util.errors import UserError
from mlm.util.terminal import Screen, progress_bar


def preflight(config: ImportMegatronConfig) -> list[str]:
    """Return what is wrong with the settings, the folders and the tokenizer; no tensor file is opened."""
    numbers = {"vocab_size": config.vocab_size, "num_heads": config.num_heads}
    problems = [
        f"{key}={value} must be 1 or more"
        for key, value in numbers.items()
        if value is not None and value < 1
    ]
    problems += out_problems(config.out)
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
    found = open_checkpoint(
        files,
        vocab_size=config.vocab_size,
        known=tokenizer.vocab_size if tokenizer else None,
        num_heads=config.num_heads,
    )
    source = describe_source(config, found, read_all(files))
    path = write_imported(
        Path(config.out), found.model, found.read, source=source, tokenizer=tokenizer, filled=found.filled
    )
    show(config, found, path, tokenizer)


def read_all(files: RankFiles) -> dict[str, str]:
    """Return the digest of each rank file by its name; its records are compared with their checksums.

    Raises CorruptFileError where one differs, UserError where a file cannot be read.
    """
    paths = files.files.values()
    with progress_bar(
        "reading", sum(path.stat().st_size * (1 + is_zip(path)) for path in paths), in_bytes=True
    ) as advance:
        digests = {}
        for path in paths:
            try:
                check_records(path, advance)
                digests[path.relative_to(files.path).as_posix()] = digest_file(path)
                advance(path.stat().st_size)
            except OSError as error:
                raise unreadable(path, error) from error
    return digests


def describe_source(
    config: ImportMegatronConfig, found: MegatronModel, digests: dict[str, str]
) -> dict[str, JSON]:
    """Return the origin of the checkpoint; the folder by its last component, which names no machine."""
    return {
        "kind": "megatron",
        "name": Path(config.source).resolve().name,
        "files": digests,
        "iteration": found.iteration,
        "checkpoint_version": found.version,
        "layout": {"tp": found.files.tp, "pp": found.files.pp, "vp": found.vp},
    }


def show(config: ImportMegatronConfig, found: MegatronModel, path: Path, tokenizer: Tokenizer | None) -> None:
    """Print the table and notes."""
    model, files = found.model, found.files
    iteration = "" if found.iteration is None else f" · iteration {found.iteration}"
    layout = f"tp={files.tp} pp={files.pp} vp={found.vp}"
    table = Table(title=f"import megatron · {config.source}{iteration} · {layout}", title_justify="left")
    cells = {
        "parameters": f"{model.num_parameters():,}",
        "layers": str(model.num_layers),
        "hidden": str(model.hidden_size),
        "heads": str(model.num_heads),
        "positions": str(model.max_positions),
        "vocabulary": f"{model.vocab_size:,}",
    }
    for name in cells:
        table.add_column(name, justify="right")
    table.add_row(*cells.values())
    console = Screen(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for note in (*found.notes, *remarks(found, tokenizer)):
        console.print(f"note: {note}")
    console.print(f"written to {path}")


def remarks(found: MegatronModel, tokenizer: Tokenizer | None) -> list[str]:
    """Return remarks on what was left out."""
    said = ["weights only: the optimizer's state is left out, a run that starts from it begins at step 0"]
    if padding := found.table_rows - found.model.vocab_size:
        said.append(
            f"the last {padding:,} of {found.table_rows:,} rows of the token table are padding: left out"
        )
    if tokenizer is None:
        said.append("no tokenizer was named: give tokenizer=… where text is read or written")
    return said
