"""The folder of an incident: out/incidents/step-00001234. JSON and .npz arrays; nothing is ever unpickled.

incident.json     settings, versions, numbers, samples, the first place, the last checkpoint
README.md         the same in a few lines
rank-00000.json   statistics of every tensor on a rank
samples-00000.npz tokens of a data-parallel rank's micro-batches
"""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from torch import Tensor

from mlm.checkpoint.native.folders import step_name
from mlm.parallel.mesh import ParallelContext
from mlm.tracking.history import replace_nonfinite
from mlm.training.incidents.probe import StepProbe
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.files import dump_json, parse_json, read_bounded, write_atomic

FOLDER, FILE, REPORT = "incidents", "incident.json", "README.md"
FORMAT = 1
MAX_ELEMENTS = 1 << 22
"""Tokens of a rank that are kept: 32 MiB of int64."""
MAX_BYTES = 1 << 22
REMEDY = "name a folder of out/incidents"


def make_folder(root: Path, step: int) -> str | None:
    """Make a new folder for an incident at a step and return its name; None if the disk does not take it."""
    name = first = step_name(step)
    for number in count(2):
        try:
            (root / name).mkdir(parents=True)
            return name
        except FileExistsError:
            name = f"{first}-{number}"
        except OSError:
            break
    return None


def write_rank(folder: Path, ctx: ParallelContext, probe: StepProbe) -> None:
    """Write the statistics of this rank. Raises OSError."""
    place = {axis.name: axis.rank for axis in (ctx.tp, ctx.cp, ctx.pp, ctx.dp)}
    content = {"rank": ctx.rank, **place, "host": socket.gethostname()}
    tensors = [each.encode() for each in probe.ordered()]
    write_atomic(folder / f"rank-{ctx.rank:05d}.json", dump_json(_finite({**content, "tensors": tensors})))


def rows_of(batch: Any) -> tuple[int, ...]:
    """Return the numbers of a micro-batch's rows in a training split; none where samples are counted."""
    return getattr(batch, "examples", ())


def write_samples(folder: Path, ctx: ParallelContext, batches: Sequence[Any]) -> None:
    """Write the micro-batches, from one rank of each replica. Raises OSError."""
    if ctx.tp.rank or ctx.cp.rank or ctx.pp.rank:
        return
    arrays: dict[str, Any] = {"first_samples": np.array([batch.first_sample for batch in batches])}
    held = 0
    for number, batch in enumerate(batches):
        values = {"tokens": batch.tokens}
        if is_dataclass(batch):
            values = {each.name: getattr(batch, each.name) for each in fields(batch)}
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        held += sum(tensor.numel() for tensor in tensors.values())
        if held > MAX_ELEMENTS:
            break
        arrays |= {f"{number}.{name}": tensor.cpu().numpy() for name, tensor in tensors.items()}
        if rows := rows_of(batch):
            arrays[f"{number}.rows"] = np.array(rows)

    def save(f: BinaryIO) -> None:
        np.savez(f, **arrays)

    write_atomic(folder / f"samples-{ctx.dp.rank:05d}.npz", save)


def write_record(folder: Path, record: Mapping[str, Any], lines: Sequence[str]) -> None:
    """Write incident.json and the report. Raises OSError."""
    write_atomic(folder / FILE, dump_json(_finite({"format": FORMAT, **record})))
    title = f"# Incident at step {record['step']}: {', '.join(record['kinds'])}\n\n"
    write_atomic(folder / REPORT, (title + "".join(f"- {line}\n" for line in lines)).encode())


def read_incident(path: str) -> tuple[Path, dict[str, Any]]:
    """Return the folder of an incident and its record. Raises UserError, CorruptFileError."""
    folder = Path(path)
    if folder.is_file():
        folder = folder.parent
    file = folder / FILE
    try:
        record = parse_json(read_bounded(file, MAX_BYTES, REMEDY))
    except FileNotFoundError:
        raise UserError(f"incident={path}: holds no {FILE}; {REMEDY}") from None
    except OSError as error:
        raise UserError(f"incident={path}: {error.strerror} ({error.filename}); {REMEDY}") from None
    except ValueError as error:
        raise CorruptFileError(f"{file}: is damaged ({error}); take another incident") from None
    if not isinstance(record, dict) or record.get("format") != FORMAT:
        raise CorruptFileError(f"{file}: is no incident of this version; take another")
    return folder, record


def _finite(content: Mapping[str, Any]) -> dict[str, Any]:
    made = replace_nonfinite(dict(content))
    assert isinstance(made, dict)
    return made
