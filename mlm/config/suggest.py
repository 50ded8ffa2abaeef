"""The nearest valid setting: of a misspelled word, of a number that does not divide."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from math import isqrt

from mlm.config.neighbours import CHOICES, KEYS


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate the user most likely meant, or None.

    A dotted key also matches by its last part, so `hidden_size` and `modl.hidden_size` find
    `model.hidden_size`. The names that other programs have for a key come next.
    """
    known = list(candidates)
    last = word.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    meant = () if same else KEYS.get(last.lower().replace("-", "_"), ())
    if found := next((key for key in meant if key in known), None):
        return found
    if len(same) == 1:
        return same[0]
    lowered = {key.lower(): key for key in reversed(known)}
    close = get_close_matches(word.lower(), [key.lower() for key in same] or list(lowered), n=1, cutoff=0.6)
    if close:
        return lowered[close[0]]
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = get_close_matches(last.lower(), tails, n=1, cutoff=0.75)
    return tails[close[0]] if close else None


def nearest_choice(word: str, choices: Iterable[str]) -> str | None:
    """The choice of a group that the user most likely meant, or None: gpt2-medium → gpt2_355m."""
    known = list(choices)
    found = CHOICES.get(word.lower().replace("-", "_"))
    return found if found in known else nearest(word, known)


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no candidate is near."""
    found = nearest(word, candidates)
    return f"; did you mean '{found}'?" if found else ""


def divisors(number: int) -> list[int]:
    """Every positive divisor, ascending."""
    low = [d for d in range(1, isqrt(max(number, 0)) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]


def around(value: int, valid: Iterable[int]) -> list[int]:
    """The nearest valid numbers below and above `value` (one of them when there is no other)."""
    ordered: Sequence[int] = valid if isinstance(valid, range) else sorted(valid)  # a range may be long
    at = bisect_right(ordered, value)
    return [*ordered[max(at - 1, 0) : at], *ordered[at : at + 1]]


def multiples_around(value: int, quantum: int) -> list[int]:
    """The nearest positive multiples of `quantum` below and above `value`."""
    below = value // quantum * quantum
    return [below, below + quantum] if below > 0 else [quantum]


def either(key: str, values: Iterable[object]) -> str:
    """`tp=2 or tp=4`."""
    return " or ".join(f"{key}={value}" for value in values)
