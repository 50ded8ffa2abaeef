"""Resharding of a checkpoint to another layout, in one process and the memory of one tensor.

No model is built: the manifest holds the split of every tensor. The output is a function of the saved state
and the target layout alone, so resharding 1 -> 2 -> 4 gives the same bytes as 1 -> 4.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mlm.checkpoint.native.format import JSON, RESTORE, Manifest, TensorEntry
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.run_state import EMA, LINEAGE
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import derived_id, write_streamed
from mlm.util.errors import CorruptFileError, UserError, reading_from
from mlm.util.terminal import Advance


@dataclass(frozen=True)
class ReshardPlan:
    source: Path
    """The step-… directory to read."""
    manifest: Manifest
    tensors: Mapping[str, TensorEntry]
    stage_ranks: Mapping[int | str, int]
    """Pipeline rank of each layer, and of "first" and "last"."""
    state: Mapping[str, JSON]
    reads: Mapping[str, str]
    """Name of a tensor to write -> its stored name, where they differ."""

    @property
    def num_bytes(self) -> int:
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def plan_reshard(
    path: Path,
    manifest: Manifest,
    stage_ranks: Mapping[int | str, int],
    layout: Mapping[str, int],
    *,
    weights_only: bool,
    average: bool = False,
) -> ReshardPlan:
    """Return the tensors and state to write; the state records the original save and the new layout.

    With `average`, the averaged weights replace the weights and nothing else is written. Raises
    CorruptFileError for a tensor without a split that fits the model, UserError without an average.
    """
    weights_only |= average
    tensors, state, reads = {}, dict(manifest.state), dict[str, str]()
    for name, entry in manifest.tensors.items():
        if weights_only and name.startswith("optimizer."):
            continue
        averaged = name.replace("model.", "optimizer.ema.", 1)
        if average and averaged in manifest.tensors:
            reads[name] = averaged
        if entry.split.stage not in stage_ranks:
            raise CorruptFileError(f"{path}: does not record how {name} is split in this model. {RESTORE}")
        tensors[name] = entry
    if average and not reads:
        raise UserError(f"ema=true: {path} holds no average of its weights; train with ema.decay=0.999")
    if average and manifest.state.get(EMA) == 0:
        raise UserError(f"ema=true: no update is in the average of {path}, as all overflowed; train on")
    if weights_only:
        for key in ("applied_steps", "scaler", EMA, LINEAGE):  # of the optimizer
            state.pop(key, None)
        state["weights_only"] = True
    recorded = manifest.state.get("reshard", {"origin": manifest.save_id})
    if not isinstance(recorded, dict) or "origin" not in recorded:
        raise CorruptFileError(f"{path}: does not record what it was resharded from. {RESTORE}")
    state["reshard"] = {"origin": recorded["origin"], "layout": dict(layout)}
    return ReshardPlan(path, manifest, tensors, stage_ranks, state, reads)


def write_checkpoint(plan: ReshardPlan, root: Path, tp: int, advance: Advance) -> Path:
    """Write `root/step-…` and return it. Its save id derives from origin, layout and tensors."""
    content = {"reshard": plan.state["reshard"], "weights_only": plan.state.get("weights_only", False)}
    content |= {"average": True} if plan.reads else {}
    with Reader(plan.source, plan.manifest) as reader:

        def read_region(name: str, piece: Region) -> Tensor:
            with reading_from(plan.source, RESTORE):
                return reader.read(plan.reads.get(name, name), piece)

        return write_streamed(
            root,
            plan.manifest.step,
            plan.tensors,
            read_region,
            save_id=derived_id(content),
            state=plan.state,
            tp=tp,
            stage_rank=plan.stage_ranks.__getitem__,
            progress=advance,
        )
