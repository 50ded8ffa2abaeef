"""Tokenizer, chat template, token ids and labels that an import keeps of a model folder."""

from dataclasses import replace
from pathlib import Path

from mlm.checkpoint.native.format import JSON
from mlm.convert.huggingface.folder import SAVE_AGAIN, TOKENIZER, HFModel, find_file, read_json
from mlm.convert.huggingface.mapping import TokenIds
from mlm.convert.huggingface.mapping import show as show_value
from mlm.data.chat_files import find_chat_template
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import CorruptFileError, UserError, reading_from

SETTINGS = "tokenizer_config.json"


def read_tokenizer(model: HFModel) -> tuple[Tokenizer | None, list[str]]:
    """Return the model's tokenizer if it is supported, and notes. Raises CorruptFileError."""
    present = {name for name in TOKENIZER if find_file(model.folder, name)}
    if not any(present.issuperset(kind) for kind in (TOKENIZER[:1], TOKENIZER[1:3], TOKENIZER[3:4])):
        return None, ["no tokenizer is there: give tokenizer=… where text is read or written"]
    with reading_from(model.folder, SAVE_AGAIN):
        try:
            tokenizer = Tokenizer.load(model.folder)
        except CorruptFileError:
            raise
        except UserError as error:
            return None, [f"the tokenizer was not taken: {error}"]
    notes, size = unread_tokens(model.folder, tokenizer), model.config.vocab_size
    try:
        tokenizer.chat_template = find_chat_template(model.folder, tokenizer)
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
