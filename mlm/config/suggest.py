"""The nearest valid setting: of a misspelled word, of a number that does not divide."""

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from math import isqrt

from mlm.config.elsewhere import Typed, elsewhere
from mlm.config.tree import HOISTED, leaves, other_names, sections
from mlm.util.errors import Problem


def nearest(
    word: str, candidates: Iterable[str], also: Mapping[str, Sequence[str]] | None = None
) -> str | None:
    """The candidate the user most likely meant, or None.

    A dotted key also matches by its last part, so `hidden_size` and `modl.hidden_size` find
    `model.hidden_size`. Next come the names that other programs have for candidates: `also`, in lower case.
    """
    known = list(candidates)
    last = word.rpartition(".")[2]
    same = [key for key in known if key.rpartition(".")[2] == last]
    meant = () if same else (also or {}).get(last.lower().replace("-", "_"), ())
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


def nearest_key(cls: type, key: str) -> str | None:
    """The key of a run spec closest to an unknown one; `tp` for `parallel.tp`."""
    top = key.removeprefix(f"{HOISTED}.")
    if found := elsewhere(cls, key):
        return next(iter(found.keys), None)
    return top if top in leaves(cls) else nearest(key, leaves(cls), other_names(cls))


def unknown_key(cls: type, key: str, value: str = "…", typed: Typed | None = None) -> Problem:
    """The problem of a key that this type of run spec does not have, and what stands in its place.

    `value` was given to it, beside the other settings `typed`.
    """
    if key in sections(cls):
        first = next(iter(leaves(sections(cls)[key])))
        return Problem((key,), f"'{key}' is a section: set its keys, such as {key}.{first}=…")
    if found := elsewhere(cls, key):
        return Problem((key, *found.keys), f"unknown key '{key}'", found.of(value, typed or {}))
    if (top := key.split(".")[0]) in leaves(cls):
        return Problem((key,), f"unknown key '{key}': {top} has no keys below it")
    near = nearest_key(cls, key)
    return Problem(
        (key,), f"unknown key '{key}'", f"did you mean '{near}'?" if near else "--help lists the keys"
    )


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
