"""`mlm ckpt diff`: how two checkpoints differ in state and tensors, whatever their layouts."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.compare import CheckpointComparison, compare_checkpoints
from mlm.checkpoint.native.folders import resolve
from mlm.checkpoint.native.run_state import LINEAGE
from mlm.cli.ckpt.settings import CkptDiffConfig
from mlm.cli.result import write_result
from mlm.config.tree import flatten
from mlm.util.errors import CheckFailedError
from mlm.util.terminal import add_row, console, table

SHOWN = 10  # tensors a table lists
ABSENT = "—"

Differences = dict[str, dict[str, Any]]
"""Key of the state that differs -> its value in the first and in the second; None where one lacks it."""


def run(config: CkptDiffConfig) -> None:
    """Compare, print tables, write out. Raises CheckFailedError unless all tensors are equal bit for bit."""
    first, second = resolve(config.first, "first"), resolve(config.second, "second")
    comparison = compare_checkpoints(first, second)
    # Two runs never share the saves that they descend from.
    first_state, second_state = (
        {"step": manifest.step} | flatten({k: v for k, v in manifest.state.items() if k != LINEAGE})
        for manifest in (comparison.first, comparison.second)
    )
    differences = {
        key: {"first": first_state.get(key), "second": second_state.get(key)}
        for key in first_state | second_state
        if first_state.get(key) != second_state.get(key)
    }
    if config.out is not None:
        result = {
            "task": "ckpt diff",
            **{
                side: {"path": str(path), "step": manifest.step, "digest": manifest.digest}
                for side, path, manifest in (
                    ("first", first, comparison.first),
                    ("second", second, comparison.second),
                )
            },
            "equal": comparison.equal,
            "state": differences,
            "only_first": list(comparison.only_first),
            "only_second": list(comparison.only_second),
            "forms": [asdict(form) for form in comparison.forms],
            "tensors": [asdict(tensor) | {"relative": tensor.relative} for tensor in comparison.tensors],
        }
        write_result(config.out, result)
    print_tables(first, second, comparison, differences)
    if not comparison.equal:
        raise CheckFailedError(f"{second} is not {first}: {comparison.sentence}")


def print_tables(
    first: Path, second: Path, comparison: CheckpointComparison, differences: Differences
) -> None:
    out = console()
    out.print(f"first   {first}\nsecond  {second}")
    states = table("state that differs" if differences else "state: the same", "", "first", "second")
    for key, values in differences.items():
        add_row(states, key, *(ABSENT if value is None else value for value in values.values()))
    out.print(states)
    forms = [(form.name, form.first, form.second) for form in comparison.forms]
    forms += [(name, "there", ABSENT) for name in comparison.only_first]
    forms += [(name, ABSENT, "there") for name in comparison.only_second]
    if forms:
        unlike = table(f"tensors that are not in both, or not alike: {len(forms)}", "", "first", "second")
        for row in forms[:SHOWN]:
            add_row(unlike, *row)
        out.print(unlike)
    if comparison.differing:
        title = f"tensors that differ: {len(comparison.differing)}, the most different first"
        tensors = table(title, "", "elements#", "differing#", "largest#", "relative#")
        for tensor in comparison.differing[:SHOWN]:
            numbers = f"{tensor.largest:.1e}", f"{tensor.relative:.1e}"
            add_row(tensors, tensor.name, f"{tensor.elements:,}", f"{tensor.differing:,}", *numbers)
        out.print(tensors)
    if comparison.equal:
        out.print(f"tensors: {comparison.sentence}")
