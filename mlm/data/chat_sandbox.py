"""The process that chat templates are rendered in: Jinja's sandbox, and bounds of time and memory.

A template from a model folder is untrusted. Jinja's immutable sandbox keeps it from files and from Python's
own objects, but lets it compute 10 ** (10 ** 10) in C code, which nothing in the same process can end. This
one the kernel ends, and a failure to allocate memory is an exception here alone.

`python -m mlm.data.chat_sandbox SECONDS BYTES PARENT` answers lines of JSON on standard input: [template, or
null for the one before; names and their values] becomes {"text": …} or {"error": …}. It needs Jinja alone,
and ends with the process PARENT.
"""

import json
import resource
import signal
import sys
from collections.abc import Iterable, Iterator
from datetime import datetime
from functools import cache
from typing import IO, Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from mlm.util.system import die_with_parent

BEGIN, END = "\ufdd0", "\ufdd1"
"""Around a rendered {% generation %} block: noncharacters, which no text holds."""
SECONDS = 5
"""Processor time of a text; most take less than a millisecond."""
MEMORY = 1 << 30
"""Bytes of address space of the process."""
GROWTH = 16
"""Letters of a text for each byte of its template and its conversation."""


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


class PlainNamespace(Namespace):
    """Jinja's namespace without names that begin with an underscore."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            reject_private(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        reject_private(name)
        super().__setitem__(name, value)


class Dictionaries:
    """`dict` without the attributes of a class."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        """Return a dictionary."""
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        """Return a dictionary of keys with one value."""
        return dict.fromkeys(*args)


def reject_private(name: Any) -> None:
    """Raise SecurityError for a name that begins with an underscore."""
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace has no attribute {name[:40]!r}")


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


@cache
def environment() -> ImmutableSandboxedEnvironment:
    """Return the environment of all templates, with the names that `transformers` gives them."""
    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
    )
    found.filters["tojson"] = as_json
    found.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": Dictionaries(),
        "namespace": PlainNamespace,
    }
    return found


def answers(requests: Iterable[str], seconds: float) -> Iterator[str]:
    """Yield a line of JSON for each request; one of more than `seconds` ends the process."""
    template, size = jinja2.Template(""), 0
    for line in requests:
        signal.setitimer(signal.ITIMER_PROF, seconds)  # SIGPROF ends the process, within C code too
        try:
            source, values = json.loads(line)
            if source is not None:
                template, size = environment().from_string(source), len(source)
            text, most = template.render(values), GROWTH * (size + len(line))
            if len(text) > most:
                answer = json.dumps({"error": f"it writes {len(text):,} letters, {most:,} is the limit"})
            else:
                answer = json.dumps({"text": text})
        except MemoryError:
            answer = json.dumps({"error": "it needs more memory than it may have"})
        except Exception as error:  # a template may raise anything: TypeError, OverflowError, RecursionError
            reason = " ".join(str(error).split())[:200] or type(error).__name__
            answer = json.dumps({"error": reason})
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield answer


def serve(requests: IO[str], out: IO[str], seconds: float, memory: int) -> None:
    """Answer requests until their end, within bounds of processor time and memory."""
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    most = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = memory if most == resource.RLIM_INFINITY else min(memory, most)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    for answer in answers(requests, seconds):
        out.write(answer + "\n")
        out.flush()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    serve(sys.stdin, sys.stdout, float(sys.argv[1]), int(sys.argv[2]))
