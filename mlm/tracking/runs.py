"""Records of a run's folder, read in spite of damaged files."""

import math
from array import array
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.config.plain_yaml import parse as parse_yaml
from mlm.config.plain_yaml import read_text
from mlm.config.tree import flatten
from mlm.tracking.history import FILE_NAME, MOVE, parse, read_lines, step_of
from mlm.util.errors import UserError, escape_controls
from mlm.util.files import parse_json, read_bounded
from mlm.util.lock import LOCK, Lock
from mlm.util.ownership import RUN_SETTINGS

Column = NDArray[np.float64]
RESULT = "result.json"  # of finetuning
MISSING = "–"
MAX_LISTED = 500
"""Newest incidents, checkpoints, samples and attempts of a run that are kept."""
MAX_PROBLEMS = 5
"""Damaged files of a run that are named."""
LARGEST = float(1 << 53)
STATISTICS: dict[str, Callable[[Column], Any]] = {
    "last": lambda column: column[-1],
    "min": np.min,
    "max": np.max,
    "median": np.median,
}


class MetricRows:
    """Numbers of one kind of record by column, in file order."""

    def __init__(self) -> None:
        self.columns: dict[str, array[float]] = {"step": array("d")}

    def add(self, numbers: Mapping[str, float]) -> None:
        """Append a row; missing columns get NaN."""
        for name in numbers:
            if name not in self.columns and len(self.columns) < 64:  # a damaged file may have any number
                self.columns[name] = array("d", [math.nan]) * len(self.columns["step"])
        for name, column in self.columns.items():
            column.append(numbers.get(name, math.nan))

    def table(self) -> dict[str, Column]:
        """Columns with ascending steps; the last of rows with equal steps."""
        table = {name: np.array(column) for name, column in self.columns.items()}
        order = np.argsort(table["step"], kind="stable")
        keep = order[np.append(np.diff(table["step"][order]) > 0, True)] if len(order) else order
        table = {name: column[keep] for name, column in table.items()}
        for name in ("tokens", "time"):  # axes must not decrease
            if name in table:
                table[name] = np.fmax.accumulate(table[name])
        return table


def number(value: object) -> float:
    """A JSON value as a finite number, else NaN."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        converted = float(value)
    except OverflowError:
        return math.nan
    return converted if math.isfinite(converted) else math.nan


def when(seconds: object) -> str:
    try:
        return datetime.fromtimestamp(number(seconds), UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    except (ValueError, OverflowError, OSError):
        return MISSING


def newest_list() -> "deque[dict[str, Any]]":
    return deque(maxlen=MAX_LISTED)


@dataclass
class RunRecords:
    """Facts and records of a run."""

    name: str
    folder: Path
    command: str = ""
    """pretrain or finetune."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Flat: model.num_layers → 2."""
    problems: list[str] = field(default_factory=list)
    """Lines on unreadable files."""
    attempts: "deque[dict[str, Any]]" = field(default_factory=newest_list)
    rows: dict[str, MetricRows] = field(default_factory=dict)
    """Numbers by kind of record; scores of finetuning by split."""
    incidents: "deque[dict[str, Any]]" = field(default_factory=newest_list)
    """Incidents and returns to a checkpoint."""
    saves: "deque[dict[str, Any]]" = field(default_factory=newest_list)
    loads: "deque[dict[str, Any]]" = field(default_factory=lambda: deque(maxlen=1))
    """Newest loads of experts."""
    samples: "deque[dict[str, Any]]" = field(default_factory=newest_list)
    """Continuations of prompts at validations."""
    failure: str = ""
    """The error that ended the newest attempt."""
    is_held: bool = False
    """True if a process writes checkpoints now."""
    scores: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    """Results of evaluations by file name."""
    checkpoints: frozenset[str] = frozenset()
    """Names of existing checkpoints."""
    seconds: float = 0.0
    """Sum over attempts, from start to last record."""
    last_time: float = math.nan
    damaged: int = 0
    """Lines without a record."""
    tables: dict[str, dict[str, Column]] = field(default_factory=dict)
    """Numbers by kind of record and column, steps ascending."""

    @property
    def latest(self) -> Mapping[str, Any]:
        return self.attempts[-1] if self.attempts else {}

    @property
    def done(self) -> int:
        steps = [int(table["step"][-1]) for table in self.tables.values() if len(table["step"])]
        return max([*steps, *map(step_of, self.saves)], default=0)

    @property
    def total(self) -> int | None:
        total = self.latest.get("total_steps", self.settings.get("train.steps"))
        return total if type(total) is int and 0 < total < LARGEST else None

    @property
    def is_finished(self) -> bool:
        """True if all steps are done, or patience ended finetuning at the newest step."""
        result = dict(self.scores).get(RESULT, {})
        by_seed = "seeds" in result and not self.attempts  # the seeds' folders have the metrics
        is_complete = by_seed or (self.done > 0 and result.get("steps") == self.done)
        return is_complete or (self.total is not None and self.done >= self.total)

    @property
    def progress(self) -> str:
        return f"{self.done:,}" + (f" of {self.total:,}" if self.total else "")

    @property
    def state(self) -> str:
        """failed, finished, running since …, stopped or not started."""
        if self.failure:
            return "failed"
        if self.is_finished:
            return "finished"
        if self.is_held:
            return f"running since {when(self.latest.get('time'))[:16]}"
        return "stopped" if self.attempts or self.done else "not started"

    @property
    def notes(self) -> list[str]:
        lines = self.problems[:MAX_PROBLEMS]
        if len(self.problems) > MAX_PROBLEMS:
            lines.append(f"{len(self.problems) - MAX_PROBLEMS} further files are damaged")
        if self.failure:
            lines.append(f"failed at step {self.done:,}: {self.failure}")
        if self.damaged:
            lines.append(f"{self.damaged:,} damaged lines of metrics.jsonl are left out")
        if not len(self.column("step", "step")):
            lines.append("no step is logged yet")
        elif not len(self.column("validation", "loss")) and self.command != "finetune":
            lines.append("no validation is logged")
        for name in ("loss", "grad_norm"):
            lost = len(self.tables.get("step", {}).get(name, ())) - len(self.column("step", name))
            if lost:
                lines.append(f"{lost:,} values of {name} are not finite; their curve has gaps there")
        return [f"{self.name}: {line}" for line in lines]

    def column(self, kind: str, name: str) -> Column:
        column = self.tables.get(kind, {}).get(name, np.empty(0))
        return column[np.isfinite(column)]

    def statistic(self, statistic: str, kind: str, name: str) -> float:
        """Return a statistic (a key of STATISTICS) of a column's finite numbers; NaN without any."""
        column = self.column(kind, name)
        return float(STATISTICS[statistic](column)) if len(column) else math.nan


def names_of(folders: Sequence[str]) -> list[str]:
    """Name folders by their last part, or more of their path if that is ambiguous."""
    parts = [Path(folder).resolve().parts for folder in folders]
    names = list[str]()
    for path in parts:
        count = 1
        different = [other for other in parts if other != path]
        while count < len(path) and any(other[-count:] == path[-count:] for other in different):
            count += 1
        names.append(escape_controls("/".join(path[-count:]))[-80:])
    return names


def read_run(folder: Path, name: str) -> RunRecords:
    run = RunRecords(name, folder)
    try:
        if (folder / FILE_NAME).exists():
            read_metrics(run)
        if (folder / RUN_SETTINGS).exists():
            try:
                tree = parse_yaml(read_text(folder / RUN_SETTINGS), folder / RUN_SETTINGS)
                run.command = str(tree.pop("command", ""))
                run.settings = flatten(tree)
            except UserError as error:
                run.problems.append(str(error))
        results = [*sorted(folder.glob("eval-*.json")), folder / RESULT]
        for file in filter(Path.is_file, results[-100:]):
            try:
                result = parse_json(read_bounded(file, 1 << 22, MOVE), foreign=True)
            except (UserError, ValueError) as error:
                run.problems.append(f"{file.name} is damaged: {error}")
                continue
            if isinstance(result, dict):
                run.scores.append((file.name, result))
        run.is_held = Lock(folder / "checkpoints" / LOCK).is_held()
        run.checkpoints = frozenset(path.name for path in (folder / "checkpoints").glob("step-*"))
    except OSError as error:
        path = error.filename or folder
        raise UserError(
            f"runs={folder}: {path}: {error.strerror}; make it readable", keys=("runs",)
        ) from error
    run.tables = {kind: rows.table() for kind, rows in run.rows.items()}
    steps = run.tables.get("step", {})
    if "memory_bytes" in steps:
        steps["memory_gib"] = steps["memory_bytes"] / 2**30
    for kind, table in run.tables.items():
        if kind != "step" and "tokens" in steps and len(steps["step"]):
            table["tokens"] = np.interp(table["step"], steps["step"], steps["tokens"])
    return run


def read_metrics(run: RunRecords) -> None:
    """Add the records of metrics.jsonl to a run; a last line without newline may be unfinished."""
    for line in read_lines(run.folder / FILE_NAME):
        record = parse(line)
        if not 0 <= step_of(record) < LARGEST:
            run.damaged += line.endswith(b"\n") and bool(line.strip())
            continue
        kind, now, previous = record["kind"], number(record.get("time")), run.last_time
        if kind != "run" and now > previous:  # not between attempts
            run.seconds += now - previous
        run.last_time = now if now == now else previous
        if kind == "run":
            run.attempts.append(record)
            run.failure = ""
        if kind == "rewound":
            run.incidents.append(record)
        if kind in ("run", "rewound"):
            for rows in run.rows.values():  # later steps are trained again
                mask = np.array(rows.columns["step"]) <= step_of(record)
                if not mask.all():
                    rows.columns = {name: array("d", np.array(c)[mask]) for name, c in rows.columns.items()}
            keep = (sample for sample in run.samples if step_of(sample) <= step_of(record))
            run.samples = deque(keep, maxlen=MAX_LISTED)
        elif kind == "failed":
            run.failure = escape_controls(str(record.get("error")))[:500]
        elif kind in ("step", "measured", "validation", "scores"):
            table = f"scores/{record.get('split')}"[:80] if kind == "scores" else kind
            numbers = {
                str(name)[:80]: number(value)
                for name, value in record.items()
                if (value is None or isinstance(value, int | float)) and not isinstance(value, bool)
            }
            if len(run.rows) < 16 or table in run.rows:
                run.rows.setdefault(table, MetricRows()).add({**numbers, "time": run.seconds})
        elif kind == "incident":
            run.incidents.append(record)
        elif kind in ("saved", "save_failed"):
            run.saves.append(record)
        elif kind == "experts":
            run.loads.append(record)
        elif kind == "sample":
            run.samples.append(record)
