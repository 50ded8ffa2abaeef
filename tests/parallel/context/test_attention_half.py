"""Rounding of attention over ranks in half precision: once per result, however many blocks are added up."""

from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mlm.parallel import context as module
from mlm.parallel.context import context_attention, local_tokens
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


@pytest.mark.parametrize("dtype", HALF)
def test_a_window_of_all_tokens_rounds_scores_no_more_than_none(dtype: torch.dtype) -> None:
    """Of scores of up to 50: rounded to half precision, results are six and gradients three times as far off.

    A window's kernel rounds the products of output gradients and values: 1.6 times.
    """
    without, windowed = (rounding(dtype, 2, window, sharpness=10.0) for window in (0, LENGTH))
    for name in ("y", "dq"):
        assert windowed[name] < 2 * without[name]


def rounding(dtype: torch.dtype, cp: int, window: int = 0, sharpness: float = 1.0) -> dict[str, float]:
    """Relative errors of `cp` ranks, which run one after another; `sharpness` is a factor of queries."""
    torch.manual_seed(0)
    sizes = (4, sharpness), (2, 1.0), (2, 1.0)
    whole = [(factor * torch.randn(1, heads, LENGTH, 16)).to(dtype) for heads, factor in sizes]
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
            mine = context_attention(q, k, v, axis, window=window)
            mine.backward(local_tokens(dy, axis, 2))
            assert q.grad is not None
            found["y"].append(mine.detach() - local_tokens(y.detach(), axis, 2))
            found["dq"].append(q.grad - local_tokens(exact[0].grad, axis, 2))  # type: ignore[arg-type]
    scales = {"y": y.detach(), "dq": exact[0].grad}
    return {name: float(torch.cat(errors, 2).norm() / scales[name].norm()) for name, errors in found.items()}  # type: ignore[union-attr]
