"""The process of an audit: it imports the user's code once, and forks the ranks of each layout.

Ranks exchange files only with it, so that nothing here takes part in the subject's communication.
"""

import importlib
import importlib.util
import json
import math
import os
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import timedelta
from difflib import get_close_matches
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from mlm.util.errors import UserError
from mlm.util.system import die_with_parent
from mlm.verify.audit.compare import Comparison, Layout, Ranks, assemble_weights
from mlm.verify.audit.diagnose import Finding, diagnose
from mlm.verify.audit.record import KINDS, Record, Recorder, StateFile
from mlm.verify.audit.subject import AXES, AuditSubject

GRACE_S = 5.0
"""Seconds that ranks get to report after the first has failed."""
STUCK = 1.5
"""Timeouts of a collective after which ranks that report nothing count as stuck."""
LOST_PEER = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Socket closed")
TIMED_OUT = ("Timed out waiting", "timed out", "Timeout")


@dataclass(frozen=True)
class Outcome:
    """Result of the audit of one layout."""

    layout: dict[str, int]
    finding: Finding | None
    compared: int
    wrong: int
    skipped: tuple[str, ...]
    precision: str
    seconds: float

    @classmethod
    def of(cls, fields: dict[str, Any]) -> "Outcome":
        """Read one back from JSON."""
        finding = fields["finding"] and Finding(**fields["finding"])
        return cls(**fields | {"finding": finding, "skipped": tuple(fields["skipped"])})


def main() -> None:
    """Audit as the job of the first argument says; write the outcomes, or the error, beside it."""
    path = Path(sys.argv[1])
    job = json.loads(path.read_text())
    try:
        found = audit_layouts(load_build(job["build"]), job, path.parent)
        result: dict[str, object] = {"outcomes": [asdict(outcome) for outcome in found]}
    except UserError as error:
        result = {"error": str(error)}
    (path.parent / "result").write_text(json.dumps(result))


def load_build(name: str) -> Callable[..., AuditSubject]:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION. Raises UserError where it cannot be imported."""
    where, _, function = name.rpartition(":")
    file = next((f for f in (Path(where), Path(f"{where}.py")) if f.is_file()), None)
    if not where or not function:
        raise UserError(f"build={name}: names no function; type FILE.py:FUNCTION")
    if file is None and (where.endswith(".py") or os.sep in where):
        raise UserError(f"build={name}: {where} is no file; type FILE.py:FUNCTION")
    try:
        module = importlib.import_module(where) if file is None else import_file(file)
    except (Exception, SystemExit) as error:
        text = f"{type(error).__name__}: {error}"
        raise UserError(f"build={name}: importing {where} fails: {first_line(text)}") from error
    found = getattr(module, function, None)
    if not callable(found):
        near = get_close_matches(function, vars(module)) if found is None else []
        problem = f"{where} has no function {function}" if found is None else f"{function} is no function"
        raise UserError(f"build={name}: {problem}; name one of it" + (f", such as {near[0]}" if near else ""))
    return found


def import_file(file: Path) -> ModuleType:
    """A file as a module, which may import its neighbours."""
    sys.path.insert(0, str(file.resolve().parent))
    loader = SourceFileLoader(file.stem, str(file))
    spec = importlib.util.spec_from_loader(file.stem, loader)
    assert spec is not None
    module = sys.modules[file.stem] = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def first_line(text: str) -> str:
    """The first line, at most 400 characters of it."""
    return text.strip().split("\n")[0][:400]


def audit_layouts(build: Callable[..., AuditSubject], job: Mapping[str, Any], folder: Path) -> list[Outcome]:
    """Audit the layout; where it parts, also its axes one by one, for the smallest layout that does."""
    layout = {axis: job[axis] for axis in AXES}
    outcomes = [audit_layout(build, layout, job, folder)]
    axes = [axis for axis in AXES if layout[axis] > 1]
    if outcomes[0].finding is not None and len(axes) > 1:
        smaller = sorted(
            (dict.fromkeys(AXES, 1) | {axis: layout[axis]} for axis in axes), key=lambda s: sorted(s.values())
        )
        for size in smaller:
            try:
                outcomes.append(audit_layout(build, size, job, folder))
            except UserError:  # code that needs several axes
                continue
    return outcomes


def audit_layout(
    build: Callable[..., AuditSubject], layout: Layout, job: Mapping[str, Any], folder: Path
) -> Outcome:
    """Run a layout and one process twice, and compare."""
    begin = time.monotonic()
    world = World(build, layout, job, folder / "layout-{}".format("-".join(map(str, layout.values()))))
    failure: UserError | None = None
    try:
        ranks = world.run()
    except UserError as error:
        failure = error
    ones = dict.fromkeys(AXES, 1)
    alone = [World(build, ones, job, world.folder / f"one-{i}", None if failure else world) for i in range(2)]
    for each in alone:
        each.start()
    (reference,), (again,) = (each.wait().values() for each in alone)
    if failure is not None:
        finding = Finding("the layout's ranks", "run", 1, math.inf, "failed", str(failure))
        return Outcome(dict(layout), finding, 0, 0, (), "fp64", time.monotonic() - begin)
    for key, tensor in reference.tensors.items():
        if not torch.equal(tensor, again.tensors[key]) and not bool(tensor.isnan().any()):
            raise UserError(
                f"the subject is not deterministic: {KINDS[key.kind]} of {key.name or 'the module'} differs "
                "between two runs of one process; draw its random numbers from torch's generator, which is "
                "seeded"
            )
    comparison = Comparison(reference, ranks, layout)
    wrong = len(comparison.wrong)
    return Outcome(
        dict(layout),
        diagnose(comparison),
        len(comparison.places),
        wrong,
        tuple(comparison.skipped),
        comparison.precision,
        time.monotonic() - begin,
    )


class World:
    """Forked ranks of one layout."""

    def __init__(
        self,
        build: Callable[..., AuditSubject],
        layout: Layout,
        job: Mapping[str, Any],
        folder: Path,
        weights_of: "World | None" = None,
    ) -> None:
        self.build, self.layout, self.job, self.folder = build, layout, job, folder
        self.weights_of = weights_of
        """The layout whose initial weights these ranks take."""
        self.size = math.prod(layout.values())
        self.pids: dict[int, int] = {}
        folder.mkdir(parents=True)

    def run(self) -> Ranks:
        """Start and wait."""
        self.start()
        return self.wait()

    def start(self) -> None:
        """Fork the ranks."""
        host = os.getpid()
        for rank in range(self.size):
            if (pid := os.fork()) == 0:
                self._rank(rank, host)
            self.pids[rank] = pid

    def wait(self) -> Ranks:
        """Wait for the ranks and return their records. Raises UserError for one that failed or hangs."""
        left, failed, end = dict(self.pids), list[int](), math.inf
        while left and time.monotonic() < end and not self._is_stuck():
            for rank, pid in list(left.items()):
                if os.waitpid(pid, os.WNOHANG)[0]:
                    del left[rank]
                    if not self._file(rank, "record").exists():
                        failed.append(rank)
                        end = min(end, time.monotonic() + GRACE_S)
            time.sleep(0.02)
        for pid in left.values():
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        if failed or left:
            raise UserError(self._failure(failed))
        return self.records()

    def _is_stuck(self) -> bool:
        """True if no rank has reported progress for longer than a collective may take."""
        states = [self._file(rank, "state") for rank in self.pids]
        newest = max((state.stat().st_mtime for state in states if state.exists()), default=time.time())
        return time.time() - newest > STUCK * self.job["timeout_s"]

    def records(self) -> Ranks:
        """Records of the ranks by their coordinates, read from files."""
        return {
            tuple(map(int, np.unravel_index(rank, tuple(self.layout.values())))): Record.load(
                self._file(rank, "record")
            )
            for rank in range(self.size)
        }

    def _file(self, rank: int, name: str) -> Path:
        return self.folder / f"{name}-{rank}"

    def _failure(self, failed: list[int]) -> str:
        """One line: a user's mistake, the rank that failed itself, or where each waits."""
        if mistake := next((f for rank in failed if (f := self._file(rank, "mistake")).exists()), None):
            return mistake.read_text()
        errors = {
            rank: self._file(rank, "error").read_text()
            for rank in failed
            if self._file(rank, "error").exists()
        }
        own = {r: e for r, e in errors.items() if not any(words in e for words in (*LOST_PEER, *TIMED_OUT))}
        states = {
            rank: self._file(rank, "state").read_bytes().decode(errors="replace").rstrip(" \0")
            for rank in range(self.size)
        }
        silent = [rank for rank in failed if rank not in errors]
        if own:
            rank, text = next(iter(own.items()))
            if "CUDA" in text or "cuda" in text:
                return f"the subject needs CUDA ({text}); build it on mesh.device_type, which is cpu here"
            if self.size == 1:
                return f"the subject fails in {states[rank]} on one process: {text}"
            return f"rank {rank} of {self.size} fails in {states[rank]}: {text}" + (
                "" if len(own) == self.size else "; other ranks do not"
            )
        if silent:
            return f"rank {silent[0]} of {self.size} died in {states[silent[0]]}"
        where = "; ".join(f"rank {rank}: {state}" for rank, state in states.items())
        limit = f"timeout_s={self.job['timeout_s']:g}"
        return f"deadlock, or {limit} is too low: no progress in that time ({where})"

    def _rank(self, rank: int, host: int) -> None:
        """One rank's process, from the fork to its end."""
        code = 1
        try:
            die_with_parent(host)
            warnings.simplefilter("ignore")
            note = StateFile(str(self._file(rank, "state")))
            note("build")
            try:
                record = self._record(rank, note)
                note("the end")
                partial = self._file(rank, "partial")
                record.save(partial)
                partial.rename(self._file(rank, "record"))
                code = 0
            except BaseException as error:
                if isinstance(error, UserError):
                    self._file(rank, "mistake").write_text(str(error))
                self._file(rank, "error").write_text(first_line(f"{type(error).__name__}: {error}"))
                self._file(rank, "trace").write_text(traceback.format_exc())
        finally:
            os._exit(code)  # destructors could wait for a peer

    def _record(self, rank: int, note: StateFile) -> Record:
        torch.set_num_threads(1)
        torch.set_default_dtype(torch.float64)
        store = dist.FileStore(str(self.folder / "store"), self.size)
        timeout = timedelta(seconds=self.job["timeout_s"])
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=timeout)
        mesh = init_device_mesh("cpu", tuple(self.layout.values()), mesh_dim_names=tuple(self.layout))
        torch.manual_seed(self.job["seed"])
        subject = self.build(mesh)
        if not isinstance(subject, AuditSubject):
            raise UserError(f"build returns a {type(subject).__name__}; return an AuditSubject")
        recorder = Recorder(subject, note)
        if self.weights_of is not None:
            shapes = {name: p.detach() for name, p in recorder.parameters.items()}
            weights = assemble_weights(shapes, self.weights_of.records(), self.weights_of.layout)
            recorder.load(weights)
        return recorder.run(self.job["steps"])
