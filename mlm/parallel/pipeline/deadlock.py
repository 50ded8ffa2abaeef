"""Proof that the ranks' instructions of a pipeline plan complete: they are carried out, without computing."""

from collections.abc import Sequence

from mlm.parallel.pipeline.actions import Action, Instruction, Receive, ScheduleError, Send
from mlm.parallel.pipeline.simulate import consumer, listed, needs_neighbour, num_chunks


def check_no_deadlock(instructions: Sequence[Sequence[Instruction]]) -> None:
    """Execute the ranks' instructions under the strictest rules; return if all complete.

    A rank does one thing at a time in its order. A computation waits for its input; a transfer waits until
    its data is computed and the rank at the other end has come to it too (rendezvous). What completes so
    also completes where transfers overlap the computation, in order, on one stream per rank or per pair.

    Raises ScheduleError naming the ranks and the instruction each is stuck at, or a transfer whose two ends
    mean different data.
    """
    execution = _Execution(instructions)
    ready = list(range(len(instructions)))  # ranks that may have become able to continue
    while ready:
        rank = ready.pop()
        while (freed := execution.step(rank)) is not None:
            ready += freed
    stuck = {rank: execution.current(rank) for rank in range(len(instructions))}
    left = [f"rank {rank} at {instruction}" for rank, instruction in stuck.items() if instruction]
    if left:
        raise ScheduleError("deadlock: " + listed(left))


class _Execution:
    """Progress of every rank in `check_no_deadlock`."""

    def __init__(self, instructions: Sequence[Sequence[Instruction]]) -> None:
        self.instructions = instructions
        self.p = len(instructions)
        self.v = num_chunks([[i for i in mine if isinstance(i, Action)] for mine in instructions])
        self.position = [0] * self.p
        self.computed: list[set[Action]] = [set() for _ in range(self.p)]
        self.arrived: list[set[Action]] = [set() for _ in range(self.p)]
        """Per rank, the actions whose input from another rank is there."""

    def current(self, rank: int) -> Instruction | None:
        """Return the next instruction of a rank; None at its end."""
        mine, position = self.instructions[rank], self.position[rank]
        return mine[position] if position < len(mine) else None

    def step(self, rank: int) -> tuple[int, ...] | None:
        """Carry out what `rank` is at. Returns the other ranks this moved on; None if `rank` has to wait."""
        now = self.current(rank)
        if now is None:
            return None
        if isinstance(now, Action):
            remote = self.p > 1 and needs_neighbour(rank, now, p=self.p, v=self.v)
            if remote and now not in self.arrived[rank]:
                return None
            self.computed[rank].add(now)
            self.position[rank] += 1
            return ()
        there = self.current(now.peer)
        if isinstance(now, Send) and isinstance(there, Receive) and there.peer == rank:
            moved = self._transfer(rank, now, now.peer, there)
        elif isinstance(now, Receive) and isinstance(there, Send) and there.peer == rank:
            moved = self._transfer(now.peer, there, rank, now)
        else:
            return None
        return (now.peer,) if moved else None

    def _transfer(self, sender: int, send: Send, receiver: int, receive: Receive) -> bool:
        """Let both ends of a transfer pass it, if its data is computed."""
        if consumer(sender, send.action, p=self.p, v=self.v) != (receiver, receive.action):
            raise ScheduleError(f"mismatch: rank {sender} at {send} meets rank {receiver} at {receive}")
        if send.action not in self.computed[sender]:
            return False
        self.arrived[receiver].add(receive.action)
        self.position[sender] += 1
        self.position[receiver] += 1
        return True
