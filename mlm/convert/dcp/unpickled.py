"""Pickles of PyTorch read as plain data: nothing is imported, looked up or called.

A pickle is a program for a stack machine. `read_pickle` runs the instructions that build containers and
numbers; where one names a class or function it keeps the name, and where one calls it, a `Record` of the name
and its arguments. Time and memory are linear in the file: no instruction copies, and none recurses.

Source of the instructions: https://github.com/python/cpython/blob/main/Lib/pickletools.py, protocols 2 to 5.
"""

import struct
from collections.abc import Callable
from typing import Any

MAX_INSTRUCTIONS = 1 << 25
"""Of one pickle: about a million chunks of tensors; an object for each takes 3 GB."""
MAX_INT_BYTES = 16


class PickleError(ValueError):
    """A pickle that is damaged, or holds what is not data."""


class NotDataError(PickleError):
    """A pickle that refers to a class or function which is not data."""


class Name(str):
    """Dotted name of a class or function."""


class Record:
    """A call or an object in a pickle: the name of a class or function, arguments, and the state it sets.

    Compared and hashed by identity: its content may be nested without end.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: Name, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def fields(self, name: str) -> dict[str, Any]:
        """Return the state of an object of the class `name`. Raises PickleError if it is another."""
        if self.name != name or type(self.state) is not dict:
            raise PickleError(f"{self.name[:60]} is no {name} with fields")
        return self.state


class PersistentId:
    """Reference to what is stored outside of the pickle: in torch's files, the bytes of a tensor."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


_MARK = object()
_KEYS = (str, bool, bytes, type(None), Record)
"""Types of keys that are kept: an adversary knows the hash of a number, that of a tuple would recurse."""
_DICTS = ("collections.OrderedDict", "collections.defaultdict")


class _Machine:
    def __init__(self, content: bytes, is_data: Callable[[str], bool]) -> None:
        self.content, self.position, self.is_data = content, 0, is_data
        self.stack: list[Any] = []
        self.memo: dict[int, Any] = {}
        self.references: list[PersistentId] = []

    def take(self, count: int) -> bytes:
        begin, self.position = self.position, self.position + count
        if not 0 <= count <= len(self.content) - begin:
            raise PickleError("ends early")
        return self.content[begin : self.position]

    def number(self, form: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form)))[0]

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise PickleError("a value is missing")
        return value

    def to_mark(self) -> list[Any]:
        for first in range(len(self.stack) - 1, -1, -1):
            if self.stack[first] is _MARK:
                items = self.stack[first + 1 :]
                del self.stack[first:]
                return items
        raise PickleError("a mark is missing")

    def top(self, kind: type) -> Any:
        if not self.stack or type(self.stack[-1]) is not kind:
            raise PickleError(f"no {kind.__name__} to add to")
        return self.stack[-1]

    def run(self) -> Any:
        self.stack.clear()
        self.memo.clear()
        push = self.stack.append
        for _ in range(MAX_INSTRUCTIONS):
            code = self.take(1)
            if code == b".":
                return self.pop()
            if (read := _VALUES.get(code)) is not None:
                push(read(self))
            elif (change := _CHANGES.get(code)) is not None:
                change(self)
            else:
                raise PickleError(f"instruction {code!r} is none of those that data needs")
        raise PickleError(f"more than {MAX_INSTRUCTIONS} instructions")

    def text(self, count: int) -> str:
        return self.take(count).decode("utf-8", "surrogatepass")

    def named(self, module: Any, name: Any) -> Name:
        if type(module) is not str or type(name) is not str or not self.is_data(f"{module}.{name}"):
            raise NotDataError(f"refers to {str(module)[:60]}.{str(name)[:60]}, which is not data")
        return Name(f"{module}.{name}")

    def global_name(self) -> Name:
        lines = []
        for _ in range(2):
            end = self.content.find(b"\n", self.position, self.position + 256)
            lines.append(self.text(end - self.position))
            self.position += 1
        return self.named(*lines)

    def record(self) -> Any:
        args, name = self.pop(), self.pop()
        if type(name) is not Name or type(args) is not tuple:
            raise PickleError("calls what is no class of data")
        return {} if name in _DICTS else Record(name, args)

    def record_with_keywords(self) -> Any:
        if self.pop():
            raise PickleError("calls with keywords")
        return self.record()

    def remember(self, index: int) -> None:
        if not self.stack:
            raise PickleError("nothing to remember")
        self.memo[index] = self.stack[-1]

    def recall(self, index: int) -> Any:
        if index not in self.memo:
            raise PickleError(f"entry {index} is not there")
        return self.memo[index]

    def put(self, items: list[Any]) -> None:
        target = self.top(dict)
        if len(items) % 2:
            raise PickleError("a key without a value")
        pairs = zip(items[::2], items[1::2], strict=True)
        target.update((key, value) for key, value in pairs if type(key) in _KEYS)

    def build(self) -> None:
        state = self.pop()
        if not self.stack or type(self.stack[-1]) is not dict:  # whose attributes are not kept
            self.top(Record).state = state

    def reference(self) -> PersistentId:
        self.references.append(PersistentId(self.pop()))
        return self.references[-1]

    def tuple_of(self, count: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(count)][::-1])

    def long(self) -> int:
        count = self.take(1)[0]
        if count > MAX_INT_BYTES:
            raise PickleError(f"a number of {count} bytes")
        return int.from_bytes(self.take(count), "little", signed=True)


def _stack_global(m: _Machine) -> Name:
    name, module = m.pop(), m.pop()
    return m.named(module, name)


_VALUES: dict[bytes, Callable[[_Machine], Any]] = {
    b"(": lambda m: _MARK,
    b"N": lambda m: None,
    b"\x88": lambda m: True,
    b"\x89": lambda m: False,
    b"J": lambda m: m.number("<i"),
    b"K": lambda m: m.number("<B"),
    b"M": lambda m: m.number("<H"),
    b"\x8a": _Machine.long,
    b"G": lambda m: m.number(">d"),
    b"X": lambda m: m.text(m.number("<I")),
    b"\x8c": lambda m: m.text(m.number("<B")),
    b"\x8d": lambda m: m.text(m.number("<Q")),
    b"C": lambda m: m.take(m.number("<B")),
    b"B": lambda m: m.take(m.number("<I")),
    b"]": lambda m: [],
    b"}": lambda m: {},
    b")": lambda m: (),
    b"\x8f": lambda m: [],  # a set, as a list
    b"t": lambda m: tuple(m.to_mark()),
    b"\x91": _Machine.to_mark,
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"c": _Machine.global_name,
    b"\x93": _stack_global,
    b"R": _Machine.record,
    b"\x81": _Machine.record,
    b"\x92": _Machine.record_with_keywords,
    b"Q": _Machine.reference,
    b"h": lambda m: m.recall(m.number("<B")),
    b"j": lambda m: m.recall(m.number("<I")),
}
"""Instruction -> the value that it pushes."""
_CHANGES: dict[bytes, Callable[[_Machine], Any]] = {
    b"\x80": lambda m: m.take(1),
    b"\x95": lambda m: m.take(8),
    b"0": _Machine.pop,
    b"q": lambda m: m.remember(m.number("<B")),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(len(m.memo)),
    b"a": lambda m: _append(m, [m.pop()]),
    b"e": lambda m: _append(m, m.to_mark()),
    b"\x90": lambda m: _append(m, m.to_mark()),
    b"s": lambda m: m.put(list(m.tuple_of(2))),
    b"u": lambda m: m.put(m.to_mark()),
    b"b": _Machine.build,
}
"""Instruction -> the change that it makes."""


def _append(m: _Machine, items: list[Any]) -> None:
    m.top(list).extend(items)


def read_pickle(content: bytes, is_data: Callable[[str], bool]) -> Any:
    """Return the value of a pickle: None, bool, int, float, str, bytes, list, dict, tuple, Record.

    `is_data(name)` says of a dotted name whether a Record of it is data to the caller. Entries of a dict
    whose keys are numbers or tuples are left out. Raises PickleError.
    """
    return read_pickles(content, 1, is_data)[0][0]


def read_pickles(
    content: bytes, count: int, is_data: Callable[[str], bool]
) -> tuple[list[Any], list[PersistentId], int]:
    """Return the values of consecutive pickles, all references in them, and the bytes they take.

    As `read_pickle` otherwise.
    """
    machine = _Machine(content, is_data)
    try:
        values = [machine.run() for _ in range(count)]
    except (IndexError, UnicodeDecodeError, OverflowError) as error:
        raise PickleError(str(error)) from error
    return values, machine.references, machine.position
