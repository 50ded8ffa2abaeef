"""Operations of a step one by one: their results and what they read, kept or replaced."""

import os
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import BackwardCFunction
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from mlm.verify.audit.compare import Location
from mlm.verify.audit.formats import COLLECTIVES
from mlm.verify.audit.record import Key, Recorder

READ, RESULT, NUMBERS = "read", "result", "numbers"
"""Types of tensors that an operation reads and returns, and of the Python numbers among its arguments."""
BACKWARD = " in backward"
"""End of the name of an operation that computes gradients."""
MOST_OPERATIONS = 4000
PLAIN = (Tensor, nn.Parameter)
LIBRARIES = tuple(f"{Path(file).parent}/" for file in (torch.__file__, __file__) if file)


class Tracer:
    """Runs operations of a step until a tensor is recorded, and keeps their numbers or replaces some.

    Their names are `MODULE|FILE:LINE|OPERATION`: the same on ranks and on one process. A gradient's operation
    has the module and line of the forward operation, but that of a custom function those of its backward.
    """

    def __init__(self, recorder: Recorder, target: Key, patches: Mapping[Key, Tensor] | None = None) -> None:
        self.recorder, self.target, self.patches = recorder, target, patches
        self.patched = {key.name for key in patches or ()}
        self.kept: dict[Key, Tensor] = {}
        self.sources: dict[Key, Key] = {}
        """Of what is read: the result that it is, or was before ranks communicated it."""
        self.counts: Counter[tuple[int, str]] = Counter()
        self.made: dict[tuple[object, ...], Key] = {}
        """By identity of a tensor: the result that it is."""
        self.alive: list[Any] = []
        """Results, so that none takes the address of another."""
        self.changed: list[tuple[Tensor, Tensor]] = []
        """Constants, and their own numbers."""
        self.nodes: dict[int, str] = {}
        """Module and line of the forward operation of a node of the autograd graph."""
        tensors = (getattr(p, "_local_tensor", p) for p in recorder.parameters.values())
        self.parameters = {(x.untyped_storage().data_ptr(), x.shape) for x in tensors}

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        is_in_scope = self._is_in_scope()
        if is_in_scope or self.target.kind in ("backward", "gradient"):  # which name forward operations
            place = self._place()
        if not is_in_scope:
            return func(*args, **kwargs)
        if func.namespace in COLLECTIVES or "empty" in func._opname:
            result = func(*args, **kwargs)
            # what is communicated, or made empty for that, has the source of its first input
            sources = (self.made.get(identity(x)) for x in tree_leaves(args) if isinstance(x, Tensor))
            if (source := next(filter(None, sources), None)) is not None:
                self._note(result, source)
            return result
        name = f"{place}|{func._opname.strip('_')}{BACKWARD if is_backward() else ''}"
        micro = self.recorder.micro if self.recorder.where else 0
        key = Key(self.recorder.step, READ, name, self.counts[micro, name], 0, micro)
        self.counts[micro, name] += 1
        if self.patches is not None and name not in self.patched:
            result = func(*args, **kwargs)
            self._note(result, key)
            return result
        leaves, spec = tree_flatten((args, kwargs))
        for item, leaf in enumerate(leaves):
            if self._is_seen(leaf):
                leaves[item] = self._read(key._replace(item=item), leaf, func._schema.is_mutable)
        own_args, own_kwargs = tree_unflatten(leaves, spec)
        own_args = self._numbers(key._replace(kind=NUMBERS), own_args)
        results, spec = tree_flatten(func(*own_args, **own_kwargs))
        for item, x in enumerate(results):
            if type(x) in PLAIN or (self.recorder.phase == "update" and isinstance(x, Tensor)):
                result = key._replace(kind=RESULT, item=item)
                results[item] = self._return(result, x, func._schema.is_mutable)
        return tree_unflatten(results, spec)

    def _is_in_scope(self) -> bool:
        """True between the last tensor that is right and the target."""
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
        is_left = target._replace(kind=kind, micro=recorder.micro) in recorder.record.tensors
        return is_left == (target.kind == "backward")

    def _place(self) -> str:
        recorder = self.recorder
        place = f"{recorder.where[-1] if recorder.where else recorder.phase}|{user_line()}"
        if not is_backward():
            self.nodes.setdefault(torch.autograd._get_sequence_nr() - 1, place)
            return place
        node = torch._C._current_autograd_node()
        if node is None:
            return place
        forward = self.nodes.get(node._sequence_nr(), place)
        if isinstance(node, BackwardCFunction):
            return f"{forward.split('|')[0]}|{user_line()}"
        return forward

    def _is_seen(self, x: Any) -> bool:
        """True for plain tensors but parameters; of these for a slice of all rows: others read their part."""
        if type(x) not in PLAIN or (x.untyped_storage().data_ptr(), x.shape) not in self.parameters:
            return type(x) in PLAIN
        return self.recorder.phase != "update" and identity(x) in self.made

    def _note(self, result: Any, key: Key) -> None:
        for x in tree_leaves(result):
            if isinstance(x, Tensor):
                self.made[identity(x)] = key
                self.alive.append(x)

    def _read(self, key: Key, x: Tensor, is_mutable: bool) -> Tensor:
        """The tensor, or what takes its place."""
        if self.patches is not None:
            value = self.patches.get(key)
            if value is None or value.shape != x.shape or is_mutable:
                return x
            if is_backward() or (identity(x) in self.made and self.target.kind != "backward"):
                return value.to(x.dtype).clone()
            # what else reads a constant, and backward what it has saved, takes the same numbers
            self.changed.append((x.data, x.detach().clone()))
            x.data.copy_(value)
            return x
        if len(self.kept) < MOST_OPERATIONS:
            self.kept[key] = x.detach().clone()
            if (source := self.made.get(identity(x))) is not None:
                self.sources[key] = source
        return x

    def _numbers(self, key: Key, args: Sequence[Any]) -> Sequence[Any]:
        """Arguments, or with other numbers in the place of theirs."""
        numbers = torch.tensor([x for x in args if isinstance(x, int | float)], dtype=torch.float64)
        if self.patches is None:
            self.kept[key] = numbers
        value = None if self.patches is None else self.patches.get(key)
        if value is None or value.shape != numbers.shape:
            return args
        others = iter(value.tolist())
        return [type(x)(next(others)) if isinstance(x, int | float) else x for x in args]

    def _return(self, key: Key, x: Tensor, is_mutable: bool) -> Tensor:
        """The result, or what takes its place."""
        if self.patches is None:
            if len(self.kept) < MOST_OPERATIONS:
                self.kept[key] = x.detach().clone()
            self._note(x, key)
            return x
        value = self.patches.get(key)
        if value is not None and value.shape == x.shape:
            x = x.copy_(value) if is_mutable else value.to(x.dtype).clone()
        self._note(x, key)
        return x


def identity(x: Tensor) -> tuple[object, ...]:
    """Equal for a tensor and what autograd or a view makes of the same numbers."""
    if type(x) not in PLAIN:
        return (id(x),)
    return x.untyped_storage().data_ptr(), x.storage_offset(), tuple(x.shape), x.stride()


def is_backward() -> bool:
    return bool(torch._C._current_graph_task_id() != -1)


def user_line() -> str:
    """File and line of the innermost frame that is neither PyTorch's nor the audit's.

    Where the step has none, as in an optimizer of PyTorch: of PyTorch's innermost frame in a public module.
    """
    frame: Any = sys._getframe()
    line = ""
    while frame.f_code is not Recorder._run_step.__code__ and frame.f_back is not None:
        file, is_library = _file_of(frame.f_code.co_filename)
        if not is_library:
            return f"{file}:{frame.f_lineno}"
        if file and not line:
            line = f"{file}:{frame.f_lineno}"
        frame = frame.f_back
    return line


@cache
def _file_of(path: str) -> tuple[str, bool]:
    """A file as reports name it, empty for one that they do not, and if it is PyTorch's or the audit's."""
    if not path.startswith((*LIBRARIES, "<")):
        return os.path.basename(path), False
    within = path.removeprefix(LIBRARIES[0])
    is_named = within != path and not any(part.startswith("_") for part in within.split("/"))
    return (f"torch/{within}" if is_named else ""), True


def advance(recorder: Recorder, step: int) -> None:
    """Run the steps before one."""
    for recorder.step in range(step):
        recorder._run_step()
    recorder.step = step


def trace(recorder: Recorder, place: Location, patches: Mapping[Key, Tensor] | None = None) -> Tracer:
    """Run the step of a wrong tensor; record operations before it, and the tensor or all weights."""
    recorder.calls.clear()
    recorder.record.tensors.clear()
    item = place.key.item if place.key.kind == "scalar" else 0
    tracer = Tracer(recorder, place.key._replace(call=0, item=item), patches)
    recorder.call = tracer.run
    try:
        recorder._run_step(has_update=place.key.kind in ("gradient", "weight"))
    finally:
        for x, value in reversed(tracer.changed):
            x.copy_(value)
    size = 2 if place.key.kind == "weight" else 5
    others = recorder.record.tensors.items()
    kept = {k: x for k, x in others if k.kind == "input" or k[:size] == place.key[:size]}
    recorder.record.tensors = tracer.kept | kept
    return tracer


def trace_rank(recorder: Recorder, place: Location) -> None:
    """Record the operations of a rank."""
    advance(recorder, place.key.step)
    trace(recorder, place)


class State:
    """A snapshot of parameters, buffers and the optimizer, to run a step from the same start again."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, module, self.optimizer = recorder, recorder.subject.module, recorder.subject.optimizer
        buffers = nn.Module.buffers(module)  # of Megatron's wrapper these are others
        self.tensors = {x: x.detach().clone() for x in (*module.parameters(), *buffers)}
        self.moments, self.counts = {}, {}
        if self.optimizer is not None:
            self.moments = {p: _cloned(own) for p, own in self.optimizer.state.items()}
            self.counts = {k: v for k, v in vars(self.optimizer).items() if type(v) in (int, float)}

    def restore(self) -> None:
        with torch.no_grad():
            for x, value in self.tensors.items():
                x.copy_(value)
        if self.optimizer is not None:
            self.optimizer.state.clear()
            self.optimizer.state.update({p: _cloned(own) for p, own in self.moments.items()})
            vars(self.optimizer).update(self.counts)


def _cloned(moments: Mapping[Any, Any]) -> dict[Any, Any]:
    return {k: x.clone() if isinstance(x, Tensor) else x for k, x in moments.items()}
