"""Checkpoints of Megatron-LM and torchtitan as sources of a conversion."""

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
from mlm.convert.megatron.args import MegatronOverrides
from mlm.convert.megatron.distributed import open_distributed, open_moments
from mlm.convert.megatron.files import RankFiles, find_files, find_step
from mlm.convert.megatron.merge import RankTensors, open_checkpoint
from mlm.convert.megatron.model import MegatronModel
from mlm.convert.source import Source, is_ours, open_source
from mlm.convert.source import open_checkpoint as open_ours
from mlm.data.tokenizer import Tokenizer
from mlm.models.config import ModelConfig
from mlm.runs.folder import run_config
from mlm.util.errors import UserError
from mlm.util.files import read_bounded
from mlm.util.terminal import progress_bar


def open_any(path: str, settings: ConvertConfig, tokenizer: Tokenizer | None = None) -> Source:
    """Open a checkpoint of any format, and check all that a conversion reads except tensors.

    `settings` have what the files may not record: `config`, `vocab_size` and `num_heads`.

    Raises UserError and CorruptFileError.
    """
    folder = Path(path)
    if not (is_ours(path) or folder.is_dir()):
        raise UserError(f"source={path}: no such folder; name a run, a model folder or a checkpoint folder")
    has_config = (folder / CONFIG).is_file()
    if is_ours(path) or (has_config and not (folder / METADATA).exists()):
        source = open_source(path, tokenizer)
        source.check()
        return source
    step, named, config = find_step(path), settings.config, None
    if named is not None and is_ours(named):
        config = open_ours(named).model
    elif named is not None or has_config:
        config = read_settings(Path(named or folder))[2]
    is_dcp = (step / METADATA).is_file()
    if is_dcp and TOKEN_TABLE.encode() in read_bounded(step / METADATA, MAX_METADATA_BYTES, COPY_AGAIN):
        return TorchtitanSource(step, config, tokenizer)
    overrides = MegatronOverrides(
        vocab_size=settings.vocab_size,
        tokenizer_size=tokenizer.vocab_size if tokenizer else None,
        num_heads=settings.num_heads,
        config=config,
    )
    if is_dcp:
        return MegatronSource(open_distributed(step, overrides), tokenizer)
    return MegatronSource(open_checkpoint(find_files(path), replace(overrides, config=None)), tokenizer)


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
        self._readers = dict.fromkeys([self._tensors.reader, *(moment.reader for moment in moments.values())])
        self.moments = {name: moment.read for name, moment in moments.items()}
        self.origin = {"iteration": steps} if moments else {}

    def read(self, name: str, region: Region) -> Tensor:
        return self._tensors.read(name, region)

    def digests(self) -> dict[str, str]:
        return _digests(*self._readers)


class MegatronSource(Source):
    """A checkpoint of Megatron-LM: distributed, or the files of its ranks."""

    def __init__(self, opened: MegatronModel, tokenizer: Tokenizer | None) -> None:
        tensors, notes = opened.tensors, list(opened.notes)
        if padding := opened.table_rows - opened.model.vocab_size:
            rows = f"the last {padding:,} of {opened.table_rows:,} rows of the token table"
            notes.append(f"{rows} are padding: left out")
        if tokenizer is None:
            notes.append("no tokenizer was named: give tokenizer=… where text is read or written")
        config = run_config(tensors.path.name, opened.model)
        super().__init__(tensors.path, config, tuple(map(Note, notes)), tokenizer)
        self._opened, self._moments = opened, open_moments(opened)
        self.format, self.filled = "torch_dist", opened.filled
        self.moments = {name: moment.read for name, moment in self._moments.items()}
        self.origin = {"iteration": opened.iteration}
        if isinstance(tensors, RankTensors):
            self.format = "torch"
            layout = {"tp": tensors.tp, "pp": tensors.pp, "vp": tensors.vp}
            self.origin |= {"checkpoint_version": tensors.version, "layout": layout}

    def read(self, name: str, region: Region) -> Tensor:
        return self._opened.read(name, region)

    def digests(self) -> dict[str, str]:
        return _digests(*(model.tensors.files for model in (self._opened, *self._moments.values())))


def _digests(*files: DCPReader | RankFiles) -> dict[str, str]:
    """Compare records with their checksums; return the digest of each file by its name.

    Raises CorruptFileError where a checksum differs, UserError where a file cannot be read.
    """
    digests: dict[str, str] = {}
    with progress_bar("reading", sum(part.num_bytes for part in files), in_bytes=True) as advance:
        for part in files:
            digests |= part.verify(advance)
    return digests
