"""Agreement of ranks: JSON carried as bytes over gloo (no pickle), and errors that all ranks raise."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from mlm.checkpoint.native.format import JSON, CheckpointError, NotFiniteError
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.watch import Wait, Watch
from mlm.util.errors import CorruptFileError, UserError

T = TypeVar("T")

KINDS: dict[str, type[UserError]] = {
    kind.__name__: kind for kind in (CheckpointError, CorruptFileError, NotFiniteError)
}


@dataclass(frozen=True)
class Ranks:
    """Ranks that save or load together. `group` is a gloo group of all, None for a single rank."""

    rank: int = 0
    world_size: int = 1
    group: ProcessGroup | None = None
    watch: Watch = field(default_factory=Watch, compare=False)
    """Reports the pending collective when a rank is lost."""

    def __post_init__(self) -> None:
        assert self.world_size == 1 or self.group is not None, "several ranks need a gloo group"
        assert self.group is None or (self.group.rank(), self.group.size()) == (self.rank, self.world_size)

    @classmethod
    def of(cls, ctx: ParallelContext) -> "Ranks":
        return cls(ctx.rank, ctx.world_size, ctx.host_group, ctx.watch)

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def all_gather(self, value: JSON) -> list[JSON]:
        """Return every rank's value, on every rank."""
        return [json.loads(part) for part in self._gather(json.dumps(value).encode(), to_all=True)]

    def gather(self, value: JSON) -> list[JSON]:
        """Return every rank's value on rank 0, an empty list on other ranks."""
        return [json.loads(part) for part in self.gather_bytes(json.dumps(value).encode())]

    def gather_bytes(self, value: bytes) -> list[bytes]:
        """Return every rank's bytes (not empty) on rank 0, an empty list on other ranks."""
        return self._gather(value, to_all=False)

    def _gather(self, value: bytes, *, to_all: bool) -> list[bytes]:
        if self.group is None:
            return [value]
        payload = torch.frombuffer(bytearray(value), dtype=torch.uint8)
        lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(self.world_size)]
        with self._waiting("all_gather"):
            dist.all_gather(lengths, torch.tensor([payload.numel()]), group=self.group)
        sizes = [int(n) for n in lengths]
        padded = torch.zeros(max(sizes), dtype=torch.uint8)  # gloo rejects uneven sizes
        padded[: payload.numel()] = payload
        received = [torch.empty_like(padded) for _ in sizes] if to_all or self.is_main else []
        with self._waiting("all_gather" if to_all else "gather"):
            if to_all:
                dist.all_gather(received, padded, group=self.group)
            else:
                dist.gather(padded, received if self.is_main else None, group=self.group, group_dst=0)
        return [content[:n].numpy().tobytes() for content, n in zip(received, sizes, strict=False)]

    def broadcast(self, value: JSON) -> JSON:
        """Return rank 0's value, on every rank."""
        if self.group is None:
            return value
        payload = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
        length = torch.tensor([payload.numel()])
        with self._waiting("broadcast"):
            dist.broadcast(length, group=self.group, group_src=0)
            text = payload if self.is_main else torch.empty(int(length), dtype=torch.uint8)
            dist.broadcast(text, group=self.group, group_src=0)
        return json.loads(text.numpy().tobytes())

    def any_of(self, flags: Sequence[bool]) -> list[bool]:
        """Return for each flag True if it is true on some rank. All ranks pass equally many."""
        any_flags = torch.tensor(flags, dtype=torch.uint8)
        if self.group is not None and flags:
            with self._waiting("all_reduce"):
                dist.all_reduce(any_flags, op=dist.ReduceOp.MAX, group=self.group)
        return [bool(flag) for flag in any_flags.tolist()]

    def _waiting(self, op: str) -> Wait:
        return self.watch.waiting(f"{op} for a checkpoint", "world", tuple(range(self.world_size)))

    def together(self, work: Callable[[], T], explain: Callable[[Exception], UserError]) -> T:
        """Run `work` on every rank; if it raises on any, raise the first failing rank's error on all.

        `explain` converts other exceptions to UserError. Classes in KINDS are kept, others become UserError;
        on a failing rank the original is the cause. `work` must not communicate.
        """
        cause: Exception | None = None
        shared: UserError | None = None
        result: T | None = None
        try:
            result = work()
        except Exception as e:  # any error: unshared, it would leave the other ranks waiting forever
            cause, shared = e, e if isinstance(e, UserError) else explain(e)
        # a message of bounded size: every rank receives each rank's
        verdicts = self.all_gather(shared and [type(shared).__name__, str(shared)[:2000]])
        failed = [verdict for verdict in verdicts if verdict]
        if not failed:
            return result  # type: ignore[return-value]
        kind, message = failed[0]
        suffix = f" ({len(failed) - 1} more ranks failed)" if len(failed) > 1 else ""
        raise KINDS.get(kind, UserError)(message + suffix) from cause


ONE_RANK = Ranks()
