"""parallelize_module of torch.distributed.tensor (DTensor), tp; a head whose output is put together."""
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH = 64, 32, 4, 2, 8, 4
DIM = HIDDEN // HEADS


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(HIDDEN, HIDDEN, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, DIM).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.w1, self.w2 = nn.Linear(HIDDEN, 96), nn.Linear(96, HIDDEN)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.attention, self.feed_forward = Attention(), FeedForward()

    def forward(self, x):
        x = x + self.attention(self.n1(x))
        return x + self.feed_forward(self.n2(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.output = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens) + self.position(torch.arange(tokens.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def build(mesh):
    torch.manual_seed(0)
    model = Model()
    if mesh["tp"].size() > 1:
        parallelize_module(model, mesh["tp"], {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Replicate()),
            "output": ColwiseParallel(output_layouts=Replicate()),
        })
        for layer in model.layers:
            parallelize_module(layer, mesh["tp"], {
                "attention.wq": ColwiseParallel(), "attention.wk": ColwiseParallel(), "attention.wv": ColwiseParallel(),
                "attention.wo": RowwiseParallel(), "feed_forward.w1": ColwiseParallel(), "feed_forward.w2": RowwiseParallel(),
            })
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def loss(logits):
        return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())

    def clip(limit=0.5):
        split = [p for p in model.parameters() if isinstance(p, DTensor)]
        plain = [p for p in model.parameters() if not isinstance(p, DTensor)]
        norms = [nn.utils.get_total_norm([p.grad for p in ps], foreach=False) for ps in (split, plain) if ps]
        norm = torch.stack([n.full_tensor() if isinstance(n, DTensor) else n for n in norms]).norm()
        for p in model.parameters():
            p.grad.mul_(min(1.0, limit / (norm.item() + 1e-6)))
        return norm

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return AuditSubject(module=model, batch=tokens[:, :-1], loss=loss, clip=clip, optimizer=optimizer)
