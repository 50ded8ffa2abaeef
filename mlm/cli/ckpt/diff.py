"""`mlm ckpt diff`: how two checkpoints differ in state and tensors, whatever their layouts."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlm.checkpoint.native.run_state import LINEAGE
from mlm.cli.command import Command, check_out_file
from mlm.config.fields import InputPath, ResultFile
from mlm.config.tree import flatten
from mlm.util.errors import CheckFailedError

if TYPE_CHECKING:  # which need torch
    from mlm.checkpoint.native.compare import CheckpointComparison
    from mlm.checkpoint.native.format import Manifest

SHOWN = 10  # tensors a table lists
ABSENT = "—"

Differences = dict[str, dict[str, Any]]
"""Key of the state that differs -> its value in the first and in the second; None where one lacks it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CkptDiffConfig:
    """The run spec of `mlm ckpt diff`: how two checkpoints differ, whatever their layouts."""

    first: InputPath
    """Checkpoint (step-…) or run directory (its latest checkpoint; of a finetuned run the best)."""
    second: InputPath
    """The one to compare it with."""
    out: ResultFile | None = None
    """JSON file for every tensor's difference; null writes none."""


def run(config: CkptDiffConfig) -> None:
    """Compare, print tables, write out. Raises CheckFailedError unless all tensors are equal bit for bit."""
    from mlm.checkpoint.native.compare import compare_checkpoints
    from mlm.checkpoint.native.folders import resolve
    from mlm.cli.result import write_result

    first, second = resolve(config.first, "first"), resolve(config.second, "second")
    comparison = compare_checkpoints(first, second)
    differences = state_differences(comparison.first, comparison.second)
    if config.out is not None:
        write_result(config.out, result_of(first, second, comparison, differences))
    show(first, second, comparison, differences)
    if not comparison.equal:
        raise CheckFailedError(f"{second} is not {first}: {comparison.sentence}")


def state_differences(first: "Manifest", second: "Manifest") -> Differences:
    """Return what differs in step and state, but the saves they descend from, which two runs never share."""
    here, there = (
        {"step": manifest.step} | flatten({k: v for k, v in manifest.state.items() if k != LINEAGE})
        for manifest in (first, second)
    )
    return {
        key: {"first": here.get(key), "second": there.get(key)}
        for key in here | there
        if here.get(key) != there.get(key)
    }


def result_of(
    first: Path, second: Path, comparison: "CheckpointComparison", differences: Differences
) -> dict[str, Any]:
    """Every difference, and every tensor's, for machines."""
    sides = {"first": (first, comparison.first), "second": (second, comparison.second)}
    return {
        "task": "ckpt diff",
        **{
            side: {"path": str(path), "step": manifest.step, "digest": manifest.digest}
            for side, (path, manifest) in sides.items()
        },
        "equal": comparison.equal,
        "state": differences,
        "only_first": list(comparison.only_first),
        "only_second": list(comparison.only_second),
        "forms": [asdict(form) for form in comparison.forms],
        "tensors": [asdict(tensor) | {"relative": tensor.relative} for tensor in comparison.tensors],
    }


def show(first: Path, second: Path, comparison: "CheckpointComparison", differences: Differences) -> None:
    """Print the tables: state, tensors that cannot be compared, and those that differ most."""
    from mlm.util.terminal import add_row, console, table

    out = console()
    out.print(f"first   {first}\nsecond  {second}")
    made = table("state that differs" if differences else "state: the same", "", "first", "second")
    for key, values in differences.items():
        add_row(made, key, *(ABSENT if value is None else value for value in values.values()))
    out.print(made)
    forms = [(form.name, form.first, form.second) for form in comparison.forms]
    forms += [(name, "there", ABSENT) for name in comparison.only_first]
    forms += [(name, ABSENT, "there") for name in comparison.only_second]
    if forms:
        made = table(f"tensors that are not in both, or not alike: {len(forms)}", "", "first", "second")
        for row in forms[:SHOWN]:
            add_row(made, *row)
        out.print(made)
    if comparison.differing:
        title = f"tensors that differ: {len(comparison.differing)}, the most different first"
        made = table(title, "", "elements#", "differing#", "largest#", "relative#")
        for tensor in comparison.differing[:SHOWN]:
            numbers = f"{tensor.largest:.1e}", f"{tensor.relative:.1e}"
            add_row(made, tensor.name, f"{tensor.elements:,}", f"{tensor.differing:,}", *numbers)
        out.print(made)
    if comparison.equal:
        out.print(f"tensors: {comparison.sentence}")


DIFF = Command(
    words=("ckpt", "diff"),
    spec=CkptDiffConfig,
    target="mlm.cli.ckpt.diff:run",
    local_check=check_out_file,
    positional=("first", "second"),
    summary="compare two checkpoints: step, state, tensors",
    about=(
        "Compares two checkpoints tensor by tensor, whatever layouts wrote them. Ends with 0 if all "
        "tensors are equal bit for bit, 1 if not."
    ),
    examples=(("Compare the latest checkpoints of two runs", "mlm ckpt diff runs/shakespeare runs/longer"),),
)
