"""A training loop in the manner of nanoGPT, of parts of this library: GPT-2 on the bytes of a text file.

python scripts/examples/training_loop.py input.txt
torchrun --nproc-per-node 2 scripts/examples/training_loop.py input.txt 2     # the same losses at tp=2,
torchrun --nproc-per-node 4 scripts/examples/training_loop.py input.txt 1 2   # and at cp=2 dp=2
"""

import sys
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

import mlm

STEPS, BATCH, LENGTH, EVERY = 60, 8, 64, 20
MODEL = mlm.ModelConfig(num_layers=2, hidden_size=64, num_heads=4, max_positions=LENGTH, vocab_size=256)
OPTIMIZER = mlm.OptimizerConfig(lr=3e-3, weight_decay=0.1)
SCHEDULE = mlm.ScheduleConfig(warmup_steps=5, min_lr=3e-4)


def windows(text: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of the text and the byte after each, all ranks' together: two of [BATCH, LENGTH]."""
    starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
    found = text[starts + torch.arange(LENGTH + 1)]  # [BATCH, LENGTH + 1]
    return found[:, :-1], found[:, 1:]


def main(path: str, tp: int = 1, cp: int = 1) -> None:
    ctx = mlm.build_mesh(tp=tp, cp=cp)  # the ranks that are left are dp
    text = torch.from_numpy(np.fromfile(Path(path), dtype=np.uint8)).long().to(ctx.device)
    model = mlm.GPT2(MODEL, tp=ctx.tp, cp=ctx.cp).to(ctx.device)
    mlm.init_parameters(model, 1234, ctx.tp)  # equal weights at every layout
    shards = list(mlm.parameter_shards(model, ctx.tp))
    optimizer = mlm.build_optimizer(shards, OPTIMIZER)
    reducer = mlm.GradientReducer(model.parameters(), ctx.replicas)
    generator = torch.Generator().manual_seed(0)
    for step in range(1, STEPS + 1):
        tokens, labels = (x.chunk(ctx.dp.size)[ctx.dp.rank] for x in windows(text, generator))
        reducer.start_step()
        reducer.sync = True  # of several micro-batches the last
        loss = model(tokens, labels) / ctx.dp.size  # mean over this rank's samples; of cp ranks a part each
        loss.backward()
        reducer.finish()
        mlm.sum_replicated_gradients(shards, ctx.tp, sequence_parallel=False)
        mlm.scale_gradients(shards, mlm.clip_factor(mlm.gradient_norm(shards, ctx), max_norm=1.0))
        mlm.set_lr(optimizer, mlm.learning_rate(step, OPTIMIZER, SCHEDULE, STEPS))
        optimizer.step()
        if step % EVERY == 0:
            whole = mlm.all_reduce(loss.detach(), ctx.replicas)
            if ctx.is_main:
                print(f"step {step}: loss {whole.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
