"""Trace of operators for a model of time: products, attention, bytes moved, and communication.

Events are grouped by place: the phase of a step and the label of the module that computes. A message is in
flight from its start to its wait, in program order, so that computation in between may hide it.

Kernels other than products have two sums of bytes. Eager: each kernel reads its operands from memory and
writes its results. Fused, as by a compiler: a kernel does not read the results of kernels of the same place,
reads each other tensor once, and results that only kernels of that place read are never written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from mlm.parallel.watch import Wait, Watch

ALLOCATIONS = ("empty", "new_empty", "_local_scalar_dense", "is_", "equal")
"""Prefixes of the names of operators that touch no element."""
OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")
"""Operators that overwrite a tensor without reading it."""
LOOKUPS = ("embedding", "index", "index_select", "gather", "index_put_", "_index_put_impl_", "index_add_")
"""Operators that read or write some rows of a table."""
Place = tuple[str, str]
"""Phase of a step, and label of the computing module."""


class Product(NamedTuple):
    """`times` products [m, k] x [k, n]."""

    times: float
    m: float
    k: float
    n: float
    bytes: int
    """Operands and result."""
    operand: int
    """Bytes per element of the operands: 1 for 8-bit floats."""


class Attention(NamedTuple):
    flops: float
    """Without the masked half of causal attention."""
    bytes: int


class Message(NamedTuple):
    axis: str
    operation: str
    ranks: int
    """Size of the axis."""
    bytes: int
    """Full tensor: after a gather, before a reduction or scatter."""
    number: int = 0
    """Number in the trace; 0 for a type of message."""

    @property
    def ring_bytes(self) -> float:
        """Bytes that this rank sends if collectives run over a ring."""
        n = self.ranks
        share = {"all-reduce": 2 * (n - 1) / n, "receive": 0.0}
        share |= dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), (n - 1) / n)
        return self.bytes * share.get(self.operation, 1.0)


class Waited(NamedTuple):
    """The wait for a message."""

    number: int


Event = Product | Attention | Message | Waited


@dataclass
class Work:
    events: list[Event] = field(default_factory=list)
    eager_bytes: int = 0
    fused_bytes: int = 0
    kernels: int = 0
    """Kernels other than products."""


class Trace:
    """Work by place, from the operators that a `Meter` reports."""

    def __init__(self) -> None:
        self.passes: list[defaultdict[Place, Work]] = [defaultdict(Work)]
        """Work by place: before the first pass, and of each pass."""
        self._unwritten: dict[int, tuple[Place, int]] = {}
        """Place and bytes of kernels' results that no other place has read yet, by storage."""
        self._readers: defaultdict[int, set[Place]] = defaultdict(set)
        """Places that have read a storage."""
        self._in_flight: defaultdict[str, list[int]] = defaultdict(list)
        """Numbers of messages by axis."""
        self._wait: tuple[str, Place] | None = None
        """Axis of a message that begins or is waited for, and the place; the next operator tells which."""
        self._messages = 0
        self.place: Place = ("", "")
        """Place of the newest operator."""

    @property
    def work(self) -> defaultdict[Place, Work]:
        return self.passes[-1]

    def begin_pass(self) -> None:
        """Begin another pass: later work belongs to it."""
        self.passes.append(defaultdict(Work))

    def waiting(self, axis: str) -> None:
        """Record that the program begins a message on an axis, or waits for one."""
        self._end_wait()
        self._wait = axis, self.place

    def _end_wait(self) -> None:
        if self._wait is not None:
            axis, place = self._wait
            if self._in_flight[axis]:
                self.work[place].events.append(Waited(self._in_flight[axis].pop(0)))
            self._wait = None

    def message(self, place: Place, message: Message) -> None:
        self.place, self._wait = place, None
        self._messages += 1
        self._in_flight[message.axis].append(self._messages)
        self.work[place].events.append(message._replace(number=self._messages))

    def operator(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, flops: int
    ) -> None:
        """Record an operator; `flops` counts its products."""
        if func.namespace == "c10d":
            self._write_results(tensors_of(args))
            return
        self.place = place
        self._end_wait()
        name: str = func._overloadpacket.__name__
        arguments = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        changed = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        written = list(tensors_of(x for key, x in arguments.items() if key in changed))
        skips = name in OVERWRITES or "out" in changed
        operands = list(tensors_of(x for key, x in arguments.items() if not (skips and key in changed)))
        before = {x.untyped_storage()._cdata for x in (*operands, *written)}
        results = [x for x in tensors_of([out]) if x.untyped_storage()._cdata not in before]
        for x in results:
            self._unwritten.pop(x.untyped_storage()._cdata, None)
            self._readers.pop(x.untyped_storage()._cdata, None)
        if name.startswith(ALLOCATIONS) or not (results or written):
            return
        if flops or name in LOOKUPS:
            self._write_results(operands)
        work = self.work[place]
        if flops:
            work.events.append(product_of(name, arguments, operands, results or written, flops))
            return
        work.kernels += 1
        if name in LOOKUPS:
            size = 2 * (sum(map(bytes_of, results)) or bytes_of(operands[-1]))
            work.eager_bytes += size
            work.fused_bytes += size
            return
        work.eager_bytes += sum(map(bytes_of, (*operands, *results, *written)))
        for x in operands:
            key = x.untyped_storage()._cdata
            if key in self._unwritten and self._unwritten[key][0] == place:
                continue
            self._write_results([x])
            if place not in self._readers[key]:
                self._readers[key].add(place)
                work.fused_bytes += bytes_of(x)
        work.fused_bytes += sum(map(bytes_of, written))
        self._unwritten |= {x.untyped_storage()._cdata: (place, bytes_of(x)) for x in results}

    def _write_results(self, tensors: Iterable[Tensor]) -> None:
        """Count the writes of kernels' results that another place reads."""
        for x in tensors:
            place, size = self._unwritten.pop(x.untyped_storage()._cdata, (None, 0))
            if place is not None:
                self.work[place].fused_bytes += size


class TracedWatch(Watch):
    """Reports the begins and waits of messages to a trace."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def waiting(self, op: str, axis: str, ranks: tuple[int, ...], limit_s: float | None = None) -> Wait:
        self.trace.waiting(axis)
        return super().waiting(op, axis, ranks, limit_s)


def product_of(
    name: str, arguments: Mapping[str, Any], operands: list[Tensor], results: list[Tensor], flops: int
) -> Event:
    """Return the event of an operator with products."""
    size = sum(map(bytes_of, (*operands, *results)))
    if "attention" in name:
        return Attention(flops / 2 if arguments.get("is_causal") else flops, size)
    a = next(arguments[key] for key in ("mat1", "batch1", "self") if key in arguments)
    b = next(arguments[key] for key in ("mat2", "batch2", "weight") if key in arguments)
    k, n = float(a.shape[-1]), float(b.shape[-1])
    m = a.shape[-2] / (b.shape[0] if b.dim() == 3 and a.dim() == 2 else 1)  # rows sorted by expert
    return Product(flops / (2 * m * k * n), m, k, n, size, a.element_size())


def bytes_of(x: Tensor) -> int:
    """Bytes of a tensor in memory; an expanded one has those of its storage."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among values and in nested lists."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def sum_work(works: Iterable[Work]) -> Work:
    """Return the sum of works, with their events in order."""
    total = Work()
    for work in works:
        total.events += work.events
        total.eager_bytes += work.eager_bytes
        total.fused_bytes += work.fused_bytes
        total.kernels += work.kernels
    return total
