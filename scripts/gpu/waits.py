"""Places where a steady training step waits for the device."""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from gpu.agree import batches_of, config_of
from gpu.child import Case
from mlm.data.sampler import MicroBatch
from mlm.parallel.mesh import ParallelContext
from mlm.training.incidents.watcher import Incidents
from mlm.training.observer import Observers
from mlm.training.trainer import Trainer

WARM_UP = 3
ROOT = Path(__file__).resolve().parents[2]


def run(case: Case) -> None:
    """Waits of each family, mixtures included, eager and in fp16."""
    kinds = (("gpt2", "bf16"), ("gpt2", "fp16"), ("bert", "bf16"), ("mixtral", "bf16"), ("deepseek", "bf16"))
    for kind, precision in kinds:
        steady(case, kind, precision)


def steady(case: Case, kind: str, precision: str) -> None:
    """One step of the training loop after some, with every wait for the device noted.

    The watcher waits for an event behind which the update is queued, which does not wait for the device.
    """
    config = config_of(kind, precision, quick=case.quick)
    device = torch.device(case.device, 0 if case.is_cuda else None)
    trainer: Trainer[MicroBatch] = Trainer(config, ParallelContext(device=device))
    # the observer of `mlm pretrain` that judges each step; nobody reads what it reports
    quiet: Callable[..., None] = lambda *_: None  # noqa: E731
    reporter = SimpleNamespace(problem=quiet, note=quiet, event=quiet, rewound=quiet)
    incidents = Incidents(trainer, case.scratch / "watched", reporter, SimpleNamespace())  # type: ignore[arg-type]
    trainer.observers = Observers([incidents])
    steps = batches_of(config, pin_memory=case.is_cuda)
    for batches in steps[:WARM_UP]:
        step(trainer, incidents, batches)
    with noted_waits(case.is_cuda) as places:
        step(trainer, incidents, steps[WARM_UP])
    for place, count in places.most_common():
        case.row("waits for the device", model=kind, precision=precision, place=place, times=count)
    case.row("waits in a steady step", model=kind, precision=precision, waits=sum(places.values()))


def step(trainer: Trainer[MicroBatch], incidents: Incidents, batches: Sequence[MicroBatch]) -> None:
    incidents.on_step_start(batches)
    incidents.after_step(trainer.train_step(batches))


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


def device_of(case: Case) -> torch.device:
    if not case.is_cuda:
        return torch.device("cpu")
    torch.cuda.set_device(0)
    return torch.device("cuda", 0)
