"""What a protocol is: requests to score, and what their scores come to."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mlm.evaluate.scoring import Request, Score
from mlm.evaluate.zero_shot.sources import Texts

V1, LM_EVAL = "Megatron-LM", "lm-eval"
MAX_PLACES = 20
"""Places that a receipt lists of what was cut or left out; it counts all."""


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a protocol."""

    value: float
    stderr: float | None
    """Standard error; None where the sample is too small to tell."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a protocol says of a model."""

    metrics: dict[str, Metric]
    samples: list[dict[str, Any]]
    """One per window, article or passage, for the file of samples."""


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """A text or texts, cut into requests by one protocol."""

    task: str
    """What it is called where it comes from: wikitext103, lambada_openai, …"""
    name: str
    """V1 (arXiv:1909.08053, appendix E) or LM_EVAL."""
    source: Texts
    requests: tuple[Request, ...]
    finish: Callable[[Sequence[Score]], Outcome]
    """Metrics from the scores of `requests`, in their order."""
    facts: dict[str, Any]
    """What a receipt says of it: T, T_o, N, …, by key."""
    counts: str
    """The same in one line, for people."""
    warnings: tuple[str, ...] = field(default=())
    """What was left out or cut, and whether the text is of the form that the protocol is meant for."""


def rolling_request(context: Sequence[int], scored: Sequence[int]) -> Request:
    """A request for `scored` after `context`, which is not empty."""
    return Request(np.array([*context, *scored], dtype=np.int64), len(context))


def distinct(requests: Sequence[Request]) -> tuple[list[Request], list[int]]:
    """Requests without repetitions, and where each one's score is among theirs.

    Protocols that agree on a passage's tokens share a request.
    """
    seen: dict[tuple[bytes, int], int] = {}
    kept, where = list[Request](), list[int]()
    for request in requests:
        key = (request.tokens.tobytes(), request.first)
        if key not in seen:
            seen[key] = len(kept)
            kept.append(request)
        where.append(seen[key])
    return kept, where


def as_tokens(ids: Sequence[int]) -> NDArray[np.int64]:
    """[n] token ids."""
    return np.asarray(ids, dtype=np.int64)


def listed(places: Sequence[str]) -> str:
    """Some places, in words."""
    shown = ", ".join(places[:3])
    return f"{shown} and {len(places) - 3} more" if len(places) > 3 else shown
