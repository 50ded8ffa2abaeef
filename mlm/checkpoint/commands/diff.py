"""`mlm ckpt diff`: how two checkpoints differ in settings, counters and tensors, whatever their layouts."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from mlm.checkpoint.commands.config import CkptDiffConfig
from mlm.checkpoint.commands.result import versions, write_result
from mlm.checkpoint.native.compare import Comparison, compare_checkpoints, compared_bytes
from mlm.checkpoint.native.format import JSON, Manifest, read_manifest
from mlm.checkpoint.native.run_state import LINEAGE
from mlm.checkpoint.native.save_load import resolve
from mlm.config.tree import flatten
from mlm.util.errors import CheckFailedError
from mlm.util.terminal import add_row, console, one_line, progress_bar, table

SHOWN = 10  # tensors a table lists
ABSENT = "—"


def run(config: CkptDiffConfig) -> None:
    """Compare, print tables, write out. Raises CheckFailedError unless all tensors are equal bit for bit."""
    first, second = resolve(config.first, "first"), resolve(config.second, "second")
    total = compared_bytes(read_manifest(first), read_manifest(second))
    with progress_bar("comparing", total, in_bytes=True) as advance:
        comparison = compare_checkpoints(first, second, advance)
    others = state_differences(comparison.first, comparison.second)
    if config.out is not None:
        write_result(config.out, result_of(first, second, comparison, others))
    show(first, second, comparison, others)
    if not comparison.equal:
        raise CheckFailedError(f"{second} is not {first}: {sentence(comparison)}")


def without_lineage(state: Mapping[str, JSON]) -> dict[str, JSON]:
    """A state without the saves it descends from, which two runs never share."""
    return {key: value for key, value in state.items() if key != LINEAGE}


Differences = dict[str, list[tuple[str, JSON, JSON]]]
"""settings, counters, versions → key, value in the first, value in the second; of those that differ."""


def state_differences(first: Manifest, second: Manifest) -> Differences:
    """Return differences other than tensors; a key that one lacks is None there."""
    here, there = ({"step": m.step} | flatten(without_lineage(m.state)) for m in (first, second))
    others: Differences = {"settings": [], "counters": [], "versions": []}
    for key in here | there:
        if here.get(key) != there.get(key):
            section, _, rest = key.partition(".")
            kind = {"config": "settings", "versions": "versions"}.get(section if rest else "", "counters")
            name = key if kind == "counters" else rest.removeprefix("parallel.")
            others[kind].append((name, here.get(key), there.get(key)))
    return others


def result_of(first: Path, second: Path, comparison: Comparison, others: Differences) -> dict[str, Any]:
    """Every difference, and every tensor's, for machines."""
    sides = ((first, comparison.first), (second, comparison.second))
    return {
        "task": "ckpt diff",
        **{
            name: {"path": str(path), "step": manifest.step, "digest": manifest.digest}
            for name, (path, manifest) in zip(("first", "second"), sides, strict=True)
        },
        "equal": comparison.equal,
        **{
            kind: {key: {"first": here, "second": there} for key, here, there in differences}
            for kind, differences in others.items()
        },
        "only_first": list(comparison.only_first),
        "only_second": list(comparison.only_second),
        "forms": [asdict(form) for form in comparison.forms],
        "tensors": [asdict(tensor) | {"relative": tensor.relative} for tensor in comparison.tensors],
        "versions_here": versions(),
    }


def sentence(comparison: Comparison) -> str:
    """Return the differences of the tensors in a line."""
    alike, differing = len(comparison.tensors), comparison.differing
    parts = []
    if differing:
        most = differing[0]
        parts.append(
            f"{len(differing)} of {alike} tensors differ, {one_line(most.name)} most: by {most.largest:.1e}, "
            f"{most.relative:.1e} of its largest element"
        )
    if comparison.forms:
        parts.append(f"{len(comparison.forms)} have another shape or dtype")
    if comparison.only_first or comparison.only_second:
        parts.append(
            f"{len(comparison.only_first)} are only in the first, {len(comparison.only_second)} in the second"
        )
    return "; ".join(parts) or f"all {alike} tensors are equal bit for bit"


def show(first: Path, second: Path, comparison: Comparison, others: Differences) -> None:
    """Print the tables."""
    out = console()
    out.print(f"first   {first}\nsecond  {second}")
    for kind, differences in others.items():
        if differences:
            made = table(f"{kind} that differ", "", "first", "second")
            for key, here, there in differences:
                add_row(made, key, *(ABSENT if value is None else value for value in (here, there)))
            out.print(made)
        else:
            out.print(f"{kind}: the same")
    show_forms(out, comparison)
    if comparison.differing:
        shown = comparison.differing[:SHOWN]
        count = f"the {len(shown)} that differ most of {len(comparison.differing)}"
        made = table(f"tensors: {count}", "", "elements#", "differing#", "largest#", "relative#")
        for tensor in shown:
            numbers = f"{tensor.largest:.1e}", f"{tensor.relative:.1e}"
            add_row(made, tensor.name, f"{tensor.elements:,}", f"{tensor.differing:,}", *numbers)
        out.print(made)
    if comparison.equal:
        out.print(f"tensors: {sentence(comparison)}")


def show_forms(out: Console, comparison: Comparison) -> None:
    """Tensors that cannot be compared."""
    rows = [(form.name, form.first, form.second) for form in comparison.forms]
    rows += [(name, "there", ABSENT) for name in comparison.only_first]
    rows += [(name, ABSENT, "there") for name in comparison.only_second]
    if rows:
        made = table("tensors that are not in both, or not alike", "", "first", "second")
        for row in rows[:SHOWN]:
            add_row(made, *row)
        out.print(made)
        if rows[SHOWN:]:
            out.print(f"and {len(rows) - SHOWN} more")
