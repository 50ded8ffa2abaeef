"""The parameters of a model as checkpoints store them: full shapes, and their split over layouts."""

from collections.abc import Sequence

import torch
from torch import Tensor

from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import TensorShard, TensorSplit
from mlm.models.config import ModelConfig
from mlm.models.shape import build_on_meta
from mlm.models.stage import parameter_home
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard, parameter_shards


def parameters(model: ModelConfig) -> dict[str, TensorEntry]:
    """Return every parameter: name (layers.0.mlp.up.weight) -> full shape without padding, float32."""
    return {
        shard.name: TensorEntry(shard.global_shape, torch.float32, split_of(shard, model.vocab_multiple))
        for shard in parameter_shards(build_on_meta(model), Axis("tp"))
    }


def split_of(shard: ParameterShard, vocab_multiple: int) -> TensorSplit:
    return TensorSplit(
        shard.tp_dim, parameter_home(shard.name), 1 if shard.true_size is None else vocab_multiple
    )


def model_shards(shards: Sequence[ParameterShard], vocab_multiple: int = 1) -> dict[str, TensorShard]:
    """Return parameters under their checkpoint names: views of the live tensors without padding.

    `vocab_multiple` is model.vocab_multiple; loading does not need it.
    """
    return {f"model.{s.name}": as_shard(s, s.parameter.detach(), vocab_multiple) for s in shards}


def as_shard(s: ParameterShard, x: Tensor, vocab_multiple: int) -> TensorShard:
    """Return the shard of a tensor that is split like a parameter (itself, a moment)."""
    return TensorShard(s.without_padding(x), s.global_shape, s.offset, split_of(s, vocab_multiple))
