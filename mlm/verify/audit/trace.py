"""Operations of a step: record or replace the tensors that each reads and returns."""

import os
import random
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from pathlib import Path
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.optim import Optimizer
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mlm.verify.audit.compare import Location
from mlm.verify.audit.formats import COLLECTIVES
from mlm.verify.audit.record import Key, Recorder

READ, RESULT, NUMBERS = "read", "result", "numbers"
"""Types of tensors that an operation reads and returns, and of the Python numbers among its arguments."""
BACKWARD = " in backward"
"""End of the name of an operation that computes gradients."""
MOST_OPERATIONS = 12_000
PLAIN = (Tensor, nn.Parameter)
OWNED = (Tensor, nn.Module, Optimizer)
"""Types that a snapshot keeps though a library's class wraps them."""
LIBRARIES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__) if file)


class Tracer:
    """Runs operations of a step up to a target tensor; records their tensors, or replaces some by `patches`.

    Operations are named `MODULE|FILE:LINE|OPERATION`, alike on ranks and on one process. Backward operations
    have the module and line of their forward operation, but in custom functions the line in backward.
    """

    def __init__(self, recorder: Recorder, target: Key, patches: Mapping[Key, Tensor] | None = None) -> None:
        self.recorder, self.target, self.patches = recorder, target, patches
        self.patched_operations = {key.name for key in patches or ()}
        self.tensors: dict[Key, Tensor] = {}
        self.sources: dict[Key, Key] = {}
        """By read tensor: the result that it is, or was before ranks communicated it."""
        self.counts: Counter[tuple[int, str]] = Counter()
        self.result_keys: dict[tuple[object, ...], Key] = {}
        """By identity of a tensor: its key as a result."""
        self.live_results: list[Any] = []
        """Results, kept so that no address is used twice."""
        self.overwritten: list[tuple[Tensor, Tensor]] = []
        """(constant, original numbers) to restore."""
        self.forward_places: dict[int, str] = {}
        """By sequence number of an autograd node: module and line of its forward operation."""
        tensors = (getattr(p, "_local_tensor", p) for p in recorder.parameters.values())
        self.parameters = {(x.untyped_storage().data_ptr(), x.shape) for x in tensors}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_in_scope = self._is_in_scope()
        if is_in_scope or self.target.kind in ("backward", "gradient"):  # records forward places
            place = self._place()
        if not is_in_scope:
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES or "empty" in func._opname:
            result = func(*args, **kwargs)
            # results of communication, and their empty buffers, have the source of the first input
            sources = (self.result_keys.get(identity(x)) for x in tree_leaves(args) if isinstance(x, Tensor))
            if (source := next(filter(None, sources), None)) is not None:
                self._register(result, source)
            return result
        name = f"{place}|{func._opname.strip('_')}{BACKWARD if is_backward() else ''}"
        micro = self.recorder.micro if self.recorder.module_stack else 0
        key = Key(self.recorder.step, READ, name, self.counts[micro, name], 0, micro)
        self.counts[micro, name] += 1
        if self.patches is not None and name not in self.patched_operations:
            result = func(*args, **kwargs)
            self._register(result, key)
            return result
        leaves, spec = tree_flatten((args, kwargs))
        for item, leaf in enumerate(leaves):
            if self._is_recorded(leaf):
                leaves[item] = self._record_read(key._replace(item=item), leaf, func._schema.is_mutable)
        new_args, new_kwargs = tree_unflatten(leaves, spec)
        new_args = self._record_numbers(key._replace(kind=NUMBERS), new_args)
        results, spec = tree_flatten(func(*new_args, **new_kwargs))
        for item, x in enumerate(results):
            if type(x) in PLAIN or (self.recorder.phase == "update" and isinstance(x, Tensor)):
                result = key._replace(kind=RESULT, item=item)
                results[item] = self._record_result(result, x, func._schema.is_mutable)
        return tree_unflatten(results, spec)

    def _is_in_scope(self) -> bool:
        """True between the last right tensor and the target."""
        recorder, target = self.recorder, self.target
        if target.kind == "weight":
            return recorder.phase == "update"
        if target.kind == "gradient":
            return is_backward() or recorder.phase == "reduction"
        if is_backward():
            return target.kind == "backward" and target not in recorder.record.tensors
        if target.kind == "loss" and (recorder.phase == "backward" or target in recorder.record.tensors):
            return False
        kind = "scalar" if target.kind == "scalar" else "output"
        is_recorded = target._replace(kind=kind, micro=recorder.micro) in recorder.record.tensors
        return is_recorded == (target.kind == "backward")

    def _place(self) -> str:
        recorder = self.recorder
        place = f"{recorder.module_stack[-1] if recorder.module_stack else recorder.phase}|{user_line()}"
        if not is_backward():
            self.forward_places.setdefault(torch.autograd._get_sequence_nr() - 1, place)
            return place
        node = torch._C._current_autograd_node()
        if node is None:
            return place
        forward = self.forward_places.get(node._sequence_nr(), place)
        if isinstance(node, BackwardCFunction):
            return f"{forward.split('|')[0]}|{user_line()}"
        return forward

    def _is_recorded(self, x: Any) -> bool:
        """False for parameters, of which ranks read their part, unless as a slice of all rows."""
        if type(x) not in PLAIN or (x.untyped_storage().data_ptr(), x.shape) not in self.parameters:
            return type(x) in PLAIN
        return self.recorder.phase != "update" and identity(x) in self.result_keys

    def _register(self, result: Any, key: Key) -> None:
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.result_keys[identity(x)] = key
                self.live_results.append(x)

    def _record_read(self, key: Key, x: Tensor, is_mutable: bool) -> Tensor:
        """The tensor, or its replacement."""
        if self.patches is not None:
            value = self.patches.get(key)
            if value is None or value.shape != x.shape or is_mutable:
                return x
            if is_backward() or (identity(x) in self.result_keys and self.target.kind != "backward"):
                return value.to(x.dtype).clone()
            # overwrite a constant in place, for its other readers and what backward has saved
            self.overwritten.append((x.data, x.detach().clone()))
            x.data.copy_(value)
            return x
        if len(self.tensors) < MOST_OPERATIONS:
            self.tensors[key] = x.detach().clone()
            if (source := self.result_keys.get(identity(x))) is not None:
                self.sources[key] = source
        return x

    def _record_numbers(self, key: Key, args: Sequence[Any]) -> Sequence[Any]:
        """The arguments, with replaced Python numbers."""
        numbers = torch.tensor([x for x in args if isinstance(x, int | float)], dtype=torch.float64)
        if self.patches is None:
            self.tensors[key] = numbers
        value = (self.patches or {}).get(key)
        if value is None or value.shape != numbers.shape:
            return args
        patched = iter(value.tolist())
        return [type(x)(next(patched)) if isinstance(x, int | float) else x for x in args]

    def _record_result(self, key: Key, x: Tensor, is_mutable: bool) -> Tensor:
        """The result, or its replacement."""
        value = (self.patches or {}).get(key)
        if self.patches is None and len(self.tensors) < MOST_OPERATIONS:
            self.tensors[key] = x.detach().clone()
        if value is not None and value.shape == x.shape:
            x = x.copy_(value) if is_mutable else value.to(x.dtype).clone()
        self._register(x, key)
        return x


def identity(x: Tensor) -> tuple[object, ...]:
    """Equal for tensors over the same memory, as autograd or a view makes them."""
    if type(x) not in PLAIN:
        return (id(x),)
    return x.untyped_storage().data_ptr(), x.storage_offset(), tuple(x.shape), x.stride()


def is_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def user_line() -> str:
    """File and line of the innermost frame outside PyTorch and the audit.

    Without such a frame, as in an optimizer of PyTorch: its innermost frame in a public module of PyTorch.
    """
    frame: Any = sys._getframe()
    line = ""
    while frame.f_code is not Recorder.run_step.__code__ and frame.f_back is not None:
        file, is_library = _file_of(frame.f_code.co_filename)
        if not is_library:
            return f"{file}:{frame.f_lineno}"
        if file and not line:
            line = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return line


@cache
def _file_of(path: str) -> tuple[str, bool]:
    """Name of a file in reports, empty for private ones, and True if it is PyTorch's or the audit's."""
    if not path.startswith((*LIBRARIES, "<")):
        return os.path.basename(path), False
    relative_path = path.removeprefix(LIBRARIES[0])
    is_public = relative_path != path and not any(part.startswith("_") for part in relative_path.split("/"))
    return (f"torch/{relative_path}" if is_public else ""), True


def advance(recorder: Recorder, step: int) -> None:
    for recorder.step in range(step):
        recorder.run_step()
    recorder.step = step


def trace(recorder: Recorder, location: Location, patches: Mapping[Key, Tensor] | None = None) -> Tracer:
    """Run the step of a wrong tensor; record the operations before it, and the tensor or all weights."""
    recorder.calls.clear()
    recorder.record.tensors.clear()
    item = location.key.item if location.key.kind == "scalar" else 0
    tracer = Tracer(recorder, location.key._replace(call=0, item=item), patches)
    recorder.run_operation = tracer.run
    try:
        recorder.run_step(has_update=location.key.kind in ("gradient", "weight"))
    finally:
        for x, value in reversed(tracer.overwritten):
            x.copy_(value)
    fields = 2 if location.key.kind == "weight" else 5  # of keys: step and kind, or all but the micro-batch
    recorded = recorder.record.tensors.items()
    target_tensors = {k: x for k, x in recorded if k.kind == "input" or k[:fields] == location.key[:fields]}
    recorder.record.tensors = tracer.tensors | target_tensors
    return tracer


def trace_rank(recorder: Recorder, location: Location) -> None:
    advance(recorder, location.key.step)
    trace(recorder, location)


class State:
    """Snapshot of the objects that a step reaches through its functions, to run it again from the same state.

    A trainer's own step count, rates, moments and random streams change its next step as weights do.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, subject = recorder, recorder.subject
        self._setters: list[Callable[[], object]] = [
            partial(torch.set_rng_state, torch.get_rng_state()),
            partial(random.setstate, random.getstate()),
            partial(np.random.set_state, np.random.get_state()),
        ]
        queue: list[Any] = [subject.module, subject.optimizer, subject.batch]
        queue += [subject.step, subject.loss, subject.reduce, subject.clip]
        visited: dict[int, Any] = {}
        while queue:
            x = queue.pop()
            if id(x) not in visited and (isinstance(x, OWNED) or not is_opaque(x)):
                visited[id(x)] = x  # alive, so that no other takes its id
                queue += self._save(x)

    def _save(self, x: Any) -> list[Any]:
        """Save an object; return the objects that it holds."""
        match x:
            case Tensor():
                if all(stride or size == 1 for stride, size in zip(x.stride(), x.shape, strict=True)):
                    self._setters.append(partial(x.copy_, x.detach().clone()))
                return []  # an expanded one cannot be written
            case np.ndarray():
                self._setters += [partial(np.copyto, x, x.copy())] * x.flags.writeable
                return []
            case torch.Generator():
                self._setters.append(partial(x.set_state, x.get_state()))
                return []
            case random.Random():
                self._setters.append(partial(x.setstate, x.getstate()))
                return []
            case np.random.Generator():
                self._setters.append(partial(setattr, x.bit_generator, "state", x.bit_generator.state))
                return []
            case CellType():
                with suppress(ValueError):  # of an empty cell
                    self._setters.append(partial(setattr, x, "cell_contents", x.cell_contents))
                    return [x.cell_contents]
                return []
            case MethodType():
                return [x.__self__, x.__func__]
            case FunctionType():
                numbers = {
                    name: value for name, value in x.__globals__.items() if type(value) in (int, float)
                }
                self._setters.append(partial(x.__globals__.update, numbers))
                return [*(x.__closure__ or ()), *(x.__defaults__ or ())]
            case partial():
                return [x.func, *x.args, *x.keywords.values()]
            case tuple() | set():
                return [*x]
            case list() | dict():
                self._setters.append(partial(refill, x, copy(x)))
                return [*x] if isinstance(x, list) else [*x.values()]
        return [x.__dict__] if hasattr(x, "__dict__") else []

    def restore(self) -> None:
        with torch.no_grad():
            for set_value in self._setters:
                set_value()


def refill(container: Any, content: Any) -> None:
    """Give a list or dictionary the items of a copy again."""
    if isinstance(container, list):
        container[:] = content
        return
    for key in container.keys() - content.keys():
        del container[key]
    container.update(content)


def is_opaque(x: Any) -> bool:
    """True for values, for classes and modules, and for the state of libraries."""
    kinds = (str, bytes, int, float, type(None), type, ModuleType, Recorder, Tracer)
    libraries = ("torch.distributed", "threading", "_thread")
    return isinstance(x, kinds) or type(x).__module__.startswith(libraries)
