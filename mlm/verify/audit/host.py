"""The process of an audit: it imports the user's code once, and forks the ranks of each layout.

Ranks exchange files only with it, so that nothing here takes part in the subject's communication. The files
have no name: they end with the processes, however these end.
"""

import importlib
import importlib.util
import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryFile
from types import ModuleType
from typing import IO, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mlm.config.suggest import nearest
from mlm.util.errors import UserError
from mlm.util.system import die_with_parent
from mlm.verify.audit.compare import Comparison, Layout, Ranks, assemble_weights
from mlm.verify.audit.diagnose import Finding, diagnose
from mlm.verify.audit.record import Record, Recorder
from mlm.verify.audit.subject import AXES, AuditSubject
from mlm.verify.config import AuditConfig

GRACE_S = 5.0
"""Seconds that ranks get to report after the first has failed."""
STUCK = 1.5
"""Timeouts of a collective after which ranks that report nothing count as stuck."""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
TIMED_OUT = ("Timed out waiting", "timed out", "Timeout")
IMPORTING = "MLM_AUDIT"
"""Environment variable that is set while the user's code is imported."""
MISTAKE = "mistake: "
"""Beginning of a rank's error that is the user's."""


@dataclass(frozen=True)
class Outcome:
    """Result of the audit of one layout."""

    layout: dict[str, int]
    finding: Finding | None
    seconds: float
    compared: int = 0
    wrong: int = 0
    skipped: tuple[str, ...] = ()
    precision: str = "fp64"


def load_build(name: str) -> Callable[..., AuditSubject]:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION. Raises UserError where it cannot be imported."""
    where, _, function = name.rpartition(":")
    file = Path(where if where.endswith(".py") else f"{where}.py")
    if not where or not function:
        raise UserError(f"build={name}: names no function; type FILE.py:FUNCTION")
    if not file.is_file() and (where.endswith(".py") or os.sep in where):
        raise UserError(f"build={name}: {where} is no file; type FILE.py:FUNCTION")
    os.environ[IMPORTING] = name
    try:
        module = import_file(file) if file.is_file() else importlib.import_module(where)
    except (Exception, SystemExit) as error:
        raise UserError(f"build={name}: importing {where} fails: {first_line(error)}") from error
    finally:
        del os.environ[IMPORTING]
    found = getattr(module, function, None)
    if not callable(found):
        near = nearest(function, vars(module)) if found is None else None
        problem = f"{where} has no function {function}" if found is None else f"{function} is no function"
        raise UserError(f"build={name}: {problem}; name one of it" + (f", such as {near}" if near else ""))
    return found


def import_file(file: Path) -> ModuleType:
    """A file as a module, which may import its neighbours."""
    sys.path.insert(0, str(file.resolve().parent))
    spec = importlib.util.spec_from_file_location(file.stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its text, at most 400 characters."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:400]


def audit_layouts(build: Callable[..., AuditSubject], config: AuditConfig) -> list[Outcome]:
    """Audit the layout; where it parts, also its axes one by one, for the smallest layout that does."""
    layout = {axis: getattr(config, axis) for axis in AXES}
    outcomes = [audit_layout(build, layout, config)]
    axes = [axis for axis in AXES if layout[axis] > 1]
    if outcomes[0].finding is not None and len(axes) > 1:
        alone = (dict.fromkeys(AXES, 1) | {axis: layout[axis]} for axis in axes)
        for size in sorted(alone, key=lambda s: sorted(s.values())):
            try:
                outcomes.append(audit_layout(build, size, config))
            except UserError:  # code that needs several axes
                continue
    return outcomes


def audit_layout(build: Callable[..., AuditSubject], layout: Layout, config: AuditConfig) -> Outcome:
    """Run a layout and one process twice, and compare."""
    begin = time.monotonic()
    world, failure = World(build, layout, config), ""
    try:
        ranks = world.wait()
    except UserError as error:
        failure = str(error)
    ones = dict.fromkeys(AXES, 1)
    alone = [World(build, ones, config, None if failure else world) for _ in range(2)]
    (reference,), (again,) = (each.wait().values() for each in alone)
    if failure:
        finding = Finding("the layout's ranks", "run", 1, math.inf, "failed", failure)
        return Outcome(dict(layout), finding, time.monotonic() - begin)
    for key, tensor in reference.tensors.items():
        if not torch.equal(tensor, again.tensors[key]) and not bool(tensor.isnan().any()):
            raise UserError(
                f"the subject is not deterministic: {key.words} differs between two runs of one process; "
                "draw its random numbers from torch's generator, which is seeded"
            )
    comparison = Comparison(reference, ranks, layout)
    if comparison.blind:
        raise UserError(
            f"{comparison.blind} is not finite on one process either, so that nothing after it says anything",
            fix="give a batch and weights of which it is a number",
        )
    return Outcome(
        dict(layout),
        diagnose(comparison),
        time.monotonic() - begin,
        len(comparison.places),
        len(comparison.wrong),
        tuple(comparison.skipped),
        comparison.precision,
    )


class RankProcess(NamedTuple):
    """A forked rank, and the files it writes."""

    pid: int
    state: IO[bytes]
    """What it does at present."""
    output: IO[bytes]
    """Its record, or its error if it ends with another code than 0."""


def path_of(file: IO[bytes]) -> Path:
    """The path of an open file, in this process."""
    return Path(f"/proc/self/fd/{file.fileno()}")


class World:
    """Ranks of one layout; `weights_of` is the layout whose initial weights they take."""

    def __init__(
        self,
        build: Callable[..., AuditSubject],
        layout: Layout,
        config: AuditConfig,
        weights_of: "World | None" = None,
    ) -> None:
        self.build, self.layout, self.config, self.weights_of = build, layout, config, weights_of
        self.size, host = math.prod(layout.values()), os.getpid()
        self.store = TemporaryFile()  # noqa: SIM115  # the files are open as long as this
        self.ranks: list[RankProcess] = []
        for rank in range(self.size):
            state, output = TemporaryFile(), TemporaryFile()  # noqa: SIM115
            if (pid := os.fork()) == 0:
                self._run_rank(rank, host, partial(_note, state), output)
            self.ranks.append(RankProcess(pid, state, output))

    def wait(self) -> Ranks:
        """Wait for the ranks and return their records. Raises UserError for one that failed or hangs."""
        left, failed, end = dict(enumerate(self.ranks)), list[int](), math.inf
        while left and time.monotonic() < end and not self._is_stuck():
            for number, rank in list(left.items()):
                pid, status = os.waitpid(rank.pid, os.WNOHANG)
                if pid:
                    del left[number]
                if pid and (status or not os.fstat(rank.output.fileno()).st_size):
                    failed.append(number)
                    end = min(end, time.monotonic() + GRACE_S)
            time.sleep(0.02)
        for rank in left.values():
            os.kill(rank.pid, signal.SIGKILL)
            os.waitpid(rank.pid, 0)
        if failed or left:
            raise UserError(self._failure(failed))
        return self.records()

    def _is_stuck(self) -> bool:
        """True if no rank has reported progress for longer than a collective may take."""
        newest = max(os.fstat(rank.state.fileno()).st_mtime for rank in self.ranks)
        return time.time() - newest > STUCK * self.config.timeout_s

    def records(self) -> Ranks:
        """Records of the ranks by their coordinates."""
        sizes = tuple(self.layout.values())
        places = (tuple(map(int, np.unravel_index(rank, sizes))) for rank in range(self.size))
        outputs = (path_of(rank.output).read_bytes() for rank in self.ranks)
        return {at: Record.of_bytes(output) for at, output in zip(places, outputs, strict=True)}

    def _failure(self, failed: list[int]) -> str:
        """One line: a user's mistake, the rank that failed itself, or where each waits."""
        outputs = {rank: path_of(self.ranks[rank].output).read_text(errors="replace") for rank in failed}
        errors = {rank: text for rank, text in outputs.items() if text}
        states = [path_of(rank.state).read_text(errors="replace").rstrip(" \0") for rank in self.ranks]
        own = {r: e for r, e in errors.items() if not any(words in e for words in (*LOST_PEER, *TIMED_OUT))}
        silent = [rank for rank in failed if rank not in errors]
        if mistake := next((e for e in own.values() if e.startswith(MISTAKE)), ""):
            return mistake.removeprefix(MISTAKE)
        if own:
            rank, text = next(iter(own.items()))
            if "cuda" in text.lower():
                return f"the subject needs CUDA ({text}); build it on mesh.device_type, which is cpu here"
            if self.size == 1:
                return f"the subject fails in {states[rank]} on one process: {text}"
            others = "" if len(own) == self.size else "; other ranks do not"
            return f"rank {rank} of {self.size} fails in {states[rank]}: {text}{others}"
        if silent:
            return f"rank {silent[0]} of {self.size} died in {states[silent[0]]}"
        where = "; ".join(f"rank {rank}: {state}" for rank, state in enumerate(states))
        limit = f"timeout_s={self.config.timeout_s:g}"
        return f"deadlock, or {limit} is too low: no progress in that time ({where})"

    def _run_rank(self, rank: int, host: int, note: Callable[[str], None], output: IO[bytes]) -> None:
        """One rank's process, from the fork to its end."""
        code = 1
        try:
            die_with_parent(host)
            warnings.simplefilter("ignore")
            os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{self.size}"}
            note("build")
            content = self._record(rank, note).to_bytes()
            note("the end")
            code = 0
        except UserError as error:
            content = f"{MISTAKE}{error}".encode()
        except BaseException as error:
            content = first_line(error).encode()
        finally:
            output.write(content)
            output.flush()
            os._exit(code)  # destructors could wait for a peer

    def _record(self, rank: int, note: Callable[[str], None]) -> Record:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        store = dist.FileStore(str(path_of(self.store)), self.size)
        timeout = timedelta(seconds=self.config.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=timeout)
        mesh = init_device_mesh("cpu", tuple(self.layout.values()), mesh_dim_names=tuple(self.layout))
        torch.manual_seed(self.config.seed)
        subject = self.build(mesh)
        if not isinstance(subject, AuditSubject):
            raise UserError(f"build returns a {type(subject).__name__}; return an AuditSubject")
        recorder = Recorder(subject, note)
        if self.weights_of is not None:
            shapes = {name: p.detach() for name, p in recorder.parameters.items()}
            weights = assemble_weights(shapes, self.weights_of.records(), self.weights_of.layout)
            recorder.load(weights)
        return recorder.run(self.config.steps)


def _note(state: IO[bytes], text: str) -> None:
    """Write what a rank does over what it did: quickly, since each collective does."""
    os.pwrite(state.fileno(), text.encode()[:200].ljust(200), 0)
