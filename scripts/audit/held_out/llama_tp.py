"""A Llama with tensor parallelism by hand: grouped-query attention with norms of q and k, SwiGLU, a tied vocabulary-parallel
table, and a cross entropy over the split vocabulary with label smoothing and z-loss."""
import torch
import torch.distributed as dist
import torch.nn.functional as F
from common import Copy as ToParallel
from common import Sum as FromParallel
from common import rotate
from torch import nn

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, KV, FFN, LAYERS, LENGTH, BATCH = 64, 32, 4, 2, 48, 2, 10, 4
DIM = HIDDEN // HEADS
SMOOTHING, Z = 0.1, 1e-2


def part(full, group, dim=0):
    return nn.Parameter(full.chunk(group.size(), dim)[group.rank()].clone().contiguous())


class Column(nn.Module):
    def __init__(self, n_in, n_out, group):
        super().__init__()
        self.weight = part(torch.randn(n_out, n_in) * n_in**-0.5, group)
        self.weight.sharded = True

    def forward(self, x):
        return F.linear(x, self.weight)


class Row(nn.Module):
    def __init__(self, n_in, n_out, group):
        super().__init__()
        self.group = group
        self.weight = part(torch.randn(n_out, n_in) * n_in**-0.5, group, 1)
        self.weight.sharded = True

    def forward(self, x):
        return FromParallel.apply(F.linear(x, self.weight), self.group)


class RMSNorm(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * self.weight


class Attention(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.wq = Column(HIDDEN, HEADS * DIM, group)
        self.wk, self.wv = Column(HIDDEN, KV * DIM, group), Column(HIDDEN, KV * DIM, group)
        self.wo = Row(HEADS * DIM, HIDDEN, group)
        self.q_norm, self.k_norm = RMSNorm(DIM), RMSNorm(DIM)

    def forward(self, x):
        b, t, _ = x.shape
        x = ToParallel.apply(x, self.group)
        q, k, v = (w(x).view(b, t, -1, DIM).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        q, k = rotate(self.q_norm(q)), rotate(self.k_norm(k))
        k, v = (z.repeat_interleave(HEADS // KV, 1) for z in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).reshape(b, t, -1))


class FeedForward(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.w1, self.w3, self.w2 = Column(HIDDEN, FFN, group), Column(HIDDEN, FFN, group), Row(FFN, HIDDEN, group)

    def forward(self, x):
        x = ToParallel.apply(x, self.group)
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Layer(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.attention_norm, self.attention = RMSNorm(HIDDEN), Attention(group)
        self.ffn_norm, self.ffn = RMSNorm(HIDDEN), FeedForward(group)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.ffn(self.ffn_norm(x))


class Table(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.weight = part(torch.randn(VOCAB, HIDDEN) * 0.3, group)
        self.weight.sharded = True
        self.start = group.rank() * self.weight.shape[0]

    def forward(self, tokens):
        local = tokens - self.start
        outside = (local < 0) | (local >= self.weight.shape[0])
        x = F.embedding(local.masked_fill(outside, 0), self.weight).masked_fill(outside[..., None], 0.0)
        return FromParallel.apply(x, self.group)


def vocab_parallel_loss(logits, labels, start, group):
    """Cross entropy with label smoothing, and the z-loss, of logits split over the vocabulary."""
    peak = logits.detach().amax(-1, keepdim=True)
    dist.all_reduce(peak, dist.ReduceOp.MAX, group=group)
    logits = logits - peak
    total = FromParallel.apply(logits.exp().sum(-1), group)
    log_z = total.log()
    local = labels - start
    outside = (local < 0) | (local >= logits.shape[-1])
    picked = logits.gather(-1, local.masked_fill(outside, 0)[..., None])[..., 0].masked_fill(outside, 0.0)
    picked = FromParallel.apply(picked, group)
    mean = FromParallel.apply(logits.sum(-1), group) / VOCAB
    nll = log_z - (1 - SMOOTHING) * picked - SMOOTHING * mean
    z = log_z + peak[..., 0]
    return nll.mean() + Z * z.square().mean()


class Llama(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.group = group
        self.tok = Table(group)
        self.layers = nn.ModuleList(Layer(group) for _ in range(LAYERS))
        self.norm = RMSNorm(HIDDEN)

    def forward(self, tokens):
        x = self.tok(tokens)
        for layer in self.layers:
            x = layer(x)
        x = ToParallel.apply(self.norm(x), self.group)
        return F.linear(x, self.tok.weight)


def build(mesh):
    group = mesh["tp"].get_group()
    torch.manual_seed(0)
    model = Llama(group)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))

    def loss(logits):
        return vocab_parallel_loss(logits, tokens[:, 1:], model.tok.start, group)

    def reduce():
        for name, p in model.named_parameters():
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                dist.all_reduce(p.grad, group=group)

    def clip(limit=0.5):
        split = sum(p.grad.square().sum() for p in model.parameters() if hasattr(p, "sharded"))
        dist.all_reduce(split, group=group)
        whole = sum(p.grad.square().sum() for p in model.parameters() if not hasattr(p, "sharded"))
        norm = (split + whole).sqrt()
        for p in model.parameters():
            p.grad.mul_((limit / (norm + 1e-6)).clamp(max=1.0))
        return norm

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    return AuditSubject(module=model, batch=tokens[:, :-1], loss=loss, reduce=reduce, clip=clip, optimizer=optimizer)
