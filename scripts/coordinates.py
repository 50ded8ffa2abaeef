"""Coordinate check of muP: how far activations move in the first steps, by the model's width.

    python scripts/coordinates.py --out coordinates.json

Trains GPT-2s and Llamas of widths 64 to 512, heads of 16 each, on random tokens for a few steps with and
without muP, and shows the mean absolute change of each layer's output and of the logits since the first step
(arXiv:2203.03466, appendix D.1). Flat over width is right. A plot goes beside the result (.png).
"""

import argparse
import json
import math
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch import Tensor

from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.optim.config import OptimizerConfig, ScheduleConfig
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.trainer import Trainer

mpl.use("Agg")
import matplotlib.pyplot as plt

BASE, HEAD, SEQ, VOCAB = 64, 16, 32, 256


def spec_of(kind: str, width: int, optimizer: OptimizerConfig, *, mup: bool) -> PretrainConfig:
    return PretrainConfig(
        name="coordinates",
        out="unused",
        model=ModelConfig(
            kind=kind,
            num_layers=2,
            hidden_size=width,
            num_heads=width // HEAD,
            max_positions=SEQ,
            vocab_size=VOCAB,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            activation="silu" if kind == "llama" else "gelu_tanh",
            mup_base_width=BASE if mup else None,
        ),
        optimizer=optimizer,
        schedule=ScheduleConfig(decay="constant", warmup_steps=0, min_lr=0.0),
        data=DataConfig(kind="synthetic", seq_length=SEQ),
        train=TrainConfig(steps=100, global_batch_size=8, micro_batch_size=8),
    )


def changes(spec: PretrainConfig, steps: int, seeds: int = 3) -> dict[str, float]:
    """Mean absolute change of activations after some steps on the same samples, by the place; over seeds."""
    total: dict[str, float] = {}
    for seed in range(seeds):
        torch.manual_seed(seed)
        tokens = torch.randint(VOCAB, (8, SEQ + 1))
        batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), 0)
        trainer: Trainer[Batch] = Trainer(spec, shape_context())
        before = activations(trainer, batch.tokens)
        for _ in range(steps):
            trainer.train_step([batch])
        after = activations(trainer, batch.tokens)
        for name, x in after.items():
            total[name] = total.get(name, 0.0) + (x - before[name]).abs().mean().item() / seeds
    return total


@torch.no_grad()
def activations(trainer: Trainer[Batch], tokens: Tensor) -> dict[str, Tensor]:
    (model,) = trainer.model.chunks
    found: dict[str, Tensor] = {}
    hooks = [
        layer.register_forward_hook(lambda m, a, y, n=n: found.update({f"layer {n}": y.clone()}))
        for n, layer in model.layers.items()
    ]
    found["logits"] = model.logits(tokens)  # type: ignore[operator]
    for hook in hooks:
        hook.remove()
    return found


def slope(values: dict[int, float]) -> float:
    """Exponent of a power law of width through the first and the last value."""
    (first, low), *_, (last, high) = sorted(values.items())
    return math.log(high / low) / math.log(last / first)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the result")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 128, 256, 512])
    args = parser.parse_args()
    cases = [(kind, "adamw") for kind in ("gpt2", "llama")] + [("gpt2", "muon")]
    figure, axes = plt.subplots(2, len(cases), figsize=(11, 6), squeeze=False, sharex=True)
    result: dict[str, Any] = {"steps": args.steps, "base_width": BASE, "cases": {}}
    for column, (kind, optimizer) in enumerate(cases):
        for row, mup in enumerate((False, True)):
            settings = OptimizerConfig(kind=optimizer, lr=1e-2, weight_decay=0.0)
            by_width = {w: changes(spec_of(kind, w, settings, mup=mup), args.steps) for w in args.widths}
            case = f"{kind} {optimizer} {'muP' if mup else 'standard'}"
            lines = {name: {w: found[name] for w, found in by_width.items()} for name in by_width[BASE]}
            result["cases"][case] = {
                name: {"change": values, "exponent": slope(values)} for name, values in lines.items()
            }
            for name, values in lines.items():
                axes[row][column].loglog(list(values), list(values.values()), "o-", label=name)
                print(f"{case}, {name}: width^{slope(values):+.2f}")
            axes[row][column].set(title=case, xlabel="width")
    axes[0][0].set_ylabel(f"mean change in {args.steps} steps")
    axes[0][0].legend()
    figure.tight_layout()
    figure.savefig(args.out.with_suffix(".png"), dpi=110)
    args.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
