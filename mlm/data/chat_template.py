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

from mlm.data.chat_builtin import TURNS
from mlm.data.chat_sandbox import BEGIN, END, RenderError, environment, render
from mlm.util.errors import UserError, lone_surrogate
from mlm.util.files import digest_bytes, write_atomic

FILE = "chat_template.jinja"
FOR_TOOLS, FOLDER = "tool_use", "additional_chat_templates"
"""Name of a second template for conversations with tools, and the folder of its file."""
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


def with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under the names that templates read, as `transformers` does."""
    found = next((message[key] for key in REASONING if message.get(key) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}
