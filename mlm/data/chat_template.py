"""A tokenizer's chat template: conversations as text, rendered as `transformers` renders them.

The template is Jinja from a model folder, which is untrusted: it sees JSON values alone, in a sandbox
(chat_sandbox.py). It may mark the assistant's answers with {% generation %} blocks.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2

from mlm.data.chat_builtin import BUILT_IN, IM_END, IM_START
from mlm.data.chat_sandbox import BEGIN, END, RenderError, environment, render
from mlm.data.tokenizer import Tokenizer, read_config
from mlm.util.errors import UserError, lone_surrogate, reading_from
from mlm.util.files import READABLE, decode_text, digest_bytes, read_bounded, write_atomic

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
MAX_BYTES = 1 << 20
"""Largest template: 1 MiB."""
TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Special tokens whose names a template may use."""
GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names of a message's reasoning; templates read the first, or the second."""

Message = dict[str, Any]


class ChatError(Exception):
    """A conversation that a template cannot render: the problem and its fix in one line."""


@dataclass(frozen=True)
class Rendered:
    """A conversation as text."""

    text: str
    answers: tuple[tuple[int, int], ...]
    """First character and end of each {% generation %} block; none in a template without them."""


class ChatTemplate:
    """A chat template and the names of the special tokens that it uses.

    Attributes:
        marks_answers: True if it has {% generation %} blocks.
        digest: of the template and these names.
        note: a line on what ends a turn of a built-in template; empty where that is its own token.

    Raises UserError if it is no Jinja.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], place: str = "chat template", note: str = ""
    ) -> None:
        self.source, self.tokens, self.place, self.note = source, dict(tokens), place, note
        if (half := lone_surrogate(source)) is not None:
            raise UserError(f"{place}: holds {half}: correct the template")
        self.marks_answers = GENERATION.search(source) is not None
        self.digest = digest_bytes(json.dumps([source, sorted(self.tokens.items())]).encode())
        try:
            environment().parse(source)  # compiling would compute its constants, here
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{place}:{error.lineno}: no Jinja ({error.message}): correct the template"
            ) from None
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
            raise UserError(f"{place}: no Jinja ({error}): correct the template") from None

    @classmethod
    def find(cls, folder: Path, tokenizer: Tokenizer, file: str | None = None) -> "ChatTemplate | None":
        """Return the template in `file`, else the one of a folder's tokenizer; None if there is none.

        `file` may be the name of one that is built in. Raises UserError, CorruptFileError.
        """
        tokens = token_names(read_config(folder / SETTINGS), tokenizer)
        if file in BUILT_IN:
            source, note = with_turn_end(BUILT_IN[file], file, tokenizer)
            return cls(source, tokens, f"chat template {file}", note)
        found = find_template(folder) if file is None else (read_template(Path(file)), file)
        return None if found is None else cls(found[0], tokens, found[1])

    def save(self, folder: Path) -> None:
        """Write the template and the names of its tokens beside a tokenizer.json. Raises OSError."""
        write_atomic(folder / FILE, self.source.encode())
        write_atomic(folder / SETTINGS, (json.dumps(self.tokens, indent=2) + "\n").encode())

    def render(
        self, messages: Sequence[Message], tools: Any = None, *, add_generation_prompt: bool = False
    ) -> Rendered:
        """Render messages, each with a role; with `add_generation_prompt` up to where an answer begins.

        Raises ChatError.
        """
        values = {
            "messages": [with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
        }
        try:
            text = render(self.source, values)
        except RenderError as error:
            raise ChatError(
                f"{self.place} fails ({error}): correct the conversation, or give another template"
            ) from error
        if (half := lone_surrogate(text)) is not None:
            raise ChatError(f"{self.place} writes {half}: correct the conversation, or the template")
        return without_marks(text)


def without_marks(text: str) -> Rendered:
    """Return a rendered text without the marks of its blocks, and where the outermost of these were."""
    if BEGIN not in text:
        return Rendered(text, ())
    parts, answers, length, begins = list[str](), list[tuple[int, int]](), 0, list[int]()
    for part in re.split(f"([{BEGIN}{END}])", text):
        if part == BEGIN:
            begins.append(length)
        elif part == END:
            begin = begins.pop() if begins else length  # a template can write the mark itself
            if not begins:
                answers.append((begin, length))
        else:
            parts.append(part)
            length += len(part)
    return Rendered("".join(parts), tuple(answers))


def with_turn_end(source: str, name: str, tokenizer: Tokenizer) -> tuple[str, str]:
    """Return a built-in template whose turns end with one token, and a note where that is not its own.

    After a mark that is text of several tokens no answer would end. Raises UserError without such a token.
    """
    if IM_END in tokenizer.special_names:
        return source, ""
    if tokenizer.eod_id not in tokenizer.special_ids:
        raise UserError(
            f"chat template {name}: the vocabulary has no special token that could end a turn: add {IM_END}, "
            "or give another template"
        )
    end = tokenizer.name_of(tokenizer.eod_id)
    started = "" if IM_START in tokenizer.special_names else f", and {IM_START} is text of several tokens"
    note = f"chat template {name}: a turn ends with {end}, as the vocabulary has no {IM_END}{started}"
    return source.replace(f"'{IM_END}'", json.dumps(end)), note


def with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under the names that templates read, as `transformers` does."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def token_names(settings: Mapping[str, Any], tokenizer: Tokenizer) -> dict[str, str]:
    """Return the names of special tokens by tokenizer_config.json; without one those of the tokenizer."""
    if not settings:
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eod_id, "pad_token": tokenizer.pad_id}
        return {name: tokenizer.name_of(id) for name, id in ids.items() if id is not None}
    found = {}
    for name in TOKENS:
        value = settings.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found


def find_template(folder: Path) -> tuple[str, str] | None:
    """Return a folder's template and its place; None without one. Raises UserError, CorruptFileError."""
    path = folder / FILE
    if path.is_file():
        return read_template(path), str(path)
    source = default_template(read_config(folder / SETTINGS).get("chat_template"))
    return None if source is None else (source, f"{folder / SETTINGS}: chat_template")


def default_template(value: Any) -> str | None:
    """Return the template of a tokenizer_config.json: a text, or the one named default of a list."""
    if isinstance(value, list):
        named = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
        value = named.get("default")
    return value if isinstance(value, str) else None


def read_template(path: Path) -> str:
    """Read a template. Raises UserError, CorruptFileError."""
    with reading_from(path, READABLE):
        return decode_text(read_bounded(path, MAX_BYTES, "replace it"), str(path))
