"""Megatron Core without a GPU: what of CUDA it calls is replaced, what it fuses there is off.

It calls CUDA in four places, which are replaced: torch.cuda.synchronize by nothing, torch.cuda.current_device
by the CPU, Tensor.cuda of tied tables in two stages by the tensor, and the generator around attention's
dropout, which is 0 here. Its routers look for Transformer Engine's product by a name that is not defined
without it, and take PyTorch's once it is None.
"""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

UNFUSED = {
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "apply_rope_fusion": False,
    "masked_softmax_fusion": False,
    "gradient_accumulation_fusion": False,
}
"""Arguments of a TransformerConfig."""
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


@contextmanager
def _no_fork(*_: Any, **__: Any) -> Iterator[None]:
    yield


def replace_cuda() -> None:
    """Let this process compute on its CPU; of Transformer Engine nothing is used."""
    warnings.simplefilter("ignore")  # about accelerators that are not here
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
    from megatron.core.transformer.moe import moe_utils

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.Tensor.cuda = lambda tensor, *_, **__: tensor  # type: ignore[method-assign]
    moe_utils.te_general_gemm = None
    CudaRNGStatesTracker.fork = _no_fork
