"""A trained model from a checkpoint, at the layout of this command."""

from dataclasses import asdict, dataclass
from pathlib import Path

from mlm.checkpoint.save_load import Manifest, read_manifest, resolve
from mlm.config.build import from_dict
from mlm.config.errors import CorruptFileError, UserError
from mlm.config.layout_checks import SPLIT_RULES, Launch
from mlm.config.nearest_layout import layout_faults
from mlm.config.schema import ModelConfig, ParallelConfig, PrecisionConfig, PretrainConfig
from mlm.data.tokenizer import Tokenizer
from mlm.models.documents import Boundaries
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import parameter_shards
from mlm.train.memory import reuse_large_blocks
from mlm.train.pipelined import PipelinedModel
from mlm.train.state import load_weights


@dataclass(frozen=True)
class Trained:
    """A model and what it was trained with."""

    model: PipelinedModel
    config: PretrainConfig
    manifest: Manifest
    path: Path
    """The step-… directory."""


def trained_config(manifest: Manifest, path: Path) -> PretrainConfig:
    """The run spec saved in a checkpoint. Raises CorruptFileError if it is none of this version."""
    try:
        config = from_dict(PretrainConfig, dict(manifest.state["config"]))
        Boundaries.of(config.data)  # the model will be asked to keep documents apart by it
        return config
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptFileError(f"{path}: holds no configuration this version can read ({error})") from error


def load_trained(
    ckpt: str, parallel: ParallelConfig, precision: PrecisionConfig, ctx: ParallelContext
) -> Trained:
    """Build the model of a checkpoint or run directory and load its weights. Collective over all ranks.

    Of `parallel`, the sizes count; how training saves memory does not.
    """
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    path = resolve(ckpt)
    manifest = read_manifest(path)
    config = trained_config(manifest, path)
    layout = ParallelConfig(tp=parallel.tp, pp=parallel.pp, vp=parallel.vp)
    model = PipelinedModel(config.model, layout, precision, ctx, config.data)
    shards = [shard for chunk in model.chunks for shard in parameter_shards(chunk, ctx.tp)]
    load_weights(tuple(shards), path, ctx)
    return Trained(model, config, manifest, path)


def checkpoint_faults(ckpt: str, parallel: ParallelConfig) -> list[str]:
    """What is wrong with a checkpoint, or with splitting its model so; read before any rank starts."""
    try:
        path = resolve(ckpt)
        config = trained_config(read_manifest(path), path)
    except UserError as error:
        return [str(error)]
    return split_faults(config.model, parallel)


def split_faults(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """What keeps tp from dividing the layers of a trained model, or pp and vp from dealing them out."""
    values = {f"model.{key}": value for key, value in asdict(model).items()} | asdict(parallel)
    faults = layout_faults(values, Launch(None, None), SPLIT_RULES)
    return [fault.replace("model.", "the checkpoint's ") for fault in faults]


def run_directory(path: Path) -> Path:
    """The run directory of a checkpoint: out of out/checkpoints/step-…"""
    return path.parent.parent


def load_tokenizer(named: str | None, path: Path) -> Tokenizer:
    """The tokenizer a command names, else the one saved with the run. Raises UserError when there is none."""
    if named is not None:
        return Tokenizer.load(named)
    saved = run_directory(path) / "tokenizer.json"
    if not saved.exists():
        raise UserError(f"tokenizer=null and {saved} is not there: give tokenizer=…/tokenizer.json")
    return Tokenizer.load(saved)
