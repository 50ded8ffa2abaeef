"""What is reported while training: the numbers of a step, and the places they go to."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import MappingProxyType
from typing import Any

Parts = Mapping[str, float]
"""Numbers besides the loss, by name: what it is made of, and of a validation that of each corpus of a blend.
Empty where the loss is all there is."""
NO_PARTS: Parts = MappingProxyType({})


@dataclass(frozen=True)
class StepMetrics:
    """Numbers of one logged step, already on the host. Rates cover the steps since the last logged one."""

    step: int
    """Optimizer steps done, this one included."""
    loss: float
    """Mean loss of the global batch, in nats: per token; of a BERT the sum of both heads'."""
    lr: float
    """Learning rate this step used."""
    grad_norm: float
    """Global L2 norm of the gradient before clipping."""
    loss_scale: float | None
    """fp16: factor on the loss before backward; None in other formats."""
    skipped_steps: int
    """fp16: steps skipped for overflow so far."""
    tokens: int
    """Tokens consumed so far, over all ranks and attempts."""
    tokens_per_s: float
    """Tokens per second of the whole job."""
    step_time_s: float
    """Seconds per step, without validation and saving."""
    tflops: float
    """Model TFLOP/s of one device, recomputation not counted."""
    mfu: float | None
    """Model FLOP/s as a fraction of the device's peak; None if no peak is known."""
    memory_bytes: int
    """Peak memory of this rank's device; resident set of the process on CPU."""
    parts: Parts = field(default_factory=dict)
    """What the loss is made of, and how much is right: mlm_loss, sop_loss, mlm_accuracy, sop_accuracy."""


def flat(metrics: StepMetrics) -> dict[str, Any]:
    """The numbers of a step, its parts among them."""
    named = {each.name: getattr(metrics, each.name) for each in fields(metrics)}
    named.pop("parts")
    return {**named, **metrics.parts}


class Sink:
    """A place reports go to. Every method does nothing here: a sink overrides what it takes."""

    def start(self, run: dict[str, object]) -> None:
        """The run begins; `run` is the record of its configuration."""

    def step(self, metrics: StepMetrics) -> None:
        """A logged step."""

    def validation(self, step: int, loss: float, perplexity: float, parts: Parts = NO_PARTS) -> None:
        """A validation after `step`; loss in nats per token, in `parts` that of each corpus of a blend."""

    def scores(self, step: int, split: str, metrics: Parts, *, is_best: bool) -> None:
        """A split of a task was scored after `step`; whether better than ever before."""

    def saved(self, step: int, path: Path, seconds: float, waited: float) -> None:
        """A checkpoint was written in `seconds`; training waited that many of them."""

    def save_failed(self, step: int, error: str) -> None:
        """A checkpoint could not be written; `error` says why, where, and the remedy."""

    def note(self, text: str) -> None:
        """Something to tell the user in one line."""

    def announce(self, text: str) -> bool:
        """Show what a signal asked for; False if this is no place for it. Called inside signal handlers."""
        return False

    def advance(self, step: int) -> None:
        """`step` steps are issued; their numbers stay on the device."""

    def close(self) -> None:
        """The run ends, in whatever way."""


def of_parts(parts: Parts) -> dict[str, float]:
    """Those losses under the names that records and trackers have for them."""
    return {f"validation/{name}": loss for name, loss in parts.items()}
