"""NCCL with the one rank there is: every collective of `mlm`, and a step with state sharded by FSDP2.

A run of one rank communicates nothing. Here its data-parallel axis has a group of one rank, with which
collectives run all the same. FSDP2 calls none over one rank, so the ones that it gets from us are
called directly.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from gpu.agree import batches_of, config_of, differences_of, gradients_of
from gpu.child import Case
from gpu.waits import device_of
from mlm.data.sampler import MicroBatch
from mlm.parallel import collectives, sharded
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.training.trainer import Trainer
from mlm.verify.verdict import TOLERANCES

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.int64)
TIMEOUT_S = 60.0
OPERATIONS: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.gather_rows,
    "reduce_scatter": collectives.reduce_scatter,
    "broadcast": lambda x, axis: collectives.broadcast(x, axis, 0),
    "FSDP2's all_gather": lambda x, axis: by_fsdp(x, axis, reduces=False),
    "FSDP2's reduce_scatter": lambda x, axis: by_fsdp(x, axis, reduces=True),
}


def run(case: Case) -> None:
    device = device_of(case)
    with one_rank(case) as group:
        axis = Axis("dp", 0, 1, group, (0,))
        for name, operation in OPERATIONS.items():
            wrong = [str(dtype) for dtype in DTYPES if not is_identity(operation, dtype, axis, device)]
            case.row("over a group of one rank", operation=name, backend=dist.get_backend(group), wrong=wrong)
            if wrong:
                case.problem(f"{name} of one rank changes {', '.join(wrong)}")
        tp = Axis("tp", 0, 1, first_in_line(device), (0,))
        if not is_identity(collectives.all_reduce, torch.bfloat16, tp, device):
            case.problem("all_reduce over a group whose kernels go first changes bfloat16")
        for zero, precision in ((2, "fp32"), (3, "fp32"), (3, "bf16")):
            train_sharded(case, axis, device, zero, precision)


@contextmanager
def one_rank(case: Case) -> Iterator[Any]:
    os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    store = dist.FileStore(str(case.scratch / "store"), 1)
    backend = "nccl" if case.is_cuda else "gloo"
    dist.init_process_group(backend, store=store, rank=0, world_size=1, timeout=timedelta(seconds=TIMEOUT_S))
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def first_in_line(device: torch.device) -> Any:
    """Process group with the options of a tp axis (high-priority stream)."""
    limit, options = timedelta(seconds=TIMEOUT_S), None
    if device.type == "cuda":
        options = dist.ProcessGroupNCCL.Options()
        options.is_high_priority_stream, options._timeout = True, limit
    return dist.new_group([0], timeout=limit, pg_options=options)


def by_fsdp(x: Tensor, axis: Axis, *, reduces: bool) -> Tensor:
    """Run our collective of FSDP2 on a separate stream, as FSDP2 does."""
    comm = sharded._Collective(axis)
    words: dict[str, Any] = {"op": dist.ReduceOp.SUM} if reduces else {}
    if x.device.type == "cpu":
        out = comm.allocate((x.numel(),), dtype=x.dtype, device=x.device)
        comm(output_tensor=out, input_tensor=x.view(-1), group=axis.group, **words)
        return out
    current, own = torch.cuda.current_stream(), torch.cuda.Stream()
    own.wait_stream(current)
    with torch.cuda.stream(own):
        out = comm.allocate((x.numel(),), dtype=x.dtype, device=x.device)
        comm(output_tensor=out, input_tensor=x.view(-1), group=axis.group, **words)
    current.wait_stream(own)
    return out


def is_identity(
    operation: Callable[[Tensor, Axis], Tensor], dtype: torch.dtype, axis: Axis, device: torch.device
) -> bool:
    x = torch.arange(1 << 12, device=device).view(-1, 8).to(dtype)
    return torch.equal(operation(x.clone(), axis).view_as(x), x)


def train_sharded(case: Case, axis: Axis, device: torch.device, zero: int, precision: str) -> None:
    """Gradients of one step with FSDP2 on one rank, against those without."""
    config = config_of("gpt2", precision, f"zero={zero}", quick=case.quick)
    gradients = []
    for dp in (Axis("dp"), axis):
        trainer: Trainer[MicroBatch] = Trainer(config, ParallelContext(dp=dp, device=device))
        batches = batches_of(config)[0]
        parts = trainer.compute_gradients(batches)
        gradients.append(gradients_of(trainer))
        loss = trainer.mean_loss(trainer.clip_and_update(parts))
    by = max(off / max(largest, 1e-12) for _, largest, off in differences_of(gradients[1], gradients[0]))
    allowed = TOLERANCES[precision].gradient
    values = {"worst gradient by": by, "allowed": allowed}
    case.row("FSDP2 on one rank", zero=zero, precision=precision, loss=loss, **values)
    if not by <= allowed:
        case.problem(f"zero={zero} {precision}: gradients differ by {by:.1e} from those without")
