"""Rounding of attention over ranks in half precision: once per result, however many blocks are added up."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel.context import attention as module
from mlm.parallel.context.attention import UnfusedKernel, attention_blocks, context_attention
from mlm.parallel.context.zigzag import local_tokens
from mlm.parallel.mesh import Axis

HALF = [torch.bfloat16, torch.float16]
LENGTH = 512


class Gathered:
    """A gather that is over."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def wait(self) -> Tensor:
        return self.tensor


@pytest.mark.parametrize("dtype", HALF)
def test_rounding_does_not_grow_with_the_ranks(dtype: torch.dtype) -> None:
    """Results and gradients of queries, summed over 2 or 16 ranks' keys, against float64 of the same inputs.

    A sum in half precision is rounded with each block: at 16 ranks 1.8 and 1.5 times as much as at 2; a sum
    in float32 1.09 times at most.
    """
    few, many = rounding(dtype, 2), rounding(dtype, 16)
    for name in ("y", "dq"):
        assert many[name] < 1.25 * few[name]
        assert few[name] < torch.finfo(dtype).eps / 2


def rounding(dtype: torch.dtype, cp: int) -> dict[str, float]:
    """Relative errors of `cp` ranks, which run one after another."""
    torch.manual_seed(0)
    whole = [torch.randn(1, heads, LENGTH, 16).to(dtype) for heads in (4, 2, 2)]
    dy = torch.randn(1, 4, LENGTH, 16).to(dtype)
    exact = [x.double().requires_grad_() for x in whole]
    y = F.scaled_dot_product_attention(*exact, is_causal=True, enable_gqa=True)
    y.backward(dy.double())
    axes = [Axis("cp", rank, cp) for rank in range(cp)]
    pairs = torch.stack([torch.stack([local_tokens(x, axis, 2) for x in whole[1:]]) for axis in axes])
    found: dict[str, list[Tensor]] = {"y": [], "dq": []}
    with (
        patch.object(module, "start_all_gather", lambda x, axis: Gathered(pairs)),
        patch.object(module, "reduce_scatter", lambda x, axis: x[axis.rank][None]),
    ):
        for axis in axes:
            q, k, v = (local_tokens(x, axis, 2).requires_grad_() for x in whole)
            mine = context_attention(q, k, v, axis)
            mine.backward(local_tokens(dy, axis, 2))
            assert q.grad is not None
            found["y"].append(mine.detach() - local_tokens(y.detach(), axis, 2))
            found["dq"].append(q.grad - local_tokens(exact[0].grad, axis, 2))  # type: ignore[arg-type]
    scales = {"y": y.detach(), "dq": exact[0].grad}
    return {name: float(torch.cat(errors, 2).norm() / scales[name].norm()) for name, errors in found.items()}  # type: ignore[union-attr]


@pytest.mark.parametrize("dtype", HALF)
def test_gradients_of_probabilities_lose_no_bit_of_their_mean(dtype: torch.dtype) -> None:
    """Of two equally probable keys, dp is n and n + 2, n being where half precision has steps of 2.

    Both, and all elements of y, are exact; their mean n + 1 is not. So the gradient of q, which is
    (dp - mean) / 2 of the second key times 1/4 (the scale of D = 16), is exactly 1/8, and 1/4 or 0 where the
    mean is rounded.
    """
    n = round(2 / torch.finfo(dtype).eps)
    q, k, v = (torch.zeros(1, 1, 2, 16, dtype=dtype) for _ in range(3))
    k[..., 1, :] = 1
    v[:] = n / 16
    v[..., 1, :2] += 1
    kernel, block = UnfusedKernel(Axis("cp"), 2), attention_blocks(Axis("cp"), 2)[0]
    y, log_sum = kernel.forward(block, q, k, v)
    dq, *_ = kernel.backward(block, torch.ones_like(q), q, k, v, y, log_sum)
    assert dq[0, 0, 1].tolist() == [0.125] * 16


@pytest.mark.parametrize("dtype", HALF)
def test_scores_are_exponentiated_in_float32(dtype: torch.dtype) -> None:
    """Probabilities of scores s and s + 1/2 that half precision would round to the same number."""
    s = 1 / torch.finfo(dtype).eps  # times 1/4 (the scale of D = 16) its steps are 1/4
    q, k, v = (torch.zeros(1, 1, 2, 16, dtype=dtype) for _ in range(3))
    q[..., 1, 0] = 1
    k[..., 0, 0], k[..., 1, 0] = s, s + 1
    v[..., 1, :] = 1
    y, log_sum = UnfusedKernel(Axis("cp"), 2).forward(attention_blocks(Axis("cp"), 2)[0], q, k, v)
    want = torch.tensor([s, s + 1]).double() / 4
    assert float(log_sum[0, 0, 1]) == pytest.approx(float(want.logsumexp(0)), rel=1e-6)
    probability = float(want.softmax(0)[1])
    assert y[0, 0, 1].tolist() == pytest.approx([probability] * 16, rel=torch.finfo(dtype).eps)
