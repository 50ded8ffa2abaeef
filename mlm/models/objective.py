"""Training objectives: the numbers that a micro-batch gives, and what each is divided by."""

from collections.abc import Sequence
from typing import Protocol, TypeVar

from torch import Tensor

from mlm.data.sampler import MicroBatch
from mlm.models.backbone import Transformer
from mlm.parallel.dropout import DropoutStream

C = TypeVar("C", bound=Transformer, contravariant=True)
B = TypeVar("B", bound=MicroBatch, contravariant=True)


class Objective(Protocol[C, B]):
    """Objective of a model of class C on micro-batches B.

    Its `parts` are k numbers; the first `losses` of them are minimised.
    """

    parts: tuple[str, ...]
    losses: int
    methods: tuple[str, ...]
    """Methods of the model that it calls, other than `forward`."""

    def counts(self, batch: B) -> Sequence[int]:
        """Return the number of terms in each part of a micro-batch: scored tokens, samples. On the host.

        Over cp ranks those of all of them; `output` and `sums` add up this rank's.
        """
        ...

    def output(
        self, chunk: C, batch: B, scale: Tensor, stream: DropoutStream | None, x: Tensor | None
    ) -> Tensor:
        """Return a stage's hidden states, or in the last stage `scale` [k] times each part's sum.

        The latter is [k], of which the losses are differentiable. `x` are the hidden states of the stage
        before, None in the first.
        """
        ...

    def sums(self, chunk: C, batch: B, x: Tensor | None) -> Tensor:
        """Return the same without dropout, gradients and scale: [k] float64."""
        ...
