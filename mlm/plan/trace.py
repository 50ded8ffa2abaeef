"""Trace of what operators do, for a model of time: products, attention, bytes moved, and communication.

Events are kept by place: the phase of a step and the label of the module that computes. A message is under
way from its start to its wait, as the program orders them, so that what is computed in between may hide it.

Of kernels that are not products two sums of bytes are kept. Eager: each reads its operands from memory and
writes its results there. Fused, as a compiler makes them: a tensor that a kernel of the same place made is
not read again, each other is read once, and what nothing but kernels of that place reads is never written.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor

from mlm.parallel.watch import Wait, Watch

ALLOCATIONS = ("empty", "new_empty", "_local_scalar_dense", "is_", "equal")
"""Beginnings of the names of operators that touch no element."""
OVERWRITES = ("copy_", "_foreach_copy_", "fill_", "zero_", "_foreach_zero_")
"""Operators that do not read what they write."""
LOOKUPS = ("embedding", "index", "index_select", "gather", "index_put_", "_index_put_impl_", "index_add_")
"""Operators that read or write some rows of a table."""
Place = tuple[str, str]
"""Phase of a step, and label of what computes."""


class Product(NamedTuple):
    """`times` products [m, k] x [k, n]."""

    times: float
    m: float
    k: float
    n: float
    bytes: int
    """Of both operands and the result."""
    operand: int
    """Bytes of an element of the operands: 1 of 8-bit floats."""


class Attention(NamedTuple):
    flops: float
    """Of a causal one the half that is not masked."""
    bytes: int


class Message(NamedTuple):
    axis: str
    operation: str
    ranks: int
    """Size of the axis."""
    bytes: int
    """Of the whole tensor, that is the gathered one, or the one that is reduced and scattered."""
    number: int = 0
    """Number in the trace; 0 for a type of message."""

    @property
    def ring_bytes(self) -> float:
        """Bytes that this rank sends, if collectives go round a ring: never its own share."""
        n = self.ranks
        share = {"all-reduce": 2 * (n - 1) / n, "receive": 0.0}
        share |= dict.fromkeys(("all-gather", "reduce-scatter", "all-to-all"), (n - 1) / n)
        return self.bytes * share.get(self.operation, 1.0)


class Waited(NamedTuple):
    """A communication whose result is needed from here on."""

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
    """Work by place, as a `Meter` reports operators."""

    def __init__(self) -> None:
        self.passes: list[defaultdict[Place, Work]] = [defaultdict(Work)]
        """Work by place: before the first pass, and from the beginning of each."""
        self._pending: dict[int, tuple[Place, int]] = {}
        """Place and bytes of what a kernel made and no other place has read yet, by storage."""
        self._read: defaultdict[int, set[Place]] = defaultdict(set)
        self._under_way: defaultdict[str, list[int]] = defaultdict(list)
        self._wait: tuple[str, Place] | None = None
        """Axis of a communication that begins or is waited for: what follows tells which."""
        self._messages = 0
        self.place: Place = ("", "")
        """Place of the newest operator."""

    @property
    def work(self) -> defaultdict[Place, Work]:
        return self.passes[-1]

    def begin_pass(self) -> None:
        """Note work from here on as of another pass."""
        self.passes.append(defaultdict(Work))

    def waiting(self, axis: str) -> None:
        """Note that the program begins a communication, or waits for one."""
        self._end_wait()
        self._wait = axis, self.place

    def _end_wait(self) -> None:
        if self._wait is not None:
            axis, place = self._wait
            if self._under_way[axis]:
                self.work[place].events.append(Waited(self._under_way[axis].pop(0)))
            self._wait = None

    def message(self, place: Place, message: Message) -> None:
        self.place, self._wait = place, None
        self._messages += 1
        self._under_way[message.axis].append(self._messages)
        self.work[place].events.append(message._replace(number=self._messages))

    def operator(
        self, place: Place, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any, flops: int
    ) -> None:
        """Note an operator; `flops` are its products', 0 if it has none."""
        if func.namespace == "c10d":
            self._write_pending(tensors_of(args))
            return
        self.place = place
        self._end_wait()
        name: str = func._overloadpacket.__name__
        arguments = {a.name: x for a, x in zip(func._schema.arguments, args, strict=False)} | dict(kwargs)
        changed = {a.name for a in func._schema.arguments if a.alias_info and a.alias_info.is_write}
        written = list(tensors_of(x for key, x in arguments.items() if key in changed))
        skips = name in OVERWRITES or "out" in changed
        read = list(tensors_of(x for key, x in arguments.items() if not (skips and key in changed)))
        before = {x.untyped_storage()._cdata for x in (*read, *written)}
        results = [x for x in tensors_of([out]) if x.untyped_storage()._cdata not in before]
        for x in results:
            self._pending.pop(x.untyped_storage()._cdata, None)
            self._read.pop(x.untyped_storage()._cdata, None)
        if name.startswith(ALLOCATIONS) or not (results or written):
            return
        if flops or name in LOOKUPS:
            self._write_pending(read)
        work = self.work[place]
        if flops:
            work.events.append(product_of(name, arguments, read, results or written, flops))
            return
        work.kernels += 1
        if name in LOOKUPS:
            size = 2 * (sum(map(bytes_of, results)) or bytes_of(read[-1]))
            work.eager_bytes += size
            work.fused_bytes += size
            return
        work.eager_bytes += sum(map(bytes_of, (*read, *results, *written)))
        for x in read:
            key = x.untyped_storage()._cdata
            if key in self._pending and self._pending[key][0] == place:
                continue
            self._write_pending([x])
            if place not in self._read[key]:
                self._read[key].add(place)
                work.fused_bytes += bytes_of(x)
        work.fused_bytes += sum(map(bytes_of, written))
        self._pending |= {x.untyped_storage()._cdata: (place, bytes_of(x)) for x in results}

    def _write_pending(self, read: Iterable[Tensor]) -> None:
        """Count as written what a kernel made and something else reads."""
        for x in read:
            place, size = self._pending.pop(x.untyped_storage()._cdata, (None, 0))
            if place is not None:
                self.work[place].fused_bytes += size


class TracedWatch(Watch):
    """Reports to a trace where communications begin and are waited for."""

    def __init__(self, trace: Trace) -> None:
        super().__init__()
        self.trace = trace

    def waiting(self, op: str, axis: str, ranks: tuple[int, ...], limit_s: float | None = None) -> Wait:
        self.trace.waiting(axis)
        return super().waiting(op, axis, ranks, limit_s)


def product_of(
    name: str, arguments: Mapping[str, Any], read: list[Tensor], results: list[Tensor], flops: int
) -> Event:
    """The event of an operator with products."""
    size = sum(map(bytes_of, (*read, *results)))
    if "attention" in name:
        return Attention(flops / 2 if arguments.get("is_causal") else flops, size)
    a = next(arguments[key] for key in ("mat1", "batch1", "self") if key in arguments)
    b = next(arguments[key] for key in ("mat2", "batch2", "weight") if key in arguments)
    k, n = float(a.shape[-1]), float(b.shape[-1])
    m = a.shape[-2] / (b.shape[0] if b.dim() == 3 and a.dim() == 2 else 1)  # rows sorted by expert
    return Product(flops / (2 * m * k * n), m, k, n, size, a.element_size())


def bytes_of(x: Tensor) -> int:
    """Bytes that a tensor takes in memory: its storage's if it is expanded."""
    return min(x.numel() * x.element_size(), x.untyped_storage().nbytes())


def tensors_of(values: Iterable[Any]) -> Iterator[Tensor]:
    """Tensors among values, and in lists of them."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from tensors_of(value)


def joined(works: Iterable[Work]) -> Work:
    """Sum of works, their events in order."""
    whole = Work()
    for work in works:
        whole.events += work.events
        whole.eager_bytes += work.eager_bytes
        whole.fused_bytes += work.fused_bytes
        whole.kernels += work.kernels
    return whole
