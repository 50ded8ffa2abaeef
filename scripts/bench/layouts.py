"""Layouts of `mlm` as contenders: `tp=2,sequence_parallel=true`, each in processes of its own."""

from dataclasses import dataclass, fields

import torch

from bench.contenders import Trainee, run_config
from bench.shapes import make_batches
from bench.spec import Spec
from mlm.config.build import build
from mlm.data.sampler import Batch
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError


@dataclass(frozen=True)
class Layout:
    """A layout and its micro-batches."""

    parallel: ParallelConfig
    micro_batches: int = 1
    """Per data-parallel replica."""

    @property
    def processes(self) -> int:
        return self.parallel.replica * (self.parallel.dp or 1)


def parse_layout(words: str) -> Layout:
    """`pp=2,pipeline=zb_h1,micro_batches=8` as a layout. Raises UserError."""
    values: dict[str, object] = {}
    for word in words.split(","):
        key, _, value = word.partition("=")
        known = {f.name for f in fields(ParallelConfig)} | {"micro_batches"}
        if key not in known or not value:
            raise UserError(
                f"{word!r} in {words!r}: give key=value with key one of {', '.join(sorted(known))}"
            )
        values[key] = {"true": True, "false": False}.get(value, int(value) if value.isdecimal() else value)
    count = values.pop("micro_batches", 1)
    assert isinstance(count, int)
    return Layout(build(ParallelConfig, values), count)


class LayoutTrainee(Trainee):
    """`mlm`'s Trainer at a layout; what the equality of the numbers is worth, `mlm parity` says."""

    def __init__(self, name: str, spec: Spec, device: torch.device, ctx: ParallelContext) -> None:
        super().__init__(name, spec, device)
        self.layout = parse_layout(name)
        count, dp = self.layout.micro_batches, ctx.dp.size
        size = spec.shape.batch_size
        if size % (count * dp):
            raise UserError(f"{name}: {count} micro-batches * dp={dp} must divide the batch of {size}")
        config = run_config(spec, size // (count * dp), self.layout.parallel)
        self.trainer = Trainer(config, ctx)
        self.steps = []
        for tokens, labels in make_batches(spec.shape, spec.seed):
            pairs = zip(tokens.chunk(count * dp), labels.chunk(count * dp), strict=True)
            micro = [Batch(t.contiguous(), y.contiguous(), i) for i, (t, y) in enumerate(pairs)]
            self.steps.append(micro[ctx.dp.rank :: dp])

    def step(self, index: int) -> None:
        self.trainer.train_step(self.steps[index % len(self.steps)])

    def loss_and_gradients(self) -> tuple[float, dict[str, torch.Tensor]]:
        raise UserError("layouts are compared by `mlm parity`, not here")

    def clear(self) -> None:
        for reducer in self.trainer.reducers:
            reducer.start_step()
