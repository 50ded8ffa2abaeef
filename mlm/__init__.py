"""Megatron-style model parallelism you can read, run on a laptop, and check before you rent a cluster.

    import mlm

    model = mlm.load("runs/shakespeare")  # under torchrun: mlm.load("runs/shakespeare", tp=2)
    print(model.generate("ROMEO.", max_new_tokens=50))

The names in `__all__` are the public API. They are imported when first used, so that `import mlm` does not
import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mlm.api import Model, export_hf, import_hf, load
    from mlm.config.imports import trust
    from mlm.launch.join import build_mesh
    from mlm.models.bert.model import BERT
    from mlm.models.config import ModelConfig
    from mlm.models.family import ModelFamily
    from mlm.models.gpt2.model import GPT2
    from mlm.optim.adamw import build_optimizer, set_lr
    from mlm.optim.clip import clip_factor, gradient_norm, scale_gradients
    from mlm.optim.config import OptimizerConfig, ScheduleConfig
    from mlm.optim.schedule import learning_rate
    from mlm.parallel.collectives import (
        all_reduce,
        copy_to_tp,
        gather_sequence,
        reduce_from_tp,
        scatter_sequence,
    )
    from mlm.parallel.cross_entropy import linear_cross_entropy
    from mlm.parallel.gradients import GradientReducer, sum_replicated_gradients
    from mlm.parallel.layers import ColumnParallelLinear, RowParallelLinear, VocabParallelEmbedding
    from mlm.parallel.mesh import ParallelContext
    from mlm.parallel.random import init_parameters
    from mlm.parallel.sharding import parameter_shards
    from mlm.verify.audit.api import audit
    from mlm.verify.audit.record import AuditSubject, Replicated, Split

__version__ = "0.2.0"

__all__ = [
    "BERT",
    "GPT2",
    "AuditSubject",
    "ColumnParallelLinear",
    "GradientReducer",
    "Model",
    "ModelConfig",
    "ModelFamily",
    "OptimizerConfig",
    "ParallelContext",
    "Replicated",
    "RowParallelLinear",
    "ScheduleConfig",
    "Split",
    "VocabParallelEmbedding",
    "all_reduce",
    "audit",
    "build_mesh",
    "build_optimizer",
    "clip_factor",
    "copy_to_tp",
    "export_hf",
    "gather_sequence",
    "gradient_norm",
    "import_hf",
    "init_parameters",
    "learning_rate",
    "linear_cross_entropy",
    "load",
    "parameter_shards",
    "reduce_from_tp",
    "scale_gradients",
    "scatter_sequence",
    "set_lr",
    "sum_replicated_gradients",
    "trust",
]

_MODULES = {
    "mlm.config.imports": ("trust",),
    "mlm.launch.join": ("build_mesh",),
    "mlm.api": ("Model", "export_hf", "import_hf", "load"),
    "mlm.models.bert.model": ("BERT",),
    "mlm.models.config": ("ModelConfig",),
    "mlm.models.family": ("ModelFamily",),
    "mlm.models.gpt2.model": ("GPT2",),
    "mlm.parallel.collectives": (
        *("all_reduce", "copy_to_tp", "gather_sequence", "reduce_from_tp", "scatter_sequence"),
    ),
    "mlm.parallel.cross_entropy": ("linear_cross_entropy",),
    "mlm.parallel.layers": ("ColumnParallelLinear", "RowParallelLinear", "VocabParallelEmbedding"),
    "mlm.parallel.mesh": ("ParallelContext",),
    "mlm.optim.adamw": ("build_optimizer", "set_lr"),
    "mlm.optim.clip": ("clip_factor", "gradient_norm", "scale_gradients"),
    "mlm.optim.config": ("OptimizerConfig", "ScheduleConfig"),
    "mlm.optim.schedule": ("learning_rate",),
    "mlm.parallel.gradients": ("GradientReducer", "sum_replicated_gradients"),
    "mlm.parallel.random": ("init_parameters",),
    "mlm.parallel.sharding": ("parameter_shards",),
    "mlm.verify.audit.api": ("audit",),
    "mlm.verify.audit.record": ("AuditSubject", "Replicated", "Split"),
}


def __getattr__(name: str) -> Any:
    """Import a name of `__all__` when it is first used."""
    for module, names in _MODULES.items():
        if name in names:
            value = globals()[name] = getattr(import_module(module), name)
            return value
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
