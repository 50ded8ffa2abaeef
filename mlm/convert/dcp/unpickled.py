"""Pickles of PyTorch and Megatron, read as plain data: nothing in them is imported, looked up or called.

A pickle is a program. Python's unpickler runs the instructions in it that build containers and numbers; a
class or function stays a `Name`, and a call of one becomes a `Record` of the name and its arguments.

It is the unpickler in Python, not the one in C that `pickle.load` uses: a dictionary's key nested a million
deep overflows the C stack as it is hashed, there and in `torch.load(weights_only=True)`.
"""

import io
import pickle
import re
from collections.abc import Callable
from typing import Any

DATA = re.compile(
    r"torch\.(\w+Storage|Size|Tensor|device|strided|u?int\d+|b?float\d+\w*|bool|complex\d+)"
    r"|torch\.(storage\.UntypedStorage|nn\.parameter\.Parameter|serialization\._get_layout)"
    r"|torch\._(utils|tensor)\._rebuild_\w+"
    r"|torch\.distributed\.checkpoint\.(metadata|planner|filesystem|_fsspec_filesystem)\.\w+"
    r"|argparse\.Namespace|types\.SimpleNamespace|datetime\.timedelta|signal\.Signals|_?io\.BytesIO"
    r"|collections\.(OrderedDict|defaultdict)|_codecs\.encode|(builtins|__builtin__)\.(set|bytes|bytearray)"
    r"|pathlib\.(_local\.)?(Posix|Pure\w*)?Path"
    r"|numpy\.(_?core\.multiarray\.(_reconstruct|scalar)|ndarray|dtype|dtypes\.\w+DType)"
    r"|(megatron\.(\w+\.)*|fp16\.loss_scaler\.)[A-Z]\w*"  # settings, loss scalers, the re-run state
    r"|megatron\.core\.dist_checkpointing\.[\w.]+",
    re.ASCII,
)
"""Names of classes and functions that such files hold. A pickle that refers to another is rejected."""

MAX_INSTRUCTIONS = 1 << 25
"""Of one pickle: about a million chunks of tensors; an object for each takes 3 GB."""


class PickleError(ValueError):
    """A pickle that is damaged, or holds what is not data."""


class NotDataError(PickleError):
    """A pickle that refers to a class or function which is not data."""


class Name(str):
    """Dotted name of a class or function, in place of it."""

    __slots__ = ()

    def __call__(self, *args: Any) -> "dict[str, Any] | Record":
        """Return what stands for a call: for a dictionary's class an empty one, which is filled later."""
        is_dict = self in ("collections.OrderedDict", "collections.defaultdict")
        return {} if is_dict else Record(self, args)


class Record:
    """A call or an object in a pickle: the name of a class or function, arguments, and the state it sets.

    Compared and hashed by identity: its content may be nested without end.
    """

    __slots__ = ("args", "name", "state")

    def __init__(self, name: str, args: Any) -> None:
        self.name, self.args = name, args
        self.state: Any = None

    def fields(self, name: str) -> dict[str, Any]:
        """Return the state of an object of the class `name`. Raises PickleError if it is another."""
        if self.name != name or type(self.state) is not dict:
            raise PickleError(f"{self.name[:60]} is no {name} with fields")
        return self.state


STORAGE = "storage"
"""Name of the Record for bytes stored outside of the pickle; its arguments are what torch.save wrote."""
_KEYS = (str, bool, bytes, type(None), Record)
"""Types of keys that are kept: an adversary knows the hash of a number, and hashing a tuple would recurse."""
_PROTOCOL_2_TO_5 = b"(N\x88\x89JKM\x8aGX\x8c\x8dCB]})t\x85\x86\x87c\x93RQhj\x80\x95.0qr\x94ae"
"""Instructions run as they are. A dictionary's entries, states, sets and objects have methods below."""
_USUAL = vars(pickle._Unpickler)["dispatch"]


class _Instructions(dict[int, Any]):
    """Code of an instruction -> what runs it, as often as one pickle may ask."""

    def __init__(self, usual: dict[int, Any]) -> None:
        super().__init__(usual)
        self.left = MAX_INSTRUCTIONS

    def __getitem__(self, code: int) -> Any:
        self.left -= 1
        if self.left < 0:
            raise PickleError(f"more than {MAX_INSTRUCTIONS} instructions")
        return super().__getitem__(code)


class _Unpickler(pickle._Unpickler):
    stack: list[Any]
    pop_mark: Callable[[], list[Any]]

    def __init__(self, content: bytes) -> None:
        super().__init__(io.BytesIO(content))
        self.dispatch = _Instructions(self.instructions)  # type: ignore[misc]

    def find_class(self, module: str, name: str) -> Name:
        full = f"{module}.{name}"
        if not DATA.fullmatch(full):
            raise NotDataError(f"refers to {ascii(full)[1:-1][:120]}, which is not data")
        return Name(full)

    def persistent_load(self, pid: Any) -> Record:
        return Record(STORAGE, pid)

    def put_items(self) -> None:
        items = self.pop_mark()
        pairs = zip(items[::2], items[1::2], strict=True)
        self.stack[-1].update((key, value) for key, value in pairs if type(key) in _KEYS)

    def put_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        if type(key) in _KEYS:
            self.stack[-1][key] = value

    def set_state(self) -> None:
        state = self.stack.pop()
        if type(self.stack[-1]) is Record:  # attributes of a dictionary are not kept
            self.stack[-1].state = state

    instructions = {code: _USUAL[code] for code in _PROTOCOL_2_TO_5} | {
        pickle.SETITEMS[0]: put_items,
        pickle.SETITEM[0]: put_item,
        pickle.BUILD[0]: set_state,
        pickle.NEWOBJ[0]: _USUAL[pickle.REDUCE[0]],
        # Sets as lists: hashing their items could recurse.
        pickle.EMPTY_SET[0]: _USUAL[pickle.EMPTY_LIST[0]],
        pickle.ADDITEMS[0]: _USUAL[pickle.APPENDS[0]],
        pickle.FROZENSET[0]: _USUAL[pickle.TUPLE[0]],
    }


def read_pickle(content: bytes) -> Any:
    """Return the value of a pickle: None, bool, int, float, str, bytes, list, dict, tuple, Name, Record.

    Entries of a dict whose keys are numbers or tuples are left out. Raises PickleError.
    """
    try:
        return _Unpickler(content).load()
    except PickleError:
        raise
    except Exception as error:  # whichever an adversary's instructions lead to
        raise PickleError(f"is no pickle of data ({type(error).__name__})") from error
