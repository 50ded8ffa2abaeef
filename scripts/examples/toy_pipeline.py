"""A pipeline of two stages for a toy model, by our schedule and engine: loss and gradients of one process.

torchrun --nproc-per-node 2 scripts/examples/toy_pipeline.py
"""

import torch
from torch import Tensor, nn

import mlm
from mlm.parallel.pipeline.engine import Stages, run_plan
from mlm.parallel.pipeline.lower import lower
from mlm.parallel.pipeline.schedules import build_schedule

WIDTH, MICRO_BATCHES = 8, 4


def main() -> None:
    ctx = mlm.build_mesh(pp=2, device="cpu")
    torch.manual_seed(0)  # every rank draws the same layers and samples
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)).double()
    batches = torch.randn(MICRO_BATCHES, 3, WIDTH, dtype=torch.float64)  # [m, B, H]
    first = 2 * ctx.pp.rank  # layers 0 and 1 are stage 0, 2 and 3 stage 1
    stage = layers[first : first + 2]

    def forward(chunk: int, batch: Tensor, x: Tensor | None) -> Tensor:
        """Output of this stage for a micro-batch; the last stage returns the loss."""
        y = batch if x is None else x
        for layer in stage:
            y = torch.tanh(layer(y))
        is_last = ctx.pp.rank == ctx.pp.size - 1
        return y.square().mean() / MICRO_BATCHES if is_last else y

    stages = Stages(
        pp=ctx.pp,
        num_stages=ctx.pp.size,
        forward=forward,
        boundary_shape=lambda batch: tuple(batch.shape),
        dtype=torch.float64,
        device=ctx.device,
    )
    plan = lower(build_schedule("1f1b", stages=ctx.pp.size, chunks=1, micro_batches=MICRO_BATCHES))
    losses = run_plan(stages, plan.instructions[ctx.pp.rank], list(batches))
    found = [layer.weight.grad.clone() for layer in stage]

    layers.zero_grad()  # the same in one process
    loss = nn.Sequential(*(nn.Sequential(layer, nn.Tanh()) for layer in layers))(batches).square().mean()
    loss.backward()
    torch.testing.assert_close(found, [layer.weight.grad for layer in stage])
    if losses:  # the last stage
        torch.testing.assert_close(sum(losses), loss.detach())
        print(f"pp={ctx.pp.size}: loss {sum(losses):.6f}, as in one process; bubble {plan.bubble:.2f}")


if __name__ == "__main__":
    main()
