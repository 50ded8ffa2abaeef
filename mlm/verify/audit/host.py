"""The process of an audit: it imports the user's code once, and forks the ranks of each layout.

Ranks report through unnamed files, which end with the processes, so that an audit adds no communication to
the subject's.
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
import torch._dynamo  # operators import it at their first run: import it before forking
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
"""Seconds for other ranks to report after one has failed."""
STUCK_TIMEOUTS = 1.5
"""Ranks without progress for this many timeouts of a collective are stuck."""
LOST_PEER = 75
"""Exit code of a rank that lost a peer or waited too long for it."""
LACKS_FLOAT64 = 76
"""Exit code of a rank with an operation that has no float64."""
NOISY_RUNS = 3
"""Runs of one process that measure the rounding of narrow formats."""
PROGRESS_BYTES = 200
"""Bytes of a rank's progress."""
TRACED = ("output", "scalar", "loss", "backward", "gradient", "weight")
"""Types of tensors whose operations are traced."""
MOST_LISTED = 50
"""Largest number of wrong tensors in a report."""
FAILED = "failed"
"""Cause of a layout whose ranks do not complete a step."""
STOPPED = "stopped before a cause was found"
IMPORTING = "MLM_AUDIT"
"""Environment variable set while the user's code is imported."""


class LacksFloat64Error(UserError):
    """Failure on one process of an operation that has no float64."""


@dataclass(frozen=True)
class Outcome:
    layout: dict[str, int]
    finding: Finding | None
    """First difference from one process; None if there is none."""
    compared: int = 0
    wrong: int = 0
    differences: tuple[dict[str, object], ...] = ()
    """First wrong tensors: name, kind, step, and error as a fraction of the largest element."""
    skipped: tuple[str, ...] = ()
    precision: str = "fp64"
    rounding: str = ""
    """Formats narrower than float64, and the errors that they hide, in words."""

    @property
    def described(self) -> str:
        """`tp=2 dp=2`."""
        return format_settings({axis: size for axis, size in self.layout.items() if size > 1})

    @property
    def sentence(self) -> str:
        if (finding := self.finding) is None:
            precision = self.rounding or self.precision
            return f"ALIKE: {self.described} in {self.compared} tensors of one process ({precision})"
        return f"PARTS at {finding.where} with {self.described}: {finding.cause}: {finding.sentence}"


def load_build(name: str) -> Build:
    """Import FILE.py:FUNCTION or MODULE:FUNCTION. Raises UserError."""
    source, _, function = name.rpartition(":")
    os.environ[IMPORTING], module = name, None
    try:
        if source.endswith(".py"):
            file = Path(source)
            sys.path.insert(0, str(file.resolve().parent))  # for its imports of neighbours
            spec = spec_from_file_location(file.stem, file)
            assert spec is not None
            assert spec.loader is not None
            loaded = sys.modules[file.stem] = module_from_spec(spec)
            spec.loader.exec_module(loaded)
            module = loaded
        else:
            module = import_module(source)
        build: Build = getattr(module, function)
    except (Exception, SystemExit) as error:
        failure = f"{source} has no {function}" if module else f"importing it fails: {first_line(error)}"
        raise UserError(f"build={name}: {failure}", fix="type FILE.py:FUNCTION") from error
    finally:
        del os.environ[IMPORTING]
    return build


def first_line(error: BaseException) -> str:
    """Type of an error and the first line of its text, at most 400 characters."""
    return f"{type(error).__name__}: {error}".strip().split("\n")[0][:400]


def audit_layouts(build: Build, config: AuditConfig) -> list[Outcome]:
    """Audit the layout; if it differs, also each of its axes. The smallest layout that differs comes first.

    Layouts that differ in dropout masks alone come after those that differ without dropout.
    """
    layout = {axis: getattr(config, axis) for axis in AXES}
    dtype, prefix, split_parameters = torch.float64, "", set[str]()
    try:
        outcomes = [audit_layout(build, layout, config, dtype, split_parameters)]
    except LacksFloat64Error as error:
        dtype, prefix = torch.float32, f"in float32, since {error}: "
        outcomes = [audit_layout(build, layout, config, dtype, split_parameters)]
    single_axes = [dict.fromkeys(AXES, 1) | {axis: n} for axis, n in layout.items() if n > 1]
    with suppress(KeyboardInterrupt, SystemExit):  # report what is done
        for single_axis in single_axes if outcomes[0].finding is not None and len(single_axes) > 1 else ():
            if not outcomes[-1].sentence.endswith(STOPPED):
                with suppress(UserError):  # code may need several axes
                    outcomes.append(audit_layout(build, single_axis, config, dtype, split_parameters))
    outcomes = [replace(outcome, rounding=prefix + outcome.rounding) for outcome in outcomes]
    outcomes.sort(key=lambda o: (o.finding is None, sorted(o.layout.values())))
    return sorted(outcomes, key=lambda o: o.finding is None or o.finding.kind == MASK)


def audit_layout(
    build: Build,
    layout: Layout,
    config: AuditConfig,
    dtype: torch.dtype,
    split_parameters: set[str],
    *,
    has_dropout: bool = True,
) -> Outcome:
    """Run a layout, and one process twice; compare. Adds names of split parameters to `split_parameters`."""
    run = partial(World, build, config=config, dtype=dtype, has_dropout=has_dropout)
    world, failure = run(layout), ""
    try:
        ranks = world.wait()
    except UserError as error:
        failure = str(error)
    one_process = dict.fromkeys(AXES, 1)
    source = None if failure else world
    references = [run(one_process, weights_of=source) for _ in range(2)]
    (reference,), (repeated,) = (reference.wait().values() for reference in references)
    if failure:
        if has_dropout:  # ranks may end in a later pass by what the first step computes
            config = replace(config, steps=1)
            first = audit_layout(build, layout, config, dtype, split_parameters, has_dropout=False)
            if first.finding is not None and first.finding.cause != FAILED:
                return replace(first, finding=first.finding.with_note(f"later {failure}"))
        return Outcome(dict(layout), Finding("the layout's ranks", "run", 1, math.inf, FAILED, failure))
    check_deterministic(reference, repeated)
    seeds = range(1, NOISY_RUNS + 1) if reference.formats else ()
    worlds = [run(one_process, weights_of=source, seed=seed) for seed in seeds]
    noisy_records = [record for world in worlds for record in world.wait().values()]
    spreads = spreads_of(reference, noisy_records)
    sample_causes = explain_samples(reference, ranks, layout)
    reference, ranks, unmatched, swap_causes = match_calls(reference, ranks, layout)
    comparison = Comparison(reference, ranks, layout, spreads=spreads)
    comparison.sample_causes, comparison.swap_causes = sample_causes, swap_causes
    comparison.split_parameters |= split_parameters
    split_parameters |= comparison.split_parameters
    if comparison.first_nonfinite:
        problem = "is not finite on one process either: nothing after it says anything"
        fix = "give a batch and weights of which it is a number"
        raise UserError(f"{comparison.first_nonfinite} {problem}", fix=fix)
    finding = diagnose(comparison)
    if finding is not None:
        finding = find_cause(comparison, finding, run, source)
    return Outcome(
        dict(layout),
        finding,
        len(comparison.locations),
        len(comparison.wrong_locations),
        tuple(
            {"name": x.key.name, "kind": KINDS[x.key.kind], "step": x.key.step + 1, "error": x.relative}
            for x in comparison.wrong_locations[:MOST_LISTED]
        ),
        tuple(dict.fromkeys(unmatched + comparison.skipped)),
        comparison.precision,
        comparison.rounding,
    )


def check_deterministic(first: Record, second: Record) -> None:
    """Raise UserError for a tensor that differs between two runs of one process; a scalar may be a time."""
    for key, tensor in first.tensors.items():
        is_equal = torch.equal(tensor, second.tensors[key]) or key.kind == "scalar"
        if not is_equal and not bool(tensor.isnan().any()):
            raise UserError(
                f"the subject is not deterministic: {key.words} differs between two runs of one process; "
                "draw its random numbers from torch's generator, which is seeded"
            )


def find_cause(
    comparison: Comparison, finding: Finding, run: Callable[..., "World"], source: "World | None"
) -> Finding:
    """Search for the operation that is the cause of a finding."""
    try:
        for location in locations_to_trace(comparison, finding):
            with suppress(UserError):
                traced = run(comparison.layout, task=partial(trace_rank, location=location)).wait()
                task = partial(find_operation, comparison=comparison, location=location, ranks=traced)
                (record,) = run(dict.fromkeys(AXES, 1), weights_of=source, task=task).wait().values()
                comparison.operation_cause = next(iter(record.causes), None)
                finding, tries = diagnose(comparison) or finding, record.tries_at_limit
                if tries is not None:
                    finding = finding.with_note(f"the search ended at its limit of time, after {tries} tries")
                if comparison.operation_cause is not None:
                    break
    except (KeyboardInterrupt, SystemExit):
        return finding.with_note(STOPPED)
    return finding


def locations_to_trace(comparison: Comparison, finding: Finding) -> list[Location]:
    """Tensors to explain by operations; none if samples or formulas explain the first difference."""
    location, *later = comparison.wrong_locations or (None,)
    if location is None or location.key.kind not in TRACED or location.key in comparison.swap_causes:
        return []
    is_sum = location.key.kind in ("scalar", "loss")
    if (is_sum or location.key.kind == "output") and location.key.step in comparison.sample_causes:
        return []
    is_formula = location.key.kind in ("loss", "gradient", "weight")
    if is_formula and finding.is_explained and finding.cause != "reported loss":
        return []
    # gradients may show more than a sum over replicas
    return [location, *[x for x in later if x.key[:2] == (location.key.step, "backward")][:is_sum]]


class World:
    """Forked ranks of one layout.

    Args:
        weights_of: Layout whose initial weights and gradients replace the subject's.
        seed: Of random rounding in narrow formats; 0 for none.
        task: Replaces the steps.
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
        has_dropout: bool = True,
    ) -> None:
        self.build, self.layout, self.config, self.dtype = build, layout, config, dtype
        self.weights_of, self.seed, self.task = weights_of, seed, task
        self.has_dropout = has_dropout
        self.size, host = math.prod(layout.values()), os.getpid()
        self.store = TemporaryFile()  # noqa: SIM115  # open as long as this object
        self.files = [TemporaryFile() for _ in range(self.size)]  # noqa: SIM115
        """By rank: its progress in PROGRESS_BYTES bytes, then its record or error."""
        self.pids: list[int] = []
        for rank in range(self.size):
            if (pid := os.fork()) == 0:
                self._run_rank(rank, host)
            self.pids.append(pid)

    def wait(self) -> Ranks:
        """Wait for the ranks and return their records; show rank 0's progress on a terminal.

        Raises UserError if one fails or hangs.
        """
        running, failed, end = dict(enumerate(self.pids)), dict[int, int](), math.inf
        screen, ranks = Screen(stderr=True), "1 rank" if self.size == 1 else f"{self.size} ranks"
        try:
            with screen.status("", spinner="line") if screen.is_terminal else nullcontext() as progress:
                while running and time.monotonic() < end:
                    last_report = max(os.fstat(file.fileno()).st_mtime for file in self.files)
                    if time.time() - last_report > STUCK_TIMEOUTS * self.config.timeout_s:
                        break
                    for rank, pid in list(running.items()):
                        has_ended, status = os.waitpid(pid, os.WNOHANG)
                        if has_ended:
                            del running[rank]
                        if has_ended and (status or not self._result(rank)):
                            failed[rank] = os.waitstatus_to_exitcode(status)
                            end = min(end, time.monotonic() + GRACE_S)
                    if progress is not None:
                        progress.update(Text(f"{ranks}: {one_line(self._progress(0))}"))
                    time.sleep(0.02)
        finally:
            for pid in running.values():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
        if failed or running:
            is_narrow = LACKS_FLOAT64 in failed.values() and self.size == 1 and self.dtype is torch.float64
            raise (LacksFloat64Error if is_narrow else UserError)(self._failure_text(failed))
        return self.records()

    def records(self) -> Ranks:
        coordinates = product(*map(range, self.layout.values()))
        return {at: Record.of_bytes(self._result(rank)) for rank, at in enumerate(coordinates)}

    def _progress(self, rank: int) -> str:
        return os.pread(self.files[rank].fileno(), PROGRESS_BYTES, 0).decode(errors="replace").rstrip(" \0")

    def _result(self, rank: int) -> bytes:
        """Record or error of a rank that has ended; else empty."""
        descriptor = self.files[rank].fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, PROGRESS_BYTES)

    def _failure_text(self, failed: Mapping[int, int]) -> str:
        """One line: a user's mistake, the rank that failed first, or what each rank waits for."""
        failures = [rank for rank, code in failed.items() if code != LOST_PEER]
        if not failures:
            states = [f"rank {rank}: {self._progress(rank)}" for rank in range(self.size)]
            states += [self._result(rank).decode(errors="replace") for rank in list(failed)[:1]]
            limit = f"timeout_s={self.config.timeout_s:g}"
            return f"deadlock, or {limit} is too low: no progress in that time ({'; '.join(states)})"
        rank = min(failures, key=lambda rank: failed[rank] != UserError.exit_code)
        state, text = self._progress(rank), self._result(rank).decode(errors="replace")
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
        suffix = "" if len(failures) == self.size else "; other ranks do not"
        return f"rank {rank} of {self.size} fails in {state}: {text}{suffix}"

    def _run_rank(self, rank: int, host: int) -> None:
        """Run a rank's process from the fork to its exit."""
        descriptor, code = self.files[rank].fileno(), 1

        def report(text: str) -> None:  # fast: runs before each collective
            os.pwrite(descriptor, text.encode()[:PROGRESS_BYTES].ljust(PROGRESS_BYTES), 0)

        try:
            die_with_parent(host)
            warnings.simplefilter("ignore")
            os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{self.size}"}
            report("build")
            content, code = self._record_rank(rank, report).to_bytes(), 0
        except UserError as error:
            content, code = str(error).encode(), error.exit_code
        except BaseException as error:
            content = first_line(error).encode()
            if is_transport_error(error):
                code = LOST_PEER
            elif isinstance(error, RuntimeError) and "Double" in str(error):
                code = LACKS_FLOAT64
        finally:
            os.pwrite(descriptor, content, PROGRESS_BYTES)
            os._exit(code)  # skip destructors, which may wait for a peer

    def _record_rank(self, rank: int, report: Callable[[str], None]) -> Record:
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
        recorder = Recorder(subject, report, self.seed)
        if self.weights_of is not None:
            shapes = {name: p.detach() for name, p in recorder.parameters.items()}
            full_tensors = partial(assemble, shapes, self.weights_of.records(), self.weights_of.layout)
            recorder.load(full_tensors(Key(0, "initial", "")))
            for step in range(self.config.steps):  # judge clipping and updates apart from gradients
                gradients = full_tensors(Key(step, "gradient", ""))
                recorder.updates |= {(step, name): grad for name, grad in gradients.items()}
        if self.task is not None:
            self.task(recorder)
            return recorder.record
        return recorder.run(self.config.steps, has_dropout=self.has_dropout)
