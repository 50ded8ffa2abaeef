"""The process of an audit: it imports the user's code once, and forks the ranks of each layout.

Ranks exchange files only with it, so that nothing here takes part in the subject's communication. The files
have no name: they end with the processes, however these end.
"""

import math
import os
import signal
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile

import torch
import torch._dynamo  # operators import it where they run first: once here, not on each rank that is forked
import torch.distributed as dist
from rich.text import Text
from torch.distributed.device_mesh import init_device_mesh

from mlm.parallel.watch import is_transport_error
from mlm.util.errors import UserError, format_settings
from mlm.util.system import die_with_parent
from mlm.util.terminal import Screen, one_line
from mlm.verify.audit.calls import explain_samples, match_calls
from mlm.verify.audit.compare import Comparison, Layout, Location, Ranks, assemble, spreads_of
from mlm.verify.audit.diagnose import MASK, Finding, diagnose
from mlm.verify.audit.record import AXES, KINDS, AuditSubject, Key, Record, Recorder
from mlm.verify.audit.search import find_operation
from mlm.verify.audit.trace import trace_rank
from mlm.verify.config import AuditConfig

Build = Callable[..., AuditSubject]
GRACE_S = 5.0
"""Seconds that ranks get to report after the first has failed."""
STUCK = 1.5
"""Timeouts of a collective after which ranks that report nothing count as stuck."""
LOST_PEER = 75
"""Exit code of a rank whose error is that another is lost or late."""
LACKS_FLOAT64 = 76
"""Exit code of a rank whose error is an operation without float64."""
NOISES = 3
"""Runs of one process by which the rounding of narrow formats is measured."""
NOTE = 200
"""Bytes that say what a rank does."""
TRACED = ("output", "scalar", "loss", "backward", "gradient", "weight")
"""Types of tensors whose causes are sought among operations."""
MOST_LISTED = 50
"""Wrong tensors in a report."""
STOPPED = "stopped by Ctrl-C before a cause was found"
IMPORTING = "MLM_AUDIT"
"""Environment variable that is set while the user's code is imported."""


class LacksFloat64Error(UserError):
    """The subject fails on one process, in an operation that has no float64."""


@dataclass(frozen=True)
class Outcome:
    layout: dict[str, int]
    finding: Finding | None
    """Where it parts from one process; None where it trains as that does."""
    compared: int = 0
    wrong: int = 0
    differences: tuple[dict[str, object], ...] = ()
    """The first wrong tensors: name, kind, step and error, as a fraction of the largest element."""
    skipped: tuple[str, ...] = ()
    precision: str = "fp64"
    rounding: str = ""
    """Where formats are narrower than float64, and which errors these hide."""

    @property
    def described(self) -> str:
        """`tp=2 dp=2`."""
        return format_settings({axis: size for axis, size in self.layout.items() if size > 1})

    @property
    def sentence(self) -> str:
        if (found := self.finding) is None:
            how = self.rounding or self.precision
            return f"ALIKE: {self.described} in {self.compared} tensors of one process ({how})"
        return f"PARTS at {found.where} with {self.described}: {found.cause}: {found.sentence}"


def load_build(name: str) -> Build:
    """The function FILE.py:FUNCTION or MODULE:FUNCTION. Raises UserError where it cannot be imported."""
    where, _, function = name.rpartition(":")
    os.environ[IMPORTING], module = name, None
    try:
        if where.endswith(".py"):
            file = Path(where)
            sys.path.insert(0, str(file.resolve().parent))  # it may import its neighbours
            spec = spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            loaded = sys.modules[file.stem] = module_from_spec(spec)
            spec.loader.exec_module(loaded)
            module = loaded
        else:
            module = import_module(where)
        build: Build = getattr(module, function)
    except (Exception, SystemExit) as error:
        fails = f"{where} has no {function}" if module else f"importing it fails: {first_line(error)}"
        raise UserError(f"build={name}: {fails}", fix="type FILE.py:FUNCTION") from error
    finally:
        del os.environ[IMPORTING]
    return build


def first_line(error: BaseException) -> str:
    """The type of an error and the first line of its text, at most 400 characters."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:400]


def audit_layouts(build: Build, config: AuditConfig) -> list[Outcome]:
    """Audit the layout; where it parts, also its axes one by one. The smallest that parts comes first.

    One that parts in masks of dropout alone comes after those whose numbers are wrong without dropout.
    """
    layout = {axis: getattr(config, axis) for axis in AXES}
    dtype, why, split = torch.float64, "", set[str]()
    try:
        outcomes = [audit_layout(build, layout, config, dtype, split)]
    except LacksFloat64Error as error:
        dtype, why = torch.float32, f"in float32, since {error}: "
        outcomes = [audit_layout(build, layout, config, dtype, split)]
    alone = [dict.fromkeys(AXES, 1) | {axis: n} for axis, n in layout.items() if n > 1]
    with suppress(KeyboardInterrupt):  # what was found until then is reported
        for each in alone if outcomes[0].finding is not None and len(alone) > 1 else ():
            if not outcomes[-1].sentence.endswith(STOPPED):
                with suppress(UserError):  # of code that needs several axes
                    outcomes.append(audit_layout(build, each, config, dtype, split))
    outcomes = [replace(outcome, rounding=why + outcome.rounding) for outcome in outcomes]
    is_found = {id(o): (o.finding is None or o.finding.kind == MASK, o.finding is None) for o in outcomes}
    return sorted(outcomes, key=lambda o: (is_found[id(o)], sorted(o.layout.values())))


def audit_layout(
    build: Build, layout: Layout, config: AuditConfig, dtype: torch.dtype, split: set[str]
) -> Outcome:
    """Run a layout and one process twice, and compare; `split` receives the names of split parameters."""
    run = partial(World, build, config=config, dtype=dtype)
    world, failure = run(layout), ""
    try:
        ranks = world.wait()
    except UserError as error:
        failure = str(error)
    ones = dict.fromkeys(AXES, 1)
    source = None if failure else world
    alone = [run(ones, weights_of=source) for _ in range(2)]
    (reference,), (again,) = (each.wait().values() for each in alone)
    if failure:
        return Outcome(dict(layout), Finding("the layout's ranks", "run", 1, math.inf, "failed", failure))
    for key, tensor in reference.tensors.items():
        is_equal = torch.equal(tensor, again.tensors[key]) or key.kind == "scalar"  # as of a clock
        if not is_equal and not bool(tensor.isnan().any()):
            raise UserError(
                f"the subject is not deterministic: {key.words} differs between two runs of one process; "
                "draw its random numbers from torch's generator, which is seeded"
            )
    seeds = range(1, NOISES + 1) if reference.formats else ()
    worlds = [run(ones, weights_of=source, seed=seed) for seed in seeds]
    noise = [record for each in worlds for record in each.wait().values()]
    spreads = spreads_of(reference, noise)
    misread = explain_samples(reference, ranks, layout)
    reference, ranks, unmatched, swapped = match_calls(reference, ranks, layout)
    comparison = Comparison(reference, ranks, layout, spreads=spreads)
    comparison.misread, comparison.swapped = misread, swapped
    comparison.split |= split
    split |= comparison.split
    if comparison.blind:
        problem = f"{comparison.blind} is not finite on one process either: nothing after it says anything"
        raise UserError(problem, fix="give a batch and weights of which it is a number")
    found = diagnose(comparison)
    if found is not None:
        found = explain(comparison, found, run, source)
    return Outcome(
        dict(layout),
        found,
        len(comparison.locations),
        len(comparison.wrong),
        tuple(
            {"name": p.key.name, "kind": KINDS[p.key.kind], "step": p.key.step + 1, "error": p.relative}
            for p in comparison.wrong[:MOST_LISTED]
        ),
        tuple(dict.fromkeys(unmatched + comparison.skipped)),
        comparison.precision,
        comparison.rounding,
    )


def explain(
    comparison: Comparison, found: Finding, run: Callable[..., "World"], source: "World | None"
) -> Finding:
    """The finding with the operation that is its cause, where one is found."""
    try:
        for place in places_to_trace(comparison, found):
            with suppress(UserError):
                traced = run(comparison.layout, task=partial(trace_rank, place=place)).wait()
                task = partial(find_operation, comparison=comparison, place=place, ranks=traced)
                (record,) = run(dict.fromkeys(AXES, 1), weights_of=source, task=task).wait().values()
                comparison.operation = next(iter(record.causes), None)
                found, tries = diagnose(comparison) or found, record.given_up
                if tries is not None:
                    found = found.with_note(f"the search ended at its limit of time, after {tries} tries")
                if comparison.operation is not None:
                    break
    except KeyboardInterrupt:
        return found.with_note(STOPPED)
    return found


def places_to_trace(comparison: Comparison, found: Finding) -> list[Location]:
    """The tensor to explain by operations, and another for a loss; none if samples or formulas explain it."""
    place, *others = comparison.wrong or (None,)
    if place is None or place.key.kind not in TRACED or place.key in comparison.swapped:
        return []
    is_sum = place.key.kind in ("scalar", "loss")
    if (is_sum or place.key.kind == "output") and place.key.step in comparison.misread:
        return []
    is_formula = place.key.kind in ("loss", "gradient", "weight")
    if is_formula and found.is_explained and found.cause != "reported loss":
        return []
    # of replicas a sum may say less than its gradients
    return [place, *[p for p in others if p.key[:2] == (place.key.step, "backward")][:is_sum]]


class World:
    """Ranks of one layout; `weights_of` is the layout whose initial weights and gradients they take.

    With a seed, their narrow formats round at random; a task takes the place of the steps.
    """

    def __init__(
        self,
        build: Build,
        layout: Layout,
        *,
        config: AuditConfig,
        dtype: torch.dtype,
        weights_of: "World | None" = None,
        seed: int = 0,
        task: Callable[[Recorder], None] | None = None,
    ) -> None:
        self.build, self.layout, self.config, self.dtype = build, layout, config, dtype
        self.weights_of, self.seed, self.task = weights_of, seed, task
        self.size, host = math.prod(layout.values()), os.getpid()
        self.store = TemporaryFile()  # noqa: SIM115  # the files are open as long as this
        self.files = [TemporaryFile() for _ in range(self.size)]  # noqa: SIM115
        """Of each rank: what it does at present in NOTE bytes, then its record or error."""
        self.pids: list[int] = []
        for rank in range(self.size):
            if (pid := os.fork()) == 0:
                self._run_rank(rank, host)
            self.pids.append(pid)

    def wait(self) -> Ranks:
        """Wait for the ranks and return their records. Raises UserError for one that failed or hangs.

        A line on a terminal says what rank 0 does.
        """
        left, failed, end = dict(enumerate(self.pids)), dict[int, int](), math.inf
        screen, ranks = Screen(stderr=True), "1 rank" if self.size == 1 else f"{self.size} ranks"
        try:
            with screen.status("", spinner="line") if screen.is_terminal else nullcontext() as shown:
                while left and time.monotonic() < end:
                    reported = max(os.fstat(file.fileno()).st_mtime for file in self.files)
                    if time.time() - reported > STUCK * self.config.timeout_s:
                        break
                    for rank, pid in list(left.items()):
                        ended, status = os.waitpid(pid, os.WNOHANG)
                        if ended:
                            del left[rank]
                        if ended and (status or not self._content(rank)):
                            failed[rank] = os.waitstatus_to_exitcode(status)
                            end = min(end, time.monotonic() + GRACE_S)
                    if shown is not None:
                        shown.update(Text(f"{ranks}: {one_line(self._note(0))}"))
                    time.sleep(0.02)
        finally:
            for pid in left.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if failed or left:
            is_narrow = LACKS_FLOAT64 in failed.values() and self.size == 1 and self.dtype is torch.float64
            raise (LacksFloat64Error if is_narrow else UserError)(self._failure(failed))
        return self.records()

    def records(self) -> Ranks:
        """Records of the ranks by their coordinates."""
        every = product(*map(range, self.layout.values()))
        return {at: Record.of_bytes(self._content(rank)) for rank, at in enumerate(every)}

    def _note(self, rank: int) -> str:
        """A rank's newest note of its progress."""
        return os.pread(self.files[rank].fileno(), NOTE, 0).decode(errors="replace").rstrip(" \0")

    def _content(self, rank: int) -> bytes:
        """The record or error that a rank left at its end."""
        file = self.files[rank].fileno()
        return os.pread(file, os.fstat(file).st_size, NOTE)

    def _failure(self, failed: Mapping[int, int]) -> str:
        """One line: a user's mistake, the rank that failed itself, or where each waits."""
        own = [rank for rank, code in failed.items() if code != LOST_PEER]
        if not own:
            waits = [f"rank {rank}: {self._note(rank)}" for rank in range(self.size)]
            waits += [self._content(rank).decode(errors="replace") for rank in list(failed)[:1]]
            limit = f"timeout_s={self.config.timeout_s:g}"
            return f"deadlock, or {limit} is too low: no progress in that time ({'; '.join(waits)})"
        rank = min(own, key=lambda rank: failed[rank] != UserError.exit_code)
        state, text = self._note(rank), self._content(rank).decode(errors="replace")
        if not text:
            return f"rank {rank} of {self.size} died in {state}"
        if failed[rank] == UserError.exit_code:
            return text
        if "cuda" in text.lower():
            return f"the subject needs CUDA ({text}); build it on mesh.device_type, which is cpu here"
        if self.size == 1:
            is_fixed_dtype = failed[rank] == LACKS_FLOAT64 and self.dtype is not torch.float64
            fix = "; build it in torch.get_default_dtype()" if is_fixed_dtype else ""
            return f"the subject fails in {state} on one process: {text}{fix}"
        others = "" if len(own) == self.size else "; other ranks do not"
        return f"rank {rank} of {self.size} fails in {state}: {text}{others}"

    def _run_rank(self, rank: int, host: int) -> None:
        """One rank's process, from the fork to its end."""
        file, code = self.files[rank].fileno(), 1

        def note(text: str) -> None:  # quickly, since each collective does
            os.pwrite(file, text.encode()[:NOTE].ljust(NOTE), 0)

        try:
            die_with_parent(host)
            warnings.simplefilter("ignore")
            os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{self.size}"}
            note("build")
            content, code = self._record(rank, note).to_bytes(), 0
        except UserError as error:
            content, code = str(error).encode(), error.exit_code
        except BaseException as error:
            content = first_line(error).encode()
            if is_transport_error(error):
                code = LOST_PEER
            elif isinstance(error, RuntimeError) and "Double" in str(error):
                code = LACKS_FLOAT64
        finally:
            os.pwrite(file, content, NOTE)
            os._exit(code)  # destructors could wait for a peer

    def _record(self, rank: int, note: Callable[[str], None]) -> Record:
        torch.set_num_threads(1)
        torch.set_default_dtype(self.dtype)
        store = dist.FileStore(f"/proc/self/fd/{self.store.fileno()}", self.size)
        timeout = timedelta(seconds=self.config.timeout_s)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=self.size, timeout=timeout)
        mesh = init_device_mesh("cpu", tuple(self.layout.values()), mesh_dim_names=tuple(self.layout))
        torch.manual_seed(0)
        subject = self.build(mesh)
        if not isinstance(subject, AuditSubject):
            raise UserError(f"build returns {type(subject).__name__}; return an AuditSubject")
        recorder = Recorder(subject, note, self.seed)
        if self.weights_of is not None:
            shapes = {name: p.detach() for name, p in recorder.parameters.items()}
            whole = partial(assemble, shapes, self.weights_of.records(), self.weights_of.layout)
            recorder.load(whole(Key(0, "initial", "")))
            for step in range(self.config.steps):  # so that clipping and updates are judged by themselves
                gradients = whole(Key(step, "gradient", ""))
                recorder.updates |= {(step, name): grad for name, grad in gradients.items()}
        if self.task is not None:
            self.task(recorder)
            return recorder.record
        return recorder.run(self.config.steps)
