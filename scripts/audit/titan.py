"""torchtitan's Llama 3 under its own plans, on CPUs over gloo, as subjects of `mlm audit`.

    pip install torchtitan==0.2.2
    mlm audit scripts/audit/titan.py:llama --tp 2

Its rotary positions are computed in float32. Its context parallelism needs fused attention of a GPU.
"""

import sys
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from healthy import HEADS, HIDDEN, LENGTH, VOCAB, samples

from mlm import AuditSubject

for absent in ("tensorboard", "torch.utils.tensorboard", "torchtitan.models.moe.kernels"):
    sys.modules.setdefault(absent, MagicMock())  # of metrics, and of experts in Triton

from torchtitan.config.job_config import ActivationCheckpoint  # noqa: E402
from torchtitan.distributed.activation_checkpoint import apply_ac  # noqa: E402
from torchtitan.models.llama3 import Transformer, TransformerModelArgs  # noqa: E402
from torchtitan.models.llama3.infra.parallelize import apply_fsdp, apply_tp  # noqa: E402


def llama(mesh, *, recompute: str = "none", split_loss: bool = False) -> AuditSubject:
    sizes = TransformerModelArgs(
        dim=HIDDEN,
        n_layers=2,
        n_heads=HEADS,
        n_kv_heads=2,
        vocab_size=VOCAB,
        multiple_of=16,
        max_seq_len=LENGTH,
    )
    model = Transformer(sizes)
    with torch.no_grad():
        model.init_weights()
    if mesh["tp"].size() > 1:
        apply_tp(model, mesh["tp"], loss_parallel=False, enable_float8_tensorwise_tp=False)
    if recompute != "none":
        apply_ac(model, ActivationCheckpoint(mode=recompute), model_compile_enabled=False)
    dp = mesh["dp"].size()
    if dp > 1:
        apply_fsdp(model, mesh["dp"], torch.float64, torch.float64, pp_enabled=False)
    tokens, labels = samples(mesh)

    def step() -> torch.Tensor:
        """The sum over tokens by the count of the global batch, since its FSDP does not divide."""
        losses = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), reduction="sum")
        loss = losses / (labels.numel() * dp)
        loss.backward()
        return loss.detach()

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    return AuditSubject(module=model, step=step, optimizer=optimizer)


def recomputed(mesh) -> AuditSubject:
    return llama(mesh, recompute="full")
