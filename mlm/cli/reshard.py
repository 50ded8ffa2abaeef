"""`mlm reshard`: rewrite a checkpoint for another layout, in one process and the memory of a tensor.

No model is built: the manifest holds the split of every tensor. The output is a function of the saved state
and the target layout alone, so resharding 1 -> 2 -> 4 gives the bytes of 1 -> 4.
"""

import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from mlm.checkpoint.native.folders import CHECKPOINTS, best_note
from mlm.checkpoint.native.format import (
    JSON,
    RESTORE,
    Manifest,
    TensorEntry,
    read_manifest_head,
)
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.run_state import LINEAGE, TOKENIZER_FILE, check_run_tokenizer, tokenizer_path
from mlm.checkpoint.native.save_load import read_finite, resolve
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import derived_id, write_streamed
from mlm.cli.conversion_settings import ReshardConfig
from mlm.cli.result import show_table
from mlm.data.tokenizer_settings import MAX_BYTES
from mlm.inference.base import Base
from mlm.inference.trained import check_stored_parameters, split_problems, trained_config
from mlm.models.config import ModelConfig
from mlm.models.stage import split_layers
from mlm.parallel.config import ParallelConfig
from mlm.runs.folder import new_folder, out_problems
from mlm.util.errors import ConfigError, CorruptFileError, UserError, attempt, reading_from
from mlm.util.files import read_bounded, write_atomic
from mlm.util.terminal import Advance, format_bytes, progress_bar

TRAINING_STATE = ("applied_steps", "scaler", LINEAGE)
"""State of the optimizer in a checkpoint: left out with weights alone."""


@dataclass(frozen=True)
class ReshardPlan:
    """Checkpoint to read and layout to write."""

    source: Path
    """The step-… directory to read."""
    manifest: Manifest
    tensors: dict[str, TensorEntry]
    stage_ranks: dict[int | str, int]
    """Pipeline rank of each layer, and of "first" and "last"."""
    state: dict[str, JSON]
    tokenizer: bytes | None
    """The source run's tokenizer.json, if it has one."""

    @property
    def num_bytes(self) -> int:
        """Bytes of tensors to write."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())

    @property
    def save_id(self) -> str:
        """A function of the save that all comes from, the layout, and whether weights alone are written."""
        weights_only = self.state.get("weights_only", False)
        return derived_id({"reshard": self.state["reshard"], "weights_only": weights_only})


def preflight(config: ReshardConfig) -> list[str]:
    """Return what is wrong with the checkpoint, the layout or `out`; no tensor is read."""
    problems = out_problems(config.out)
    attempt(problems, lambda: make_plan(config))
    return problems


def make_plan(config: ReshardConfig) -> ReshardPlan:
    """Read the manifest and assign its tensors to the layout. Raises UserError."""
    path = resolve(config.ckpt)
    manifest = read_finite(path)
    model = trained_config(manifest, path).model
    if Base.of(manifest, path) is not None:
        raise UserError(f"ckpt={config.ckpt}: holds adapters alone, which any layout loads as they are")
    check_stored_parameters(manifest, model, path)
    if problems := split_problems(model, ParallelConfig(tp=config.tp, pp=config.pp, vp=config.vp)):
        raise ConfigError(problems)
    with reading_from(path, RESTORE):
        check_run_tokenizer(path, manifest.state)
        file = tokenizer_path(path)
        tokenizer = read_bounded(file, MAX_BYTES, RESTORE) if file.exists() else None
    stage_ranks = stage_ranks_of(model, config.pp, config.vp)
    tensors = tensors_to_write(path, manifest, stage_ranks, weights_only=config.weights_only)
    return ReshardPlan(path, manifest, tensors, stage_ranks, new_state(path, manifest, config), tokenizer)


def stage_ranks_of(model: ModelConfig, pp: int, vp: int) -> dict[int | str, int]:
    """Pipeline rank of each layer and of both ends: stage number s is with rank s modulo pp."""
    ranks: dict[int | str, int] = {"first": 0, "last": pp - 1}
    for number, stage in enumerate(split_layers(model.num_layers, pp * vp)):
        ranks.update(dict.fromkeys(stage.layers, number % pp))
    return ranks


def tensors_to_write(
    path: Path, manifest: Manifest, stage_ranks: dict[int | str, int], *, weights_only: bool
) -> dict[str, TensorEntry]:
    """Return the tensors by name. Raises CorruptFileError for one without a split that fits the model."""
    tensors = {}
    for name, entry in manifest.tensors.items():
        if weights_only and name.startswith("optimizer."):
            continue
        if entry.split.stage not in stage_ranks:
            raise CorruptFileError(f"{path}: does not record how {name} is split in this model. {RESTORE}")
        tensors[name] = entry
    return tensors


def new_state(path: Path, manifest: Manifest, config: ReshardConfig) -> dict[str, JSON]:
    """The state of the source, with the first save that it comes from and the new layout."""
    state = dict(manifest.state)
    if config.weights_only:
        state = {key: value for key, value in state.items() if key not in TRAINING_STATE}
        state["weights_only"] = True
    recorded = manifest.state.get("reshard", {"origin": manifest.save_id})
    if not isinstance(recorded, dict) or "origin" not in recorded:
        raise CorruptFileError(f"{path}: does not record what it was resharded from. {RESTORE}")
    layout = {"tp": config.tp, "pp": config.pp, "vp": config.vp}
    return state | {"reshard": {"origin": recorded["origin"], "layout": layout}}


def run(config: ReshardConfig) -> None:
    """Split, publish, and print a table. Raises UserError, and leaves nothing then."""
    plan = make_plan(config)
    begin = time.perf_counter()
    with (
        new_folder(Path(config.out), plan.num_bytes) as folder,
        progress_bar("resharding", plan.num_bytes, in_bytes=True) as advance,
    ):
        if plan.tokenizer is not None:
            write_atomic(folder / TOKENIZER_FILE, plan.tokenizer)
        name = write_checkpoint(plan, folder / CHECKPOINTS, config.tp, advance).name
    show(config, plan, Path(config.out) / CHECKPOINTS / name, time.perf_counter() - begin)


def write_checkpoint(plan: ReshardPlan, root: Path, tp: int, advance: Advance) -> Path:
    """Write `root/step-…` and return it."""
    with Reader(plan.source, plan.manifest) as reader:

        def read(name: str, piece: Region) -> Tensor:
            with reading_from(plan.source, RESTORE):
                return reader.read(name, piece)

        return write_streamed(
            root,
            plan.manifest.step,
            plan.tensors,
            read,
            save_id=plan.save_id,
            state=plan.state,
            tp=tp,
            stage_rank=plan.stage_ranks.__getitem__,
            progress=advance,
        )


def show(config: ReshardConfig, plan: ReshardPlan, path: Path, seconds: float) -> None:
    """Print the table and notes."""
    written = read_manifest_head(path)
    columns = {
        "step#": written.step,
        "layout": f"tp={config.tp} pp={config.pp} vp={config.vp}",
        "files before#": f"{len(plan.manifest.files):,}",
        "files#": f"{len(written.files):,}",
        "tensors#": f"{len(written.tensors):,}",
        "bytes#": format_bytes(sum(entry.bytes for entry in written.files.values())),
        "bytes/s#": format_bytes(int(plan.num_bytes / seconds)),
    }
    notes = filter(None, [best_note(config.ckpt, plan.source)])
    show_table(f"reshard · {plan.source}", columns, notes, f"written to {path} in {seconds:,.1f} s")
