"""The nearest valid setting: of a misspelled word, of a number that does not divide."""

from collections.abc import Iterable
from difflib import get_close_matches


def nearest(word: str, candidates: Iterable[str]) -> str | None:
    """The candidate the user most likely meant, or None.

    A dotted key also matches by its last part, so `hidden_size` and `modl.hidden_size` find
    `model.hidden_size`.
    """
    known = list(candidates)
    last = word.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    if len(same) == 1:
        return same[0]
    lowered = {key.lower(): key for key in reversed(known)}
    close = get_close_matches(word.lower(), [key.lower() for key in same] or list(lowered), n=1, cutoff=0.6)
    if close:
        return lowered[close[0]]
    tails = {key.rpartition(".")[2]: key for key in reversed(known)}
    close = get_close_matches(last.lower(), tails, n=1, cutoff=0.75)
    return tails[close[0]] if close else None


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no candidate is near."""
    found = nearest(word, candidates)
    return f"; did you mean '{found}'?" if found else ""


def divisors(number: int) -> list[int]:
    """Every positive divisor, ascending."""
    return [d for d in range(1, number + 1) if number % d == 0] if number > 0 else []


def around(value: int, valid: Iterable[int]) -> list[int]:
    """The nearest valid numbers below and above `value` (one of them when there is no other)."""
    ordered = sorted(valid)
    below = [v for v in ordered if v <= value][-1:]
    above = [v for v in ordered if v > value][:1]
    return below + above


def multiples_around(value: int, quantum: int) -> list[int]:
    """The nearest positive multiples of `quantum` below and above `value`."""
    below = value // quantum * quantum
    return [below, below + quantum] if below > 0 else [quantum]


def either(key: str, values: Iterable[object]) -> str:
    """`tp=2 or tp=4`."""
    return " or ".join(f"{key}={value}" for value in values)
