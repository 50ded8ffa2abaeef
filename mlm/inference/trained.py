"""A trained model from a checkpoint, at the layout of this command.

`ckpt=` names a checkpoint or run directory of ours, or a model of `transformers`: its folder or an id of the
Hub. A model folder is read as it is, and nothing is written to it.
"""

import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch

import mlm
from mlm.checkpoint.native.folders import locate
from mlm.checkpoint.native.format import MANIFEST, canonical
from mlm.checkpoint.native.run_state import TOKENIZER_FILE, TokenizerDigest, check_run_tokenizer
from mlm.checkpoint.native.save_load import Manifest, read_manifest, resolve
from mlm.config.build import from_dict
from mlm.config.imports import OwnCodeError, is_path
from mlm.convert.huggingface.folder import CONFIG, read_model
from mlm.convert.huggingface.mapping import Note
from mlm.data.receipt import version_of
from mlm.data.tokenizer import Tokenizer
from mlm.inference.base import Base, base_digest, load_any_weights
from mlm.inference.hf_source import find_model, model_name, open_tensors, run_spec
from mlm.launch.rules.layout import SPLIT_RULES, Launch
from mlm.launch.rules.nearest import layout_problems
from mlm.models.config import KINDS, ModelConfig
from mlm.models.documents import Boundaries
from mlm.models.family import family_of
from mlm.models.shape import architecture_of, count_parameters
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import parameter_shards
from mlm.runs.checks import saved_problems
from mlm.runs.config import PretrainConfig
from mlm.runs.tokenizer import digests_of_tokenizer, receipt_tokenizer, vocabulary_problem
from mlm.training.kernels import choose_products
from mlm.training.memory import reuse_large_blocks
from mlm.training.pipelined import PipelinedModel
from mlm.util.errors import ConfigError, CorruptFileError, UserError
from mlm.util.files import digest_bytes

LISTED = 3  # problems of a saved configuration that a message lists


class NoTokenizerError(UserError):
    """No tokenizer is saved with a checkpoint or a model, and none was named."""


@dataclass(frozen=True)
class Trained:
    """A model and what it was trained with."""

    model: PipelinedModel
    config: PretrainConfig
    manifest: Manifest
    """Of a model folder, one made up for it: step 0, and the digest of its files."""
    path: Path
    """The step-… directory, or the model folder."""

    def facts(self, *packages: str) -> dict[str, Any]:
        """Return the entries of a result on the model, and the versions that it was computed with."""
        return {
            "checkpoint": str(self.path),
            "checkpoint_digest": self.manifest.digest,
            "step": self.manifest.step,
            "versions": {
                "mlm": mlm.__version__,
                "torch": torch.__version__,
                **{package: version_of(package) for package in packages},
                "python": platform.python_version(),
            },
        }


@dataclass(frozen=True)
class CheckpointSource:
    """Model that `ckpt=` names, before a tensor is read."""

    path: Path
    """The step-… directory, or the model folder."""
    config: PretrainConfig
    """Of a model folder: its model, and max_positions as data.seq_length."""
    notes: tuple[Note, ...] = ()
    """Of a model folder: what is not there and takes initial values, what is left out; one line each."""


def resolve_checkpoint(ckpt: str) -> CheckpointSource:
    """Find what `ckpt=` names and read its settings; an id of the Hub is fetched.

    Raises UserError (ConfigError for several problems), CorruptFileError.
    """
    folder = _model_folder(ckpt)
    if folder is not None:
        model = read_model(folder)
        return CheckpointSource(folder, run_spec(model), model.notes)
    path = resolve(ckpt)
    manifest = read_manifest(path)
    config, base = trained_config(manifest, path), Base.of(manifest, path)
    if base is None:
        check_stored_parameters(manifest, config.model, path)
    else:
        # no chain of true digests is a ring; those of a model folder are compared when its weights are read
        if (base.path / MANIFEST).exists() and base_digest(base.path) != base.digest:
            raise UserError(
                f"{base.name}: is no longer the base of the adapters in {path}; bring that base back"
            )
        resolve_checkpoint(str(base.path))
    return CheckpointSource(path, config)


def _model_folder(ckpt: str) -> Path | None:
    """The folder of a model of `transformers`; None for all else. What is ours is taken as ours."""
    if Path(ckpt).is_dir():
        try:
            locate(ckpt)
        except UserError:
            return find_model(ckpt)
        return None
    return None if Path(ckpt).exists() else find_model(ckpt)


def is_model_folder(path: Path) -> bool:
    """True if the path of a `CheckpointSource` is a model folder of `transformers`, not an mlm checkpoint."""
    return (path / CONFIG).is_file() and not (path / MANIFEST).exists()


def trained_config(manifest: Manifest, path: Path) -> PretrainConfig:
    """The run spec saved in a checkpoint. Raises CorruptFileError if it is none of this version."""
    try:
        config = from_dict(PretrainConfig, dict(manifest.state["config"]))
        if is_path(config.model.kind):
            family_of(config.model.kind)
        if problems := saved_problems(config):
            raise ValueError("; ".join(problems[:LISTED]))
        Boundaries.of(config.data)  # the model will be asked to keep documents apart by it
        return config
    except OwnCodeError:
        raise  # the file is whole
    except (KeyError, TypeError, ValueError) as error:
        reason = "; ".join(str(error).split("\n")[:LISTED])
        raise CorruptFileError(f"{path}: holds no configuration this version can read ({reason})") from error


def check_stored_parameters(manifest: Manifest, model: ModelConfig, path: Path) -> None:
    """Raise CorruptFileError unless the tensors stored are as many and as large as those of the model.

    Asked before the model is built: then it takes the memory of tensors that are there, and no more.
    """
    stored = [entry for name, entry in manifest.tensors.items() if name.startswith("model.")]
    held, last = sum(prod(entry.shape) for entry in stored), f"model.layers.{model.num_layers - 1}."
    is_deep = len(stored) >= model.num_layers and any(name.startswith(last) for name in manifest.tensors)
    # counting builds the layers that are not alike, however many a file claims
    is_short = is_deep or (model.kind in KINDS and architecture_of(model).dense_layers < len(stored))
    made_of = count_parameters(model, with_state=True) if is_short else 0
    if not is_deep or held != made_of:
        made = f"{made_of:,} parameters in " if is_short else ""
        raise CorruptFileError(
            f"{path}: its configuration makes {made}{model.num_layers:,} layers, "
            f"other than the {held:,} stored: restore it from a copy, or load another"
        )


def load_trained(
    ckpt: str, parallel: ParallelConfig, precision: PrecisionConfig, ctx: ParallelContext
) -> Trained:
    """Build the model of a checkpoint or run directory and load its weights. Collective over all ranks.

    Of `parallel`, the sizes count; how training saves memory does not.
    """
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    named = resolve_checkpoint(ckpt)
    choose_products(precision, ctx.device)
    layout = ParallelConfig(tp=parallel.tp, pp=parallel.pp, vp=parallel.vp)
    model = PipelinedModel(named.config.model, layout, precision, ctx)
    shards = tuple(shard for chunk in model.chunks for shard in parameter_shards(chunk, ctx.tp))
    manifest = load_any_weights(shards, named.path, ctx)
    # nothing changes them any more: each token of a continuation would cast them again
    model.casts.hold(trains=False)
    return Trained(model, named.config, manifest, named.path)


def checkpoint_problems(ckpt: str, parallel: ParallelConfig) -> list[str]:
    """Problems of a checkpoint, or of splitting its model this way; read before any rank starts."""
    try:
        named = resolve_checkpoint(ckpt)
        if is_model_folder(named.path):
            open_tensors(named.path)
    except UserError as error:
        return list(error.problems)
    return split_problems(named.config.model, parallel)


def check_source(ckpt: str, parallel: ParallelConfig, *, causal: bool = True) -> CheckpointSource:
    """Return what `ckpt` names, of which no tensor is read yet.

    Raises UserError, with all problems, unless it can be split this way and predicts tokens, with `causal`
    the next one.
    """
    if problems := checkpoint_problems(ckpt, parallel):
        raise ConfigError(problems)
    named = resolve_checkpoint(ckpt)
    predicts = continuation_problem if causal else prediction_problem
    if problem := predicts(ckpt, named.config.model):
        raise UserError(problem)
    return named


def continuation_problem(ckpt: str, model: ModelConfig) -> str | None:
    """Problem of continuing a prompt with a model that is not causal; None if it is."""
    if not family_of(model.kind).causal:
        return (
            f"ckpt={ckpt} holds a {model.kind} model, which does not read from left to right; give a gpt2 or "
            "llama checkpoint"
        )
    return prediction_problem(ckpt, model)


def prediction_problem(ckpt: str, model: ModelConfig) -> str | None:
    """Problem of a model that does not predict tokens (finetuned, or an encoder alone); None if it does."""
    if model.head == "language_model":
        return None
    return (
        f"ckpt={ckpt} holds a {model.kind} with head={model.head}, which predicts no tokens; give a "
        "pretrained one"
    )


def split_problems(model: ModelConfig, parallel: ParallelConfig) -> list[str]:
    """Problems of splitting a trained model's layers over tp, or of assigning them to pp and vp stages."""
    values = {f"model.{key}": value for key, value in asdict(model).items()} | asdict(parallel)
    names = {f"model.{key}": f"the checkpoint's {key}" for key in asdict(model)}
    return list(layout_problems(values, Launch(None, None), SPLIT_RULES, names=names))


def run_directory(path: Path) -> Path:
    """The run directory of a checkpoint: `out` of out/checkpoints/step-….

    Model folders are never written to: for one, the working directory.
    """
    return Path() if is_model_folder(path) else path.parent.parent


def result_file(path: Path, name: str) -> Path:
    """Default path of a command's result, without out=….

    In the run directory; for a model folder in the working directory, with the model's name as prefix.
    """
    return run_directory(path) / (f"{model_name(path)}-{name}" if is_model_folder(path) else name)


def result_identity(result: Mapping[str, Any]) -> str:
    """Return the digest of what an evaluation scored: checkpoint, tokenizer, number format, and texts."""
    keys = ("task", "split", "protocol", "digest", "seq_length", "stride", "max_length")
    texts = [[each.get(key) for key in keys] for each in result.get("results", []) if isinstance(each, dict)]
    model = [result.get(key) for key in ("checkpoint_digest", "tokenizer_digest", "precision")]
    return digest_bytes(canonical([*model, texts]))


def window_length(seq_length: int | None, trained: PretrainConfig) -> int:
    """Tokens that the model reads at a time: those typed, else those of its training. Raises UserError."""
    positions = trained.model.max_positions
    length = min(trained.data.seq_length, positions) if seq_length is None else seq_length
    if length > positions:
        raise UserError(
            f"seq_length={length}: more than the checkpoint's max_positions={positions}; "
            f"use seq_length={positions} or less"
        )
    return length


def load_tokenizer(
    named: str | None,
    path: Path,
    model: ModelConfig | None = None,
    key: str = "tokenizer",
    *,
    force: bool = False,
) -> Tokenizer:
    """The tokenizer that `key` names, else the one saved with the run or the model.

    With `model` it must have no more tokens than that has. One that is named must be the one the checkpoint
    was trained with, unless `force` is given. Raises UserError; CorruptFileError when the saved one is not
    the one that was trained with.
    """
    tokenizer = _saved_tokenizer(path, key) if named is None else _named_tokenizer(named, path)
    if model is not None and (problem := vocabulary_problem(named, tokenizer, model, key)):
        raise UserError(problem)
    known = None if named is None or force else known_tokenizer(path)
    if known is not None and not known.is_same(digests_of_tokenizer(tokenizer)):
        raise UserError(
            f"{key}={named}: has another vocabulary ({tokenizer.digest}) than {path} was trained with "
            f"({known.digest}); remove {key}="
        )
    return tokenizer


def _saved_tokenizer(path: Path, key: str) -> Tokenizer:
    """The tokenizer.json of a run or model folder."""
    if is_model_folder(path):
        try:
            return Tokenizer.load(path)
        except CorruptFileError:
            raise
        except (UserError, OSError) as error:
            raise NoTokenizerError(f"{key}=null: {error}: give {key}=…/tokenizer.json") from error
    saved = run_directory(path) / TOKENIZER_FILE
    if not os.path.lexists(saved):
        raise NoTokenizerError(f"{key}=null and {saved} is not there: give {key}=…/tokenizer.json")
    state = read_manifest(path).state
    check_run_tokenizer(path, state)
    known = TokenizerDigest.of(state)
    return (
        Tokenizer.load(saved) if known is None else Tokenizer.load(saved, eod=known.eod_id, bos=known.bos_id)
    )


def _named_tokenizer(named: str, path: Path) -> Tokenizer:
    """A tokenizer.json, with the special tokens of the checkpoint if it is of its vocabulary."""
    known = None if is_model_folder(path) else TokenizerDigest.of(read_manifest(path).state)
    if known is None or known.eod_id is None:
        return Tokenizer.load(named)
    tokenizer = Tokenizer.load(named, eod=known.eod_id, bos=known.bos_id)
    return tokenizer if known.is_same(digests_of_tokenizer(tokenizer)) else Tokenizer.load(named)


def known_tokenizer(path: Path) -> TokenizerDigest | None:
    """The tokenizer that a checkpoint or a model folder was trained with; None if not recorded."""
    if not is_model_folder(path):
        return TokenizerDigest.of(read_manifest(path).state)
    try:
        return digests_of_tokenizer(Tokenizer.load(path))
    except (UserError, OSError):
        return None


def corpus_problem(prefix: Path, path: Path, key: str = "path") -> str | None:
    """The error where a corpus was written with another tokenizer than a checkpoint was trained with."""
    known, written = known_tokenizer(path), receipt_tokenizer(prefix.parent)
    if known is None or written is None or known.is_same(written):
        return None
    return (
        f"{key}={prefix}: was written with the tokenizer {written.digest}, {path} was trained with "
        f"{known.digest}; name a corpus that `mlm data build` wrote with the run's tokenizer.json"
    )
