"""`mlm import hf`: a model of `transformers`, from a folder or the Hub, as a run directory of ours.

Read without `transformers`: config.json, safetensors and the tokenizer. Its logits and those of what was
written are compared before that gets its name.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.table import Table

from mlm.checkpoint.huggingface.content import Ids
from mlm.checkpoint.huggingface.folder import AGAIN, TOKENIZER, HFModel, find_file, read_json, read_model
from mlm.checkpoint.huggingface.keys import show as show_value
from mlm.checkpoint.huggingface.tensors import HFTensors
from mlm.checkpoint.native.format import JSON
from mlm.convert.config import ImportHFConfig
from mlm.convert.hf_verify import NOT_COMPARED, Agreement, compare_logits, extra_problems
from mlm.data.files_present import HUB_NAME
from mlm.data.tokenizer import Tokenizer
from mlm.errors import ConfigError, CorruptFileError, UserError
from mlm.inference.hf_source import commit_of, fetch
from mlm.terminal import byte_progress
from mlm.train.run_folder import out_problems, parameters, write_imported

SETTINGS = "tokenizer_config.json"


def preflight(config: ImportHFConfig) -> list[str]:
    """What is wrong with the settings and the folder; nothing is downloaded."""
    faults = [*out_problems(config.out), *extra_problems(config.verify)]
    folder = Path(config.source)
    if not folder.exists():
        return faults + ([] if HUB_NAME.fullmatch(config.source) else [no_such_folder(config.source)])
    if config.revision is not None:
        faults.append(
            f"revision={config.revision} is for the Hub, source={config.source} is a folder: leave it"
        )
    try:
        HFTensors(read_model(folder))
    except ConfigError as error:
        faults += error.problems
    except UserError as error:
        faults.append(str(error))
    return faults


def no_such_folder(source: str) -> str:
    """The fault of a source that is neither there nor an id."""
    return f"source={source}: no such folder. Give one with config.json and model.safetensors, or a Hub id"


def run(config: ImportHFConfig) -> None:
    """Read, write, verify, publish, and print a table. Raises UserError; nothing is left behind."""
    folder, revision = locate(config)
    model = read_model(folder)
    tensors = HFTensors(model)
    tensors.check({name: tensor.shape for name, tensor in parameters(model.config).items()})
    tokenizer, notes = read_tokenizer(model)
    ids, padding = ids_to_keep(model, tokenizer)
    with byte_progress("reading", tensors.num_bytes) as advance:
        files = tensors.digests(advance)
    found: list[Agreement] = []
    path = write_imported(
        Path(config.out),
        model.config,
        tensors.read,
        source=describe_source(config, folder, revision, files) | told_of(ids),
        tokenizer=tokenizer,
        filled=tensors.filled,
        check=lambda run: found.append(compare_logits(folder, run)) if config.verify else None,
    )
    show(config, model, path, [*notes, *padding], found[0] if found else None)


def describe_source(
    config: ImportHFConfig, folder: Path, revision: str | None, files: Mapping[str, str]
) -> dict[str, JSON]:
    """What the checkpoint was made of; a folder by its last component, which names no machine."""
    name = folder.resolve().name if revision is None else config.source
    return {"kind": "huggingface", "name": name, "revision": revision, "files": dict(files)}


def ids_to_keep(model: HFModel, tokenizer: Tokenizer | None) -> tuple[Ids, list[str]]:
    """What config.json tells of padding and labels, and a note on what of it is not kept.

    A padding of GPT-2's that is a piece of words is not: the exported tokenizer would take it for no text.
    """
    ids, _ = model.told
    if tokenizer is None or model.config.kind != "gpt2" or ids.pad is None or ids.pad in tokenizer.added_ids:
        return ids, []
    why = "is no special token of the tokenizer: an export names the end of document"
    return replace(ids, pad=None), [f"pad_token_id={ids.pad} is not kept: it {why}"]


def told_of(ids: Ids) -> dict[str, JSON]:
    """What `mlm export hf` writes again of padding and labels: part of the checkpoint's source."""
    pad: dict[str, JSON] = {} if ids.pad is None else {"pad_token_id": ids.pad}
    return {**pad, **({"labels": list(ids.labels)} if ids.labels else {})}


def locate(config: ImportHFConfig) -> tuple[Path, str | None]:
    """The folder to read, and its revision where it is the Hub's. Raises UserError."""
    folder = Path(config.source)
    if folder.exists():
        return folder, None
    if not HUB_NAME.fullmatch(config.source):
        raise UserError(no_such_folder(config.source))
    folder = fetch(config.source, config.revision, "source")
    return folder, commit_of(folder) or config.revision or "main"


def read_tokenizer(model: HFModel) -> tuple[Tokenizer | None, list[str]]:
    """The model's tokenizer if it is one of ours, and notes. Raises CorruptFileError for a damaged one."""
    there = {name for name in TOKENIZER if find_file(model.folder, name)}
    if not any(there.issuperset(kind) for kind in (TOKENIZER[:1], TOKENIZER[1:3], TOKENIZER[3:4])):
        return None, ["no tokenizer is there: give tokenizer=… where text is read or written"]
    try:
        tokenizer = Tokenizer.load(model.folder)
    except CorruptFileError:
        raise
    except UserError as error:
        return None, [f"the tokenizer was not taken: {error}"]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}. {AGAIN}") from error
    notes, size = unread_tokens(model.folder, tokenizer), model.config.vocab_size
    if tokenizer.vocab_size > size:
        notes.append(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model reads up to {size - 1}"
        )
    return tokenizer, notes


def unread_tokens(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """A note where tokenizer_config.json alone holds tokens: `transformers` adds them when it loads."""
    said = read_json(folder, SETTINGS) if find_file(folder, SETTINGS) else {}
    listed = said.get("added_tokens_decoder")
    tokens = list(listed.values()) if isinstance(listed, dict) else []
    names = [
        name for token in tokens if isinstance(token, dict) and isinstance(name := token.get("content"), str)
    ]
    unread = [name for name in names if name not in tokenizer]
    if not unread:
        return []
    more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
    return [
        f"{SETTINGS} alone holds the token {show_value(unread[0])}{more}, not kept: to keep it, load the "
        f"tokenizer by AutoTokenizer, save it by save_pretrained, and import it with the model"
    ]


def show(
    config: ImportHFConfig, found: HFModel, path: Path, notes: list[str], agreement: Agreement | None
) -> None:
    """The table for people, and what they should know."""
    table, model = Table(title=f"import hf · {config.source}", title_justify="left"), found.config
    for name in ("class", "parameters", "layers", "hidden", "heads", "positions", "vocabulary"):
        table.add_column(name, justify="right")
    numbers = (
        model.num_parameters(),
        model.num_layers,
        model.hidden_size,
        model.num_heads,
        model.max_positions,
        model.vocab_size,
    )
    table.add_row(found.family.architectures[model.head], *(f"{number:,}" for number in numbers))
    console = Console(highlight=False, markup=False, soft_wrap=True)
    console.print(table)
    for note in (*found.notes, *notes):
        console.print(f"note: {note}")
    console.print(str(agreement or NOT_COMPARED))
    console.print(f"written to {path}")
