"""Digests of the input files, so that a build knows what it was made of.

Reading 15 TB again only to learn that nothing changed would take hours: a file of the same size and time of
change as when it was last digested is taken to be the same.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

from mlm.corpus.read.records import Input, readable
from mlm.data.receipt import INPUTS
from mlm.errors import UserError
from mlm.files.atomic import digest_bytes, digest_file, write_atomic

KNOWN = "digests.json"
IN_RECEIPT = 1000  # inputs that a receipt names itself; more are in a file beside it
_touched: dict[str, tuple[tuple[int, ...], str]] = {}
"""State and digest of files that changed by their times alone, as this process found."""
SAVE_EVERY = 1 << 34  # bytes digested between two saves: 16 GiB


def with_digests(inputs: Sequence[Input], work: Path, console: Console) -> tuple[Input, ...]:
    """The inputs with their content digests; a Hub dataset has one already. Raises OSError."""
    known, fresh, unsaved = load_known(work / KNOWN), dict[str, list[object]](), 0
    columns = (TextColumn("input"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    done = list[Input]()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        row = bar.add_task("input", total=sum(item.bytes for item in inputs))
        for item in inputs:
            if item.digest:
                done.append(item)
                continue
            path = Path(item.path)
            state, key = state_of(item.path), str(path.resolve())
            entry = known.get(key)
            if (
                isinstance(entry, list)
                and len(entry) == 4
                and tuple(entry[:3]) == state
                and isinstance(entry[3], str)
            ):
                digest = entry[3]
                bar.advance(row, item.bytes)
            else:
                with readable(item.path):
                    digest = digest_file(path, lambda count: bar.advance(row, count))
                unsaved += item.bytes
            fresh[key] = [*state, digest]
            done.append(item := replace(item, digest=digest, state=state, bytes=state[0]))
            check_unchanged(item)
            if unsaved >= SAVE_EVERY:
                write_atomic(work / KNOWN, json.dumps(known | fresh).encode())
                unsaved = 0
    write_atomic(work / KNOWN, json.dumps(fresh).encode())
    return tuple(done)


def digests_of(inputs: dict[str, Any]) -> dict[str, Any]:
    """Digests of inputs by name as a receipt gives them: of many, their number and one digest."""
    if len(inputs) <= IN_RECEIPT:
        return inputs
    return {"files": len(inputs), "digest": digest_bytes(json.dumps(inputs, sort_keys=True).encode())}


def write_inputs(inputs: Sequence[Input], out: Path) -> list[str]:
    """The names and digests of inputs that are too many for a receipt; the file's name. Raises OSError."""
    if len(inputs) <= IN_RECEIPT:
        return []

    def write(f: BinaryIO) -> None:
        f.writelines(
            (json.dumps({"name": item.name, "bytes": item.bytes, "digest": item.digest}) + "\n").encode()
            for item in inputs
        )

    write_atomic(out / INPUTS, write)
    return [INPUTS]


def state_of(path: str) -> tuple[int, int, int]:
    """Size and times of change of a file. Raises UserError when it is gone."""
    with readable(path):
        found = os.stat(path)
    return found.st_size, found.st_mtime_ns, found.st_ctime_ns


def check_unchanged(item: Input) -> None:
    """Compare an input with what it was when it was digested. Raises UserError."""
    if not item.state or (state := state_of(item.path)) == item.state:
        return
    if _touched.get(item.path) == (state, item.digest):
        return  # digested again already: a large file has many shards
    with readable(item.path):
        same = state[0] == item.state[0] and digest_file(Path(item.path)) == item.digest
    if same:
        _touched[item.path] = state, item.digest
    else:
        raise UserError(
            f"input {item.path} changed while the build read it; build again once nothing writes to it"
        )


def load_known(path: Path) -> dict[str, object]:
    """The digests of an earlier start; none when there are none that can be read."""
    try:
        known = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return known if isinstance(known, dict) else {}
