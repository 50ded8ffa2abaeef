"""`mlm reshard`: rewrite a checkpoint for another layout, in one process and the memory of a tensor.

No model is built: the manifest holds the split of every tensor. The output is a function of the saved state
and the target layout alone, so resharding 1 -> 2 -> 4 gives the bytes of 1 -> 4.
"""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table
from torch import Tensor

from mlm.checkpoint.commands.config import ReshardConfig
from mlm.checkpoint.native.compare import Reader
from mlm.checkpoint.native.folders import best_note, staging_path
from mlm.checkpoint.native.format import JSON, RESTORE, CheckpointError, Manifest
from mlm.checkpoint.native.lineage import LINEAGE
from mlm.checkpoint.native.save_load import read_finite, read_manifest, resolve
from mlm.checkpoint.native.shard_file import read_header
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.stream import GlobalTensor, derived_id, published, write_streamed
from mlm.checkpoint.native.tokenizer_digest import check_beside
from mlm.data.tokenizer import MAX_BYTES
from mlm.inference.trained import check_stored, run_directory, split_problems, trained_config
from mlm.models.stage import split_layers
from mlm.parallel.config import ParallelConfig
from mlm.training.config import PretrainConfig
from mlm.training.run_folder import check_space
from mlm.training.state import CHECKPOINTS
from mlm.util.atomic import digest_file, read_bounded, write_atomic
from mlm.util.errors import ConfigError, CorruptFileError, UserError, writing_to
from mlm.util.lock import sole_writer
from mlm.util.ownership import claim_folder, claim_problems
from mlm.util.terminal import Advance, Screen, progress_bar, size

TOKENIZER = "tokenizer.json"
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

    @property
    def to_verify(self) -> int:
        """Bytes of the files to read, each of which is verified first."""
        return sum(entry.bytes for entry in self.manifest.files.values())


def preflight(config: ReshardConfig) -> list[str]:
    """Return what is wrong with the checkpoint, the layout or `out`; no tensor is read."""
    try:
        plan = make_plan(config)
        if problems := claim_problems(plan.out, "run", **claimed(plan)):
            return problems
        if published(plan.root, plan.manifest.step, plan.save_id) is None:
            new_tokenizer(plan)
            check_disk(plan)
    except UserError as error:
        return list(error.problems)
    return []


def make_plan(config: ReshardConfig) -> Plan:
    """Read the manifest and assign its tensors to the layout. Raises UserError."""
    path = resolve(config.ckpt)
    manifest = read_finite(path)
    trained = trained_config(manifest, path)
    check_stored(manifest, trained.model, path)
    model, layout = trained.model, ParallelConfig(tp=config.tp, pp=config.pp, vp=config.vp)
    if problems := split_problems(model, layout):
        raise ConfigError(problems)
    stage_ranks = stage_ranks_of(model.num_layers, config.pp, config.vp)
    tensors = {}
    for name, entry in manifest.tensors.items():
        if name.startswith("optimizer.") and config.weights_only:
            continue
        if entry.split is None:
            raise UserError(
                f"{path}: does not record how {name} is split: an earlier version wrote it. Load and save it "
                f"once, with mlm pretrain ckpt={path} out=…, and reshard that"
            )
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
    said = manifest.state.get("reshard")
    if said is None:
        return manifest.save_id, trained.parallel
    try:
        tp, pp, vp = (int(said["layout"][key]) for key in ("tp", "pp", "vp"))
        return str(said["origin"]), ParallelConfig(tp=tp, pp=pp, vp=vp)
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


def check_disk(plan: Plan) -> None:
    """Raises UserError unless what is still to be written fits on the disk."""
    staging = staging_path(plan.root, plan.manifest.step, plan.save_id)
    folder = plan.root.absolute()
    while not folder.is_dir():
        folder = folder.parent
    try:
        there = sum(path.stat().st_size for path in staging.iterdir()) if staging.is_dir() else 0
        check_space(folder, max(0, plan.count - there), f"out={plan.out}")
    except OSError as error:
        raise UserError(f"out={plan.out}: {error.filename}: {error.strerror}: name another folder") from error


def run(config: ReshardConfig) -> None:
    """Verify, split, publish, and print a table. Raises UserError; complete files stay for another try."""
    plan = make_plan(config)
    with writing_to(config.out):
        claim_folder(plan.out, "run", **claimed(plan))
    with sole_writer(plan.root), saying_how_to_go_on(plan):
        if published(plan.root, plan.manifest.step, plan.save_id) is not None:
            path = write(plan, lambda count: None)
            print(f"{path}: there already, as this command writes it")
            return
        check_disk(plan)
        begin = time.perf_counter()
        with progress_bar("resharding", plan.to_verify + plan.count, in_bytes=True) as advance:
            verify(plan, advance)
            path = write(plan, advance)
        show(plan, path, time.perf_counter() - begin)
        if note := best_note(config.ckpt, plan.source):
            print(f"note: {note}")


def claimed(plan: Plan) -> dict[str, Any]:
    """Files at the top of `out`: a tokenizer that is the source's is not in the way."""
    source = run_directory(plan.source) / TOKENIZER
    same = {TOKENIZER: source.read_bytes()} if source.is_file() else {}
    return {"inputs": [plan.source], "writes": (CHECKPOINTS, TOKENIZER), "same": same}


@contextmanager
def saying_how_to_go_on(plan: Plan) -> Iterator[None]:
    """Around what may be interrupted by Ctrl-C."""
    try:
        yield
    except KeyboardInterrupt:
        message = (
            f"mlm reshard: stopped; the files that {plan.root} has complete stay: the same command continues"
        )
        print(message, file=sys.stderr)
        raise


def verify(plan: Plan, advance: Advance) -> None:
    """Compare every byte of the source with the digests in its manifest. Raises CorruptFileError."""
    path, files = plan.source, plan.manifest.files
    with reading_of(path):
        for name, entry in files.items():  # quick checks first
            read_header(path / name, entry, plan.manifest.save_id)
        for name, entry in files.items():
            if (digest := digest_file(path / name, advance)) != entry.digest:
                raise CorruptFileError(
                    f"{path / name}: damaged, digest {digest}, not {entry.digest}. {RESTORE}"
                )


def write(plan: Plan, advance: Advance) -> Path:
    """Write the checkpoint, and the tokenizer beside it first. Returns the step-… directory."""
    if (tokenizer := new_tokenizer(plan)) is not None:
        try:
            write_atomic(plan.out / TOKENIZER, tokenizer)
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
    source, target = (folder / TOKENIZER for folder in (run_directory(plan.source), plan.out))
    with reading_of(source):
        if not os.path.lexists(source):
            return None
        check_beside(plan.source, plan.manifest.state)
        content = read_bounded(source, MAX_BYTES, RESTORE)
    with reading_of(target):
        there = target.read_bytes() if target.exists() else None
    if there not in (None, content):
        raise UserError(f"{target}: another tokenizer is there. Set out=… to a new directory")
    return content if there is None else None


def show(plan: Plan, path: Path, seconds: float) -> None:
    """Print the table."""
    table = Table(box=SIMPLE_HEAD, title=f"reshard · step {plan.manifest.step}", title_justify="left")
    for name in ("", "layout", "files", "tensors", "bytes"):
        table.add_column(name, justify="left" if name in ("", "layout") else "right")
    for word, layout, manifest in (
        ("read", plan.layout_before, plan.manifest),
        ("written", plan.layout, read_manifest(path)),
    ):
        files = manifest.files.values()
        table.add_row(
            word,
            described(layout),
            f"{len(files):,}",
            f"{len(manifest.tensors):,}",
            size(sum(entry.bytes for entry in files)),
        )
    console = Screen(highlight=False, soft_wrap=True)
    console.print(table)
    console.print(f"{path} in {seconds:,.1f} s, {size(int(plan.count / seconds))}/s", markup=False)


def described(layout: ParallelConfig) -> str:
    """`tp=2 pp=2`."""
    return f"tp={layout.tp} pp={layout.pp}" + (f" vp={layout.vp}" if layout.vp > 1 else "")
