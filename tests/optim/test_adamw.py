"""The optimizer against PyTorch's plain AdamW, and its state."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from mlm.optim.adamw import AdamW, build_optimizer, can_defer
from mlm.optim.config import OptimizerConfig
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import parameter_shards

CONFIG = OptimizerConfig(lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95), eps=0.1)


def model_with_gradients() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)).double()
    for p in model.parameters():
        p.grad = torch.randn_like(p)
    return model


def test_fused_steps_equal_plain_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = model_with_gradients(), model_with_gradients()
    optimizer = build_optimizer(list(parameter_shards(ours, Axis("tp"))), CONFIG)
    decayed = [p for p in theirs.parameters() if p.dim() > 1]
    plain = [p for p in theirs.parameters() if p.dim() == 1]
    reference = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}],
        lr=1e-2,
        betas=(0.8, 0.95),
        eps=0.1,
        fused=False,
        foreach=False,
    )
    for _ in range(3):
        optimizer.step()
        reference.step()
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("scale", [None, 4.0])
def test_cautious_decay_is_of_elements_that_the_update_moves_towards_zero(scale: float | None) -> None:
    """x - lr (u + decay [u x >= 0] x) with Adam's u (arXiv:2510.12402, algorithm 1), in four steps."""
    model = model_with_gradients()
    p = model[0].weight
    x, m, v = p.detach().clone(), torch.zeros_like(p), torch.zeros_like(p)
    config = replace(CONFIG, cautious_decay=True)
    optimizer = build_optimizer(list(parameter_shards(model, Axis("tp"))), config)
    optimizer.grad_scale = None if scale is None else torch.tensor(scale)
    spared = 0
    for step in range(1, 5):
        grad = torch.randn_like(p)
        p.grad = grad * (scale or 1.0)
        optimizer.step()
        m, v = 0.8 * m + 0.2 * grad, 0.95 * v + 0.05 * grad**2
        u = m / (1 - 0.8**step) / ((v / (1 - 0.95**step)).sqrt() + 0.1)
        spared += int((u * x < 0).sum())
        x = x - 1e-2 * (u + 0.1 * (u * x >= 0) * x)
        torch.testing.assert_close(p, x, rtol=0, atol=1e-10)  # the kernel rounds its constants to 1e-11
    assert 16 < spared < 48
    optimizer.found_inf = torch.tensor(1.0)
    optimizer.step()
    torch.testing.assert_close(p, x, rtol=0, atol=1e-10)


TRAIN_STEP = """
import sys
from mlm.checkpoint.parameters import parameters
from mlm.cli import main
from mlm.models.config import ModelConfig
shape = {"num_layers": 1, "hidden_size": 8, "num_heads": 2}
for kind in ("gpt2", "llama", "bert"):  # shapes as each rank reads them of a folder
    parameters(ModelConfig(kind=kind, **shape))
words = ["model=gpt2_tiny", "data=synthetic", "train.global_batch_size=8", "train.micro_batch_size=4"]
assert main(["pretrain", *words, "train.steps=1", "train.validate_every=0", f"out={sys.argv[1]}"]) == 0
print(*sorted({"torch._dynamo", "torch.distributed.fsdp", "sympy"} & set(sys.modules)))
"""


@pytest.mark.slow
def test_training_imports_no_compiler_no_fsdp_and_no_sympy(tmp_path: Path) -> None:
    """Each would add to the start of every rank, as torch does where a gradient is passed to `backward`."""
    words = [sys.executable, "-c", TRAIN_STEP, str(tmp_path / "run")]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == ""


def test_only_our_own_optimizer_may_be_asked_twice_about_a_step() -> None:
    class Counting(torch.optim.AdamW):
        pass

    p = torch.nn.Parameter(torch.ones(2))
    ours = AdamW([{"params": [p], "weight_decay": 0.0}], OptimizerConfig())
    assert can_defer(ours, torch.float32)
    assert not can_defer(ours, torch.float64)
    assert not can_defer(Counting([p], fused=True), torch.float32)
