"""DeepSpeed's ZeRO on CPUs over gloo, as subjects of `mlm audit`: stages 1, 2 and 3.

DS_BUILD_OPS=0 pip install deepspeed
mlm audit scripts/audit/deepspeed_zero.py:stage2 --dp 2
"""

import os
from functools import partial

import torch
import torch.nn.functional as F
from healthy import Transformer, samples

from mlm import AuditSubject

os.environ |= {"DS_ACCELERATOR": "cpu", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}

import deepspeed
from deepspeed.utils import safe_get_full_grad


class Update(torch.optim.SGD):
    """The update of an engine, as an optimizer."""

    engine = None

    def step(self, closure=None):
        return super().step(closure) if self.engine is None else self.engine.step()


def zero(mesh, stage: int) -> AuditSubject:
    """In float32, as its engine casts models to; the gradients are those that it has reduced."""
    model, (tokens, labels) = Transformer().float(), samples(mesh)
    update = Update(model.parameters(), lr=0.1, momentum=0.9)
    if mesh.size() > 1:
        config = {
            "train_micro_batch_size_per_gpu": len(tokens),
            "zero_optimization": {"stage": stage},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # by default it is 1
        }
        inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        update.engine, *_ = deepspeed.initialize(
            model=model, optimizer=inner, config=config, dist_init_required=False
        )

    def step() -> torch.Tensor:
        logits = (update.engine or model)(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        (update.engine.backward if update.engine else torch.Tensor.backward)(loss)
        return loss.detach()

    def reduce() -> None:
        for parameter in model.parameters() if update.engine else ():
            parameter.grad = safe_get_full_grad(parameter)

    return AuditSubject(module=model, step=step, reduce=reduce, optimizer=update)


stage1, stage2 = partial(zero, stage=1), partial(zero, stage=2)
