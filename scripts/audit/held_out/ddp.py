"""DDP with accumulation: a loss per target token over all replicas, AdamW with a group without decay, warmup by samples, clipping."""
import contextlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

from mlm import AuditSubject

VOCAB, HIDDEN, HEADS, LAYERS, LENGTH, BATCH, ACCUM, PAD = 64, 32, 4, 2, 12, 8, 2, 0
LR, WARMUP_SAMPLES = 1e-2, 64


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.proj = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.fc, self.out = nn.Linear(HIDDEN, 4 * HIDDEN), nn.Linear(4 * HIDDEN, HIDDEN)

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (z.view(b, t, HEADS, -1).transpose(1, 2) for z in self.qkv(self.ln_1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, -1))
        return x + self.out(F.gelu(self.fc(self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, HIDDEN), nn.Embedding(LENGTH, HIDDEN)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln_f, self.head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)

    def forward(self, tokens):
        x = self.wte(tokens) + self.wpe(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.ln_f(x))


def batches(steps=8):
    g = torch.Generator().manual_seed(1)
    for _ in range(steps):
        tokens = torch.randint(1, VOCAB, (BATCH, LENGTH + 1), generator=g)
        lengths = torch.tensor([13, 12, 13, 10, 5, 3, 7, 4])
        tokens[torch.arange(LENGTH + 1) >= lengths[:, None]] = PAD
        yield tokens


def decay_groups(model):
    skip = {"wte.weight", "wpe.weight"}
    decay, rest = [], []
    for name, p in model.named_parameters():
        (rest if p.dim() < 2 or name in skip else decay).append(p)
    return [{"params": decay, "weight_decay": 0.5}, {"params": rest, "weight_decay": 0.0}]


def build(mesh):
    group = mesh["dp"].get_group()
    world, rank = group.size(), group.rank()
    torch.manual_seed(0)
    raw = GPT()
    model = DDP(raw, process_group=group) if world > 1 else raw
    optimizer = torch.optim.AdamW(decay_groups(raw), lr=LR, betas=(0.9, 0.95))
    loader = batches()
    seen = 0

    def step():
        nonlocal seen
        seen += BATCH
        for g in optimizer.param_groups:
            g["lr"] = LR * min(1.0, seen / WARMUP_SAMPLES)
        tokens = next(loader).chunk(world)[rank]
        count = (tokens[:, 1:] != PAD).sum()
        dist.all_reduce(count, group=group)
        total = 0.0
        micro = tokens.chunk(ACCUM)
        for i, part in enumerate(micro):
            last = i == len(micro) - 1
            with contextlib.nullcontext() if world == 1 or last else model.no_sync():
                logits = model(part[:, :-1])
                loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), ignore_index=PAD, reduction="sum") / count
                (loss * world).backward()
            total = total + loss.detach()
        return total

    def clip():
        return nn.utils.clip_grad_norm_(raw.parameters(), 1.0)

    return AuditSubject(module=raw, step=step, clip=clip, optimizer=optimizer)
