"""Loss and gradient norm of a step, limits that clean steps do not reach, and the state of incidents.

A number is judged by its excess over the level, the median of the last LEVEL steps: for losses the
difference, for gradient norms the difference of logarithms. Excesses have heavy tails where batches are small
or the learning rate is high, so no multiple of their deviation holds for all runs. The tail is estimated from
the largest of `size` steps, peaks over a threshold with exponential excesses: for norms the Hill estimator
(Hill 1975). The limit is the excess that the predictive distribution reaches once in a number of steps, which
accounts for the uncertainty of few peaks.
"""

import math
from bisect import bisect_left, insort
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mlm.checkpoint.native.run_state import DOUBTFUL_SINCE, INCIDENTS, NOT_FINITE_SINCE
from mlm.data.sampler import Ranges
from mlm.parallel.collectives import all_reduce
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError
from mlm.util.files import whole_number

LEAST_SPREAD = 0.01
"""Least mean of a loss's tail, as a share of its level: a flat loss may change by a hundredth."""
LEVEL = 32
"""Steps whose median is the level."""
FEWEST = 16
"""Steps before there is a level, and excesses before there is a limit; half of a smaller window."""
FEWEST_PEAKS, SHARE = 4, 16
"""The tail is one in SHARE of the excesses, at least FEWEST_PEAKS."""
RARE, UNUSUAL, LEAST_RISE = 1e6, 1e4, 0.25
"""Weights are doubtful after one loss above the best level by the rise that clean steps reach once in RARE
steps, or two by the rise of once in UNUSUAL, and by LEAST_RISE nats: losses of a memorised data set rise a
hundredfold by chance. After a loss above all recent ones by LEAST_RISE no good checkpoint is deleted."""
DOUBTFUL, LONGEST = 3, 8
"""`IncidentState.count` from which weights are doubtful, and its maximum: three usual losses end the
doubt."""
SUSPICION = "suspicion"
"""Key of the state of `judge_loss` in a checkpoint."""
TINY = 1e-30
MOST_STEPS, MOST_RANGES, MOST_SAMPLES = 10_000, 10_000, (1 << 62) - 1


@dataclass(frozen=True)
class StepNumbers:
    """Loss and gradient norm of a step, the same on every rank."""

    loss: float
    norm: float
    scale: float = 1.0
    """fp16: loss scale, where gradients overflowed."""

    def __str__(self) -> str:
        return f"loss {self.loss:.8g}, gradient norm {self.norm:.8g}"

    @property
    def are_finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.norm)


def sum_numbers(trainer: Trainer, parts: Tensor, norm: Tensor) -> Tensor:
    """Return a step's loss and gradient norm, bit for bit the same on all ranks: [2]. Collective."""
    ctx = trainer.ctx
    loss = parts[: trainer.objective.num_losses].sum()
    numbers = torch.stack([loss.to(norm.dtype) / ctx.tp.size, norm / ctx.world_size])
    if ctx.device.type == "cpu":  # the group of all ranks is gloo: one message
        return all_reduce(numbers, ctx.world)
    axes = (ctx.tp, ctx.replicas, ctx.pp)
    for axis in axes:
        all_reduce(numbers, axis)
    # Groups may have summed in different orders: the largest result is the same for all.
    for axis in axes:
        all_reduce(numbers, axis, dist.ReduceOp.MAX)
    return numbers


def shared_numbers(trainer: Trainer, parts: Tensor, norm: Tensor) -> StepNumbers:
    """Return a step's numbers, bit for bit the same on all ranks. Collective; reads the device."""
    (loss, shared_norm), scaler = sum_numbers(trainer, parts, norm).tolist(), trainer.scaler
    scale = float(scaler.scale.item()) if scaler.dynamic and not math.isfinite(shared_norm) else 1.0
    return StepNumbers(loss, shared_norm, scale)


def exceeds_limits(numbers: Tensor, limits: Sequence[float]) -> Tensor:
    """Return 1.0 if one of the numbers is not finite or has reached its limit, else 0.0: 0-d."""
    exact = numbers.double()  # the host compares in float64 too
    within = exact.isfinite().all()
    for number, limit in zip(exact.unbind(), limits, strict=True):
        within = within & (number < limit)
    return within.logical_not().to(numbers.dtype)


def return_level(excesses: Sequence[float], steps: float, least: float) -> float:
    """Return the excess that is reached once in `steps` steps; `least` bounds the tail's mean from below.

    Excesses are in ascending order.
    """
    size = len(excesses)
    count = min(max(FEWEST_PEAKS, size // SHARE), size)
    start = excesses[-count - 1] if count < size else 0.0
    mean = max(sum(excesses[-count:]) / count - start, least)
    # Exponential excesses with this estimated mean: P(excess > x) = (1 + x / (count * mean)) ** -count
    return start + mean * count * (max(steps * count / size, 1.0) ** (1 / count) - 1)


def least_update_rise(loss: float) -> float:
    """Return the rise of this loss from which an update is doubtful: a nat, and a quarter."""
    return max(1.0, abs(loss) / 4)


class PeaksOverThreshold:
    """Level of a number's last steps, and its excesses over the levels of `size` steps."""

    def __init__(self, size: int) -> None:
        self.size, self.fewest = size, max(1, min(FEWEST, size // 2))
        self.values = deque[float](maxlen=min(LEVEL, size))
        self.excesses = deque[float]()
        self.ordered: list[float] = []
        """The excesses, in ascending order."""
        self.level = math.nan
        self.levels = deque[float](maxlen=size)
        self.ceilings = deque([(math.inf,) * 3], maxlen=8)
        """Ceilings after each of the last steps: growing losses do not raise the older ones."""

    def add(self, value: float) -> None:
        if len(self.values) >= self.fewest:
            if len(self.excesses) == self.size:
                del self.ordered[bisect_left(self.ordered, self.excesses.popleft())]
            self.excesses.append(max(value - self.level, 0.0))
            insort(self.ordered, self.excesses[-1])
        self.values.append(value)
        self.level = median(self.values)
        self.levels.append(self.level)
        self.ceilings.append((self.ceiling(RARE), self.ceiling(UNUSUAL), max(self.values) + LEAST_RISE))

    def limit(self, steps: float, least: float) -> float:
        """Return the number that clean steps reach once in `steps`; infinite until there are enough steps."""
        if len(self.excesses) < self.fewest:
            return math.inf
        least *= self.size / len(self.excesses)  # few steps underestimate the tail of a young run
        return self.level + return_level(self.ordered, steps, least)

    def ceiling(self, steps: float) -> float:
        """Return the loss that clean steps reach once in RARE or UNUSUAL `steps`, by all steps so far.

        Until the window is full, RARE is twice the highest level and a nat, UNUSUAL is `least_update_rise`
        above the level.
        """
        highest = max(self.levels)
        young = 2 * highest + 1
        if steps == UNUSUAL and len(self.levels) >= FEWEST_PEAKS:
            young = highest + least_update_rise(highest)
        if len(self.excesses) < self.fewest:
            return young
        rise = max(return_level(self.ordered, steps, LEAST_SPREAD * abs(self.level)), LEAST_RISE)
        usual = min(self.levels) + rise
        return usual if len(self.excesses) == self.size else min(usual, young)


class RecentSteps:
    """Finite losses and gradient norms of the last `size` steps, and of the steps before for their levels.

    Outliers are included: if training settles on another level, they soon are usual.
    """

    def __init__(self, size: int, pairs: Sequence[Sequence[float]] = ()) -> None:
        self.losses, self.norms = PeaksOverThreshold(size), PeaksOverThreshold(size)
        self.pairs = deque[tuple[float, float]](maxlen=size + LEVEL)
        for loss, norm in pairs[-size - LEVEL :]:
            self.add(float(loss), float(norm))

    def add(self, loss: float, norm: float) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            self.pairs.append((loss, norm))
            self.losses.add(loss)
            self.norms.add(math.log(max(norm, TINY)))

    def limits(self, steps: float) -> tuple[float, float]:
        """Return the loss and the norm that clean steps reach once in `steps`; infinite for 0."""
        if not steps:
            return math.inf, math.inf
        loss = self.losses.limit(steps, max(LEAST_SPREAD * abs(self.losses.level), TINY))
        norm = self.norms.limit(steps, 0.05)  # a change by a twentieth means little
        if norm < math.inf:
            # A thousand times the level is always an outlier; clean runs reached 400 times.
            norm = math.exp(min(norm, self.norms.level + math.log(1000)))
        return loss, norm


@dataclass
class IncidentState:
    """Recent numbers, and effects of incidents; a checkpoint keeps both."""

    recent: RecentSteps
    ranges: Ranges = ()
    """Excluded samples: (first, count)."""
    steps: list[int] = field(default_factory=list)
    """Steps whose update an incident skipped."""
    rewinds: int = 0
    nonfinite_steps: int = 0
    """Newest steps in a row without finite gradients; overflows that halve the loss scale do not count."""
    last_rewind: tuple[int, int] = (0, 0)
    """Step of the last incident with a rewind, and step of the loaded checkpoint."""
    first_nonfinite_step: int = 0
    """First of the newest steps that are not finite, overflows of float16 too; 0 if the newest is finite."""
    suspect: int = 0
    """First of the newest steps whose loss is too high; 0 if the newest are usual."""
    count: int = 0
    """1 for a suspect loss, 1 more for each above UNUSUAL, 3 for one above RARE, 3 less for a usual one."""
    expires: int = 0
    """Last step that is compared with `ceilings`, which stay as they were before the doubt."""
    differ: int = 0
    """First step whose weights differed between replicas; 0 for none."""
    ceilings: tuple[float, ...] = (0.0, 0.0, 0.0)
    """Losses that clean steps reach once in RARE and in UNUSUAL, and LEAST_RISE above the last losses."""

    @property
    def doubt(self) -> int:
        """First of the newest steps that have gone wrong; 0 if the newest is sound."""
        return min(filter(None, (self.first_nonfinite_step, self.high, self.differ)), default=0)

    @property
    def high(self) -> int:
        """First of the newest steps whose loss is far above the best; 0 if chance may explain it."""
        return self.suspect if self.count >= DOUBTFUL else 0

    def judge_loss(self, loss: float, step: int, *, is_repeated: bool = False) -> None:
        """Compare the loss of a step with the run's best, before it is added to `recent`.

        A repeated loss is of the samples of the last step, which its update has fitted: rises that are usual
        between samples do not excuse it, and a low one ends no doubt.
        """
        is_frozen, losses = step <= self.expires, self.recent.losses
        rare, unusual, usual = self.ceilings if is_frozen else map(min, zip(*losses.ceilings, strict=True))
        if is_repeated and self.recent.pairs:
            before = self.recent.pairs[-1][0]
            rare = min(rare, before + least_update_rise(before))
        if loss > (rare if is_repeated else min(unusual, usual)):
            if not is_frozen:
                self.ceilings, self.expires = (rare, unusual, usual), step + LEVEL
            self.suspect = self.suspect or step
            more = DOUBTFUL if loss > rare else int(loss > unusual)
            self.count = min(max(self.count, loss <= rare) + more, LONGEST)
            if self.high:
                self.expires = max(self.expires, self.suspect + losses.size + LEVEL)
        elif not is_repeated:
            self.count = max(0, self.count - DOUBTFUL)
            self.suspect = self.suspect if self.count else 0

    def rewind_below(self, step: int) -> int | None:
        """Return the step below which an incident at `step` takes its checkpoint; None for any.

        Training that fails again by the same step goes further back.
        """
        failed, target = self.last_rewind
        return target if step <= failed else None

    def encode(self) -> dict[str, Any]:
        return {
            "recent": [list(pair) for pair in self.recent.pairs],
            "left_out_samples": [list(range_) for range_ in self.ranges],
            "left_out_steps": self.steps[-MOST_STEPS:],
            "rewinds": self.rewinds,
            "streak": self.nonfinite_steps,
            "returned": list(self.last_rewind),
            NOT_FINITE_SINCE: self.first_nonfinite_step,
            DOUBTFUL_SINCE: self.doubt,
            SUSPICION: [self.suspect, self.count, self.expires, self.differ, *self.ceilings],
        }


def decode(saved: Any, window: int) -> IncidentState:
    """Return the state that a checkpoint holds; a new one for None. Raises CorruptFileError."""
    if saved is None:
        return IncidentState(RecentSteps(window))
    number = partial(whole_number, most=MOST_SAMPLES)
    try:
        assert isinstance(saved, Mapping)
        ranges = tuple((number(first), number(count)) for first, count in saved["left_out_samples"])
        steps = [*map(number, saved["left_out_steps"])]
        if len(ranges) > MOST_RANGES or len(steps) > MOST_STEPS:
            raise ValueError("too many entries")
        failed, target = map(number, saved["returned"])
        suspect, count, expires, differ = map(number, saved[SUSPICION][:4])
        rare, unusual, usual = map(float, saved[SUSPICION][4:])
        return IncidentState(
            RecentSteps(window, saved["recent"]),
            ranges,
            steps,
            rewinds=number(saved["rewinds"]),
            nonfinite_steps=number(saved["streak"]),
            last_rewind=(failed, target),
            first_nonfinite_step=number(saved[NOT_FINITE_SINCE]),
            suspect=suspect,
            count=count,
            expires=expires,
            differ=differ,
            ceilings=(rare, unusual, usual),
        )
    except KeyError as error:
        problem = f"its state of incidents is of another version, without {error}"
        raise CorruptFileError(f"{problem}; use the version of mlm that saved it") from error
    except (AssertionError, TypeError, ValueError) as error:
        raise CorruptFileError(
            f"its state of incidents is damaged ({error!r}); take another checkpoint"
        ) from error


def spare_samples(trainer: Trainer) -> int:
    """Return the samples that a run may need beyond its steps, for exclusions by incidents."""
    settings, size = trainer.config.incident, trainer.config.train.global_batch_size
    state = decode(trainer.extra_state.get(INCIDENTS), settings.window)
    further = 2 * size * settings.rewinds if settings.action == "rewind" else 0
    return sum(count + size for _, count in state.ranges) + further
