"""Chat templates from the files of a folder, or built in."""

import json
import re
from pathlib import Path

from mlm.data.chat_builtin import BUILT_IN, IM_END, IM_START, TURNS
from mlm.data.chat_template import FILE, FOLDER, FOR_TOOLS, ChatTemplate
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import SETTINGS, named_tokens, read_config
from mlm.util.errors import UserError, reading_from
from mlm.util.files import READABLE, decode_text, read_bounded

DEFAULT = "default"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Valid names of templates, which become names of files."""


def find_chat_template(folder: Path, tokenizer: Tokenizer, file: str | None = None) -> ChatTemplate | None:
    """Return the template in `file`, else of the tokenizer in `folder`; None without one.

    `file` may be the name of a built-in template, or TURNS. The template receives the special tokens that the
    folder declares and the vocabulary contains. Raises UserError, CorruptFileError.
    """
    declared = named_tokens(folder)
    if declared is None:  # without declarations the tokenizer's tokens
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eod_id, "pad_token": tokenizer.pad_id}
        tokens = {name: tokenizer.name_of(id) for name, id in ids.items() if id is not None}
    else:
        # null declares that a token does not exist, except for the end, without which no answer would end.
        empty = [name for name, token in declared.items() if not token and name != "eos_token"]
        tokens = {name: token for name, token in declared.items() if token in tokenizer or name in empty}
    if file in BUILT_IN:
        source, note = BUILT_IN[file], ""
        if IM_END not in tokenizer.special_names:
            # Turns need another end: a mark of several tokens would end no answer.
            if tokenizer.eod_id not in tokenizer.special_ids:
                raise UserError(
                    f"chat template {file}: the vocabulary has no special token that could end a turn: add "
                    f"{IM_END}, or give another template"
                )
            end, is_known = tokenizer.name_of(tokenizer.eod_id), IM_START in tokenizer.special_names
            note = f"chat template {file}: a turn ends with {end}, as the vocabulary has no {IM_END}"
            note += "" if is_known else f", and {IM_START} is text of several tokens"
            source = source.replace(f"'{IM_END}'", json.dumps(end))
        return ChatTemplate(source, tokens, f"chat template {file}", note)
    templates = (
        find_templates(folder) if file in (None, TURNS) else {DEFAULT: (read_template(Path(file)), file)}
    )
    if DEFAULT not in templates:
        return None
    source, location = templates.pop(DEFAULT)
    tool_use = templates.pop(FOR_TOOLS, None)
    return ChatTemplate(
        source,
        tokens,
        location,
        tool_use=ChatTemplate(tool_use[0], tokens, tool_use[1]) if tool_use else None,
        keeps_turns=file == TURNS,
        others={name: other for name, (other, _) in templates.items()},
    )


def find_templates(folder: Path) -> dict[str, tuple[str, str]]:
    """Return a folder's templates and their locations by name. Raises UserError, CorruptFileError.

    Files take precedence over templates in tokenizer_config.json, as in `transformers`.
    """
    files = {DEFAULT: folder / FILE}
    if (folder / FOLDER).is_dir():
        files |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    templates = {
        name: (read_template(path), str(path))
        for name, path in files.items()
        if path.is_file() and NAME.fullmatch(name)
    }
    if templates:
        return templates
    value = read_config(folder / SETTINGS).get("chat_template")
    location = f"{folder / SETTINGS}: chat_template"
    if isinstance(value, list):
        value = {entry.get("name"): entry.get("template") for entry in value if isinstance(entry, dict)}
    sources = value if isinstance(value, dict) else {DEFAULT: value}
    return {
        name: (source, location if name == DEFAULT else f"{location} {name}")
        for name, source in sources.items()
        if isinstance(source, str) and isinstance(name, str) and NAME.fullmatch(name)
    }


def read_template(path: Path) -> str:
    """Read a template of at most 1 MiB. Raises UserError, CorruptFileError."""
    with reading_from(path, READABLE):
        return decode_text(read_bounded(path, 1 << 20, "replace it"), str(path))
