"""Operations of a step on one process beside those of ranks: which numbers may be the cause, and why.

A hypothesis takes numbers of ranks in place of one process's; their relation to the right ones is put into
words.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import takewhile
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from mlm.verify.audit.compare import Comparison, Location, magnitude
from mlm.verify.audit.parts import (
    Coordinates,
    Match,
    Parts,
    Placement,
    are_copies,
    difference,
    fill,
    match,
    match_at,
    placements,
    region,
    scale_of,
)
from mlm.verify.audit.patterns import FIT, Pattern, cause_of, explain_count, pattern
from mlm.verify.audit.record import KINDS, Cause, Key, Split
from mlm.verify.audit.trace import BACKWARD, NUMBERS, READ, RESULT

PARTS, SUM, OWN = "parts", "sum", "own"
"""How results take one process's place: put together from parts or copies, added, or each rank's in a run."""
MASK = 1e3
"""Least size of an element that masks others, and of its ratio to these."""
OUTSIDE = ("step", "forward", "loss", "the whole module")
"""Places of operations that no part of a model runs."""
SHOWN = 4
"""Numbers of a tensor in a report."""
STATISTICS = ("mean", "var", "std", "sum", "norm", "amax", "amin", "softmax", "topk", "sort", "bincount")
"""Parts of names of operations over many elements."""
COUNTS = ("sum", "mean", "bincount", "histc")
"""Names of those whose results may be integral and are no indices."""
MOVES = (
    *("view", "split", "chunk", "cat", "slice", "select", "index", "gather", "unbind", "clone", "permute"),
    *("squeeze", "expand", "transpose", "embedding"),
)
"""Parts of names of operations that compute nothing."""
DRAWS = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout")
"""Parts of names of operations that draw random numbers."""
WORDS = {
    "other indices": "labels, positions or other indices are not those of this rank's part of the whole",
    "other rows": "rows are not those of this rank's part; look at q, k, v or gate, up, at heads and offsets",
    "other positions": "positions or indices are not those of this rank's part of the whole",
    "mask": "a mask is not the rank's part of the whole one; look at positions of queries and keys, "
    "and at which labels count",
    "local statistics": "a statistic is of a rank's part in place of all; reduce it over ranks",
    "another constant": "look at what fills or updates it, and at which rank's part it is",
    "random numbers": "ranks draw other random numbers than one process; seed them by sample or layer, not "
    "by rank or by a count within a rank",
    "bias added on every rank": "each rank adds the same row to its addend; add it once, after the sum",
    "wrong sum": "ranks' results add up to another tensor; look at what each adds beside its part, "
    "such as a residual, or rows of others, "
    "and at what none adds",
    "another result": "look at what a layout alone computes, or leaves out",
    "wrong communication": "look at groups, roots and orders of collectives, and at which part is taken",
    "depends on the layout": "its inputs are right, or cannot be compared",
    "several operations": "so are inputs of it; what is before it is wrong in several places",
}
"""What an operation does wrong, and what to look at."""
Tensors = Mapping[Key, Tensor]
Traced = Mapping[Coordinates, Tensors]
"""Operations of ranks."""
Name = tuple[str, str, int]
"""Type, name and item of keys: an operand, or -1 for all results, of a line in all its calls."""


class Status(NamedTuple):
    """Relation of the tensors of ranks to that of one process."""

    word: Literal["right", "addends", "wrong", "no part", "unknown"]
    """Addends: their sum is right. No part: of a shape that no split gives. Unknown: not on all ranks."""
    match: Match | None = None


class Hypothesis(NamedTuple):
    """Numbers that are taken from ranks."""

    names: Sequence[Name]
    how: str


class Operations:
    """Operations of one process beside those of ranks, in the order of its computation."""

    def __init__(
        self, comparison: Comparison, right: Tensors, sources: Mapping[Key, Key], traced: Traced
    ) -> None:
        self.ranks = traced
        """Those of ranks, where `traced` joins those of replicas."""
        self.comparison, self.right, self.sources = comparison, right, sources
        self.traced = {at: dict(tensors) for at, tensors in traced.items()}
        splits = (p.match.placement.get("cp") for p in comparison.locations if not p.is_wrong)
        self.is_zigzag = any(isinstance(how, Split) and how.is_zigzag for how in splits)
        self._statuses: dict[Key, Status] = {}
        self._scale_gradients()

    def _scale_gradients(self) -> None:
        """Give gradients of replicas one process's scale: that of the first which are right but for it."""
        if self.comparison.replicas * self.comparison.layout["pp"] == 1:
            return
        gradients = (k for k in self.right if k.kind == RESULT and BACKWARD in k.name)
        for key in gradients:
            whole, parts = self.right[key], self.parts(key)
            if parts and whole.numel() > 1 and whole.is_floating_point():
                choices = self.placements(parts, whole, ("cp", "tp"))
                found = match(parts, whole, choices, FIT * magnitude(whole), is_scaled=True)
                if found is not None and found.error <= FIT * magnitude(whole) > 0:
                    pairs = match_at(found.placement, parts, whole).pairs
                    scales = {at[:2]: scale_of(*pair) for at, pair in pairs.items()}
                    self.traced = {
                        at: {k: x / scales[at[:2]] if _is_gradient(k, x) else x for k, x in own.items()}
                        for at, own in self.traced.items()
                    }
                    return

    def parts(self, key: Key) -> Parts:
        """Return the tensor that each rank recorded under a key; empty unless all ranks did."""
        parts = {at: own[key] for at, own in self.traced.items() if key in own}
        return parts if len(parts) == len(self.traced) else {}

    def placements(self, parts: Parts, whole: Tensor, sums: Sequence[str]) -> Iterator[Placement]:
        """Placements of a tensor, with sequences split as those of right tensors are."""
        blocks = {"tp": sorted({1, *whole.shape})}
        for placement in placements(parts, whole, self.comparison.layout, blocks=blocks, sums=sums):
            how = placement.get("cp")
            if not isinstance(how, Split) or how.is_zigzag == self.is_zigzag:
                yield placement

    def status(self, key: Key) -> Status:
        if key not in self._statuses:
            self._statuses[key] = self._status(key)
        return self._statuses[key]

    def _status(self, key: Key) -> Status:
        whole = self.right.get(key)
        if whole is None or whole.is_complex() or not whole.numel() or not (parts := self.parts(key)):
            return Status("unknown")
        bound = FIT * _size(whole)
        found = match(parts, whole, self.placements(parts, whole, ("cp", "tp")), bound, is_scaled=False)
        if found is None:
            return Status("no part")
        if found.error <= bound:
            return Status("addends" if found.sums else "right", found)
        return Status("wrong", match(parts, whole, self.placements(parts, whole, ()), 0.0, is_scaled=False))

    def of_operation(self, key: Key, kind: str) -> list[Key]:
        """Return all keys of a kind, READ or RESULT, of the operation that `key` belongs to."""
        keys = (key._replace(kind=kind, item=item) for item in range(20))
        return [k for k in keys if k in self.right]

    def _followed(self) -> set[tuple[object, ...]]:
        """Operations, as `_call` names them, from whose results wrong numbers lead to the end."""
        readers: dict[Key, list[Key]] = {}
        for read, source in self.sources.items():
            readers.setdefault(source, []).append(read)
        followed: set[tuple[object, ...]] = set()
        results = [k for k in self.right if k.kind == RESULT]
        calls = {_call(k) for k in results if "_like" not in k.name}  # those that read a shape alone
        ends = [x for k, x in self.right.items() if k.kind in KINDS]
        for key in reversed(results):
            if self.status(key).word not in ("right", "addends"):
                after = {_call(k) for k in readers.get(key, ()) if _call(k) in calls} - {_call(key)}
                if not after or after & followed or any(torch.equal(self.right[key], x) for x in ends):
                    followed.add(_call(key))
        return followed

    def hypotheses(self, target: Key) -> Iterator[Hypothesis]:
        """Numbers that are not one process's, in order, and how these take its place.

        Each rank's own numbers, or their sum, do not explain a loss over replicas: they are of other samples.
        """
        seen, own, reads, numbers, is_own = set[Name](), list[Name](), list[Name](), list[Name](), False
        followed, keys = self._followed(), [*self.right]
        is_shared = target.kind in ("loss", "scalar") and self.comparison.replicas > 1
        if target.kind in ("output", "scalar", "loss"):  # outputs of other modules are right, or follow
            keys.sort(key=lambda key: not _is_near(key.name.split("|")[0], target.name))
        for key in keys:
            whole = self.right[key]
            name = _name(key)
            if name in seen or key.kind not in (READ, RESULT, NUMBERS):
                continue
            if followed and _call(key) not in followed:
                continue
            if key.kind == NUMBERS:
                words = {self.status(k).word for k in self.of_operation(key, RESULT)}
                # there are none where samples are others
                if (not words or words - {"right", "addends"}) and self.other_numbers(key):
                    seen.add(name)
                    first, *rest = self.parts(key).values()
                    is_own |= (is_apart := not all(torch.equal(first, x) for x in rest))
                    numbers.append(name)
                    if not (is_shared and is_apart):
                        yield Hypothesis([name], OWN if is_apart else PARTS)
                continue
            status, source = self.status(key), self.sources.get(key)
            if key.kind == READ and status.word == "addends":
                if any(self.status(k).word == "wrong" for k in self.of_operation(key, RESULT)):
                    seen.add(name)
                    if not is_shared:
                        yield Hypothesis([name], OWN)
                continue
            if status.word != "wrong" or (source is not None and self.status(source).word == "wrong"):
                continue
            seen.add(name)
            first, *rest = self.parts(key).values()
            yield Hypothesis([name], PARTS)
            if key.kind == READ:
                reads.append(name)
                if len(reads) > 1:
                    yield Hypothesis([*reads], PARTS)
            if whole.is_floating_point() and key.kind == RESULT and not is_shared:
                yield Hypothesis([name], SUM)
            is_apart = not all(torch.equal(first, x) for x in rest)
            if first.shape == whole.shape and is_apart and not is_shared:
                own.append(name)
                yield Hypothesis([name], OWN)
                if len(own) > 1:
                    yield Hypothesis([*own], OWN)
        if len(numbers) > 1 and not (is_own and is_shared):
            yield Hypothesis(numbers, OWN if is_own else PARTS)

    def other_numbers(self, key: Key) -> list[Tensor]:
        """Numbers of an operation on ranks that are not those of one process."""
        key = key._replace(kind=NUMBERS, item=0)
        every = self.parts(key).values()
        return [numbers for numbers in every if not torch.equal(numbers, self.right[key])]

    def values(self, hypothesis: Hypothesis, at: Coordinates) -> dict[Key, Tensor]:
        """Tensors to put in place of one process's in the run that predicts the rank at these coordinates."""
        keys = [k for k in self.right if _name(k) in hypothesis.names]
        values = ((k, self._value(self.parts(k), self.right[k], hypothesis.how, at)) for k in keys)
        return {k: x for k, x in values if x is not None}

    def _value(self, parts: Parts, whole: Tensor, how: str, at: Coordinates) -> Tensor | None:
        """A tensor of one process's shape from what ranks have; None where that does not fit."""
        if how == OWN:
            return parts.get(at)
        for placement in self.placements(parts, whole, ("cp", "tp") if how == SUM else ()) if parts else ():
            if (how == SUM) == ("sum" in placement.values()):
                summed = match_at(placement, parts, whole).parts
                value = whole.clone(memory_format=torch.contiguous_format)
                fill(value, summed, placement)
                if all(torch.equal(region(value, placement, at, parts), part) for at, part in summed.items()):
                    return value
        return None

    def explain(self, hypothesis: Hypothesis) -> Cause:
        """The cause in words, from the first of a hypothesis's numbers that is not one process's."""
        name, how = hypothesis.names[0], hypothesis.how
        if name[0] == NUMBERS:
            return self._explain_numbers(name[1])
        key = next(k for k in self.right if _name(k) == name and self.status(k).word in ("wrong", "addends"))
        return self._explain_read(key) if key.kind == READ else self._explain_result(key, how)

    def _explain_numbers(self, name: str) -> Cause:
        _, line, operation = name.split("|")
        keys = (k for k in self.right if k.kind == NUMBERS and k.name == name)
        right, (other, *_) = next((self.right[k], found) for k in keys if (found := self.other_numbers(k)))
        own, its = (", ".join(f"{x:.6g}" for x in each.tolist()) for each in (other, right))
        why = f"{operation} at {line} takes {own} in place of {its}, which gives the wrong numbers"
        return Cause("another number", f"{why}: look at ranks, sizes of parts, layers and step counts")

    def _explain_read(self, key: Key) -> Cause:
        module, line, operation = key.name.split("|")
        (word, found), source = self.status(key), self.sources.get(key)
        assert found is not None
        what, name = f"a tensor that {operation} at {line} reads", self._name_of_values(key)
        if name == "" and (count := self._count(key)) is not None:
            made = f", {_result(source)}" if source is not None else ""
            return count._replace(why=f"{what}{made}, is {count.why}")
        if source is None:
            name = {"other positions": "other indices", "": "another constant"}.get(name, name)
        elif word == "addends":
            what += f", {_result(source)}"
        elif (other := self._source_on_ranks(key)) is not None:
            what = f"{operation} at {line} reads {_result(other)}, not {_result(source)}"
            name = "another result"
        else:
            what += f", {_result(source)} that ranks communicate"
        if (cause := self._relation(key)) is not None:
            return Cause(cause.name, f"{what}: {cause.why}", module if word == "addends" else "")
        name = name or "wrong communication"
        what += ": it is the first that is wrong, and gives the wrong numbers"
        return Cause(name, f"{what}; {WORDS[name]}{self._shown(found)}")

    def _count(self, key: Key) -> Cause | None:
        """The cause of a number of a rank's own samples, the same in each of its calls."""
        parts: Parts = {}
        for at, own in self.ranks.items():
            first, *rest = [x for k, x in own.items() if _name(k) == _name(key)] or [torch.empty(0)]
            if first.shape != self.right[key].shape or not all(torch.equal(first, x) for x in rest):
                return None
            parts[at] = first.double()
        axes = (axis for axis in ("dp", "cp") if self.comparison.layout[axis] > 1)
        return next(filter(None, (explain_count(self.right[key].double(), parts, a) for a in axes)), None)

    def _source_on_ranks(self, key: Key) -> Key | None:
        """The result that all ranks read in the place of one process's; None where none is equal."""
        ranks = [(own, own[key]) for own in self.traced.values()]
        for other in takewhile(lambda k: k != key, ranks[0][0]):  # in the order of computation
            is_result = other.kind == RESULT and other != self.sources[key]
            if is_result and all(other in own and torch.equal(own[other], x) for own, x in ranks):
                return other
        return None

    def _relation(self, key: Key) -> Cause | None:
        """The cause of numbers that are a formula of right ones."""
        found, kind = self.status(key).match, "backward" if BACKWARD in key.name else "output"
        assert found is not None
        if found.sums:
            return cause_of(kind, Pattern("own", found.sums[0]))
        if not self.right[key].is_floating_point():
            return None
        place = Location(key._replace(kind=kind), found, magnitude(self.right[key]), 0.0)
        relation = pattern(self.comparison, [place])
        is_chance = relation is not None and relation.name == "scaled" and self.right[key].numel() == 1
        return None if is_chance else cause_of(kind, relation)

    def _name_of_values(self, key: Key) -> str:
        whole = self.right[key]
        if whole.dtype is torch.bool:
            return "mask"
        if key.kind == RESULT and key.name.split("|")[-1] in COUNTS:
            return ""
        is_integral = bool((whole.double() == whole.double().round()).all())
        return "other positions" if is_integral and bool((whole != whole.flatten()[0]).any()) else ""

    def _explain_result(self, key: Key, how: str) -> Cause:
        operation, found = key.name.split("|")[-1], self.status(key).match
        assert found is not None
        if self._is_drawn(key):
            return Cause(name := "random numbers", f"{_result(key)}: {WORDS[name]}{self._shown(found)}")
        if alone := self._computed_alone(key):
            return alone
        reads = {k: self.status(k).word for k in self.of_operation(key, READ)}
        addends = [k for k, word in reads.items() if word == "addends"]
        others = [k for k, word in reads.items() if word in ("wrong", "no part")]
        wrong = [k for k in others if reads[k] == "wrong"][:1]
        what = f"{_result(key)} is the first that is wrong, and gives the wrong numbers"
        name = self._name_of_values(key)
        if how == SUM and (mixed := self._explain_mixed(key)) is not None:
            return mixed
        if how == SUM:
            name = "bias added on every rank" if self._adds_rows(key) else "wrong sum"
        elif not name and addends and not self.other_numbers(key):
            return self._explain_read(addends[0])
        elif not name and addends:
            name = "local statistics"
        elif not name and how == PARTS and (cause := self._relation(key)) is not None:
            return Cause(cause.name, f"{_result(key)} gives the wrong numbers: {cause.why}")
        elif not name and wrong and len(wrong) == len(others):
            if self._is_kept(wrong[0]) and self.status(self.sources[wrong[0]]).word == "wrong":
                return self._explain_result(self.sources[wrong[0]], how)
            return self._explain_read(wrong[0])
        elif not name and others:
            what, name = f"{_result(key)} gives the wrong numbers", "several operations"
        elif not name and any(word in operation for word in STATISTICS):
            name = "local statistics"
        elif not name and any(word in operation for word in MOVES):
            name = "other rows"
        name = name or "depends on the layout"
        shown = self._shown(found) if how == PARTS and name != "mask" else ""
        return Cause(name, f"{what}: {WORDS[name]}{shown}")

    def _is_drawn(self, key: Key) -> bool:
        """True if an operation draws random numbers, or reads such alone."""
        if any(word in key.name.split("|")[-1] for word in DRAWS):
            return True
        reads = self.of_operation(key, READ)
        return bool(reads) and all(k in self.sources and self._is_drawn(self.sources[k]) for k in reads)

    def _computed_alone(self, key: Key) -> Cause | None:
        """The cause of numbers that ranks compute from their parts of right ones, without communication."""
        found, left, origins = {key}, [key], dict[str, Key]()
        while left:
            operation = left.pop()
            reads = self.of_operation(operation, READ)
            wrong = [k for k in reads if self.status(k).word in ("wrong", "no part")]
            if not wrong:
                origins.setdefault(operation.name, operation)
            for read in wrong:
                if not self._is_kept(read):
                    return None
                if (source := self.sources[read]) not in found:
                    found.add(source)
                    left.append(source)
        # indices are made for the part that is taken, where one is
        of_parts = [k for k in origins.values() if self.of_operation(k, READ)] or [*origins.values()]
        are_statistics = all(any(word in k.name.split("|")[-1] for word in STATISTICS) for k in of_parts)
        if key in of_parts or any(map(self.other_numbers, of_parts)):
            return None
        if len(of_parts) > 1 and not are_statistics:
            return None
        shapes = [list(x.shape) for x in (*self.parts(of_parts[0]).values(), self.right[of_parts[0]])]
        if not are_statistics and sum(a != b for a, b in zip(shapes[0], shapes[-1], strict=False)) == 1:
            return None  # a part along one dimension, as a split gives
        what = f": {shapes[0]} in place of {shapes[-1]}" if shapes[0] != shapes[-1] else ""
        made = " and ".join(f"{op} at {line}" for _, line, op in (k.name.split("|") for k in of_parts))
        why = f"{made} is of a rank's part as if it were all{what}; look at gathers, masks, norms and means"
        return Cause("local statistics" if are_statistics else "part taken for all", why)

    def _is_kept(self, read: Key) -> bool:
        """True if ranks read what they have computed, as one process does."""
        source, every = self.sources.get(read), self.traced.values()
        return all(source in own and torch.equal(own[read], own[source]) for own in every)

    def _explain_mixed(self, key: Key) -> Cause | None:
        """The cause of a sum of what is right on each rank, and of what each has an addend of."""
        reads = {self.status(k).word: k for k in self.of_operation(key, READ)}
        if reads.keys() != {"right", "addends"}:
            return None
        _, line, operation = key.name.split("|")
        copy, part = (_result(self.sources.get(k, k)) for k in (reads["right"], reads["addends"]))
        axis = self.status(reads["addends"]).match.sums[0]  # type: ignore[union-attr]
        why = f"{operation} at {line} adds {copy}, right on each {axis} rank, and {part}, addends of ranks: "
        of = " of a gradient" if BACKWARD in key.name else ""
        if all(are_copies(self.parts(k), axis) for k in self.right if k.kind in KINDS):
            after = " (read its tensor before operator f)" if of else ""
            why += f"summed over {axis}, the first counts on each rank; add it after the sum{after}"
            return Cause(f"doubled all-reduce{of}", why)
        return Cause(f"missing all-reduce{of}", f"{why}sum the latter over {axis} before")

    def _adds_rows(self, key: Key) -> bool:
        """True if what ranks' results have too much is the same for all rows."""
        whole = self.right[key]
        added = self._value(self.parts(key), whole, SUM, ())
        if added is None or whole.ndim < 2:
            return False
        rows = (added - whole).flatten(0, -2)
        return difference(rows, rows[:1].expand_as(rows)) <= FIT * magnitude(whole)

    def _shown(self, found: Match) -> str:
        """The first numbers that differ: ` (4, 5 … in place of 12, 13 …)`."""
        part, right = max(found.pairs.values(), key=lambda pair: difference(*pair))
        off = (part.double() - right.double()).abs().flatten()
        first = [int(n) for n in off.gt(FIT * magnitude(off)).nonzero()[:SHOWN, 0]]
        own, its = (", ".join(f"{float(x.flatten()[n]):.4g}" for n in first) for x in (part, right))
        return f" ({own} … in place of {its} …)"


def _is_near(module: str, target: str) -> bool:
    """True for the module that holds the target, those around it and in it, and what is in none."""
    parent = target.rpartition(".")[0] or target
    inner, outer = f"{module}.".startswith(f"{parent}."), f"{parent}.".startswith(f"{module}.")
    return module in OUTSIDE or inner or outer


def _size(x: Tensor) -> float:
    """The largest magnitude of an element, but for one that masks others: -1e9 among scores."""
    sizes = x.double().abs().flatten()
    sizes = sizes[sizes.isfinite()]
    largest = magnitude(sizes)
    rest = magnitude(sizes[sizes < 0.999 * largest])
    return rest if largest > MASK and largest > MASK * rest > 0 else largest


def _name(key: Key) -> Name:
    return key.kind, key.name, -1 if key.kind == RESULT else key.item


def _call(key: Key) -> tuple[object, ...]:
    """The operation of what it reads and returns."""
    return key.name, key.call, key.micro


def _result(key: Key) -> str:
    _, line, operation = key.name.split("|")
    return f"the result of {operation} at {line}"


def _is_gradient(key: Key, x: Tensor) -> bool:
    return BACKWARD in key.name and key.kind in (READ, RESULT) and x.is_floating_point()
