"""DDP under torch.autocast (bf16), tied head, SyncBatchNorm-free convolution over time, cosine schedule set by hand."""
import math

import torch
import torch.nn.functional as F
from common import Decoder
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from mlm import AuditSubject

VOCAB, HIDDEN, LAYERS, LENGTH, BATCH = 40, 32, 2, 12, 8


class ConvBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(HIDDEN), nn.Conv1d(HIDDEN, HIDDEN, 3)
        self.up, self.down = nn.Linear(HIDDEN, 64), nn.Linear(64, HIDDEN)

    def forward(self, x):
        y = F.pad(self.norm(x).transpose(1, 2), (2, 0))
        y = F.gelu(self.conv(y).transpose(1, 2))
        return x + self.down(F.relu(self.up(y)).square())


def build(mesh):
    group = mesh["dp"].get_group()
    torch.manual_seed(0)
    model = Decoder(VOCAB, HIDDEN, [ConvBlock() for _ in range(LAYERS)])
    nn.init.normal_(model.embed.weight, std=0.2)
    model.head.weight = model.embed.weight
    model = DistributedDataParallel(model, process_group=group)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))[group.rank() :: group.size()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    done = 0

    def step():
        nonlocal done
        for g in optimizer.param_groups:
            g["lr"] = 1e-2 * (1 + math.cos(math.pi * done / 10)) / 2
        done += 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        return loss.detach()

    def clip():
        return nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    return AuditSubject(module=model, step=step, clip=clip, optimizer=optimizer)
