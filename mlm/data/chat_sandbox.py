"""Jinja's sandbox for chat templates of model folders, which are untrusted, with bounds on what they make.

The immutable sandbox keeps a template from files and from Python's own objects; what it sees are copies of
JSON values. Bounds of ours keep single operations from computing without end in C code, where Ctrl-C is not
heard, and texts from doubling until memory is full. A template that only loops is ended by Ctrl-C.
"""

import json
import re
from collections.abc import Callable, Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Context, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
from jinja2.utils import missing

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around a rendered {% generation %} block: noncharacters, which no text holds."""
MOST = 1 << 24
"""Letters or entries of a value that an operation may make; bits of a number."""
TOO_LONG = f"it makes a text of more than {MOST:,} letters"
GROWTH = 16
"""Letters of a text for each byte of its template and its conversation."""
WIDE = re.compile(r"%[^%a-zA-Z]*(\d{7}|\*)|\{[^{}]*(\d{7}|\{)")
"""In a format of `%` or of `format`: a width of millions, or one that an argument gives."""
PADDING = ("center", "expandtabs", "ljust", "rjust", "zfill")
"""Methods of texts that fill them up to a width."""


class RenderError(Exception):
    """The reason why a template makes no text of its values."""


class Generation(Extension):
    """The block {% generation %} … {% endgeneration %}, whose text is put between BEGIN and END."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("marked"), [], [], body).set_lineno(line)

    def marked(self, caller: Macro) -> str:
        """Return the block's text between marks."""
        return f"{BEGIN}{caller()}{END}"


def as_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return JSON without the escapes that Jinja's own filter makes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message: str) -> None:
    """Raise what a template rejects."""
    raise jinja2.TemplateError(message)


def strftime_now(format: str) -> str:
    """Return the date in a format of strftime."""
    return datetime.now().strftime(format)


class MissingToken(jinja2.Undefined):
    """A value that a template is not given: empty, or an error if it is a special token."""

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


class BoundedCode(CodeGenerator):
    """Jinja's compiler, whose `~` goes through the sandbox."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802
        """Write `a ~ b`."""
        self.write("environment.concatenate((")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, with bounds on the values that an operation makes."""

    code_generator_class = BoundedCode
    intercepted_binops = frozenset(("+", "*", "**", "%"))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Compute `left operator right`."""
        if size_of(operator, left, right) > MOST:
            raise SecurityError(f"it makes a value of more than {MOST:,} letters, entries or bits")
        return super().call_binop(context, operator, left, right)

    def concatenate(self, parts: tuple[Any, ...]) -> str:
        """Compute `left ~ right`."""
        texts = [str(part) for part in parts]
        if sum(map(len, texts)) > MOST:
            raise SecurityError(TOO_LONG)
        return "".join(texts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return `format` or `format_map` of a text; None for what is neither."""
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and WIDE.search(value.__self__):
            raise SecurityError(TOO_LONG)
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or a method."""
        is_padding = isinstance(getattr(__obj, "__self__", None), str) and __obj.__name__ in PADDING
        if is_padding and any(isinstance(n, int) and n > MOST for n in args):
            raise SecurityError(TOO_LONG)
        return super().call(__context, __obj, *args, **kwargs)


def size_of(operator: str, left: Any, right: Any) -> int:
    """Letters, entries or bits of the result of an operation, about; 0 where it needs no bound."""
    sequences, numbers = (str, list, tuple), (int,)
    if operator == "%":
        return MOST + 1 if isinstance(left, str) and WIDE.search(left) else 0
    if operator == "+":
        return len(left) + len(right) if isinstance(left, sequences) and isinstance(right, sequences) else 0
    if isinstance(left, numbers) and isinstance(right, numbers):
        return left.bit_length() * (abs(right) if operator == "**" else 1) + right.bit_length()
    if isinstance(left, numbers):
        left, right = right, left
    return len(left) * max(0, right) if isinstance(left, sequences) and isinstance(right, numbers) else 0


@cache
def environment() -> Sandbox:
    """Return the environment of all templates, with the names that `transformers` gives them."""
    made = Sandbox(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[Generation, "jinja2.ext.loopcontrols"],
        undefined=MissingToken,
    )
    made.filters["tojson"] = as_json
    made.globals |= {"raise_exception": raise_exception, "strftime_now": strftime_now}
    return made


@lru_cache(maxsize=8)
def compiled(source: str) -> jinja2.Template:
    """Return a template. Raises TemplateError, and errors of its constants."""
    return environment().from_string(source)


def render(source: str, values: Mapping[str, Any]) -> str:
    """Return the text of a template with these JSON values. Raises RenderError."""
    copies = json.dumps(values)
    most, length, pieces = GROWTH * (len(source) + len(copies)), 0, list[str]()
    try:
        for piece in compiled(source).generate(json.loads(copies)):
            pieces.append(piece)
            length += len(piece)
            if length > most:
                raise RenderError(f"it writes more than {most:,} letters")
    except RenderError:
        raise
    except MemoryError:
        raise RenderError("it needs more memory than there is") from None
    except Exception as error:  # a template may raise anything: TypeError, OverflowError, RecursionError
        raise RenderError(" ".join(str(error).split())[:200] or type(error).__name__) from None
    return "".join(pieces)
