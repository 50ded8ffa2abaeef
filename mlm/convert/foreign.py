"""Checkpoints of Megatron-LM and torchtitan as sources of a conversion."""

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from mlm.checkpoint.native.slices import Region
from mlm.convert.config import ConvertConfig
from mlm.convert.dcp.metadata import COPY_AGAIN, MAX_METADATA_BYTES, METADATA
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.torchtitan import TOKEN_TABLE, TorchtitanReader
from mlm.convert.huggingface.folder import CONFIG, read_settings
from mlm.convert.huggingface.mapping import Note
from mlm.convert.megatron.args import Given
from mlm.convert.megatron.distributed import CoreTensors, is_distributed, open_distributed, open_moments
from mlm.convert.megatron.files import check_records, find_files, find_step
from mlm.convert.megatron.merge import RankTensors, open_checkpoint
from mlm.convert.megatron.model import MegatronModel
from mlm.convert.source import Source, is_ours, open_source
from mlm.convert.source import open_checkpoint as open_ours
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.runs.folder import run_config
from mlm.util.errors import UserError, reading_from
from mlm.util.files import digest_file, read_bounded
from mlm.util.terminal import progress_bar


def open_any(path: str, settings: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open a checkpoint of any format, and check what a conversion reads but tensors.

    `settings` have what it may not record: `config`, `vocab_size` and `num_heads`.

    Raises UserError and CorruptFileError.
    """
    folder = Path(path)
    if not (is_ours(path) or folder.is_dir()):
        raise UserError(f"source={path}: no such folder; name a run, a model folder or a checkpoint folder")
    if is_ours(path) or ((folder / CONFIG).is_file() and not (folder / METADATA).exists()):
        source = open_source(path, tokenizer)
        source.check()
        return source
    step, config = find_step(path), _config(folder, settings.config)
    is_core = is_distributed(step)
    if is_core and TOKEN_TABLE.encode() in read_bounded(step / METADATA, MAX_METADATA_BYTES, COPY_AGAIN):
        return TorchtitanSource(step, config, tokenizer)
    known = tokenizer.vocab_size if tokenizer else None
    given = Given(vocab_size=settings.vocab_size, known=known, num_heads=settings.num_heads, config=config)
    if is_core:
        return MegatronSource(open_distributed(step, given), tokenizer)
    return MegatronSource(open_checkpoint(find_files(path), replace(given, config=None)), tokenizer)


def _config(folder: Path, named: str | None) -> ModelConfig | None:
    """Return the model that `config=` names, or a config.json in the folder describes; None without."""
    if named is not None and is_ours(named):
        return open_ours(named).model
    if named is None and not (folder / CONFIG).is_file():
        return None
    return read_settings(Path(named or folder))[2]


class TorchtitanSource(Source):
    """A folder of torch.distributed.checkpoint with torchtitan's names."""

    format = "torchtitan"

    def __init__(self, folder: Path, model: ModelConfig | None, tokenizer: Tokenizer | None) -> None:
        if model is None:
            raise UserError(
                f"{folder}: torchtitan's names, and no config.json: set config=… of mlm convert to a folder "
                "with the config.json of the model (that of its transformers version) or a run of mlm"
            )
        super().__init__(folder, run_config(folder.name, model), (), tokenizer)
        self._tensors = TorchtitanReader(folder, model)
        moments, steps = self._tensors.open_moments()
        self._readers = dict.fromkeys([self._tensors.reader, *(each.reader for each in moments.values())])
        self.moments = {name: each.read for name, each in moments.items()}
        self.origin = {"iteration": steps} if moments else {}

    def read(self, name: str, region: Region) -> Tensor:
        return self._tensors.read(name, region)

    def digests(self) -> dict[str, str]:
        return digest_dcp(*self._readers)


class MegatronSource(Source):
    """A checkpoint of Megatron-LM: distributed, or the files of its ranks."""

    def __init__(self, opened: MegatronModel, tokenizer: Tokenizer | None) -> None:
        held, notes = opened.held, list(opened.notes)
        if padding := opened.table_rows - opened.model.vocab_size:
            rows = f"the last {padding:,} of {opened.table_rows:,} rows of the token table"
            notes.append(f"{rows} are padding: left out")
        if tokenizer is None:
            notes.append("no tokenizer was named: give tokenizer=… where text is read or written")
        config = run_config(held.path.name, opened.model)
        super().__init__(held.path, config, tuple(map(Note, notes)), tokenizer)
        self._opened, self._moments = opened, open_moments(opened)
        self.format, self.filled = "torch_dist", opened.filled
        self.moments = {name: each.read for name, each in self._moments.items()}
        self.origin = {"iteration": opened.iteration}
        if isinstance(held, RankTensors):
            self.format = "torch"
            layout = {"tp": held.tp, "pp": held.pp, "vp": held.vp}
            self.origin |= {"checkpoint_version": held.version, "layout": layout}

    def read(self, name: str, region: Region) -> Tensor:
        return self._opened.read(name, region)

    def digests(self) -> dict[str, str]:
        opened = (self._opened, *self._moments.values())
        return {name: digest for each in opened for name, digest in _digests(each)}


def digest_dcp(*readers: DCPReader) -> dict[str, str]:
    """Return the digest of each file by its name; items are compared with their checksums."""
    size = sum((reader.folder / name).stat().st_size for reader in readers for name in reader.files)
    digests: dict[str, str] = {}
    with progress_bar("reading", size, in_bytes=True) as advance:
        for reader in readers:
            digests |= reader.verify(advance)
    return digests


def _digests(opened: MegatronModel) -> Iterable[tuple[str, str]]:
    """Return each file and its digest; its records are compared with their checksums.

    Raises CorruptFileError where one differs, UserError where a file cannot be read.
    """
    held = opened.held
    if isinstance(held, CoreTensors):
        return digest_dcp(held.reader).items()
    assert isinstance(held, RankTensors)
    paths, digests = list(held.files.files.values()), {}
    with progress_bar("reading", sum(path.stat().st_size for path in paths), in_bytes=True) as advance:
        for path in paths:
            with reading_from(path, COPY_AGAIN):
                check_records(path)
                digests[path.relative_to(held.path).as_posix()] = digest_file(path, advance)
    return digests.items()
