"""Tokenizer, chat template, token ids and labels that an import keeps of a model folder."""

from mlm.checkpoint.native.format import JSON
from mlm.convert.huggingface.folder import SAVE_AGAIN, TOKENIZER, HFModel, find_file, read_json
from mlm.convert.huggingface.mapping import show as show_value
from mlm.data.chat_files import find_chat_template
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import CorruptFileError, UserError, reading_from

SETTINGS = "tokenizer_config.json"


def read_tokenizer(model: HFModel) -> tuple[Tokenizer | None, list[str]]:
    """Return the model's tokenizer if it is supported, and notes. Raises CorruptFileError."""
    folder, size = model.folder, model.config.vocab_size
    present = {name for name in TOKENIZER if find_file(folder, name)}
    if not any(present.issuperset(files) for files in (TOKENIZER[:1], TOKENIZER[1:3], TOKENIZER[3:4])):
        return None, ["no tokenizer is there: give tokenizer=… where text is read or written"]
    with reading_from(folder, SAVE_AGAIN):
        try:
            tokenizer = Tokenizer.load(folder)
        except CorruptFileError:
            raise
        except UserError as error:
            return None, [f"the tokenizer was not taken: {error}"]
    notes = []
    # `transformers` adds tokens of tokenizer_config.json at loading; ours reads tokenizer.json alone.
    settings = read_json(folder, SETTINGS) if find_file(folder, SETTINGS) else {}
    listed = settings.get("added_tokens_decoder")
    tokens = list(listed.values()) if isinstance(listed, dict) else []
    names = [token.get("content") for token in tokens if isinstance(token, dict)]
    if unread := [name for name in names if isinstance(name, str) and name not in tokenizer]:
        notes.append(
            f"{SETTINGS} alone holds the token {show_value(unread[0])}, one of {len(unread)} not kept: to "
            "keep them, load the tokenizer by AutoTokenizer, save it by save_pretrained, and import it with "
            "the model"
        )
    try:
        tokenizer.chat_template = find_chat_template(folder, tokenizer)
    except UserError as error:
        notes.append(f"the chat template was not taken: {error}")
    if tokenizer.vocab_size > size:
        notes.append(
            f"the tokenizer has ids up to {tokenizer.vocab_size - 1}, the model reads up to {size - 1}"
        )
    return tokenizer, notes


def ids_to_keep(model: HFModel, tokenizer: Tokenizer | None) -> tuple[dict[str, JSON], list[str]]:
    """Return padding and labels of config.json to write at an export, and a note on what is not kept."""
    pad, labels, notes = model.kept.pad, model.kept.labels, list[str]()
    kept: dict[str, JSON] = {"labels": list(labels)} if labels else {}
    is_usable = tokenizer is None or pad in tokenizer.added_ids or not model.mapping.pads_with_special_token
    if pad is not None and is_usable:
        kept["pad_token_id"] = pad
    elif pad is not None:
        why = "is no special token of the tokenizer: an export names the end of document"
        notes.append(f"pad_token_id={pad} is not kept: it {why}")
    return kept, notes
