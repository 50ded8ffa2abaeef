"""The kernel that attention over ranks takes, and what the one of a GPU is called with."""

from typing import Any
from unittest.mock import patch

import pytest
import torch

from mlm.parallel import context as module
from mlm.parallel.context import CPUKernel, GPUKernel, Kernel, KeyBlock, UnfusedKernel, context_attention
from mlm.parallel.mesh import Axis

BF16, META = torch.bfloat16, "meta"


@pytest.mark.parametrize(
    ("device", "dtype", "head_dim", "options", "kind"),
    [
        *(("cpu", BF16, 8, {}, CPUKernel), ("cpu", torch.float64, 5, {}, CPUKernel)),
        *((META, BF16, 64, {}, GPUKernel), (META, torch.float16, 256, {}, GPUKernel)),
        # FlashAttention knows half precision alone, and heads of multiples of 8 up to 256
        *(
            (META, torch.float32, 64, {}, UnfusedKernel),
            (META, BF16, 264, {}, UnfusedKernel),
            (META, BF16, 20, {}, UnfusedKernel),
        ),
        *(
            ("cpu", BF16, 8, {"window": 3}, UnfusedKernel),
            (META, BF16, 64, {"drop": lambda p, *_: p}, UnfusedKernel),
        ),
    ],
)
def test_each_device_dtype_and_width_has_its_kernel(
    device: str, dtype: torch.dtype, head_dim: int, options: dict[str, Any], kind: type[Kernel]
) -> None:
    x = torch.empty(1, 2, 4, head_dim, device=device, dtype=dtype)
    with patch.object(module._ContextAttention, "apply") as apply:
        context_attention(x, x, x, Axis("cp", 0, 2), **options)
    assert type(apply.call_args.args[3]) is kind


@pytest.mark.parametrize("causal", [False, True])
def test_a_gpus_kernel_masks_the_ranks_own_keys_alone(causal: bool) -> None:
    """Forward and backward; keys of other ranks are all before the queries."""
    x = torch.empty(1, 2, 4, 8, device=META, dtype=BF16)
    block, kernel, aten = KeyBlock(0, slice(None), slice(None), causal), GPUKernel(), torch.ops.aten
    sums = torch.empty(1, 2, 4, device=META)
    with (
        patch.object(aten, "_scaled_dot_product_flash_attention", return_value=(x, sums)) as forward,
        patch.object(
            aten, "_scaled_dot_product_flash_attention_backward", return_value=(x, x, x)
        ) as backward,
    ):
        kernel.forward(block, x, x, x)
        kernel.backward(block, x, x, x, x, x, sums)
    assert forward.call_args.args[3:] == (0.0, causal)
    assert backward.call_args.args[10:12] == (0.0, causal)
