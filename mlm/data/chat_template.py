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

from mlm.data.chat_builtin import BUILT_IN, IM_END, IM_START, TURNS
from mlm.data.chat_sandbox import BEGIN, END, RenderError, environment, render
from mlm.data.tokenizer import Tokenizer
from mlm.data.tokenizer_settings import named_tokens, read_config
from mlm.util.errors import UserError, lone_surrogate, reading_from
from mlm.util.files import READABLE, decode_text, digest_bytes, read_bounded, write_atomic

FILE, SETTINGS = "chat_template.jinja", "tokenizer_config.json"
FOR_TOOLS, FOLDER = "tool_use", "additional_chat_templates"
"""Name of a second template for conversations with tools, and the folder of its file."""
DEFAULT = "default"
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
"""Names of templates, which become those of files."""
MAX_BYTES = 1 << 20
"""Largest template: 1 MiB."""
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
        digest: of the template, these names, and `tool_use`.
        tool_use: the tokenizer's other template, for conversations with tools, or None.
        keeps_turns: True if each answer is trained as it is rendered when nothing follows it.
        others: sources of templates of other names, which are kept for an export.
        note: a line on what ends a turn of a built-in template; empty where that is its own token.

    Raises UserError if it is no Jinja.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        place: str = "chat template",
        note: str = "",
        tool_use: "ChatTemplate | None" = None,
        keeps_turns: bool = False,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.tokens, self.place, self.note = source, dict(tokens), place, note
        self.tool_use, self.keeps_turns, self.others = tool_use, keeps_turns, dict(others or {})
        if (half := lone_surrogate(source)) is not None:
            raise UserError(f"{place}: holds {half}: correct the template")
        self.marks_answers = GENERATION.search(source) is not None
        parts = [
            source,
            sorted(self.tokens.items()),
            *([tool_use.source] if tool_use else ()),
            *[TURNS] * keeps_turns,
        ]
        self.digest = digest_bytes(json.dumps(parts).encode())
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

        `file` may be the name of one that is built in, or TURNS. Raises UserError, CorruptFileError.
        """
        tokens = token_names(folder, tokenizer)
        if file in BUILT_IN:
            source, note = with_turn_end(BUILT_IN[file], file, tokenizer)
            return cls(source, tokens, f"chat template {file}", note)
        found = (
            find_templates(folder) if file in (None, TURNS) else {DEFAULT: (read_template(Path(file)), file)}
        )
        if DEFAULT not in found:
            return None
        others = {name: source for name, (source, _) in found.items() if name not in (DEFAULT, FOR_TOOLS)}
        for_tools = cls(found[FOR_TOOLS][0], tokens, found[FOR_TOOLS][1]) if FOR_TOOLS in found else None
        source, place = found[DEFAULT]
        return cls(source, tokens, place, tool_use=for_tools, keeps_turns=file == TURNS, others=others)

    @property
    def settings(self) -> dict[str, str | None]:
        """The names of its tokens as tokenizer_config.json has them."""
        return {name: token or None for name, token in self.tokens.items()}

    def save_sources(self, folder: Path) -> None:
        """Write the templates. Raises OSError."""
        write_atomic(folder / FILE, self.source.encode())
        named = self.others | ({} if self.tool_use is None else {FOR_TOOLS: self.tool_use.source})
        for name, source in named.items():
            (folder / FOLDER).mkdir(exist_ok=True)
            write_atomic(folder / FOLDER / f"{name}.jinja", source.encode())

    def for_tools(self, tools: Any) -> "ChatTemplate":
        """Return the template of a conversation with these tools, None without any."""
        return self if tools is None or self.tool_use is None else self.tool_use

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        add_generation_prompt: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> Rendered:
        """Render messages, each with a role; with `add_generation_prompt` up to where an answer begins.

        `options` are other values that the template sees. Raises ChatError.
        """
        values = {
            "messages": [with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
            **(options or {}),
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


def token_names(folder: Path, tokenizer: Tokenizer) -> dict[str, str]:
    """Return the special tokens of a folder by the names that templates use, if its vocabulary has them.

    Of a folder that says nothing of them they are those of the tokenizer.
    """
    named = named_tokens(folder)
    if named is None:
        ids = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eod_id, "pad_token": tokenizer.pad_id}
        return {name: tokenizer.name_of(id) for name, id in ids.items() if id is not None}
    # a null is a word: there is none; but without an end no answer would end
    empty = [name for name, token in named.items() if not token and name != "eos_token"]
    return {name: token for name, token in named.items() if token in tokenizer or name in empty}


def find_template(folder: Path) -> tuple[str, str] | None:
    """Return a folder's template and its place; None without one. Raises UserError, CorruptFileError."""
    return find_templates(folder).get(DEFAULT)


def find_templates(folder: Path) -> dict[str, tuple[str, str]]:
    """Return a folder's templates and their places by name. Raises UserError, CorruptFileError.

    Files come before those of tokenizer_config.json, as in `transformers`.
    """
    files = {DEFAULT: folder / FILE}
    if (folder / FOLDER).is_dir():
        files |= {path.stem: path for path in sorted((folder / FOLDER).glob("*.jinja"))}
    found = {
        name: (read_template(path), str(path))
        for name, path in files.items()
        if path.is_file() and NAME.fullmatch(name)
    }
    if found:
        return found
    value = read_config(folder / SETTINGS).get("chat_template")
    place = f"{folder / SETTINGS}: chat_template"
    if isinstance(value, list):
        value = {each.get("name"): each.get("template") for each in value if isinstance(each, dict)}
    named = value if isinstance(value, dict) else {DEFAULT: value}
    return {
        name: (source, place if name == DEFAULT else f"{place} {name}")
        for name, source in named.items()
        if isinstance(source, str) and isinstance(name, str) and NAME.fullmatch(name)
    }


def read_template(path: Path) -> str:
    """Read a template. Raises UserError, CorruptFileError."""
    with reading_from(path, READABLE):
        return decode_text(read_bounded(path, MAX_BYTES, "replace it"), str(path))
