"""Muon under tensor parallelism by hand: a split matrix is put together, orthogonalised and split again. The model is gqa's."""
import gqa
import torch
import torch.distributed as dist


def orthogonal(m, steps=5):
    """Newton-Schulz."""
    x = m / (m.norm() + 1e-7)
    tall = x.shape[0] > x.shape[1]
    x = x.T if tall else x
    for _ in range(steps):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if tall else x


class Muon(torch.optim.Optimizer):
    def __init__(self, matrices, others, group, lr):
        super().__init__([{"params": [p for p, _ in matrices]}, {"params": others}], {"lr": lr, "momentum": 0.9})
        self.dims, self.group = {p: dim for p, dim in matrices}, group

    @torch.no_grad()
    def step(self, closure=None):
        for g in self.param_groups:
            for p in g["params"]:
                state = self.state[p]
                buffer = state.setdefault("momentum", torch.zeros_like(p)).mul_(g["momentum"]).add_(p.grad)
                if p not in self.dims:
                    p.add_(buffer, alpha=-g["lr"])
                    continue
                dim, world = self.dims[p], self.group.size()
                if dim is not None and world > 1:
                    parts = [torch.empty_like(buffer) for _ in range(world)]
                    dist.all_gather(parts, buffer.contiguous(), group=self.group)
                    update = orthogonal(torch.cat(parts, dim)).chunk(world, dim)[self.group.rank()]
                else:
                    update = orthogonal(buffer)
                p.add_(update, alpha=-0.2 * g["lr"])


def build(mesh):
    subject = gqa.build(mesh)
    model = subject.module
    split = {"wq": 0, "wo": 1, "up": 0, "gate": 0, "down": 1, "wk": None, "wv": None}
    matrices = [(p, split[n.split(".")[-1]]) for n, p in model.named_parameters() if n.split(".")[-1] in split]
    taken = {p for p, _ in matrices}
    others = [p for p in model.parameters() if p not in taken]
    subject.optimizer = Muon(matrices, others, mesh["tp"].get_group(), lr=0.1)
    return subject
