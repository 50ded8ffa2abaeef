"""A tensor-parallel MLP of a custom model: it equals the dense one, gradients included.

    torchrun --nproc-per-node 2 scripts/examples/tensor_parallel_mlp.py

Column-parallel, then row-parallel (arXiv:1909.08053, figure 3a): one all-reduce forward, one backward.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import mlm
from mlm.parallel.sharding import load_full, shard_of


class MLP(nn.Module):
    """y = W2 gelu(W1 x): [S, B, H] -> [S, B, H]."""

    def __init__(self, hidden: int, *, tp) -> None:
        super().__init__()
        self.up = mlm.ColumnParallelLinear(hidden, 4 * hidden, tp=tp, init_seed=1)
        self.down = mlm.RowParallelLinear(4 * hidden, hidden, tp=tp, init_seed=2)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def main() -> None:
    ctx = mlm.build_mesh(tp=2, device="cpu")
    torch.manual_seed(0)  # every rank draws the same dense model, input and gradient
    dense = nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)).double()
    x, dy = torch.randn(2, 5, 3, 16, dtype=torch.float64)

    mlp = MLP(16, tp=ctx.tp).double()
    names = {"up": dense[0], "down": dense[2]}
    whole = {f"{name}.{key}": p for name, part in names.items() for key, p in part.named_parameters()}
    load_full(mlp, whole, ctx.tp)  # each rank keeps its slice

    x_dense, x_mlp = x.clone().requires_grad_(), x.clone().requires_grad_()
    y_dense, y = dense(x_dense), mlp(x_mlp)
    y_dense.backward(dy)
    y.backward(dy)

    torch.testing.assert_close(y, y_dense)
    torch.testing.assert_close(x_mlp.grad, x_dense.grad)
    torch.testing.assert_close(mlp.up.weight.grad, shard_of(dense[0].weight.grad, ctx.tp, 0))
    torch.testing.assert_close(mlp.down.weight.grad, shard_of(dense[2].weight.grad, ctx.tp, 1))
    if ctx.is_main:
        print(f"tp={ctx.tp.size}: output and gradients equal the dense MLP's")


if __name__ == "__main__":
    main()
