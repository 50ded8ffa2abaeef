"""Hypotheses on the operation that makes a tensor wrong, and their causes in words.

A hypothesis replaces tensors of operations on one process by ranks' tensors; their relation to the expected
tensors tells the cause.
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

JOINED, SUM, PER_RANK = "joined", "sum", "per rank"
"""Modes of replacement: tensors joined from parts or copies, summed, or each rank's in a run of its own."""
MASK = 1e3
"""Least size of a masking element such as -1e9 among scores, and least ratio to the others."""
OUTER_PLACES = ("step", "forward", "loss", "the whole module")
"""Places of operations outside the parts of a model."""
MOST_SHOWN = 4
"""Largest number of elements in a report."""
REDUCE_OPS = ("mean", "var", "std", "sum", "norm", "amax", "amin", "softmax", "topk", "sort", "bincount")
"""Words in names of operations that reduce or rank elements."""
COUNT_OPS = ("sum", "mean", "bincount", "histc")
"""Operations whose integral results are not indices."""
MOVE_OPS = (
    *("view", "split", "chunk", "cat", "slice", "select", "index", "gather", "unbind", "clone", "permute"),
    *("squeeze", "expand", "transpose", "embedding"),
)
"""Words in names of operations that only move elements."""
RANDOM_OPS = ("rand", "normal", "uniform", "bernoulli", "multinomial", "exponential", "dropout")
"""Words in names of operations that draw random numbers."""
ADVICE = {
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
"""Advice by name of a cause."""
Tensors = Mapping[Key, Tensor]
Traced = Mapping[Coordinates, Tensors]
"""Tensors of operations by rank."""
Operand = tuple[str, str, int]
"""(kind, name, item) of keys in all calls: an argument of an operation, or with item -1 all its results."""


class Status(NamedTuple):
    """Relation of ranks' tensors to one process's."""

    word: Literal["right", "addends", "wrong", "no part", "unknown"]
    """Addends: their sum is right. No part: no split gives their shape. Unknown: not on all ranks."""
    match: Match | None = None


class Hypothesis(NamedTuple):
    """Tensors to take from ranks."""

    names: Sequence[Operand]
    mode: str


class Operations:
    """Tensors of operations on one process, in the order of computation, and on ranks."""

    def __init__(
        self,
        comparison: Comparison,
        reference: Tensors,
        sources: Mapping[Key, Key],
        traced: Traced,
        ranks: Traced,
    ) -> None:
        """`traced` are the tensors of `ranks`, with replicas joined if they run other micro-batches."""
        self.comparison, self.reference, self.sources, self.ranks = comparison, reference, sources, ranks
        self.traced = {rank: dict(tensors) for rank, tensors in traced.items()}
        splits = (x.match.placement.get("cp") for x in comparison.locations if not x.is_wrong)
        self.is_zigzag = any(isinstance(sharding, Split) and sharding.is_zigzag for sharding in splits)
        self._statuses: dict[Key, Status] = {}
        self._scale_gradients()

    def _scale_gradients(self) -> None:
        """Divide gradients of replicas by the scale of the first gradient that is right but for a scale."""
        if self.comparison.replicas * self.comparison.layout["pp"] == 1:
            return
        gradients = (k for k in self.reference if k.kind == RESULT and BACKWARD in k.name)
        for key in gradients:
            full, parts = self.reference[key], self.parts(key)
            if parts and full.numel() > 1 and full.is_floating_point():
                choices = self.placements(parts, full, ("cp", "tp"))
                best = match(parts, full, choices, FIT * magnitude(full), is_scaled=True)
                if best is not None and best.error <= FIT * magnitude(full) > 0:
                    pairs = match_at(best.placement, parts, full).pairs
                    scales = {rank[:2]: scale_of(*pair) for rank, pair in pairs.items()}
                    for rank, tensors in self.traced.items():
                        scaled = {k: x / scales[rank[:2]] for k, x in tensors.items() if _is_gradient(k, x)}
                        tensors.update(scaled)
                    return

    def parts(self, key: Key) -> Parts:
        """The tensors of all ranks; empty if one has none."""
        parts = {rank: tensors[key] for rank, tensors in self.traced.items() if key in tensors}
        return parts if len(parts) == len(self.traced) else {}

    def placements(self, parts: Parts, full: Tensor, sums: Sequence[str]) -> Iterator[Placement]:
        """Placements of a tensor, with sequences split as in right tensors."""
        blocks = {"tp": sorted({1, *full.shape})}
        for placement in placements(parts, full, self.comparison.layout, blocks=blocks, sums=sums):
            sharding = placement.get("cp")
            if not isinstance(sharding, Split) or sharding.is_zigzag == self.is_zigzag:
                yield placement

    def status(self, key: Key) -> Status:
        if key not in self._statuses:
            self._statuses[key] = self._status(key)
        return self._statuses[key]

    def _status(self, key: Key) -> Status:
        full = self.reference.get(key)
        if full is None or full.is_complex() or not full.numel() or not (parts := self.parts(key)):
            return Status("unknown")
        bound = FIT * _unmasked_size(full)
        best = match(parts, full, self.placements(parts, full, ("cp", "tp")), bound, is_scaled=False)
        if best is None:
            return Status("no part")
        if best.error <= bound:
            return Status("addends" if best.sums else "right", best)
        return Status("wrong", match(parts, full, self.placements(parts, full, ()), 0.0, is_scaled=False))

    def keys_of(self, key: Key, kind: str) -> list[Key]:
        """All keys of a kind, READ or RESULT, of the operation of `key`."""
        keys = (key._replace(kind=kind, item=item) for item in range(20))
        return [k for k in keys if k in self.reference]

    def _calls_to_end(self) -> set[tuple[object, ...]]:
        """Operations from whose results a path of wrong tensors leads to the end."""
        readers: dict[Key, list[Key]] = {}
        for read_key, source in self.sources.items():
            readers.setdefault(source, []).append(read_key)
        wrong_calls: set[tuple[object, ...]] = set()
        results = [k for k in self.reference if k.kind == RESULT]
        calls = {_call_of(k) for k in results if "_like" not in k.name}  # those read a shape alone
        ends = [x for k, x in self.reference.items() if k.kind in KINDS]
        for key in reversed(results):
            if self.status(key).word not in ("right", "addends"):
                call = _call_of(key)
                next_calls = ({_call_of(k) for k in readers.get(key, ())} & calls) - {call}
                is_end = any(torch.equal(self.reference[key], x) for x in ends)
                if not next_calls or next_calls & wrong_calls or is_end:
                    wrong_calls.add(call)
        return wrong_calls

    def hypotheses(self, target: Key) -> Iterator[Hypothesis]:
        """Tensors of ranks that differ from one process's, in the order of computation.

        For a loss over replicas, PER_RANK and SUM are excluded: ranks have other samples.
        """
        visited, differs_by_rank = set[Operand](), False
        rank_names, read_names, number_names = list[Operand](), list[Operand](), list[Operand]()
        wrong_calls, keys = self._calls_to_end(), [*self.reference]
        is_shared = target.kind in ("loss", "scalar") and self.comparison.replicas > 1
        if target.kind in ("output", "scalar", "loss"):  # outputs of other modules are right, or come after
            keys.sort(key=lambda key: not _is_near(key.name.split("|")[0], target.name))
        for key in keys:
            full = self.reference[key]
            name = _name_of(key)
            if name in visited or key.kind not in (READ, RESULT, NUMBERS):
                continue
            if wrong_calls and _call_of(key) not in wrong_calls:
                continue
            if key.kind == NUMBERS:
                words = {self.status(other).word for other in self.keys_of(key, RESULT)}
                # no words: samples differ
                if (not words or words - {"right", "addends"}) and self.other_numbers(key):
                    visited.add(name)
                    first, *rest = self.parts(key).values()
                    differs_by_rank |= (is_rank_specific := not all(torch.equal(first, x) for x in rest))
                    number_names.append(name)
                    if not (is_shared and is_rank_specific):
                        yield Hypothesis([name], PER_RANK if is_rank_specific else JOINED)
                continue
            status, source = self.status(key), self.sources.get(key)
            if key.kind == READ and status.word == "addends":
                if any(self.status(other).word == "wrong" for other in self.keys_of(key, RESULT)):
                    visited.add(name)
                    if not is_shared:
                        yield Hypothesis([name], PER_RANK)
                continue
            if status.word != "wrong" or (source is not None and self.status(source).word == "wrong"):
                continue
            visited.add(name)
            first, *rest = self.parts(key).values()
            yield Hypothesis([name], JOINED)
            if key.kind == READ:
                read_names.append(name)
                if len(read_names) > 1:
                    yield Hypothesis([*read_names], JOINED)
            if full.is_floating_point() and key.kind == RESULT and not is_shared:
                yield Hypothesis([name], SUM)
            is_rank_specific = not all(torch.equal(first, x) for x in rest)
            if first.shape == full.shape and is_rank_specific and not is_shared:
                rank_names.append(name)
                yield Hypothesis([name], PER_RANK)
                if len(rank_names) > 1:
                    yield Hypothesis([*rank_names], PER_RANK)
        if len(number_names) > 1 and not (differs_by_rank and is_shared):
            yield Hypothesis(number_names, PER_RANK if differs_by_rank else JOINED)

    def other_numbers(self, key: Key) -> list[Tensor]:
        """Python numbers of an operation on ranks that differ from one process's."""
        key = key._replace(kind=NUMBERS, item=0)
        values = self.parts(key).values()
        return [numbers for numbers in values if not torch.equal(numbers, self.reference[key])]

    def values(self, hypothesis: Hypothesis, rank: Coordinates) -> dict[Key, Tensor]:
        """Replacements in the run that predicts a rank."""
        keys = [k for k in self.reference if _name_of(k) in hypothesis.names]
        values = ((k, self._value(self.parts(k), self.reference[k], hypothesis.mode, rank)) for k in keys)
        return {k: x for k, x in values if x is not None}

    def _value(self, parts: Parts, full: Tensor, mode: str, rank: Coordinates) -> Tensor | None:
        """A tensor of the reference's shape from ranks' parts; None if no placement fits."""
        if mode == PER_RANK:
            return parts.get(rank)
        for placement in self.placements(parts, full, ("cp", "tp") if mode == SUM else ()) if parts else ():
            if (mode == SUM) == ("sum" in placement.values()):
                summed = match_at(placement, parts, full).parts
                value = full.clone(memory_format=torch.contiguous_format)
                fill(value, summed, placement)
                regions = ((region(value, placement, other, parts), part) for other, part in summed.items())
                if all(torch.equal(*pair) for pair in regions):
                    return value
        return None

    def explain(self, hypothesis: Hypothesis) -> Cause:
        """The cause in words, from the first wrong tensor of a hypothesis."""
        name, mode = hypothesis.names[0], hypothesis.mode
        if name[0] == NUMBERS:
            return self._explain_numbers(name[1])
        keys = (k for k in self.reference if _name_of(k) == name)
        key = next(k for k in keys if self.status(k).word in ("wrong", "addends"))
        return self._explain_read(key) if key.kind == READ else self._explain_result(key, mode)

    def _explain_numbers(self, name: str) -> Cause:
        _, line, operation = name.split("|")
        keys = (k for k in self.reference if k.kind == NUMBERS and k.name == name)
        key, (numbers, *_) = next((k, values) for k in keys if (values := self.other_numbers(k)))
        sides = numbers, self.reference[key]
        actual, expected = (", ".join(f"{x:.6g}" for x in side.tolist()) for side in sides)
        reason = f"{operation} at {line} takes {actual} in place of {expected}, which gives the wrong numbers"
        return Cause("another number", f"{reason}: look at ranks, sizes of parts, layers and step counts")

    def _explain_read(self, key: Key) -> Cause:
        module, line, operation = key.name.split("|")
        (word, match), source = self.status(key), self.sources.get(key)
        assert match is not None
        subject, name = f"a tensor that {operation} at {line} reads", self._kind_of_values(key)
        if name == "" and (count := self._explain_count(key)) is not None:
            origin = f", {_result_text(source)}" if source is not None else ""
            return count._replace(reason=f"{subject}{origin}, is {count.reason}")
        if source is None:
            name = {"other positions": "other indices", "": "another constant"}.get(name, name)
        elif word == "addends":
            subject += f", {_result_text(source)}"
        elif (rank_source := self._source_on_ranks(key)) is not None:
            subject = f"{operation} at {line} reads {_result_text(rank_source)}, not {_result_text(source)}"
            name = "another result"
        else:
            subject += f", {_result_text(source)} that ranks communicate"
        if (cause := self._relation(key)) is not None:
            return Cause(cause.name, f"{subject}: {cause.reason}", module if word == "addends" else "")
        name = name or "wrong communication"
        subject += ": it is the first that is wrong, and gives the wrong numbers"
        return Cause(name, f"{subject}; {ADVICE[name]}{self._examples(match)}")

    def _explain_count(self, key: Key) -> Cause | None:
        """The cause of a number counted over a rank's samples, equal in all its calls."""
        parts: Parts = {}
        for rank, tensors in self.ranks.items():
            first, *rest = [x for k, x in tensors.items() if _name_of(k) == _name_of(key)] or [torch.empty(0)]
            if first.shape != self.reference[key].shape or not all(torch.equal(first, x) for x in rest):
                return None
            parts[rank] = first.double()
        axes = (axis for axis in ("dp", "cp") if self.comparison.layout[axis] > 1)
        return next(filter(None, (explain_count(self.reference[key].double(), parts, a) for a in axes)), None)

    def _source_on_ranks(self, key: Key) -> Key | None:
        """The result that all ranks read in place of one process's; None if there is none."""
        traces = [(tensors, tensors[key]) for tensors in self.traced.values()]
        for other in takewhile(lambda k: k != key, traces[0][0]):  # in the order of computation
            is_result = other.kind == RESULT and other != self.sources[key]
            if is_result and all(other in t and torch.equal(t[other], x) for t, x in traces):
                return other
        return None

    def _relation(self, key: Key) -> Cause | None:
        """The cause of a tensor that is a formula of the expected one."""
        best, kind = self.status(key).match, "backward" if BACKWARD in key.name else "output"
        assert best is not None
        if best.sums:
            return cause_of(kind, Pattern("addend", best.sums[0]))
        if not self.reference[key].is_floating_point():
            return None
        location = Location(key._replace(kind=kind), best, magnitude(self.reference[key]), 0.0)
        relation = pattern(self.comparison, [location])
        is_chance = relation is not None and relation.name == "scaled" and self.reference[key].numel() == 1
        return None if is_chance else cause_of(kind, relation)

    def _kind_of_values(self, key: Key) -> str:
        full = self.reference[key]
        if full.dtype is torch.bool:
            return "mask"
        if key.kind == RESULT and key.name.split("|")[-1] in COUNT_OPS:
            return ""
        is_integral = bool((full.double() == full.double().round()).all())
        return "other positions" if is_integral and bool((full != full.flatten()[0]).any()) else ""

    def _explain_result(self, key: Key, mode: str) -> Cause:
        operation, best = key.name.split("|")[-1], self.status(key).match
        assert best is not None
        if self._is_drawn(key):
            name = "random numbers"
            return Cause(name, f"{_result_text(key)}: {ADVICE[name]}{self._examples(best)}")
        if local_cause := self._explain_local_result(key):
            return local_cause
        reads = {k: self.status(k).word for k in self.keys_of(key, READ)}
        addends = [k for k, word in reads.items() if word == "addends"]
        others = [k for k, word in reads.items() if word in ("wrong", "no part")]
        wrong = [k for k in others if reads[k] == "wrong"][:1]
        subject = f"{_result_text(key)} is the first that is wrong, and gives the wrong numbers"
        name = self._kind_of_values(key)
        if mode == SUM and (mixed_cause := self._explain_mixed_sum(key)) is not None:
            return mixed_cause
        if mode == SUM:
            name = "bias added on every rank" if self._adds_rows(key) else "wrong sum"
        elif not name and addends and not self.other_numbers(key):
            return self._explain_read(addends[0])
        elif not name and addends:
            name = "local statistics"
        elif not name and mode == JOINED and (cause := self._relation(key)) is not None:
            return Cause(cause.name, f"{_result_text(key)} gives the wrong numbers: {cause.reason}")
        elif not name and wrong and len(wrong) == len(others):
            if self._is_uncommunicated(wrong[0]) and self.status(self.sources[wrong[0]]).word == "wrong":
                return self._explain_result(self.sources[wrong[0]], mode)
            return self._explain_read(wrong[0])
        elif not name and others:
            subject, name = f"{_result_text(key)} gives the wrong numbers", "several operations"
        elif not name and any(word in operation for word in REDUCE_OPS):
            name = "local statistics"
        elif not name and any(word in operation for word in MOVE_OPS):
            name = "other rows"
        name = name or "depends on the layout"
        suffix = self._examples(best) if mode == JOINED and name != "mask" else ""
        return Cause(name, f"{subject}: {ADVICE[name]}{suffix}")

    def _is_drawn(self, key: Key) -> bool:
        """True if an operation draws random numbers, or reads nothing else."""
        if any(word in key.name.split("|")[-1] for word in RANDOM_OPS):
            return True
        reads = self.keys_of(key, READ)
        return bool(reads) and all(k in self.sources and self._is_drawn(self.sources[k]) for k in reads)

    def _explain_local_result(self, key: Key) -> Cause | None:
        """The cause of results that ranks compute from parts of right tensors, without communication."""
        visited, pending, origins = {key}, [key], dict[str, Key]()
        while pending:
            operation = pending.pop()
            reads = self.keys_of(operation, READ)
            wrong = [k for k in reads if self.status(k).word in ("wrong", "no part")]
            if not wrong:
                origins.setdefault(operation.name, operation)
            for read_key in wrong:
                if not self._is_uncommunicated(read_key):
                    return None
                if (source := self.sources[read_key]) not in visited:
                    visited.add(source)
                    pending.append(source)
        # prefer operations on tensors: indices without inputs follow from the part that is taken
        part_origins = [k for k in origins.values() if self.keys_of(k, READ)] or [*origins.values()]
        are_statistics = all(any(word in k.name.split("|")[-1] for word in REDUCE_OPS) for k in part_origins)
        if key in part_origins or any(map(self.other_numbers, part_origins)):
            return None
        if len(part_origins) > 1 and not are_statistics:
            return None
        full = self.reference[part_origins[0]]
        part = next(iter(self.parts(part_origins[0]).values()), full)
        if not are_statistics and sum(a != b for a, b in zip(part.shape, full.shape, strict=False)) == 1:
            return None  # a part along one dimension, as a split gives
        shapes = f": {list(part.shape)} in place of {list(full.shape)}" if part.shape != full.shape else ""
        names = (k.name.split("|") for k in part_origins)
        origin = " and ".join(f"{operation} at {line}" for _, line, operation in names)
        reason = f"{origin} is of a rank's part as if it were all{shapes}; look at gathers, masks, norms and "
        reason += "means"
        return Cause("local statistics" if are_statistics else "part taken for all", reason)

    def _is_uncommunicated(self, read_key: Key) -> bool:
        """True if ranks read what they have computed themselves, as one process does."""
        source, traces = self.sources.get(read_key), self.traced.values()
        return all(source in t and torch.equal(t[read_key], t[source]) for t in traces)

    def _explain_mixed_sum(self, key: Key) -> Cause | None:
        """The cause of a sum of a tensor that is right on each rank with addends."""
        reads = {self.status(k).word: k for k in self.keys_of(key, READ)}
        if reads.keys() != {"right", "addends"}:
            return None
        _, line, operation = key.name.split("|")
        copy, part = (_result_text(self.sources.get(k, k)) for k in (reads["right"], reads["addends"]))
        axis = self.status(reads["addends"]).match.sums[0]  # type: ignore[union-attr]
        reason = f"{operation} at {line} adds {copy}, right on each {axis} rank, and {part}, addends of "
        reason += "ranks: "
        suffix = " of a gradient" if BACKWARD in key.name else ""
        if all(are_copies(self.parts(k), axis) for k in self.reference if k.kind in KINDS):
            hint = " (read its tensor before operator f)" if suffix else ""
            reason += f"summed over {axis}, the first counts on each rank; add it after the sum{hint}"
            return Cause(f"doubled all-reduce{suffix}", reason)
        return Cause(f"missing all-reduce{suffix}", f"{reason}sum the latter over {axis} before")

    def _adds_rows(self, key: Key) -> bool:
        """True if the sum over ranks differs from the expected one by the same row everywhere."""
        full = self.reference[key]
        summed = self._value(self.parts(key), full, SUM, ())
        if summed is None or full.ndim < 2:
            return False
        rows = (summed - full).flatten(0, -2)
        return difference(rows, rows[:1].expand_as(rows)) <= FIT * magnitude(full)

    def _examples(self, best: Match) -> str:
        """The first elements that differ: ` (4, 5 … in place of 12, 13 …)`."""
        pair = max(best.pairs.values(), key=lambda pair: difference(*pair))
        errors = (pair[0].double() - pair[1].double()).abs().flatten()
        indices = [int(n) for n in errors.gt(FIT * magnitude(errors)).nonzero()[:MOST_SHOWN, 0]]
        actual, expected = (", ".join(f"{float(x.flatten()[n]):.4g}" for n in indices) for x in pair)
        return f" ({actual} … in place of {expected} …)"


def _is_near(module: str, target: str) -> bool:
    """True for the target's parent, modules around it and in it, and places outside modules."""
    parent = target.rpartition(".")[0] or target
    inner, outer = f"{module}.".startswith(f"{parent}."), f"{parent}.".startswith(f"{module}.")
    return module in OUTER_PLACES or inner or outer


def _unmasked_size(x: Tensor) -> float:
    """Largest magnitude of an element, without masking elements such as -1e9 among scores."""
    sizes = x.double().abs().flatten()
    sizes = sizes[sizes.isfinite()]
    largest = magnitude(sizes)
    second = magnitude(sizes[sizes < 0.999 * largest])
    return second if largest > MASK and largest > MASK * second > 0 else largest


def _name_of(key: Key) -> Operand:
    return key.kind, key.name, -1 if key.kind == RESULT else key.item


def _call_of(key: Key) -> tuple[object, ...]:
    """Name of the operation call of a key."""
    return key.name, key.call, key.micro


def _result_text(key: Key) -> str:
    _, line, operation = key.name.split("|")
    return f"the result of {operation} at {line}"


def _is_gradient(key: Key, x: Tensor) -> bool:
    return BACKWARD in key.name and key.kind in (READ, RESULT) and x.is_floating_point()
