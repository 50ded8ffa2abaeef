"""A trained model, loaded at the layout of a command."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import mlm
from mlm.checkpoint.native.format import canonical
from mlm.checkpoint.native.save_load import Manifest
from mlm.convert.source import ModelFolder, Source, open_source
from mlm.convert.weights import fill_parameters
from mlm.data.receipt import version_of
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import parameter_shards
from mlm.runs.checks import split_problems
from mlm.runs.config import PretrainConfig
from mlm.training.kernels import choose_products
from mlm.training.memory import reuse_large_blocks
from mlm.training.pipelined import PipelinedModel
from mlm.util.errors import ConfigError, UserError
from mlm.util.files import digest_bytes


@dataclass(frozen=True)
class LoadedModel:
    """A model and its source."""

    model: PipelinedModel
    source: Source
    manifest: Manifest
    """For a model folder a stub with step 0 and the digest of its files."""

    @property
    def config(self) -> PretrainConfig:
        return self.source.config

    @property
    def path(self) -> Path:
        """The step-… directory, or the model folder."""
        return self.source.path

    def facts(self, *packages: str) -> dict[str, Any]:
        """Return a result's entries on the model and on the versions of the software."""
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


def load_trained(
    source: Source, parallel: ParallelConfig, precision: PrecisionConfig, ctx: ParallelContext
) -> LoadedModel:
    """Build the model of a source and load its weights. Collective over all ranks.

    Of `parallel` only tp, pp and vp are used.
    """
    if ctx.device.type == "cpu":
        reuse_large_blocks()
    choose_products(precision, ctx.device)
    layout = ParallelConfig(tp=parallel.tp, pp=parallel.pp, vp=parallel.vp)
    model = PipelinedModel(source.model, layout, precision, ctx)
    shards = tuple(shard for chunk in model.chunks for shard in parameter_shards(chunk, ctx.tp))
    manifest = fill_parameters(shards, source, ctx)
    # the weights are final: without this, each token of a continuation would cast them again
    model.casts.cast_for_step(trains=False)
    return LoadedModel(model, source, manifest)


def open_for_layout(ckpt: str, parallel: ParallelConfig) -> Source:
    """Open the source that `ckpt` names without reading its tensors.

    Raises UserError, with all problems of splitting it over the layout.
    """
    source = open_source(ckpt)
    if isinstance(source, ModelFolder):
        assert source.tensors, "checks their names and shapes"
    if problems := split_problems(source.model, parallel):
        raise ConfigError(problems)
    return source


def open_predictor(ckpt: str, parallel: ParallelConfig, *, causal: bool = True) -> Source:
    """Open a source as `open_for_layout`; raise UserError unless it predicts tokens, if `causal` the next."""
    source = open_for_layout(ckpt, parallel)
    if problem := prediction_problem(ckpt, source.model, causal=causal):
        raise UserError(problem)
    return source


def prediction_problem(ckpt: str, model: ModelConfig, *, causal: bool) -> str | None:
    """Return the problem of a model that predicts no tokens, or if `causal` not the next one."""
    if causal and not family_of(model.kind).causal:
        return (
            f"ckpt={ckpt} holds a {model.kind} model, which does not read from left to right; give a gpt2 or "
            "llama checkpoint"
        )
    if model.head != "language_model":
        return (
            f"ckpt={ckpt} holds a {model.kind} with head={model.head}, which predicts no tokens; give a "
            "pretrained one"
        )
    return None


def result_identity(result: Mapping[str, Any]) -> str:
    """Return the digest of an evaluation's inputs: checkpoint, tokenizer, precision and texts."""
    keys = ("task", "split", "protocol", "digest", "seq_length", "stride", "max_length")
    entries = [entry for entry in result.get("results", []) if isinstance(entry, dict)]
    model = [result.get(key) for key in ("checkpoint_digest", "tokenizer_digest", "precision")]
    return digest_bytes(canonical([*model, [[entry.get(key) for key in keys] for entry in entries]]))


def window_length(seq_length: int | None, trained: PretrainConfig) -> int:
    """Return the context length in tokens: as typed, else as in training. Raises UserError."""
    positions = trained.model.max_positions
    length = min(trained.data.seq_length, positions) if seq_length is None else seq_length
    if length > positions:
        raise UserError(
            f"seq_length={length}: more than the checkpoint's max_positions={positions}; "
            f"use seq_length={positions} or less"
        )
    return length
