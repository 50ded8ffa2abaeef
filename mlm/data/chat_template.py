"""A tokenizer's chat template, which renders conversations as text, like `transformers`.

The template is Jinja from an untrusted model folder. It runs in Jinja's immutable sandbox, without access to
files and Python objects, on copies of JSON values, and is stopped after TIME_LIMIT_S in the main thread, but
not within one operation in C, such as creating a text of 3 GB. It may mark the assistant's answers with
{% generation %} blocks.
"""

import json
import re
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import missing

from mlm.data.chat_builtin import TURNS
from mlm.util.errors import UserError, lone_surrogate
from mlm.util.files import digest_bytes, write_atomic

FILE = "chat_template.jinja"
FOR_TOOLS, FOLDER = "tool_use", "additional_chat_templates"
"""Name of a second template for conversations with tools, and the folder of its file."""
BEGIN, END = "\ufdd0", "\ufdd1"
"""Marks around a rendered {% generation %} block: noncharacters, which no text contains."""
TIME_LIMIT_S = 10

Message = dict[str, Any]


class _TimeLimit(BaseException):
    """A BaseException, as Jinja catches every `Exception` while it folds constants."""


class ChatError(Exception):
    """A conversation that a template cannot render: problem and fix in one line."""


@dataclass(frozen=True)
class TemplateOutput:
    text: str
    answers: tuple[tuple[int, int], ...]
    """First character and end of each {% generation %} block; none in a template without them."""


class ChatTemplate:
    """A chat template and the names of its special tokens.

    Attributes:
        marks_answers: True if it has {% generation %} blocks.
        digest: of the template, these names, and `tool_use`.
        tool_use: the tokenizer's template for conversations with tools, or None.
        keeps_turns: True if each answer is trained as rendered when it is the last message.
        others: sources of templates with other names, kept for an export.
        note: a line on the end of a turn in a built-in template, if it is not the template's token; else "".

    Raises UserError if it is not valid Jinja.
    """

    def __init__(
        self,
        source: str,
        tokens: Mapping[str, str],
        location: str = "chat template",
        note: str = "",
        tool_use: "ChatTemplate | None" = None,
        keeps_turns: bool = False,
        others: Mapping[str, str] | None = None,
    ) -> None:
        self.source, self.tokens, self.location, self.note = source, dict(tokens), location, note
        self.tool_use, self.keeps_turns, self.others = tool_use, keeps_turns, dict(others or {})
        if (surrogate := lone_surrogate(source)) is not None:
            raise UserError(f"{location}: holds {surrogate}: correct the template")
        self.marks_answers = re.search(r"\{%-?\s*generation\s*-?%\}", source) is not None
        identity: list[Any] = [source, sorted(self.tokens.items())]
        if tool_use is not None:
            identity.append(tool_use.source)
        if keeps_turns:
            identity.append(TURNS)
        self.digest = digest_bytes(json.dumps(identity).encode())
        try:
            environment().parse(source)  # compiling would evaluate constants, outside the time limit
        except jinja2.TemplateSyntaxError as error:
            raise UserError(
                f"{location}:{error.lineno}: no Jinja ({error.message}): correct the template"
            ) from None
        except (RecursionError, ValueError) as error:  # nested too deeply, or a number of too many digits
            raise UserError(f"{location}: no Jinja ({error}): correct the template") from None

    @property
    def settings(self) -> dict[str, str | None]:
        """Entries of tokenizer_config.json for its tokens."""
        return {name: token or None for name, token in self.tokens.items()}

    def save_sources(self, folder: Path) -> None:
        """Write the templates. Raises OSError."""
        write_atomic(folder / FILE, self.source.encode())
        sources = self.others | ({} if self.tool_use is None else {FOR_TOOLS: self.tool_use.source})
        for name, source in sources.items():
            (folder / FOLDER).mkdir(exist_ok=True)
            write_atomic(folder / FOLDER / f"{name}.jinja", source.encode())

    def for_tools(self, tools: Any) -> "ChatTemplate":
        """Return the template for a conversation with these tools; None means no tools."""
        return self if tools is None or self.tool_use is None else self.tool_use

    @cached_property
    def _compiled(self) -> jinja2.Template:
        return environment().from_string(self.source)

    def render(
        self,
        messages: Sequence[Message],
        tools: Any = None,
        *,
        add_generation_prompt: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> TemplateOutput:
        """Render messages, each with a role; with `add_generation_prompt` up to the beginning of an answer.

        `options` are further values for the template. Raises ChatError.
        """
        values = {
            "messages": [with_reasoning(message) for message in messages],
            "tools": tools,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
            **self.tokens,
            **(options or {}),
        }
        copies = json.loads(json.dumps(values))
        try:
            with time_limit(TIME_LIMIT_S):
                text = self._compiled.render(copies)
        # A template may raise any error: TypeError, OverflowError, RecursionError.
        except (Exception, _TimeLimit) as error:
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            raise ChatError(
                f"{self.location} fails ({reason}): correct the conversation, or give another template"
            ) from None
        if (surrogate := lone_surrogate(text)) is not None:
            raise ChatError(f"{self.location} writes {surrogate}: correct the conversation, or the template")
        if BEGIN not in text:
            return TemplateOutput(text, ())
        # Remove the marks of {% generation %} blocks; the outermost of nested blocks is an answer.
        parts, answers, length, begins = list[str](), list[tuple[int, int]](), 0, list[int]()
        for part in re.split(f"([{BEGIN}{END}])", text):
            if part == BEGIN:
                begins.append(length)
            elif part == END:
                begin = begins.pop() if begins else length  # the template's text may contain the mark
                if not begins:
                    answers.append((begin, length))
            else:
                parts.append(part)
                length += len(part)
        return TemplateOutput("".join(parts), tuple(answers))


def with_reasoning(message: Message) -> Message:
    """Return a message with its reasoning under all names that templates read, like `transformers`."""
    names = ("reasoning_content", "thinking", "reasoning")  # templates read the first or the second
    reasoning = next((message[name] for name in names if message.get(name) is not None), None)
    return (
        message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}
    )


@contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raise _TimeLimit in the body after some seconds; only in the main thread, which receives signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise _TimeLimit(f"it takes more than {seconds} s")

    handler = signal.signal(signal.SIGALRM, stop)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


class Generation(Extension):
    """The block {% generation %} … {% endgeneration %}, rendered between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Macro) -> str:
        return f"{BEGIN}{caller()}{END}"


class MissingToken(jinja2.Undefined):
    """An undefined value of a template: empty, or an error for a special token."""

    @property
    def _undefined_message(self) -> str:
        name = self._undefined_name
        if self._undefined_obj is missing and str(name).endswith("_token"):
            return f"it uses {name}, which the tokenizer lacks: name it in tokenizer_config.json"
        return super()._undefined_message

    def __str__(self) -> str:
        if self._undefined_obj is missing and str(self._undefined_name).endswith("_token"):
            self._fail_with_undefined_error()
        return ""


@cache
def environment() -> ImmutableSandboxedEnvironment:
    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # Jinja's filter would escape for HTML.
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    sandbox = ImmutableSandboxedEnvironment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        undefined=MissingToken,
    )
    sandbox.filters["tojson"] = to_json
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.now().strftime(format),
    }
    return sandbox
