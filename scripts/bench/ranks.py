"""Contenders in processes of their own: tensor-parallel ranks, or one fresh process for its peak memory.

The ranks wait on a pipe, without computing, while others are timed.
"""

import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.contenders import MlmTrainee, NanoGptTrainee, Trainee, TransformersTrainee
from bench.equality import Agreement, Reference
from bench.memory import measure_peak
from bench.spec import Spec
from mlm.config.errors import UserError
from mlm.parallel.mesh import build_mesh

WARM_UP_STEPS = 2
"""Steps before anything is measured: optimizer state, caches, allocator."""


def build_trainee(name: str, spec: Spec, processes: int, rank: int) -> Trainee:
    """The contender `name` on this process. Raises UserError for one that does not exist or lacks its checkout."""
    device = spec.torch_device(rank)
    if processes > 1 and name.startswith("mlm"):
        ctx = build_mesh(tp=processes, pp=1, dp=1, device=device, timeout_s=600)
        return MlmTrainee(name, spec, device, ctx)
    if name.startswith("picotron"):
        from bench.picotron_peer import PicotronTrainee  # it changes the environment: in its own process only

        return PicotronTrainee(name, spec, device)
    kinds = {"mlm": MlmTrainee, "transformers": TransformersTrainee, "nanogpt": NanoGptTrainee}
    return kinds[name.split("-")[0]](name, spec, device)


def time_steps(trainee: Trainee, first: int, steps: int) -> float:
    """Seconds per step, the device synchronised at both ends."""
    synchronise(trainee.device)
    begin = time.perf_counter()
    for index in range(first, first + steps):
        trainee.step(index)
    synchronise(trainee.device)
    return (time.perf_counter() - begin) / steps


def synchronise(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@dataclass(frozen=True)
class Facts:
    """What a contender says of itself once built."""

    flops_per_token: float
    notes: tuple[str, ...]
    build_s: float
    allocator_set: bool


class Ranks:
    """`processes` processes that hold one contender. Close it, or use it as a context manager."""

    def __init__(self, name: str, spec: Spec, processes: int) -> None:
        self.name = name
        self.folder = tempfile.TemporaryDirectory(prefix="bench-train-")
        store = os.path.join(self.folder.name, "store")
        context = mp.get_context("spawn")
        self.members: list[tuple[BaseProcess, Connection]] = []
        for rank in range(processes):
            parent, child = context.Pipe()
            process = context.Process(
                target=_serve, args=(child, name, spec, processes, rank, store), daemon=True
            )
            process.start()
            child.close()
            self.members.append((process, parent))
        try:
            self.facts: Facts = self._answers()[0]
        except BaseException:
            self.close()
            raise

    def check(self, reference: Reference | None) -> Agreement:
        """Compare with the reference; the worst of all ranks."""
        assert reference is not None
        path = Path(self.folder.name) / "reference.safetensors"
        reference.save(path)
        agreements: list[Agreement] = self._ask("check", str(path))
        path.unlink()
        return max(agreements, key=lambda a: a.gradient_error)

    def time(self, first: int, steps: int) -> float:
        """Seconds per step of the slowest rank."""
        return max(self._ask("time", first, steps))

    def memory(self) -> list[dict[str, Any]]:
        """Each rank's peak memory above weights and optimizer state."""
        return self._ask("memory")

    def _ask(self, *message: Any) -> list[Any]:
        for _, pipe in self.members:
            pipe.send(message)
        return self._answers()

    def _answers(self) -> list[Any]:
        """One answer of each rank. A failure is raised at once, whichever rank it comes from."""
        answers: dict[int, Any] = {}
        while len(answers) < len(self.members):
            waiting = {self.members[r][1]: r for r in range(len(self.members)) if r not in answers}
            for pipe in mp.connection.wait(list(waiting)):
                assert isinstance(pipe, Connection)
                rank = waiting[pipe]
                try:
                    kind, value = pipe.recv()
                except EOFError:
                    code = self.members[rank][0].exitcode
                    raise UserError(f"{self.name}: rank {rank} ended unasked (exit code {code})") from None
                if kind == "mistake":
                    raise UserError(value)
                if kind == "failure":
                    raise RuntimeError(f"{self.name}, rank {rank}:\n{value}")
                answers[rank] = value
        return [answers[r] for r in range(len(self.members))]

    def close(self) -> None:
        """End the processes."""
        for process, pipe in self.members:
            pipe.close()
            process.kill()
            process.join()
        self.members = []
        self.folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, name: str, spec: Spec, processes: int, rank: int, store: str) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the first process answers Ctrl-C and ends us
    answer: Callable[..., Any]
    try:
        begin = time.perf_counter()
        allocator_set = spec.prepare_process(processes)
        if processes > 1 or name.startswith("picotron"):
            backend = "nccl" if spec.device == "cuda" else "gloo"
            meeting = dist.FileStore(store, processes)
            dist.init_process_group(
                backend, store=meeting, rank=rank, world_size=processes, timeout=timedelta(hours=1)
            )
        trainee = build_trainee(name, spec, processes, rank)
        facts = Facts(
            trainee.flops_per_token(), tuple(trainee.notes), time.perf_counter() - begin, allocator_set
        )
        pipe.send(("ok", facts))
        while True:
            verb, *args = pipe.recv()
            if verb == "check":
                answer = lambda path: trainee.check(Reference.load(Path(path)))  # noqa: E731
            elif verb == "time":
                answer = lambda first, steps: _together(trainee, first, steps)  # noqa: E731
            else:
                answer = lambda: measure_peak(trainee, WARM_UP_STEPS)  # noqa: E731
            pipe.send(("ok", answer(*args)))
    except EOFError:
        return
    except UserError as error:
        pipe.send(("mistake", str(error)))
    except Exception:
        pipe.send(("failure", traceback.format_exc()))


def _together(trainee: Trainee, first: int, steps: int) -> float:
    """Seconds per step, all ranks starting at once."""
    if dist.is_initialized():
        dist.barrier()
    return time_steps(trainee, first, steps)
