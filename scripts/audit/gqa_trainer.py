"""A trainer of a Llama-like model in plain PyTorch, tensor-, context- and data-parallel, with bugs to plant.

It has grouped keys and values, a gated MLP, a split loss with smoothing and z-loss, and clipping by hand.
`mlm audit gqa_trainer.py:norm_skips_kv --tp 2`: bugs.txt says what is wrong. `build` and names with `healthy`
are right.
"""

import math
from functools import partial

import plain_trainer
import torch
import torch.distributed as dist
import torch.nn.functional as F
from plain_trainer import (
    BATCH,
    HEADS,
    HIDDEN,
    LAYERS,
    LENGTH,
    VOCAB,
    AllReduce,
    Gather,
    Linear,
    Table,
    bugs_of,
    split_losses,
    total,
)
from torch import Tensor, nn

from mlm import AuditSubject

GROUPS, DIM, INNER = 2, 4, 24
SMOOTHING, Z_LOSS, DECAY, LIMIT = 0.1, 1e-2, 0.1, 0.2


class Shared(plain_trainer.Shared):
    def __init__(self, mesh, bug: str, narrow) -> None:
        super().__init__(mesh, bug if mesh.size() > 1 else "", sequence_parallel=False)
        self.cp, self.norm_dtype = mesh["cp"].get_group(), narrow


class Norm(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.weight, self.dtype = nn.Parameter(torch.ones(HIDDEN)), shared.norm_dtype

    def forward(self, x: Tensor) -> Tensor:
        y, weight = x.to(self.dtype), self.weight.to(self.dtype)
        return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6) * weight).to(x.dtype)


class Attention(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.q = Linear(shared, f"{name}.q", HIDDEN, HEADS * DIM, dim=0)
        self.k, self.v = (Linear(shared, f"{name}.{x}", HIDDEN, GROUPS * DIM, dim=0) for x in "kv")
        self.out = Linear(shared, f"{name}.out", HEADS * DIM, HIDDEN, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        cp, bug = self.shared.cp, self.shared.bug
        q, k, v = (
            each(x).unflatten(-1, (-1, DIM)) for each in (self.q, self.k, self.v)
        )  # [B, S/c, heads, D]
        if bug == "kv_repeated_by_rank":
            for each in (k, v):
                dist.broadcast(each.data, dist.get_global_rank(self.shared.tp, 0), group=self.shared.tp)
        if bug != "keys_of_own_tokens":
            k, v = (Gather.apply(t, cp, 1, bug != "kv_gradients_of_own_queries") for t in (k, v))
        k, v = (t.repeat_interleave(q.shape[2] // t.shape[2], 2) for t in (k, v))
        width = q.shape[2] * DIM if bug == "scale_of_own_width" else HEADS * DIM
        scores = torch.einsum("bsnd,btnd->bnst", q, k) / math.sqrt(width / HEADS)
        first = 0 if bug in ("mask_of_own_rows", "keys_of_own_tokens") else cp.rank() * q.shape[1]
        rows, columns = torch.arange(q.shape[1]) + first, torch.arange(k.shape[1])
        weights = scores.masked_fill(columns > rows[:, None], -1e9).softmax(-1)
        return self.out(torch.einsum("bnst,btnd->bsnd", weights, v).flatten(2))


class MLP(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.is_bad = shared.bug == "gate_and_up_in_one_block"
        self.up = Linear(shared, f"{name}.up", HIDDEN, 2 * INNER, dim=0)
        self.down = Linear(shared, f"{name}.down", INNER, HIDDEN, dim=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(x)
        if self.is_bad:
            gate, up = y.chunk(2, -1)
        else:
            gate, up = y.unflatten(-1, (-1, 2)).unbind(-1)  # a row of gate and one of up in turn
        return self.down(F.silu(gate) * up)


class Block(nn.Module):
    def __init__(self, shared: Shared, name: str) -> None:
        super().__init__()
        self.shared = shared
        self.norm1, self.norm2 = Norm(shared), Norm(shared)
        self.attention, self.mlp = Attention(shared, f"{name}.attention"), MLP(shared, f"{name}.mlp")

    def forward(self, x: Tensor) -> Tensor:
        tp, bug = self.shared.tp, self.shared.bug
        scale = 1 / tp.size() if bug == "input_gradient_averaged" else 1.0
        dtype = torch.bfloat16 if bug == "row_products_in_bf16" else None
        for norm, module in ((self.norm1, self.attention), (self.norm2, self.mlp)):
            y = AllReduce.apply(norm(x), tp, 0.0, scale)
            x = x + AllReduce.apply(module(y), tp, 1.0, 0.0, dtype)
        return x


class Positions(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.weight = shared, shared.draw("positions", LENGTH, HIDDEN)

    def forward(self, x: Tensor) -> Tensor:
        first = 0 if self.shared.bug == "positions_begin_again" else self.shared.cp.rank() * x.shape[1]
        return x + self.weight[first : first + x.shape[1]]


class Model(nn.Module):
    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.shared, self.table, self.positions = shared, Table(shared), Positions(shared)
        self.layers = nn.ModuleList(Block(shared, f"layers.{n}") for n in range(LAYERS))
        self.norm, self.head = Norm(shared), Linear(shared, "head", HIDDEN, VOCAB, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.positions(self.table(tokens))
        for layer in self.layers:
            x = layer(x)
        return self.head(self.shared.into(self.norm(x)))


class Trainer:
    def __init__(self, mesh, bug: str = "", narrow=torch.float64) -> None:
        self.shared = Shared(mesh, bug, narrow)
        self.bug, shared = self.shared.bug, self.shared
        self.model = Model(shared)
        tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(5))
        keep = torch.arange(LENGTH) < torch.tensor([8, 7, 5, 8])[:, None]
        row = 0 if self.bug == "same_samples" else shared.dp.rank()
        self.tokens, self.labels, self.keep = (
            t.chunk(shared.dp.size())[row].chunk(shared.cp.size(), 1)[shared.cp.rank()].contiguous()
            for t in (tokens[:, :-1], tokens[:, 1:], keep)
        )
        if self.bug == "labels_shifted_in_chunks":
            self.labels, self.keep = self.tokens.roll(-1, 1), self.keep.clone()
            self.keep[:, -1] = False
        decay = 0.0 if self.bug == "no_decay_on_a_rank" and dist.get_rank() == 1 else DECAY
        rate = 0.01 * (shared.dp.size() if self.bug == "rate_times_replicas" else 1)
        kind = (
            torch.optim.SGD
            if self.bug == "clip_by_own_norm" or bug == "clip_by_own_norm"
            else torch.optim.AdamW
        )
        self.optimizer = kind(self.model.parameters(), lr=rate, weight_decay=decay)

    def loss(self, logits: Tensor) -> Tensor:
        """Mean over the global batch's tokens, times the replicas, which `reduce` divides by."""
        shared = self.shared
        of_part = {"z_loss_of_own_vocabulary": "z", "smoothing_over_own_vocabulary": "smoothing"}.get(
            self.bug, ""
        )
        losses = split_losses(
            logits, self.labels, shared.tp, smoothing=SMOOTHING, z_loss=Z_LOSS, of_part=of_part
        )
        count = self.keep.sum().double()
        if self.bug != "loss_times_own_count":
            count = total(total(count, shared.dp), shared.cp) / shared.dp.size()
        return (losses * self.keep).sum() / count

    def step(self) -> Tensor:
        loss = self.loss(self.model(self.tokens))
        loss.backward()
        return total(loss.detach(), self.shared.cp)

    def reduce(self) -> None:
        shared, bug = self.shared, self.bug
        if bug == "clipped_before_the_sum":
            self.clip()
        for name, parameter in self.model.named_parameters():
            grad = parameter.grad
            if not (bug == "cp_not_reduced" or (bug == "norms_not_reduced_over_cp" and "norm" in name)):
                grad.copy_(total(grad, shared.cp))
            if bug == "update_before_reduction" and "table" in name:
                continue
            grad.copy_(total(grad, shared.dp, torch.bfloat16 if bug == "gradients_in_bf16" else None))
            if not (bug == "head_summed_twice" and "head" in name):
                grad /= shared.dp.size()

    def clip(self) -> Tensor:
        shared, bug = self.shared, self.bug
        square, own = torch.zeros(()), torch.zeros(())
        for name, parameter in self.model.named_parameters():
            if bug == "norm_skips_kv" and (".k." in name or ".v." in name):
                continue
            if bug == "norm_without_table" and "table" in name:
                continue
            is_split = not ("norm" in name or "positions" in name)
            own += parameter.grad.square().sum()
            square += parameter.grad.square().sum() / (1 if is_split else shared.tp.size())
        norm = total(own.sqrt(), shared.tp) if bug == "norm_of_roots" else total(square, shared.tp).sqrt()
        by = own.sqrt() if bug == "clip_by_own_norm" else norm
        for parameter in self.model.parameters():
            parameter.grad *= (LIMIT / by).clamp(max=1.0)
        return norm


class Twice(torch.optim.AdamW):
    """Decays weights once more."""

    def step(self, closure=None):
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.mul_(1 - group["lr"] * group["weight_decay"])
        return super().step(closure)


class Halves(torch.optim.AdamW):
    """Leaves the second half of each matrix as it was."""

    def step(self, closure=None):
        before = [p.detach().clone() for group in self.param_groups for p in group["params"]]
        super().step(closure)
        with torch.no_grad():
            for old, new in zip(before, (p for g in self.param_groups for p in g["params"]), strict=True):
                new[len(new) // 2 :] = old[len(old) // 2 :]


def build(mesh, bug: str = "", narrow=torch.float64) -> AuditSubject:
    trainer = Trainer(mesh, bug, narrow)
    is_last = mesh.size() > 1 and dist.get_rank() == 1
    if bug == "decay_twice_beside_bf16_norms" and mesh.size() > 1:
        trainer.optimizer = Twice(trainer.model.parameters(), lr=0.01, weight_decay=DECAY)
    if bug == "stale_half" and is_last:
        trainer.optimizer = Halves(trainer.model.parameters(), lr=0.01, weight_decay=DECAY)
    return AuditSubject(
        module=trainer.model,
        step=trainer.step,
        reduce=trainer.reduce,
        clip=trainer.clip,
        optimizer=trainer.optimizer,
    )


healthy_float32_norms = partial(build, narrow=torch.float32)
healthy_bf16_norms = partial(build, narrow=torch.bfloat16)
NARROW = {"decay_twice_beside_bf16_norms": torch.bfloat16, "norm_skips_kv": torch.float32}
globals().update(
    {bug: partial(build, bug=bug, narrow=NARROW.get(bug, torch.float64)) for bug in bugs_of("gqa_trainer")}
)
