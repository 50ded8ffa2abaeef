"""FSDP2 with bf16 compute (MixedPrecisionPolicy), gradients reduced in fp32, accumulation, label smoothing, OneCycleLR."""
import torch
import torch.nn.functional as F
from common import Decoder
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from mlm import AuditSubject

VOCAB, HIDDEN, LAYERS, LENGTH, BATCH, ACCUM = 64, 32, 2, 10, 8, 2


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(HIDDEN)
        self.attn = nn.MultiheadAttention(HIDDEN, 4, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 64), nn.GELU(), nn.Linear(64, HIDDEN))

    def forward(self, x):
        y = self.norm(x)
        mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        x = x + self.attn(y, y, y, attn_mask=mask, need_weights=False)[0]
        return x + self.mlp(x)


def build(mesh):
    dp = mesh["dp"]
    torch.manual_seed(0)
    model = Decoder(VOCAB, HIDDEN, [Block() for _ in range(LAYERS)], bias=True)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=dp, mp_policy=policy)
    fully_shard(model, mesh=dp, mp_policy=policy)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1)).chunk(dp.size())[dp.get_local_rank()]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=10)
    optimizer.register_step_post_hook(lambda *_: schedule.step())

    def step():
        total = 0.0
        for i, part in enumerate(tokens.chunk(ACCUM)):
            model.set_requires_gradient_sync(i == ACCUM - 1)
            logits = model(part[:, :-1]).float()
            loss = F.cross_entropy(logits.flatten(0, 1), part[:, 1:].flatten(), label_smoothing=0.1) / ACCUM
            loss.backward()
            total += loss.detach()
        return total

    def clip():
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
        return norm.full_tensor() if hasattr(norm, "full_tensor") else norm

    return AuditSubject(module=model, step=step, clip=clip, optimizer=optimizer)
