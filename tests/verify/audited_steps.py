"""Subjects of tests of the audit: a mixture whose step puts its loss together, healthy and with mistakes."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from mlm.verify.audit.record import AuditSubject
from tests.verify.audited import Reduce

VOCABULARY, HIDDEN, EXPERTS, LENGTH, SAMPLES = 16, 8, 4, 6, 4


@dataclass
class Routed:
    """What a mixture returns: its output, and scalars of the router."""

    hidden: Tensor
    auxiliary: Tensor
    temperature: float


class Mixture(nn.Module):
    """Experts whose fractions of tokens are those of all replicas."""

    def __init__(self, group, mistake: str) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.group, self.mistake = group, mistake
        self.router = nn.Linear(HIDDEN, EXPERTS, bias=False)
        self.experts = nn.Parameter(torch.randn(EXPERTS, HIDDEN, HIDDEN) / 4)

    def forward(self, x: Tensor) -> Routed:
        weights = self.router(x).softmax(-1)
        chosen = F.one_hot(weights.argmax(-1), EXPERTS).flatten(0, 1).to(x.dtype)
        fractions = chosen.mean(0)
        if self.mistake != "local_fractions":
            dist.all_reduce(fractions, group=self.group)
            fractions = fractions / self.group.size()
        auxiliary = EXPERTS * (fractions * weights.mean((0, 1))).sum()
        y = torch.einsum("bse,ehk,bsh->bsk", weights, self.experts, x)
        if self.mistake == "auxiliary_twice":
            auxiliary = auxiliary * self.group.size()
        return Routed(x + y, auxiliary, float(self.group.size()) if self.mistake == "temperature" else 1.0)


class Model(nn.Module):
    """Embedding, a mixture, stochastic depth by number of the sample, and a split head."""

    def __init__(self, mesh, mistake: str) -> None:  # type: ignore[no-untyped-def]
        super().__init__()
        self.tp, self.mistake = mesh["tp"].get_group(), mistake
        self.embedding = nn.Embedding(VOCABULARY, HIDDEN)
        self.mixture = Mixture(mesh["dp"].get_group(), mistake)
        self.norm = nn.LayerNorm(HIDDEN)
        self.head = nn.Linear(HIDDEN, VOCABULARY // self.tp.size(), bias=False)

    def forward(self, tokens: Tensor, numbers: list[int]) -> dict[str, Tensor | float]:
        x = self.embedding(tokens)
        if self.mistake.startswith("depth"):
            draws = [torch.rand(1, 1, generator=torch.Generator().manual_seed(n)) for n in numbers]
            x = x * (0.5 + torch.stack(draws))
        routed = self.mixture(x)
        logits = self.head(Reduce.apply(self.norm(routed.hidden), self.tp, False))
        return {"logits": logits, "auxiliary": routed.auxiliary, "temperature": routed.temperature}


def cross_entropy(logits: Tensor, labels: Tensor, tp, mistake: str) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    """Sum over tokens, and that of the squares of log Z, of logits that are split over the vocabulary."""
    size, start = logits.shape[-1], tp.rank() * logits.shape[-1]
    own = logits.logsumexp(-1)
    total = Reduce.apply(own.exp(), tp, True).log()
    local = labels - start
    is_foreign = (local <= 0 if mistake == "edge" and start else local < 0) | (local >= size)
    picked = logits.gather(-1, local.masked_fill(is_foreign, 0)[..., None])[..., 0]
    picked = picked.masked_fill(is_foreign, 0.0)
    picked = Reduce.apply(picked, tp, True)
    return (total - picked).sum(), (own if mistake == "local_z" else total).square().sum()


def build(mesh, mistake: str = "", micro: int = 0) -> AuditSubject:  # type: ignore[no-untyped-def]
    dp, tp = mesh["dp"].get_group(), mesh["tp"].get_group()
    rank, size = dp.rank(), dp.size()
    tokens = torch.randint(1, VOCABULARY, (SAMPLES, LENGTH + 1), generator=torch.Generator().manual_seed(5))
    tokens[1, 4:] = 0  # padding
    numbers = torch.arange(SAMPLES).chunk(size)[rank]
    if mistake == "seed":
        tokens = torch.randint(1, VOCABULARY, tokens.shape, generator=torch.Generator().manual_seed(5 + rank))
    own = tokens[numbers]
    torch.manual_seed(1)
    model = Model(mesh, mistake)
    for name, parameter in model.named_parameters():
        if name == "head.weight":
            full = torch.randn(VOCABULARY, HIDDEN, generator=torch.Generator().manual_seed(2))
            parameter.data = full.chunk(tp.size())[tp.rank()].clone()
    if mistake == "depth_local":
        numbers = torch.arange(len(own))

    def step() -> Tensor:
        batches = range(0, len(own), micro or len(own))
        labels = own[:, 1:]
        count = (labels > 0).sum()
        if mistake == "count":  # the loss of a rank is the mean of its own tokens
            count = count * size
        else:
            dist.all_reduce(count, group=dp)
        total = torch.zeros(())
        for at in batches:
            part = slice(at, at + (micro or len(own)))
            output = model(own[part, :-1], numbers.tolist()[part])
            is_label = labels[part] > 0
            logits, kept = output["logits"][is_label] / output["temperature"], labels[part][is_label]
            nll, z = cross_entropy(logits, kept, tp, mistake)
            loss = (nll + 0.01 * z) / count
            if mistake == "scale_part":
                loss = loss / size
            if micro:
                loss = loss + 0.05 * output["logits"].square().sum() / tokens.numel()
            else:  # of other micro-batches it is another
                loss = loss + 0.05 * output["auxiliary"] / size
            loss.backward()
            total = total + loss.detach()
        dist.all_reduce(total, group=dp)
        return total

    def reduce() -> None:
        for parameter in model.parameters():
            if parameter.grad is not None:
                dist.all_reduce(parameter.grad, group=dp)

    return AuditSubject(
        module=model,
        step=step,
        reduce=reduce,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    )


MISTAKES = (
    *("seed", "depth_local", "auxiliary_twice", "local_fractions"),
    *("temperature", "edge", "local_z", "scale_part"),
)
seed, depth_local, auxiliary_twice, local_fractions, temperature, edge, local_z, scale_part = (
    partial(build, mistake=m) for m in MISTAKES
)
micro, micro_depth_local, micro_seed, micro_count = (
    partial(build, mistake=m, micro=1) for m in ("depth", "depth_local", "seed", "count")
)
