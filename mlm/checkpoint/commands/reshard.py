"""`mlm reshard`: rewrite a checkpoint for another layout, in one process and the memory of a tensor.

No model is built: the manifest holds the split of every tensor. The output is a function of the saved state
and the target layout alone, so resharding 1 -> 2 -> 4 gives the bytes of 1 -> 4.
"""

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mlm.checkpoint.commands.config import ReshardConfig
from mlm.checkpoint.native.folders import CHECKPOINTS, best_note, clear_up
from mlm.checkpoint.native.format import JSON, RESTORE, CheckpointError, Manifest, read_manifest_head
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.run_state import LINEAGE, TOKENIZER_FILE, check_run_tokenizer
from mlm.checkpoint.native.save_load import read_finite, resolve
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import GlobalTensor, derived_id, published, write_streamed
from mlm.data.tokenizer import MAX_BYTES
from mlm.inference.trained import check_stored_parameters, run_directory, split_problems, trained_config
from mlm.models.stage import split_layers
from mlm.parallel.config import ParallelConfig
from mlm.training.config import PretrainConfig
from mlm.training.run_folder import check_space
from mlm.util.errors import ConfigError, CorruptFileError, UserError, writing_to
from mlm.util.files import read_bounded, write_atomic
from mlm.util.lock import single_writer
from mlm.util.ownership import claim_folder, claim_problems
from mlm.util.terminal import Advance, add_row, console, format_bytes, progress_bar, table

TRAINING_STATE = ("applied_steps", "scaler", LINEAGE)
"""State of the optimizer in a checkpoint: left out with weights alone."""


@dataclass(frozen=True)
class Plan:
    """Checkpoint to read and layout to write."""

    source: Path
    """The step-… directory to read."""
    manifest: Manifest
    out: Path
    """Run directory to write."""
    layout_before: ParallelConfig
    """The layout of the source; sizes alone."""
    layout: ParallelConfig
    """The layout to write for; sizes alone."""
    tensors: dict[str, GlobalTensor]
    stage_ranks: dict[int | str, int]
    """Pipeline rank of each layer, and of "first" and "last"."""
    save_id: str
    state: dict[str, JSON]

    @property
    def root(self) -> Path:
        """Folder of checkpoints to write to."""
        return self.out / CHECKPOINTS

    @property
    def count(self) -> int:
        """Bytes of tensors to write."""
        return sum(tensor.num_bytes for tensor in self.tensors.values())


def preflight(config: ReshardConfig) -> list[str]:
    """Return what is wrong with the checkpoint, the layout or `out`; no tensor is read."""
    try:
        plan = make_plan(config)
        if problems := claim_problems(plan.out, "run", **claim_arguments(plan)):
            return problems
        if published(plan.root, plan.manifest.step, plan.save_id) is None:
            new_tokenizer(plan)
    except UserError as error:
        return list(error.problems)
    return []


def make_plan(config: ReshardConfig) -> Plan:
    """Read the manifest and assign its tensors to the layout. Raises UserError."""
    path = resolve(config.ckpt)
    manifest = read_finite(path)
    trained = trained_config(manifest, path)
    check_stored_parameters(manifest, trained.model, path)
    model, layout = trained.model, ParallelConfig(tp=config.tp, pp=config.pp, vp=config.vp)
    if problems := split_problems(model, layout):
        raise ConfigError(problems)
    stage_ranks = stage_ranks_of(model.num_layers, config.pp, config.vp)
    tensors = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("optimizer.") and config.weights_only:
            continue
        if entry.split is None:
            raise CorruptFileError(f"{path}: does not record how {name} is split. {RESTORE}")
        if entry.split.stage not in stage_ranks:
            raise CorruptFileError(
                f"{path}: {name} is of layer {entry.split.stage}, the model has {model.num_layers}. {RESTORE}"
            )
        tensors[name] = GlobalTensor(entry.shape, entry.dtype, entry.split, entry.norm, entry.norm_before)
    origin, layout_before = history(path, manifest, trained)
    state = new_state(manifest, origin, config)
    save_id = derived_id({"reshard": state["reshard"], "weights_only": state.get("weights_only", False)})
    return Plan(path, manifest, Path(config.out), layout_before, layout, tensors, stage_ranks, save_id, state)


def stage_ranks_of(num_layers: int, pp: int, vp: int) -> dict[int | str, int]:
    """Pipeline rank of each layer and of both ends: stage number s is with rank s modulo pp."""
    ranks: dict[int | str, int] = {"first": 0, "last": pp - 1}
    for number, stage in enumerate(split_layers(num_layers, pp * vp)):
        ranks.update(dict.fromkeys(stage.layers, number % pp))
    return ranks


def history(path: Path, manifest: Manifest, trained: PretrainConfig) -> tuple[str, ParallelConfig]:
    """Save id of the save that a checkpoint comes from, whatever lay between, and its own layout."""
    recorded = manifest.state.get("reshard")
    if recorded is None:
        return manifest.save_id, trained.parallel
    try:
        tp, pp, vp = (int(recorded["layout"][key]) for key in ("tp", "pp", "vp"))
        return str(recorded["origin"]), ParallelConfig(tp=tp, pp=pp, vp=vp)
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path}: does not record what it was resharded from. {RESTORE}") from error


def new_state(manifest: Manifest, origin: str, config: ReshardConfig) -> dict[str, JSON]:
    """The state of the source, with the save that all comes from and the new layout."""
    state = dict(manifest.state)
    if config.weights_only:
        state = {key: value for key, value in state.items() if key not in TRAINING_STATE}
        state["weights_only"] = True
    state["reshard"] = {
        "origin": origin,
        "layout": {"tp": config.tp, "pp": config.pp, "vp": config.vp},
    }
    return state


def run(config: ReshardConfig) -> None:
    """Split, publish, and print a table. Raises UserError, and leaves no checkpoint then."""
    plan = make_plan(config)
    with writing_to(config.out):
        claim_folder(plan.out, "run", **claim_arguments(plan))
    with single_writer(plan.root):
        if published(plan.root, plan.manifest.step, plan.save_id) is not None:
            path = write_checkpoint(plan, lambda count: None)
            print(f"{path}: there already, as this command writes it")
            return
        clear_up(plan.root)
        check_space(plan.root, plan.count, f"out={plan.out}")
        begin = time.perf_counter()
        with progress_bar("resharding", plan.count, in_bytes=True) as advance:
            path = write_checkpoint(plan, advance)
        show(plan, path, time.perf_counter() - begin)
        if note := best_note(config.ckpt, plan.source):
            print(f"note: {note}")


def claim_arguments(plan: Plan) -> dict[str, Any]:
    """Files at the top of `out`: a tokenizer that is the source's is not in the way."""
    source = run_directory(plan.source) / TOKENIZER_FILE
    same = {TOKENIZER_FILE: source.read_bytes()} if source.is_file() else {}
    return {"inputs": [plan.source], "writes": (CHECKPOINTS, TOKENIZER_FILE), "same": same}


def write_checkpoint(plan: Plan, advance: Advance) -> Path:
    """Write the checkpoint, and the tokenizer beside it first. Returns the step-… directory."""
    if (tokenizer := new_tokenizer(plan)) is not None:
        try:
            write_atomic(plan.out / TOKENIZER_FILE, tokenizer)
        except OSError as error:
            raise UserError(f"out={plan.out}: {error.strerror}: name another folder") from error
    with Reader(plan.source, plan.manifest) as reader:

        def read(name: str, piece: Region) -> Tensor:
            with reading_of(plan.source):
                return reader.read(name, piece)

        return write_streamed(
            plan.root,
            plan.manifest.step,
            plan.tensors,
            read,
            save_id=plan.save_id,
            state=plan.state,
            tp=plan.layout.tp,
            stage_rank=plan.stage_ranks.__getitem__,
            progress=advance,
        )


@contextmanager
def reading_of(path: Path) -> Iterator[None]:
    """Around what reads the source: an OSError in it is not one of the disk written to."""
    try:
        yield
    except OSError as error:
        where = error.filename or path
        raise CheckpointError(f"{where}: cannot be read: {error.strerror}. {RESTORE}") from error


def new_tokenizer(plan: Plan) -> bytes | None:
    """The source run's tokenizer, if it has one and `out` has not. Raises UserError if that has another."""
    source, target = (folder / TOKENIZER_FILE for folder in (run_directory(plan.source), plan.out))
    with reading_of(source):
        if not os.path.lexists(source):
            return None
        check_run_tokenizer(plan.source, plan.manifest.state)
        content = read_bounded(source, MAX_BYTES, RESTORE)
    with reading_of(target):
        there = target.read_bytes() if target.exists() else None
    if there not in (None, content):
        raise UserError(f"{target}: another tokenizer is there. Set out=… to a new directory")
    return content if there is None else None


def show(plan: Plan, path: Path, seconds: float) -> None:
    """Print the table."""
    made = table(f"reshard · step {plan.manifest.step}", "", "layout", "files#", "tensors#", "bytes#")
    for word, layout, manifest in (
        ("read", plan.layout_before, plan.manifest),
        ("written", plan.layout, read_manifest_head(path)),
    ):
        files, count = manifest.files.values(), f"{len(manifest.tensors):,}"
        total = format_bytes(sum(entry.bytes for entry in files))
        add_row(made, word, layout_text(layout), f"{len(files):,}", count, total)
    out = console()
    out.print(made)
    out.print(f"{path} in {seconds:,.1f} s, {format_bytes(int(plan.count / seconds))}/s")


def layout_text(layout: ParallelConfig) -> str:
    """`tp=2 pp=2`."""
    return f"tp={layout.tp} pp={layout.pp}" + (f" vp={layout.vp}" if layout.vp > 1 else "")
