"""Whole weights of a checkpoint, one at a time, for exports: its own, or those of a base with adapters."""

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from torch import Tensor

from mlm.checkpoint.native.format import RESTORE, Manifest, read_manifest
from mlm.checkpoint.native.reader import Reader
from mlm.checkpoint.native.slices import Region
from mlm.checkpoint.native.verify import check_whole, shard_bytes
from mlm.checkpoint.parameters import parameters
from mlm.inference.base import Base, base_digest
from mlm.inference.hf_source import open_tensors
from mlm.inference.trained import is_model_folder, trained_config
from mlm.models.lora import adapter_shards, merged_changes
from mlm.parallel.low_rank import WeightChange
from mlm.parallel.mesh import Axis
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.terminal import Advance


class WholeWeights:
    """Reads parameters of a checkpoint or model folder by name, float32. A context manager.

    Adapters are added to the weights of their base, whose digest is compared first.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.changes = path, dict[str, WeightChange]()
        self.reader: Reader | None = None
        self.below: WholeWeights | None = None
        if is_model_folder(path):
            self.tensors = open_tensors(path)
            return
        manifest = read_manifest(path)
        self.reader = Reader(path, manifest)
        if (base := Base.of(manifest, path)) is not None:
            if base_digest(base.path) != base.digest:
                raise UserError(
                    f"{base.name}: is no longer the base of the adapters in {path}; bring it back"
                )
            self.below = WholeWeights(base.path)
            self.changes = self._changes(manifest)

    def __enter__(self) -> "WholeWeights":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self.reader is not None:
            self.reader.__exit__(kind, error, traceback)
        if self.below is not None:
            self.below.__exit__(kind, error, traceback)

    def _changes(self, manifest: Manifest) -> dict[str, WeightChange]:
        config = trained_config(manifest, self.path)
        adapters = {s.name: self._stored(s.name) for s, _ in adapter_shards(config.model, config.lora)}
        return dict(merged_changes(config.model, config.lora, adapters))

    def read(self, name: str, rows: slice | None = None) -> Tensor:
        """Return a parameter, or some of its rows. Raises CorruptFileError."""
        if self.reader is None:
            return self.tensors.read(name, _rows(parameters(self.tensors.model.config)[name].shape, rows))
        if self.below is None or f"model.{name}" in self.reader.manifest.tensors:
            return self._stored(name, rows)
        value = self.below.read(name, rows)
        change = self.changes.get(name)
        return value if change is None else change.added_to(value, (rows or slice(None),), Axis("tp"))

    def _stored(self, name: str, rows: slice | None = None) -> Tensor:
        assert self.reader is not None
        entry = self.reader.manifest.tensors.get(f"model.{name}")
        if entry is None:
            raise CorruptFileError(f"{self.path}: holds no model.{name}, its config has one. {RESTORE}")
        try:
            return self.reader.read(f"model.{name}", _rows(entry.shape, rows)).float()
        except OSError as error:
            raise CorruptFileError(
                f"{error.filename}: cannot be read: {error.strerror}. {RESTORE}"
            ) from error

    @property
    def num_bytes(self) -> int:
        """Bytes that `check` reads."""
        below = 0 if self.below is None else self.below.num_bytes
        return below if self.reader is None else below + shard_bytes(self.path)

    def check(self, advance: Advance) -> None:
        """Compare every byte of checkpoints with their digests. Raises CorruptFileError."""
        if self.reader is not None:
            check_whole(self.path, advance)
        if self.below is not None:
            self.below.check(advance)


def _rows(shape: Sequence[int], rows: slice | None) -> Region:
    """The region of some rows, None for all."""
    first, last = (0, shape[0]) if rows is None else (rows.start, rows.stop)
    return Region((first, *(0 for _ in shape[1:])), (last - first, *shape[1:]))
