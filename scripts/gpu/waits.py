"""Places where a steady training step waits for the device, and whether the same step gives the same bits."""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from gpu.agree import batches_of, config_of
from gpu.child import Case
from gpu.shapes import SpeedTrainee, gpt2, spec_of
from mlm.data.sampler import MicroBatch
from mlm.parallel.mesh import ParallelContext
from mlm.training.incidents.watcher import Incidents
from mlm.training.trainer import Trainer

WARM_UP = 3
ROOT = Path(__file__).resolve().parents[2]


def run(case: Case) -> None:
    """Waits of GPT-2 and BERT, eager and in fp16; then two equal steps."""
    for kind, precision in (("gpt2", "bf16"), ("gpt2", "fp16"), ("bert", "bf16")):
        steady(case, kind, precision)
    for repeatable in (False, True):
        repeat(case, repeatable)


def steady(case: Case, kind: str, precision: str) -> None:
    """One step of the training loop after some, with every wait for the device noted.

    The watcher waits for an event behind which the update is queued, which is no wait of the device's.
    """
    config = config_of(kind, precision, quick=case.quick)
    device = torch.device(case.device, 0 if case.is_cuda else None)
    trainer: Trainer[MicroBatch] = Trainer(config, ParallelContext(device=device))
    steps, hooks = batches_of(config, pin_memory=case.is_cuda), watcher_of(case, trainer)
    for batches in steps[:WARM_UP]:
        step(trainer, hooks, batches)
    with noted_waits(case.is_cuda) as places:
        step(trainer, hooks, steps[WARM_UP])
    for place, count in places.most_common():
        case.row("waits for the device", model=kind, precision=precision, place=place, times=count)
    case.row("waits in a steady step", model=kind, precision=precision, waits=sum(places.values()))


def watcher_of(case: Case, trainer: Trainer[MicroBatch]) -> Incidents:
    """The hooks of `mlm pretrain`, which judge each step; nobody reads what they report."""
    quiet: Callable[..., None] = lambda *_: None  # noqa: E731
    reporter = SimpleNamespace(problem=quiet, note=quiet, event=quiet, rewound=quiet)
    return Incidents(trainer, case.scratch / "watched", reporter, SimpleNamespace())  # type: ignore[arg-type]


def step(trainer: Trainer[MicroBatch], hooks: Incidents, batches: Sequence[MicroBatch]) -> None:
    """Take a step as the training loop does."""
    hooks.begin(batches)
    trainer.train_step(batches)
    hooks.must_rewind()
    hooks.end()


@contextmanager
def noted_waits(is_cuda: bool) -> Iterator[Counter[str]]:
    """Count the waits inside by the line of this project that waits; none on a CPU."""
    places: Counter[str] = Counter()
    if not is_cuda:
        yield places
        return

    def note(message: Warning | str, *_: Any) -> None:
        if "called a synchronizing" in str(message):
            places[caller()] += 1

    torch.cuda.synchronize()
    with warnings.catch_warnings():  # puts showwarning back too
        warnings.showwarning = note  # type: ignore[assignment]
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield places
        finally:
            torch.cuda.set_sync_debug_mode("default")


def caller() -> str:
    """The innermost line of `mlm` on the stack, `file:line code`; of autograd's threads there may be none."""
    frames = [f for f in traceback.extract_stack() if f.filename.startswith(str(ROOT / "mlm"))]
    if not frames:
        return "outside of mlm"
    frame = frames[-1]
    return f"{Path(frame.filename).relative_to(ROOT)}:{frame.lineno} `{frame.line}`"


def repeat(case: Case, repeatable: bool) -> None:
    """The same forward and backward pass twice: are gradients equal bit for bit?"""
    shape = gpt2("124m", quick=case.quick, batch_size=8)
    trainee = SpeedTrainee("mlm", spec_of(shape, case.device), device_of(case))
    torch.use_deterministic_algorithms(repeatable, warn_only=True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            first, second = gradients(trainee), gradients(trainee)
    finally:
        torch.use_deterministic_algorithms(False)
    different = [name for name, g in first.items() if not torch.equal(g, second[name])]
    case.row(
        "the same step twice",
        model=shape.describe(),
        **{
            "deterministic algorithms": repeatable,
            "gradients": len(first),
            "with other bits": len(different),
            "such as": different[0] if different else "",
        },
    )


def gradients(trainee: SpeedTrainee) -> dict[str, Tensor]:
    """Gradients of the first micro-batch, on the CPU."""
    read: Callable[[], tuple[float, dict[str, Tensor]]] = trainee.loss_and_gradients
    return read()[1]


def device_of(case: Case) -> torch.device:
    """The device, made current."""
    if not case.is_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)
