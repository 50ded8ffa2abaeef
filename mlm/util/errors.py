"""User errors as values: each problem with its keys, its fix and its printed line."""

import errno
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

T = TypeVar("T")
LONG_LINE = 600
"""Most characters of a printed line on settings."""


def escape_controls(text: str) -> str:
    """Escape control characters, so that a file's content cannot control a terminal."""
    printable = "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)
    return printable.encode(errors="backslashreplace").decode()  # half a surrogate pair


def printable_line(line: str) -> str:
    """The printed form of an error's line: control characters escaped, long words shortened."""
    return re.sub(r"\S{300,}", lambda word: f"{word[0][:100]}…{word[0][-20:]}", escape_controls(line))


def lone_surrogate(text: str) -> str | None:
    """Describe the first unpaired surrogate of a text, which no tokenizer accepts; None without one."""
    half = re.search("[\ud800-\udfff]", text)
    return None if half is None else f"half a surrogate pair (U+{ord(half[0]):X})"


def decode_problem(error: UnicodeDecodeError, position: str = "") -> str:
    """Describe a decoding error, with the command that converts UTF-16."""
    if error.object.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "not UTF-8 but UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)"
    return f"not UTF-8 ({error.reason}{position})"


def format_value(value: Any) -> str:
    """A value as typed: true, null, [1,2], [{use:"my_module:Mine",every:10}]."""
    return value if isinstance(value, str) else _format_item(value)


def _format_item(value: Any) -> str:
    if isinstance(value, Mapping):  # Hydra reads no quoted keys
        return "{" + ",".join(f"{key}:{_format_item(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(map(_format_item, value)) + "]"
    return json.dumps(value, default=str)


def type_of(value: Any) -> str:
    """The type of a value with its article: null, an integer; the class of other objects."""
    names = {"NoneType": "null", "int": "an integer", "str": "a text", "dict": "an object"}
    name = type(value).__name__
    return names.get(name) or f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"


def format_settings(settings: Mapping[str, Any]) -> str:
    """Settings as typed: `tp=2 pp=1`."""
    return " ".join(f"{key}={format_value(value)}" for key, value in settings.items())


class Problem(str):
    """A problem as a line `key=value: problem; fix`, with the parts of that line.

    A string, so that it fits into any list of messages. Code reads the fields, never the line.
    """

    keys: tuple[str, ...]
    """Keys concerned."""
    problem: str
    """The settings and why they are invalid."""
    fix: str
    """Settings or an action that fix it; may be empty."""

    __slots__ = ("fix", "keys", "problem")

    def __new__(cls, keys: Iterable[str], problem: str, fix: str = "") -> "Problem":
        self = super().__new__(cls, f"{problem}; {fix}" if fix else problem)
        self.keys, self.problem, self.fix = tuple(keys), problem, fix
        return self

    def __getnewargs__(self) -> tuple[Any, ...]:
        return self.keys, self.problem, self.fix  # errors travel between processes

    @classmethod
    def at(cls, key: str, value: Any, problem: str, fix: str = "") -> "Problem":
        """The problem of one setting: `key=value: problem; fix`."""
        return cls((key,), f"{key}={format_value(value)}: {problem}", fix)

    @classmethod
    def of(cls, line: str) -> "Problem":
        """Convert a line to a problem without keys; a Problem stays as it is."""
        return line if isinstance(line, Problem) else cls((), line)

    def concerns(self, names: Iterable[str]) -> bool:
        """True if one of its keys, or the section of one, is among `names`."""
        return any(key == name or key.startswith(f"{name}.") for name in names for key in self.keys)


class Absent(Problem):
    """A missing required value, or a file or device missing on this host.

    The typed settings may be valid on another host, or with further ones.
    """

    __slots__ = ()


class Failed(Problem):
    """A problem that no setting fixes, such as a damaged file. Exit code 1 if all problems are such."""

    __slots__ = ()


class UserError(ValueError):
    """An error that the user can fix. One line: the setting, its value and the fix."""

    exit_code: int = 2
    """Exit code of the command that raises it."""
    kind: ClassVar[type[Problem]] = Problem
    """Type of its problem."""

    def __init__(self, problem: str, *, keys: Iterable[str] = (), fix: str = "") -> None:
        line = self.kind(keys, problem, fix) if fix or keys else self.kind.of(problem)
        self.problems: tuple[Problem, ...] = (line,)
        super().__init__(str(line))

    def lines(self) -> list[str]:
        return [printable_line(line) for line in str(self).split("\n")]


class ConfigError(UserError):
    """All problems of one configuration, reported together."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(map(Problem.of, problems))
        ValueError.__init__(self, "\n".join(self.problems))
        if self.problems and all(isinstance(problem, Failed) for problem in self.problems):
            self.exit_code = CorruptFileError.exit_code

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.problems,)

    def lines(self) -> list[str]:
        # Shorten the middle: a line begins with the problem and ends with the fix.
        return [
            line if len(line) < LONG_LINE else f"{line[: LONG_LINE // 2]} … {line[-LONG_LINE // 3 :]}"
            for line in map(printable_line, self.problems)
        ]


class CorruptFileError(UserError):
    """A file on disk is truncated, altered or of another format."""

    exit_code = 1
    kind = Failed


class CheckFailedError(UserError):
    """A checked condition does not hold."""

    exit_code = 1
    kind = Failed


def attempt(problems: list[str], call: Callable[[], T]) -> T | None:
    """Return the result of a call; if it raises UserError, add its problems to `problems` and return None."""
    try:
        return call()
    except UserError as error:
        problems += [problem for problem in error.problems if problem not in problems]
        return None


@contextmanager
def reading_from(path: Path, fix: str) -> Iterator[None]:
    """Raise UserError for OSErrors while reading `path`, or a file below it."""
    try:
        yield
    except OSError as error:
        reason = error.strerror or error  # of pyarrow: without a number
        raise UserError(f"{error.filename or path}: cannot be read: {reason}. {fix}") from error


def write_reason(error: OSError) -> str:
    # NumPy reports how much was written, without an error number
    return error.strerror or f"the disk took a part alone ({error}); is it full?"


@contextmanager
def writing_to(out: str) -> Iterator[None]:
    """Raise UserError for OSErrors while writing below the folder `out`."""
    try:
        yield
    except OSError as error:
        # OSErrors of writes have no file name.
        file = "" if error.filename is None else f" ({error.filename})"
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise UserError(
            f"out={out}: {write_reason(error)}{file}",
            keys=("out",),
            fix="free space, or choose another disk" if is_full else "choose a folder that can be written to",
        ) from error
