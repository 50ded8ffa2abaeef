"""Waits of mixtures whose experts are split over two fake GPUs: one for each layer and micro-batch.

    python scripts/fake_gpu.py --gpus 2 -- -m torch.distributed.run --nproc-per-node=2 \
        scripts/gpu/fake/expert_waits.py

Operators that compute on a fake GPU do not warn of waits as CUDA's do: here those are counted that read a
device's numbers, or copy to or from memory that is not page-locked. Exit code: 0 if no layer waits more than
once for a micro-batch, else 1.
"""

import os
import sys
from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from gpu.agree import MICRO_BATCH, SAMPLES, batches_of, config_of
from gpu.waits import caller
from mlm.data.sampler import MicroBatch
from mlm.parallel.mesh import build_mesh
from mlm.training.trainer import Trainer

READS = ("_local_scalar_dense", "nonzero", "bincount", "masked_select")


class Waits(TorchDispatchMode):
    """Counts operators for which the host waits, by the line of this project."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = operator(*args, **(kwargs or {}))
        name, tensors = operator.overloadpacket.__name__, [x for x in (out, *args) if isinstance(x, Tensor)]
        on_gpu = [x.is_cuda for x in tensors]
        copies = name in ("_to_copy", "copy_") and any(on_gpu) and not all(on_gpu)
        locked = all(x.is_cuda or x.is_pinned() or not x.dim() for x in tensors) if copies else True
        if (name in READS and any(on_gpu)) or not locked:
            self.places[caller()] += 1
        return out


def main() -> int:
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl", device_id=device)
    is_well = True
    for kind in ("mixtral", "deepseek"):
        config = config_of(kind, "bf16", "attention=math", quick=True)
        ctx = build_mesh(tp=1, pp=1, dp=2, ep=2, device=device, timeout_s=60)
        trainer: Trainer[MicroBatch] = Trainer(config, ctx)
        first, second = batches_of(config, pin_memory=True)[:2]
        trainer.compute_gradients(first)
        with Waits() as waits:
            trainer.compute_gradients(second)
        passes, total = config.model.num_layers * SAMPLES // MICRO_BATCH, waits.places.total()
        is_well &= total == passes
        print(f"{kind}: {total} waits of {passes} layers and micro-batches: {dict(waits.places)}", flush=True)
    dist.destroy_process_group()
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
