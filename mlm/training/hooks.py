"""Extensions of the training loop: what watches its steps without being part of them."""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any


class Hooks:
    """Calls that the loop makes on every rank, in this order at each step; these do nothing."""

    def timed(self, what: str) -> AbstractContextManager[None]:
        """Measure time that is not the step's own: `data`, `saving`, `validation`."""
        return nullcontext()

    def begin(self, batches: Sequence[Any]) -> None:
        """Take note of the micro-batches of the step that begins."""

    def must_rewind(self) -> bool:
        """Return True on all ranks if training is to return to a checkpoint, after an update left out."""
        return False

    def is_finite(self) -> bool:
        """Return True if the numbers of the newest step are finite: only such a state is worth a save."""
        return True

    def stop_if_diverged(self, warmup_key: str) -> None:
        """Raise DivergedError if steps have not been finite for too long. Collective.

        `warmup_key` is the setting of the warm-up, which the error names.
        """

    def end(self) -> None:
        """Look at the state after the update."""

    def close(self) -> None:
        """Take note that no further step follows: all are done, or a stop was requested."""

    def rewind(self) -> None:
        """Return to a checkpoint. Collective."""

    def remember(self) -> None:
        """Put into the trainer's state what a resumed run needs. Called before each save."""
