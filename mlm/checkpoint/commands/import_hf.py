"""`mlm import hf`: a model of `transformers`, from a folder or the Hub, as a run directory of ours.

config.json, safetensors and the tokenizer are read without `transformers`. Its logits and those of the new
checkpoint are compared before that gets its name.
"""

from dataclasses import replace
from pathlib import Path

from mlm.checkpoint.commands import import_peft
from mlm.checkpoint.commands.config import ImportHFConfig
from mlm.checkpoint.commands.hf_verify import NOT_COMPARED, Agreement, compare_logits, extra_problems
from mlm.checkpoint.commands.result import model_columns, show_table
from mlm.checkpoint.huggingface.folder import SAVE_AGAIN, TOKENIZER, HFModel, find_file, read_json, read_model
from mlm.checkpoint.huggingface.tensors import HFTensors
from mlm.checkpoint.native.format import JSON
from mlm.data.chat_template import ChatTemplate
from mlm.data.files_present import HUB_NAME
from mlm.data.tokenizer import Tokenizer
from mlm.inference.hf_source import commit_of, describe_source, fetch
from mlm.models.huggingface import TokenIds
from mlm.models.huggingface import show as show_value
from mlm.training.run_folder import out_problems, write_imported
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from mlm.util.terminal import progress_bar

SETTINGS = "tokenizer_config.json"


def preflight(config: ImportHFConfig) -> list[str]:
    """Return what is wrong with the settings and the folder; nothing is downloaded."""
    problems = [*out_problems(config.out), *extra_problems(config.verify)]
    folder = Path(config.source)
    if not folder.exists():
        return problems + ([] if HUB_NAME.fullmatch(config.source) else [no_such_folder(config.source)])
    if config.revision is not None:
        problems.append(
            f"revision={config.revision} is for the Hub, source={config.source} is a folder: leave it"
        )
    if import_peft.is_adapter(config.source):
        return problems
    if config.base is not None:
        problems.append(f"base={config.base}: source={config.source} holds no adapters; remove base=")
    try:
        HFTensors(read_model(folder))
    except UserError as error:
        problems += error.problems
    return problems


def no_such_folder(source: str) -> str:
    """Return the problem of a source that is neither a folder nor an id."""
    return f"source={source}: no such folder. Give one with config.json and model.safetensors, or a Hub id"


def import_hf(
    source: str | Path, out: str | Path, *, revision: str | None = None, verify: bool = True
) -> Path:
    """Write a Hugging Face model as a run directory, as `mlm import hf` does; return the directory.

    Args:
        source: Folder with config.json and model.safetensors, or the id of a model on the Hub.
        out: Run directory to write, a new folder.
        revision: Branch, tag or commit on the Hub.
        verify: Compare logits with those of `transformers`, and write nothing where they differ.

    Raises:
        UserError: The model is not supported, `out` is not free, or the logits differ.
    """
    config = ImportHFConfig(source=str(source), out=str(out), revision=revision, verify=verify)
    if problems := preflight(config):
        raise ConfigError(problems)
    convert(config)
    return Path(out)


def run(config: ImportHFConfig) -> None:
    """Import the model and print a table. Raises UserError and leaves no files."""
    if import_peft.is_adapter(config.source):
        import_peft.run(config)
    else:
        show(config, *convert(config))


def convert(config: ImportHFConfig) -> tuple[HFModel, Path, list[str], Agreement | None]:
    """Read, write, verify and publish; return what `show` prints."""
    folder, revision = locate(config)
    name = folder.resolve().name if revision is None else config.source
    model = read_model(folder)
    tensors = HFTensors(model)
    tensors.check()
    tokenizer, notes = read_tokenizer(model)
    ids, padding = ids_to_keep(model, tokenizer)
    with progress_bar("reading", tensors.num_bytes, in_bytes=True) as advance:
        files = tensors.digests(advance)
    agreements: list[Agreement] = []
    path = write_imported(
        Path(config.out),
        model.config,
        tensors.read,
        source=describe_source(name, revision, files) | ids_as_json(ids),
        tokenizer=tokenizer,
        filled=tensors.filled,
        check=lambda run: agreements.append(compare_logits(folder, run)) if config.verify else None,
    )
    return model, path, [*notes, *padding], agreements[0] if agreements else None


def ids_to_keep(model: HFModel, tokenizer: Tokenizer | None) -> tuple[TokenIds, list[str]]:
    """Return padding and labels of config.json to write at an export, and a note on what is not kept."""
    ids = model.kept
    is_usable = tokenizer is None or ids.pad is None or ids.pad in tokenizer.added_ids
    if is_usable or not model.mapping.pads_with_special_token:
        return ids, []
    why = "is no special token of the tokenizer: an export names the end of document"
    return replace(ids, pad=None), [f"pad_token_id={ids.pad} is not kept: it {why}"]


def ids_as_json(ids: TokenIds) -> dict[str, JSON]:
    """Return padding and labels as part of the checkpoint's source."""
    pad: dict[str, JSON] = {} if ids.pad is None else {"pad_token_id": ids.pad}
    return {**pad, **({"labels": list(ids.labels)} if ids.labels else {})}


def locate(config: ImportHFConfig) -> tuple[Path, str | None]:
    """Return the folder to read, and its revision if it is the Hub's. Raises UserError."""
    folder = Path(config.source)
    if folder.exists():
        return folder, None
    if not HUB_NAME.fullmatch(config.source):
        raise UserError(no_such_folder(config.source))
    folder = fetch(config.source, config.revision, "source")
    return folder, commit_of(folder) or config.revision or "main"


def read_tokenizer(model: HFModel) -> tuple[Tokenizer | None, list[str]]:
    """Return the model's tokenizer if it is supported, and notes. Raises CorruptFileError."""
    present = {name for name in TOKENIZER if find_file(model.folder, name)}
    if not any(present.issuperset(kind) for kind in (TOKENIZER[:1], TOKENIZER[1:3], TOKENIZER[3:4])):
        return None, ["no tokenizer is there: give tokenizer=… where text is read or written"]
    try:
        tokenizer = Tokenizer.load(model.folder)
    except CorruptFileError:
        raise
    except UserError as error:
        return None, [f"the tokenizer was not taken: {error}"]
    except OSError as error:
        raise UserError(f"{error.filename}: cannot be read: {error.strerror}. {SAVE_AGAIN}") from error
    notes, size = unread_tokens(model.folder, tokenizer), model.config.vocab_size
    try:
        tokenizer.chat_template = ChatTemplate.find(model.folder, tokenizer)
    except UserError as error:
        notes.append(f"the chat template was not taken: {error}")
    if tokenizer.vocab_size > size:
        notes.append(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model reads up to {size - 1}"
        )
    return tokenizer, notes


def unread_tokens(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Return a note if only tokenizer_config.json holds some tokens: `transformers` adds them at loading."""
    settings = read_json(folder, SETTINGS) if find_file(folder, SETTINGS) else {}
    listed = settings.get("added_tokens_decoder")
    tokens = list(listed.values()) if isinstance(listed, dict) else []
    names = [
        name for token in tokens if isinstance(token, dict) and isinstance(name := token.get("content"), str)
    ]
    unread = [name for name in names if name not in tokenizer]
    if not unread:
        return []
    return [
        f"{SETTINGS} alone holds the token {show_value(unread[0])}, one of {len(unread)} not kept: to keep "
        f"them, load the tokenizer by AutoTokenizer, save it by save_pretrained, and import it with the model"
    ]


def show(
    config: ImportHFConfig, model: HFModel, path: Path, notes: list[str], agreement: Agreement | None
) -> None:
    """Print the table and notes."""
    columns = {"class#": model.architecture, **model_columns(model.config)}
    lines = str(agreement or NOT_COMPARED), f"written to {path}"
    show_table(f"import hf · {config.source}", columns, (*map(str, model.notes), *notes), *lines)
