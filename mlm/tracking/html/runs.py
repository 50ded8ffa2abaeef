"""A run's folder as a page shows it: read in one pass, whatever a kill or another program left in it."""

import os
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from mlm.config.plain_yaml import parse as parse_yaml
from mlm.config.plain_yaml import read_text
from mlm.config.tree import flatten
from mlm.tracking.history import FILE_NAME, MAX_BYTES, MAX_LINE, MOVE, parse, step_of
from mlm.tracking.html.rows import LARGEST, Column, Rows, number
from mlm.util.atomic import open_bounded, parse_json, read_bounded
from mlm.util.errors import UserError, visible
from mlm.util.lock import LOCK, Lock

CONFIG = "config.yaml"
RESULT = "result.json"  # of finetuning
MOST_LISTED = 500
"""Incidents, checkpoints, samples and attempts of a run that are kept; the newest."""
LONGEST_FAILURE = 500  # characters
MOST_TIMELINES = 3  # each may take megabytes
MOST_SCORES = 100
MAX_SCORES = 1 << 22  # bytes of one result
COMPARED = 1 << 12  # bytes before a place in a file that recognise it: several records with their times
AXES = ("step", "tokens", "time")
NOT_CURVES = frozenset((*AXES, "seconds", "waited"))


def newest() -> "deque[dict[str, Any]]":
    """Return a list that keeps its newest entries."""
    return deque(maxlen=MOST_LISTED)


@dataclass
class Run:
    """Facts and records of a run."""

    name: str
    folder: Path
    command: str = ""
    """pretrain or finetune."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flat: model.num_layers → 2."""
    problems: list[str] = field(default_factory=list)
    """Lines on what could not be read."""
    attempts: "deque[dict[str, Any]]" = field(default_factory=newest)
    rows: dict[str, Rows] = field(default_factory=dict)
    """Numbers by type of record; scores of finetuning by their split."""
    incidents: "deque[dict[str, Any]]" = field(default_factory=newest)
    """Incidents and returns to a checkpoint."""
    saves: "deque[dict[str, Any]]" = field(default_factory=newest)
    ranks: "deque[dict[str, Any]]" = field(default_factory=newest)
    timelines: "deque[dict[str, Any]]" = field(default_factory=lambda: deque(maxlen=MOST_TIMELINES))
    """Times of a pipeline's computations; the newest."""
    samples: "deque[dict[str, Any]]" = field(default_factory=newest)
    """Continuations of prompts at validations."""
    failure: str = ""
    """The error that ended the newest attempt."""
    is_held: bool = False
    """True if a process writes checkpoints to it now."""
    scores: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Results of evaluations by file name."""
    kept: frozenset[str] = frozenset()
    """Names of the checkpoints that are there."""
    seconds: float = 0.0
    """From each attempt's start to its last record, summed."""
    last_time: float = float("nan")
    damaged: int = 0
    """Lines that are no records."""
    tables: dict[str, dict[str, Column]] = field(default_factory=dict)
    """Numbers by type of record and column, steps ascending."""

    @property
    def latest(self) -> Mapping[str, Any]:
        """The record of the newest attempt; empty without one."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def done(self) -> int:
        """Steps that are done, as far as was logged."""
        ends = [int(table["step"][-1]) for table in self.tables.values() if len(table["step"])]
        return max([*ends, *(step_of(each) for each in self.saves)], default=0)

    @property
    def total(self) -> int | None:
        """Steps that it is to take."""
        total = self.latest.get("total_steps", self.settings.get("train.steps"))
        return total if type(total) is int and 0 < total < LARGEST else None

    @property
    def is_finished(self) -> bool:
        """True if all steps are done, or patience ended finetuning at the newest step."""
        result = dict(self.scores).get(RESULT, {})
        by_seed = "seeds" in result and not self.attempts  # metrics are in the folders of the seeds
        ended = by_seed or (self.done > 0 and result.get("steps") == self.done)
        return ended or (self.total is not None and self.done >= self.total)

    @property
    def layout(self) -> Mapping[str, Any]:
        """Settings of the layout: those of the newest attempt, or of the settings."""
        recorded = self.latest.get("layout")
        return recorded if isinstance(recorded, dict) else self.settings

    def column(self, kind: str, name: str) -> Column:
        """Return the finite numbers of a column."""
        found = self.tables.get(kind, {}).get(name, np.empty(0))
        return found[np.isfinite(found)]


def names_of(folders: Sequence[str]) -> list[str]:
    """Name folders by their last part, by more of their path where that is ambiguous."""
    parts = [Path(folder).resolve().parts for folder in folders]
    found = list[str]()
    for mine in parts:
        count = 1
        others = [other for other in parts if other != mine]
        while count < len(mine) and any(other[-count:] == mine[-count:] for other in others):
            count += 1
        found.append(visible("/".join(mine[-count:]))[-80:])
    return found


def read_runs(folders: Sequence[str]) -> list[Run]:
    """Read runs, each named by its folder. Raises UserError, CorruptFileError."""
    return [read_run(Path(folder), name) for folder, name in zip(folders, names_of(folders), strict=True)]


def read_run(folder: Path, name: str) -> Run:
    """Read a run. Raises UserError, CorruptFileError."""
    return RunReader(folder, name).read()


class RunReader:
    """Reads a run, and of its metrics.jsonl later what was appended since."""

    def __init__(self, folder: Path, name: str) -> None:
        self.folder, self.name = folder, name
        self._run = Run(name, folder)
        self._mark: Mark | None = None

    def read(self) -> Run:
        """Return the run as it is now. Raises UserError, CorruptFileError."""
        try:
            run = self._read_metrics()
            read_settings(run)
            read_scores(run)
            run.is_held = Lock(self.folder / "checkpoints" / LOCK).is_held()
            run.kept = frozenset(path.name for path in (self.folder / "checkpoints").glob("step-*"))
        except OSError as error:
            path = error.filename or self.folder
            raise UserError(
                f"runs={self.folder}: {path}: {error.strerror}; make it readable", keys=("runs",)
            ) from error
        run.tables = {kind: rows.table() for kind, rows in run.rows.items()}
        steps = run.tables.get("step", {})
        if "memory_bytes" in steps:
            steps["memory_gib"] = steps["memory_bytes"] / 2**30
        for kind, table in run.tables.items():
            if kind != "step" and "tokens" in steps and len(steps["step"]):
                table["tokens"] = np.interp(table["step"], steps["step"], steps["tokens"])
        return run

    def _read_metrics(self) -> Run:
        """Return the run of metrics.jsonl alone: that of the last call continued, or a new one."""
        before, path = self._run, self.folder / FILE_NAME
        mark, self._mark = self._mark, None  # after an error there is nothing to continue
        self._run = Run(self.name, self.folder)
        if not path.exists():
            return self._run
        with open_bounded(path, MAX_BYTES, MOVE) as f:
            if mark is not None and mark.is_of(f):
                self._run = replace(before, command="", settings={}, problems=[], scores=[])
                f.seek(mark.position)
            else:
                f.seek(0)
            if take_records(self._run, f):
                self._mark = Mark.of(f)
        return self._run


@dataclass(frozen=True)
class Mark:
    """A place in a file up to which it was read, and what recognises the file: itself and bytes before."""

    file: tuple[int, int]
    position: int
    before: bytes

    @classmethod
    def of(cls, f: BinaryIO) -> "Mark":
        """Return the mark of a file's current position. Raises OSError."""
        position, status = f.tell(), os.fstat(f.fileno())
        f.seek(max(0, position - COMPARED))
        return cls((status.st_dev, status.st_ino), position, f.read(position - f.tell()))

    def is_of(self, f: BinaryIO) -> bool:
        """True if a file is the one that was read, and was at most appended to. Raises OSError."""
        status = os.fstat(f.fileno())
        if (status.st_dev, status.st_ino) != self.file or status.st_size < self.position:
            return False
        f.seek(self.position - len(self.before))
        return f.read(len(self.before)) == self.before


def read_settings(run: Run) -> None:
    """Read config.yaml, as far as it can be read."""
    file = run.folder / CONFIG
    if not file.exists():
        return
    try:
        tree = parse_yaml(read_text(file), file)
    except UserError as error:
        run.problems.append(str(error))
        return
    defaults = tree.pop("defaults", None)
    if isinstance(defaults, list) and len(defaults) == 3:
        run.command = str(defaults[1]).removesuffix("_defaults")
    run.settings = flatten(tree)


def take_records(run: Run, f: BinaryIO) -> bool:
    """Add the records from a file's position on, and leave it after the last line that was taken.

    False if that has no end yet, so that it may still grow. Raises OSError.
    """
    position = f.tell()
    while line := f.readline(MAX_LINE):
        record, is_whole = parse(line), line.endswith(b"\n")
        if 0 <= step_of(record) < LARGEST:
            now, previous = number(record.get("time")), run.last_time
            if record["kind"] != "run" and now > previous:  # breaks between attempts do not count
                run.seconds += now - previous
            run.last_time = now if now == now else previous
            take(run, record)
            if not is_whole:
                return False
        elif not is_whole and len(line) < MAX_LINE:  # it is being written
            break
        else:
            run.damaged += is_whole and bool(line.strip())
        position += len(line)
    f.seek(position)
    return True


def take(run: Run, record: dict[str, Any]) -> None:
    """Add a record to a run."""
    kind = record["kind"]
    if kind == "run":
        run.attempts.append(record)
        run.failure = ""
    if kind == "failed":
        run.failure = visible(str(record.get("error")))[:LONGEST_FAILURE]
    if kind in ("run", "rewound"):
        for rows in run.rows.values():
            rows.return_to(step_of(record))
        stay = (each for each in run.samples if step_of(each) <= step_of(record))
        run.samples = deque(stay, maxlen=MOST_LISTED)
    if kind in ("step", "validation", "scores"):
        where = f"scores/{record.get('split')}"[:80] if kind == "scores" else kind
        numbers = {
            str(name)[:80]: number(value)
            for name, value in record.items()
            if (value is None or isinstance(value, int | float)) and not isinstance(value, bool)
        }
        if len(run.rows) < 16 or where in run.rows:
            run.rows.setdefault(where, Rows()).add({**numbers, "time": run.seconds})
    lists = {
        **{"incident": run.incidents, "rewound": run.incidents, "ranks": run.ranks},
        **{"saved": run.saves, "save_failed": run.saves, "sample": run.samples, "timeline": run.timelines},
    }
    if isinstance(kind, str) and kind in lists:
        lists[kind].append(record)


def read_scores(run: Run) -> None:
    """Read the results of evaluations in the folder. Raises OSError."""
    files = [*sorted(run.folder.glob("eval-*.json")), run.folder / RESULT]
    for file in files[-MOST_SCORES:]:
        if not file.is_file():
            continue
        try:
            found = parse_json(read_bounded(file, MAX_SCORES, MOVE), foreign=True)
        except (UserError, ValueError) as error:
            run.problems.append(f"{file.name} is damaged: {error}")
            continue
        if isinstance(found, dict):
            run.scores.append((file.name, found))
