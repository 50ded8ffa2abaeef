"""Context parallelism with contiguous parts and SDPA's own causal mask on this rank's rows; learned positions; DDP-like mean of
gradients over cp by an averaging all-reduce and a loss scaled by the ranks."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed._functional_collectives import all_gather_tensor_autograd

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LENGTH, BATCH = 40, 32, 2, 12, 4


class Layer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group, self.ln = group, nn.LayerNorm(HIDDEN)
        self.qkv, self.out, self.mlp = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN), nn.Linear(HIDDEN, HIDDEN)

    def forward(self, x):
        q, k, v = (z.unflatten(-1, (HEADS, -1)).transpose(1, 2).contiguous() for z in self.qkv(self.ln(x)).chunk(3, -1))
        if self.group.size() > 1:
            k, v = (all_gather_tensor_autograd(z, 2, self.group) for z in (k, v))
        rows = torch.arange(x.shape[1]) + self.group.rank() * x.shape[1]
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=rows[:, None] >= torch.arange(LENGTH))
        x = x + self.out(y.transpose(1, 2).flatten(2))
        return x + self.mlp(x).tanh()


class Model(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.tok, self.pos = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers, self.head = nn.ModuleList(Layer(group) for _ in range(2)), nn.Linear(HIDDEN, VOCAB)

    def forward(self, x):
        x = self.tok(x) + self.pos(torch.arange(x.shape[1]) + self.group.rank() * x.shape[1])
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def build(mesh):
    group = mesh["cp"].get_group()
    torch.manual_seed(0)
    model = Model(group)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    x, y = (z.chunk(group.size(), 1)[group.rank()].contiguous() for z in (tokens[:, :-1], tokens[:, 1:]))

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), y.flatten())

    def reduce():
        for p in model.parameters():
            dist.all_reduce(p.grad, group=group)
            p.grad /= group.size()

    return AuditSubject(module=model, batch=x, loss=loss, reduce=reduce, optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3))
