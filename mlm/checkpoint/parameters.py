"""The parameters of a model as checkpoints see them: whole shapes, and how layouts split them."""

import torch

from mlm.checkpoint.native.format import TensorEntry
from mlm.checkpoint.native.slices import TensorSplit
from mlm.models.config import ModelConfig
from mlm.models.shape import build_on_meta
from mlm.models.stage import parameter_home
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import ParameterShard, parameter_shards


def parameters(model: ModelConfig) -> dict[str, TensorEntry]:
    """Return every parameter: name (layers.0.mlp.up.weight) -> whole shape without padding, float32."""
    return {
        shard.name: TensorEntry(shard.global_shape, torch.float32, split_of(shard, model.vocab_multiple))
        for shard in parameter_shards(build_on_meta(model), Axis("tp"))
    }


def split_of(shard: ParameterShard, vocab_multiple: int) -> TensorSplit:
    """Return how layouts split a parameter."""
    return TensorSplit(
        shard.tp_dim, parameter_home(shard.name), 1 if shard.true_size is None else vocab_multiple
    )
