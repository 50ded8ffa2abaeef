"""picotron's Llama on CPUs over gloo, as subjects of `mlm audit`.

    git clone https://github.com/huggingface/picotron
    PICOTRON=picotron mlm audit scripts/audit/picotron_llama.py:build --tp 2

Its attention, norms and rotary positions are those without flash-attn, which is not here to import. Rotary
positions and norms are computed in float32, so the tolerance is that of float32. Its ring attention (cp)
receives messages of other sizes over gloo than it expects, and is not judged.
"""

import os
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from healthy import HEADS, HIDDEN, LENGTH, VOCAB, samples
from torch import Tensor

from mlm import AuditSubject

os.environ |= {"FLASH_ATTEN": "0", "DEVICE": "cpu", "DTYPE": "float32"}
FLASH = {
    "flash_attn_interface": "flash_attn_func",
    "layers.rotary": "apply_rotary_emb",
    "ops.triton.layer_norm": "layer_norm_fn",
}
for name, function in FLASH.items():
    sys.modules[f"flash_attn.{name}"] = ModuleType(name)
    setattr(sys.modules[f"flash_attn.{name}"], function, None)
sys.path.append(os.environ["PICOTRON"])

from picotron import process_group_manager as groups  # noqa: E402
from picotron.data_parallel.data_parallel import DataParallelBucket  # noqa: E402
from picotron.model import Llama  # noqa: E402
from picotron.pipeline_parallel import pipeline_parallel as pipeline  # noqa: E402
from picotron.tensor_parallel.tensor_parallel import apply_tensor_parallel  # noqa: E402

CONFIG = SimpleNamespace(
    hidden_size=HIDDEN,
    intermediate_size=2 * HIDDEN,
    num_attention_heads=HEADS,
    num_key_value_heads=2,
    num_hidden_layers=4,
    vocab_size=VOCAB,
    max_position_embeddings=LENGTH,
    rope_theta=10_000.0,
    rms_norm_eps=1e-5,
)


class Batches:
    """One micro-batch a step, as picotron's loader gives it."""

    grad_acc_steps = 1

    def __init__(self, tokens: Tensor, labels: Tensor) -> None:
        positions = torch.arange(tokens.shape[1]).expand_as(tokens)
        self.batch = {"input_ids": tokens, "target_ids": labels, "position_ids": positions}

    def __next__(self) -> dict[str, Any]:
        return dict(self.batch)


def build(mesh) -> AuditSubject:
    torch.cuda.synchronize = lambda *_: None  # after each of its pipeline's messages
    sizes = {axis: mesh[axis].size() for axis in mesh.mesh_dim_names}
    groups.setup_process_group_manager(sizes["tp"], sizes["cp"], sizes["pp"], sizes["dp"])
    manager = groups.process_group_manager
    model = apply_tensor_parallel(Llama(CONFIG)) if sizes["tp"] > 1 else Llama(CONFIG)
    if sizes["pp"] > 1:
        model = pipeline.PipelineParallel(model, CONFIG)
    if manager.cp_dp_world_size > 1:
        model = DataParallelBucket(model, grad_type=torch.float64)
    tokens, labels = samples(mesh)

    def step() -> Tensor | None:
        if manager.cp_dp_world_size > 1:
            model.reset()
        if sizes["pp"] > 1:
            shape = (*tokens.shape, HIDDEN)
            loss = pipeline.train_step_pipeline_afab(
                model, Batches(tokens, labels), shape, torch.device("cpu"), torch.float64
            )
            return torch.tensor(loss) if manager.pp_is_last_stage else None
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())
        loss.backward()
        return loss.detach()

    return AuditSubject(module=model, step=step, optimizer=torch.optim.AdamW(model.parameters(), lr=1e-2))
