"""Micro-batches as PyTorch's pipeline schedules run them, and accumulation over samples in several orders.

Subjects of `mlm audit`: right ones, but for those that MISTAKES names.
"""

from functools import partial

import torch
from healthy import HIDDEN, VOCAB, Block, average, loss_of
from torch import Tensor, nn
from torch.distributed import pipelining

from mlm import AuditSubject

LAYERS, LENGTH, BATCH, MICRO = 4, 8, 8, 4
MISTAKES = {
    "stage_adds_input": "the last stage adds the input of the last norm to its output",
    "gradients_not_scaled": "gradients are the sum of the micro-batches', each of a mean loss",
    "replicas_read_the_same": "every replica accumulates over the samples of the first",
    "last_micro_batch_lost": "the last of a replica's micro-batches has no backward pass",
}


class Stage(nn.Module):
    """Layers of one pipeline stage, or of all, named as in the whole."""

    def __init__(self, stage: int, stages: int, mistake: str = "") -> None:
        super().__init__()
        torch.manual_seed(0)
        table, blocks = nn.Embedding(VOCAB, HIDDEN), [Block() for _ in range(LAYERS)]
        norm, head = nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, VOCAB, bias=False)
        self.table = table if stage == 0 else None
        own = range(LAYERS)[stage * LAYERS // stages : (stage + 1) * LAYERS // stages]
        self.blocks = nn.ModuleDict({str(i): blocks[i] for i in own})
        self.norm, self.head = (norm, head) if stage == stages - 1 else (None, None)
        self.adds_input = mistake == "stage_adds_input"

    def forward(self, x: Tensor) -> Tensor:
        x = x if self.table is None else self.table(x)
        for block in self.blocks.values():
            x = block(x)
        if self.norm is None or self.head is None:
            return x
        return self.head(self.norm(x) + x if self.adds_input else self.norm(x))


def samples(mesh) -> tuple[Tensor, Tensor]:
    """This replica's tokens and labels, [B/d, S], contiguous in the batch."""
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    own = tokens.chunk(mesh["dp"].size())[mesh["dp"].get_local_rank()]
    return own[:, :-1].contiguous(), own[:, 1:].contiguous()


def pipelined(mesh, schedule: str, chunks: int = 1, mistake: str = "") -> AuditSubject:
    """A schedule of torch.distributed.pipelining, which divides gradients by the number of micro-batches."""
    pp, (tokens, labels) = mesh["pp"].get_group(), samples(mesh)
    size, rank = pp.size(), pp.rank()
    if size == 1:
        module: nn.Module = Stage(0, 1)
        run = None
    else:
        kind = getattr(pipelining, schedule)
        is_v = "ZBV" in schedule or "DualPipe" in schedule
        second = 2 * size - 1 - rank if is_v else size + rank
        own = [rank, second][:chunks]
        models = [Stage(number, size * chunks, mistake) for number in own]
        stages = [
            pipelining.PipelineStage(model, number, size * chunks, torch.device("cpu"), group=pp)
            for model, number in zip(models, own, strict=True)
        ]
        module = models[0] if chunks == 1 else nn.ModuleList(models)
        run = kind(
            stages[0] if chunks == 1 else stages,
            n_microbatches=MICRO,
            loss_fn=loss_of,
            scale_grads=mistake != "gradients_not_scaled",
        )
        has_last = size * chunks - 1 in own

    def step() -> Tensor | None:
        if run is None:
            loss = loss_of(module(tokens), labels)
            loss.backward()
            return loss.detach()
        losses: list[Tensor] = []
        last = {"target": labels, "losses": losses} if has_last else {}
        run.step(*([tokens] if rank == 0 else []), **last)
        return torch.stack(losses).mean().detach() if losses else None

    return AuditSubject(
        module=module,
        step=step,
        reduce=lambda: average(module, mesh["dp"].get_group()),
        optimizer=torch.optim.AdamW(module.parameters(), lr=1e-2),
        names=lambda name: name.partition(".")[2] if name[:1].isdigit() else name,
    )


one_f_one_b = partial(pipelined, schedule="Schedule1F1B")
gpipe = partial(pipelined, schedule="ScheduleGPipe")
interleaved = partial(pipelined, schedule="ScheduleInterleaved1F1B", chunks=2)
looped_bfs = partial(pipelined, schedule="ScheduleLoopedBFS", chunks=2)
interleaved_zero_bubble = partial(pipelined, schedule="ScheduleInterleavedZeroBubble", chunks=2)
zbv_zero_bubble = partial(pipelined, schedule="ScheduleZBVZeroBubble", chunks=2)
dual_pipe_v = partial(pipelined, schedule="ScheduleDualPipeV", chunks=2)
stage_adds_input = partial(one_f_one_b, mistake="stage_adds_input")
gradients_not_scaled = partial(one_f_one_b, mistake="gradients_not_scaled")


def accumulated(mesh, size: int = 0, *, strided: bool = False, mistake: str = "") -> AuditSubject:
    """Micro-batches of `size` samples, or two a step, whose replicas hold contiguous samples or each d-th."""
    group, model = mesh["dp"].get_group(), Stage(0, 1)
    tokens = torch.randint(VOCAB, (BATCH, LENGTH + 1), generator=torch.Generator().manual_seed(1))
    rank = 0 if mistake == "replicas_read_the_same" else group.rank()
    own = tokens[rank :: group.size()] if strided else tokens.chunk(group.size())[rank]
    parts = own.split(size or len(own) // 2)

    def step() -> Tensor:
        total = torch.zeros(())
        for number, part in enumerate(parts):
            loss = loss_of(model(part[:, :-1]), part[:, 1:]) / len(parts)
            if mistake != "last_micro_batch_lost" or group.size() == 1 or number < len(parts) - 1:
                loss.backward()
            total += loss.detach()
        return total

    return AuditSubject(
        module=model,
        step=step,
        reduce=lambda: average(model, group),
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2),
    )


contiguous = accumulated
one_sample_each = partial(accumulated, size=1)
strided = partial(accumulated, strided=True)
replicas_read_the_same = partial(accumulated, mistake="replicas_read_the_same")
last_micro_batch_lost = partial(accumulated, mistake="last_micro_batch_lost")
