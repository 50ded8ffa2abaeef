"""The nearest valid setting for a misspelled word, a foreign option, or a number that does not divide."""

import re
from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from fnmatch import fnmatchcase
from functools import cache
from math import isqrt
from pathlib import Path

import yaml  # type: ignore[import-untyped]

from mlm.config.tree import HOISTED, leaves, other_names, sections
from mlm.util.errors import Problem


@dataclass(frozen=True)
class ForeignOption:
    """Options of another program and their replacement: an entry of foreign_options.yaml."""

    names: list[str]
    answer: str
    keys: tuple[str, ...] = ()
    everywhere: bool = False

    def has_name(self, name: str) -> bool:
        """True for one of the names, or a Megatron-LM flag that matches a pattern among them."""
        return any(
            name == pattern or ("*" in pattern and name in megatron_flags() and fnmatchcase(name, pattern))
            for pattern in self.names
        )

    def answer_to(self, value: str) -> str:
        return self.answer.replace("{value}", value)


@cache
def foreign_options() -> list[ForeignOption]:
    entries = yaml.safe_load(Path(__file__).with_name("foreign_options.yaml").read_text("utf-8"))
    return [ForeignOption(**{**entry, "keys": tuple(entry.get("keys", ()))}) for entry in entries]


@cache
def megatron_flags() -> dict[str, str]:
    """Name of each flag of Megatron-LM's parser → "" if it takes a value, "!" for none, "*" for several."""
    lines = Path(__file__).with_name("megatron_flags.txt").read_text("utf-8").splitlines()
    words = " ".join(line for line in lines if not line.startswith("#")).split()
    return {word.rstrip("!*"): word[len(word.rstrip("!*")) :] for word in words}


def plain_name(name: str) -> str:
    """A setting's name as the tables have it: `--Clip-Grad` as clip_grad."""
    return name.lstrip("-+~").lower().replace("-", "_")


@cache
def foreign_option(cls: type, name: str) -> ForeignOption | None:
    """The entry for a name that is not a key of this run spec; None without one.

    Patterns do not match names of keys.
    """
    schema, last = leaves(cls), plain_name(name).rpartition(".")[2]
    is_key = last in other_names(cls) or any(key.rpartition(".")[2] == last for key in schema)
    for option in foreign_options():
        keys = option.keys or ("train.steps",)  # of the commands that train
        has_name = last in option.names if is_key else option.has_name(last)
        if has_name and (option.everywhere or all(key in schema for key in keys)):
            return option
    return None


def keys_meant(cls: type, name: str) -> tuple[str, ...]:
    """Keys that another program's name stands for, the likeliest first."""
    option = foreign_option(cls, name)
    return option.keys if option else other_names(cls).get(plain_name(name).rpartition(".")[2], ())


def nearest(
    word: str, candidates: Iterable[str], aliases: Mapping[str, Sequence[str]] | None = None
) -> str | None:
    """The candidate the user most likely meant, or None.

    A dotted key also matches by its last part, so `hidden_size` and `modl.hidden_size` find
    `model.hidden_size`. `aliases`: candidates by the names of other programs, in lower case.
    """
    keys = list(candidates)
    last = word.rpartition(".")[2]
    matches = [key for key in keys if key.rpartition(".")[2] == last]
    synonyms = () if matches else (aliases or {}).get(last.lower().replace("-", "_"), ())
    if synonym := next((key for key in synonyms if key in keys), None):
        return synonym
    if len(matches) == 1:
        return matches[0]
    lowered = dict[str, str]()
    for key in keys:
        lowered.setdefault(key.lower(), key)
    # dgx_h100_80g is a dgx_h100, although dgx_a100_80g shares more letters.
    if extended := [key for key in lowered if re.match(rf"{re.escape(key)}_\d", word.lower())]:
        return lowered[max(extended, key=len)]
    section = word.rpartition(".")[0]
    siblings = [key for key in keys if section and key.rpartition(".")[0] == section]
    if siblings and not matches:  # compare names within the section
        near = {key.rpartition(".")[2].lower(): key for key in siblings}
        close = most_alike(last.lower(), near, 0.6)
    else:
        near = {key.lower(): key for key in matches} or lowered
        close = most_alike(word.lower(), near, 0.6)
    if close is not None:
        return near[close]
    tails = {key.rpartition(".")[2]: key for key in reversed(keys)}
    close = most_alike(last.lower(), tails, 0.75)
    return None if close is None else tails[close]


def most_alike(word: str, candidates: Iterable[str], least: float) -> str | None:
    """The first candidate with the largest difflib ratio; None if no ratio is at least `least`."""
    ratios = {key: SequenceMatcher(None, key, word).ratio() for key in candidates}
    best = max(ratios, key=lambda key: ratios[key], default="")
    return best if ratios.get(best, 0.0) >= least else None


def nearest_key(cls: type, key: str) -> str | None:
    """The key of a run spec closest to an unknown one; `tp` for `parallel.tp`."""
    top = key.removeprefix(f"{HOISTED}.")
    if option := foreign_option(cls, key):
        return next(iter(option.keys), None)
    return top if top in leaves(cls) else nearest(key, leaves(cls), other_names(cls))


def unknown_key(cls: type, key: str, value: str = "…") -> Problem:
    """The problem of a key that a run spec lacks, with its replacement."""
    if key in sections(cls):
        first = next(iter(leaves(sections(cls)[key])))
        name = first if key == HOISTED else f"{key}.{first}"
        return Problem((key,), f"'{key}' is a section: set its keys, such as {name}=…")
    if option := foreign_option(cls, key):
        return Problem((key, *option.keys), f"unknown key '{key}'", option.answer_to(value))
    if (top := key.split(".")[0]) in leaves(cls):
        return Problem((key,), f"unknown key '{key}': {top} has no keys below it")
    near = nearest_key(cls, key)
    return Problem(
        (key,), f"unknown key '{key}'", f"did you mean '{near}'?" if near else "--help lists the keys"
    )


def did_you_mean(word: str, candidates: Iterable[str]) -> str:
    """`; did you mean 'x'?`, or nothing when no candidate is near."""
    near = nearest(word, candidates)
    return f"; did you mean '{near}'?" if near else ""


def divisors(number: int) -> list[int]:
    low = [d for d in range(1, isqrt(max(number, 0)) + 1) if number % d == 0]
    return [*low, *(number // d for d in reversed(low) if d * d != number)]


def around(value: int, valid: Iterable[int]) -> list[int]:
    """The nearest valid numbers below and above `value`; one of them if there is no other."""
    ordered: Sequence[int] = valid if isinstance(valid, range) else sorted(valid)  # a range may be long
    index = bisect_right(ordered, value)
    return [*ordered[max(index - 1, 0) : index], *ordered[index : index + 1]]


def multiples_around(value: int, quantum: int) -> list[int]:
    """The nearest positive multiples of `quantum` below and above `value`."""
    lower = value // quantum * quantum
    return [lower, lower + quantum] if lower > 0 else [quantum]
