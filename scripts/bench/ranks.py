"""Contenders in processes of their own: one, or as many as ranks of a layout.

A process holds one contender, so that peak memory is its own, and no other's freed memory, compiled code or
patched module is in its way. It waits on a pipe, without computing, while others are timed.
"""

import contextlib
import gc
import math
import multiprocessing as mp
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench.contenders import MlmTrainee, NanoGptTrainee, Trainee, TransformersTrainee
from bench.equality import Agreement, Reference
from bench.llama import MixtralShape, TransformersMixtral
from bench.machine import synchronise
from bench.megatron import MegatronMixtral
from bench.memory import measure_peak
from bench.spec import Spec
from bench.stats import Timing
from mlm.parallel.mesh import build_mesh
from mlm.util.errors import UserError

WARM_UP_STEPS = 2
"""Steps before anything is measured: optimizer state, caches, allocator."""
CONTEXT = mp.get_context("forkserver")  # torch is imported once for all contenders
CONTEXT.set_forkserver_preload(["mlm.training.trainer", "transformers.models.gpt2.modeling_gpt2"])
TICK_S = 0.02
"""Error of `busy_s`."""
CLOSE_S = 10.0
"""Seconds processes have to end by themselves."""


def build_trainee(name: str, spec: Spec, rank: int) -> Trainee:
    """The contender `name` on this process. Raises UserError if its checkout or package is missing."""
    device = torch.device("cpu")
    if spec.device == "cuda":
        torch.cuda.set_device(rank)
        device = torch.device("cuda", rank)
    if "=" in name:
        from bench.layouts import LayoutTrainee, parse_layout

        p = parse_layout(name).parallel
        sizes = {"tp": p.tp, "cp": p.cp, "pp": p.pp, "dp": p.dp or 1, "ep": p.ep, "expert_tp": p.expert_tp}
        ctx = build_mesh(**sizes, device=device, timeout_s=600)
        return LayoutTrainee(name, spec, device, ctx)
    kinds: dict[str, type[Trainee]] = {
        "mlm": MlmTrainee,
        "transformers": TransformersTrainee,
        "nanogpt": NanoGptTrainee,
        "megatron": MegatronMixtral,
    }
    if isinstance(spec.shape, MixtralShape):
        kinds["transformers"] = TransformersMixtral
    return kinds[name.split("-")[0]](name, spec, device)


def measure_steps(trainee: Trainee, first: int, steps: int) -> Timing:
    """Wall and processor time per step of this process, the device synchronised at both ends."""
    synchronise(trainee.device)
    waited, cpu, begin = waited_s(), time.process_time(), time.perf_counter()
    for index in range(first, first + steps):
        trainee.step(index)
    synchronise(trainee.device)
    seconds = time.perf_counter() - begin
    return Timing(seconds / steps, (time.process_time() - cpu) / steps, (waited_s() - waited) / steps)


def waited_s() -> float:
    """Seconds that this process's threads waited for a processor; 0.0 where the kernel does not report it."""
    total = 0
    for schedstat in Path("/proc/self/task").glob("*/schedstat"):
        try:
            total += int(schedstat.read_text().split()[1])  # nanoseconds
        except OSError:  # the thread ended
            continue
    return total / 1e9


def for_others_s(waited: float, others: float) -> float:
    """Of the time that ranks waited for a processor, the most that was other jobs', which ran for `others`.

    The rest they waited for each other, and for their threads that communicate. `others` is NaN where the
    system does not report it.
    """
    return waited if math.isnan(others) else max(0.0, min(waited, others))


def busy_s() -> float:
    """Processor seconds of all that ran on this machine since it was started; NaN where it does not tell."""
    try:
        user, nice, system, _, _, irq, softirq, *_ = Path("/proc/stat").read_text().split()[1:]
    except OSError:
        return math.nan
    return sum(map(int, (user, nice, system, irq, softirq))) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Facts:
    """A contender's description of itself once built."""

    flops_per_token: float
    notes: tuple[str, ...]
    build_s: float


@contextlib.contextmanager
def no_interrupts() -> Iterator[None]:
    """Processes started inside never see Ctrl-C: the first process answers it and ends them."""
    resource_tracker.ensure_running()  # or the first start would start it, and unblock the signal on the way
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


class Ranks:
    """`processes` processes that hold one contender. Close it, or use it as a context manager."""

    def __init__(self, name: str, spec: Spec, processes: int) -> None:
        self.name, spec = name, spec.of(name)
        self.folder = tempfile.TemporaryDirectory(prefix="bench-train-")
        store = os.path.join(self.folder.name, "store")
        self.members: list[tuple[BaseProcess, Connection]] = []
        with no_interrupts():
            for rank in range(processes):
                parent, child = CONTEXT.Pipe()
                arguments = (child, name, spec, processes, rank, store)
                process = CONTEXT.Process(target=_serve, args=arguments, daemon=True)
                process.start()
                child.close()
                self.members.append((process, parent))
        try:
            self.facts: Facts = self._answers()[0]
        except BaseException:
            self.close()
            raise

    def save_reference(self, path: Path) -> None:
        """Write loss and gradients of a contender in one process, for others to be compared with."""
        self._ask("reference", str(path))

    def check(self, path: Path) -> Agreement:
        """Compare with what another's `save_reference` wrote. Raises UserError."""
        (found,) = self._ask("check", str(path))
        assert isinstance(found, Agreement)
        return found

    def time(self, first: int, steps: int) -> Timing:
        """Time per step: wall time of the slowest rank, processor time of all."""
        busy = busy_s()
        timings: list[Timing] = self._ask("time", first, steps)
        cpu = sum(t.cpu_s for t in timings)
        others = (busy_s() - busy + TICK_S) / steps - cpu
        waited = sum(t.waited_s for t in timings)
        return Timing(max(t.seconds for t in timings), cpu, for_others_s(waited, others))

    def memory(self) -> list[dict[str, Any]]:
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
            for pipe in wait(list(waiting)):
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
        """End the processes: those that do not end by themselves, stuck in a collective, are killed."""
        for _, pipe in self.members:
            pipe.close()
        deadline = time.monotonic() + CLOSE_S
        for process, _ in self.members:
            process.join(max(0.1, deadline - time.monotonic()))
            process.kill()
            process.join()
        self.members = []
        self.folder.cleanup()

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Connection, name: str, spec: Spec, processes: int, rank: int, store: str) -> None:
    try:
        begin = time.perf_counter()
        spec.prepare_process(processes)
        if "=" in name:
            backend = "nccl" if spec.device == "cuda" else "gloo"
            meeting = dist.FileStore(store, processes)
            dist.init_process_group(
                backend, store=meeting, rank=rank, world_size=processes, timeout=timedelta(hours=1)
            )
        trainee = build_trainee(name, spec, rank)
        if not spec.stock:  # as `mlm` does after its imports: collections look at newer objects alone
            gc.freeze()
        built_s = time.perf_counter() - begin
        pipe.send(("ok", Facts(trainee.flops_per_token(), tuple(trainee.notes), built_s)))
        while True:
            verb, *args = pipe.recv()
            answer: Any = None
            if verb == "check":
                answer = trainee.check(Reference.load(Path(args[0])))
            elif verb == "reference":
                trainee.reference().save(Path(args[0]))
            elif verb == "memory":
                answer = measure_peak(trainee)
            else:
                assert verb == "time", verb
                if dist.is_initialized():
                    dist.barrier()  # all ranks start at once
                answer = measure_steps(trainee, *args)
            pipe.send(("ok", answer))
    except (EOFError, ConnectionError):  # the first process closed the pipe, or is gone
        if dist.is_initialized():
            dist.destroy_process_group()
    except UserError as error:
        pipe.send(("mistake", str(error)))
    except Exception:
        pipe.send(("failure", traceback.format_exc()))
