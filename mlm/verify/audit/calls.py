"""Calls of modules on ranks beside those of one process: by the samples in them, not by number.

A layout runs other micro-batches than one process: more of them, of other samples, in another order. Some are
no part of the step, such as the pass in which PipelineStage infers shapes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import product

import torch
from torch import Tensor

from mlm.verify.audit.compare import Layout, Ranks, magnitude
from mlm.verify.audit.parts import Coordinates, Parts, add_over, difference, placements, region, scale_of
from mlm.verify.audit.record import OF_MODULES, Cause, Key, Record

MARGIN = 0.1
"""A row is the nearest of one process's if its distance is below this fraction of that to the second."""
MOST_COMPARED = 10**8
"""Numbers that are compared to find samples among those of one process."""
FIT = 1e-6
"""Fraction of the largest element by which gradients may differ from another micro-batch's."""
SWAP = "micro-batch {}'s gradient is micro-batch {}'s"
SUMMED = "{name}: no samples of one process are found in it, so their sums over a step are compared"

CONSTANT, SUMS = "constant", "sums"
"""Ways to compare outputs beside those by samples."""
Calls = dict[int, Tensor]
"""Tensors of a module by micro-batch."""
Table = dict[Key, Calls]
"""Calls by key, whose micro-batch is 0."""
Matched = tuple[Record, Ranks, list[str], dict[Key, Cause]]


@dataclass(frozen=True)
class Samples:
    """The rows of one process's tensors that a stage's ranks have."""

    dim: int
    """Dimension of the rows: samples, or tokens."""
    ids: Mapping[Coordinates, Mapping[int, list[int]]]
    """By rank and micro-batch, without passes that are no part of the step."""

    def join(self, whole: Calls, parts: Mapping[Coordinates, Calls]) -> tuple[Tensor, Parts]:
        """Tensors [N, ...] of each side: replicas in turn, rows of each in one process's order.

        Raises RuntimeError, IndexError or KeyError for tensors without these rows.
        """
        flat = {at: [i for ids in calls.values() for i in ids] for at, calls in self.ids.items()}
        full = rows_of(whole.values(), self.dim)
        own = {at: rows_of((parts[at][m] for m in calls), self.dim) for at, calls in self.ids.items()}
        order = [i for ids in {at[0]: sorted(ids) for at, ids in sorted(flat.items())}.values() for i in ids]
        if len(full) != len(order) or any(len(rows) != len(flat[at]) for at, rows in own.items()):
            raise RuntimeError("other rows")
        return full[order], {at: rows[torch.tensor(flat[at]).argsort()] for at, rows in own.items()}

    def explain_swap(self, whole: Calls, parts: Mapping[Coordinates, Calls]) -> Cause | None:
        """The cause of gradients of micro-batches that are, but for one scale, those of others."""
        full = rows_of(whole.values(), self.dim)
        for at, calls in self.ids.items():
            own = [rows_of([parts[at][m]], self.dim) for m in calls]
            pairs = product(enumerate(own), enumerate(full[ids] for ids in calls.values()))
            same = ((m, n, x, y, scale_of(x, y)) for (m, x), (n, y) in pairs if x.shape == y.shape)
            found = [(m, n, s) for m, n, x, y, s in same if difference(x, s * y) <= FIT * magnitude(x)]
            swaps = [SWAP.format(m + 1, n + 1) for m, n, _ in found if m != n]
            is_scaled_alike = all(math.isclose(s, found[0][2], rel_tol=FIT) for *_, s in found)
            if swaps and is_scaled_alike and [m for m, *_ in found] == [*range(len(own))]:
                why = "look at which activations the schedule's backward takes, and which gradient"
                return Cause("other micro-batches", f"{', '.join(swaps[:2])}: {why}")
        return None


def match_calls(reference: Record, ranks: Ranks, layout: Layout) -> Matched:
    """Records whose outputs of a key, and their gradients, are of the same samples; and problems, in words.

    Where a step has several micro-batches, their tensors become one; gradients of another one get a cause.
    """
    records = {(): reference, **ranks}
    kept = {at: {k: t for k, t in r.tensors.items() if k.kind not in OF_MODULES} for at, r in records.items()}
    problems, swapped = list[str](), dict[Key, Cause]()
    for step in sorted({key.step for key in reference.tensors}):
        tables = {at: tabulate(record, step) for at, record in records.items()}
        if any(micro for table in tables.values() for calls in table.values() for micro in calls):
            tables = match_step(tables, layout, problems, swapped)
        for at, table in tables.items():
            kept[at] |= {key: calls[0] for key, calls in table.items() if key.kind != "input"}
    matched = {at: replace(record, tensors=kept[at]) for at, record in records.items()}
    return matched.pop(()), matched, problems, swapped


def explain_samples(reference: Record, ranks: Ranks, layout: Layout) -> dict[int, Cause]:
    """By step, the cause of inputs of the first module that are not each sample of one process as often."""
    causes: dict[int, Cause] = {}
    for step in sorted({key.step for key in reference.tensors if key.kind == "input"}):
        first = next(key for key in reference.tensors if key[:2] == (step, "input"))
        inputs = {
            at[1:]: [x for key, x in record.tensors.items() if key[:3] == first[:3]]
            for at, record in {(0,): reference, **ranks}.items()
            if not at[0]
        }
        shapes = [{x.shape[1:] for x in own} for own in inputs.values()]
        if not first.item and all(len(own) == 1 for own in shapes):  # activations are no samples
            parts = {at: torch.cat(own)[:, None] for at, own in inputs.items()}
            if cause := _explain_inputs(parts.pop(()), parts, layout):
                causes[step] = cause
    return causes


def _explain_inputs(whole: Tensor, inputs: Parts, layout: Layout) -> Cause | None:
    like = {at: x.new_empty(len(whole), *x.shape[1:]) for at, x in inputs.items()}
    if whole.numel() * max(map(len, [whole, *inputs.values()])) > MOST_COMPARED:
        return None
    same: Parts = {}
    for placement in placements(like, whole, {**layout, "dp": 1, "tp": 1}, blocks={}):
        rights = {at: region(whole, placement, at, like) for at in inputs}
        found = {at: (x[:, None] == rights[at]).flatten(2).all(-1) for at, x in inputs.items()}
        same = max(same, found, key=lambda each: sum(int(x.any(1).sum()) for x in each.values()))
    if not same or (layout["cp"] > 1 and any(bool((x.sum(1) != 1).any()) for x in same.values())):
        return None  # over cp these may be other parts, or equal ones
    first = (whole[:, None] == whole).flatten(2).all(-1).int().argmax(1).tolist()  # the first of equal ones
    ids = {at: [first[n] for n in x.int().argmax(1)[x.any(1)].tolist()] for at, x in same.items()}
    counts = {at[1:]: Counter(n for b in ids if b[1:] == at[1:] for n in ids[b]) for at in ids}
    missing = [n for n in dict.fromkeys(first) if not all(own[n] for own in counts.values())]
    nowhere = [at for at, x in same.items() if len(x) > len(ids[at])]
    apart = [at for at, own in ids.items() if sorted(own) != sorted(ids[at[0], 0, 0])]
    why = ""
    if nowhere and missing:
        at, count = nowhere[0], len(same[nowhere[0]])
        why = (
            f"{count - len(ids[at])} of {count} samples of dp rank {at[0]} occur nowhere on one process: "
            "look at seeds and samplers that depend on the rank, and at what changes samples before a module"
        )
    elif apart and not nowhere:
        why = f"ranks of one replica, dp rank {apart[0][0]}, read samples {ids[apart[0][0], 0, 0]} and "
        why += f"{ids[apart[0]]}: look at how the number of a replica follows from the rank"
    elif missing and not nowhere:
        twice = [n for n, count in sorted(counts[0, 0].items()) if count > 1]
        replicas = " and ".join(str(own) for at, own in ids.items() if not any(at[1:]))
        why = f"replicas read samples {replicas} of {len(whole)}: {missing} are read by none"
        why += f", {twice} by several" if twice else ""
    return Cause("other samples", why) if why else None


def tabulate(record: Record, step: int) -> Table:
    """Tensors of modules in a step, in the order of micro-batches, which is not that of backward."""
    table: Table = {}
    for key, tensor in sorted(record.tensors.items(), key=lambda each: each[0].micro):
        if key.step == step and key.kind in OF_MODULES:
            table.setdefault(key._replace(micro=0), {})[key.micro] = tensor
    return table


def match_step(
    tables: Mapping[Coordinates, Table], layout: Layout, problems: list[str], swapped: dict[Key, Cause]
) -> dict[Coordinates, Table]:
    """Tables of one process, at (), and of ranks, with one tensor of the same samples for each key."""
    whole, stages = tables[()], dict[int, dict[Coordinates, Table]]()
    for at in filter(None, tables):
        stages.setdefault(at[0], {})[at[1:]] = tables[at]
    shared = [(stage, k) for stage in stages for k in whole if all(k in t for t in stages[stage].values())]
    calls = {(stage, key): {at: t[key] for at, t in stages[stage].items()} for stage, key in shared}
    # of the first module whose inputs tell which samples they are
    inputs = (samples_of(whole[own[1]], calls[own], layout) for own in shared if own[1].kind == "input")
    known = next(filter(None, inputs), None)
    matched: dict[Coordinates, Table] = {at: {} for at in tables}
    choices: dict[tuple[int, Key], Samples | str] = {}
    for stage, key in ((stage, key) for stage, key in shared if key.kind != "input"):
        output = stage, key._replace(kind="output")
        if key.kind == "output":
            choices[output] = choose(whole[key], calls[stage, key], known, layout)
        choice, joined = choices.get(output, SUMS), None
        if key.kind == "scalar":
            joined, choice = scalars(whole[key], calls[stage, key], layout), ""
        if isinstance(choice, Samples):
            try:
                joined = choice.join(whole[key], calls[stage, key])
                if key.kind == "backward" and (cause := choice.explain_swap(whole[key], calls[stage, key])):
                    swapped[key] = cause
            except (RuntimeError, IndexError, KeyError):
                choice = choices[output] = SUMS
        if choice == CONSTANT:
            joined = constants(key, whole[key], calls[stage, key])
        elif choice == SUMS and key.kind == "output":
            joined = sums(whole[key], calls[stage, key], layout)
            problems.append(SUMMED.format(name=key.name or "the whole module"))
        if joined is not None:
            matched[()][key] = {0: joined[0]}
            for at, part in joined[1].items():
                matched[stage, *at][key] = {0: part}
    return matched


def scalars(whole: Calls, parts: Mapping[Coordinates, Calls], layout: Layout) -> tuple[Tensor, Parts] | None:
    """Scalars by micro-batch, sorted where replicas run different ones; None if their numbers differ."""
    full, *each = (torch.stack([*own.values()]) for own in (whole, *parts.values()))
    own = dict(zip(parts, each, strict=True))
    if {len(x) for x in each} == {len(full)}:
        return full, own
    if {len(x) * layout["dp"] for x in each} != {len(full)}:
        return None
    joined = {at: torch.cat([x for b, x in own.items() if b[1:] == at[1:]]).sort().values for at in own}
    return full.sort().values, joined


def constants(key: Key, whole: Calls, parts: Mapping[Coordinates, Calls]) -> tuple[Tensor, Parts]:
    """Return a constant output once for all micro-batches, and its gradients added up."""
    every = [[*own.values()][: 1 if key.kind == "output" else None] for own in (whole, *parts.values())]
    full, *own = (torch.stack(tensors).sum(0) for tensors in every)
    return full, dict(zip(parts, own, strict=True))


def choose(
    whole: Calls, parts: Mapping[Coordinates, Calls], known: Samples | None, layout: Layout
) -> Samples | str:
    """Choose how outputs are matched: by their own rows, by rows of inputs, as a constant, or by sums."""
    calls = [[*own.values()] for own in (whole, *parts.values())]
    is_constant = all(torch.equal(own[0], tensor) for own in calls for tensor in own)  # rotary angles, say
    if is_constant and may_be_copies(calls[0][0].numel() / max(calls[1][0].numel(), 1), layout):
        return CONSTANT
    return samples_of(whole, parts, layout) or known or SUMS


def samples_of(whole: Calls, parts: Mapping[Coordinates, Calls], layout: Layout) -> Samples | None:
    """The rows that ranks have, along the first dimension where each is found once, on one replica."""
    for dim in range(next(iter(whole.values())).ndim):
        with suppress(RuntimeError, IndexError):  # shapes that do not fit
            full = rows_of(whole.values(), dim)
            rows = {at: rows_of(calls.values(), dim) for at, calls in parts.items()}
            like = {at: own.new_empty(len(full), *own.shape[1:]) for at, own in rows.items()}
            blocks = {"tp": sorted({1, *full.shape[1:]})}
            for placement in placements(like, full, {**layout, "dp": 1}, blocks=blocks, sums=("cp", "tp")):
                added = reduce(add_over, (axis for axis, how in placement.items() if how == "sum"), rows)
                rights = {at: region(full, placement, at, like) for at in added}
                nearest = {at: nearest_rows(own, rights[at]) for at, own in added.items()}
                ids = {at: found_once(nearest[at], dim, parts[at], len(full)) for at in parts}
                replicas = {at[0]: own for at, own in ids.items()}
                every = sorted(i for calls in replicas.values() for own in calls.values() for i in own)
                if every == [*range(len(full))] and all(ids[at] == replicas[at[0]] for at in ids):
                    return Samples(dim, ids)
    return None


def found_once(nearest: Tensor, dim: int, calls: Calls, missing: int) -> dict[int, list[int]]:
    """Rows by micro-batch; of those that have the same, the last, since what comes before is a trial."""
    split = nearest.split([tensor.shape[dim] for tensor in calls.values()])
    found: dict[int, list[int]] = {}
    for micro, ids in reversed([*zip(calls, (own.tolist() for own in split), strict=True)]):
        if missing not in ids and not any(set(ids) & set(own) for own in found.values()):
            found[micro] = ids
    return dict(sorted(found.items()))


def nearest_rows(part: Tensor, whole: Tensor) -> Tensor:
    """The number of the whole's row nearest to each row of a part, or the number of rows if none is near."""
    rights = whole.flatten(1).double()
    rights = torch.cat([rights, torch.zeros_like(rights[:1])])  # a row is nearer to its own than to zero
    distances, numbers = torch.cdist(part.flatten(1).double(), rights, p=torch.inf).topk(2, largest=False)
    return numbers[:, 0].where(distances[:, 0] < MARGIN * distances[:, 1], len(whole))


def rows_of(tensors: Iterable[Tensor], dim: int) -> Tensor:
    return torch.cat([*tensors], dim).movedim(dim, 0)


def sums(whole: Calls, parts: Mapping[Coordinates, Calls], layout: Layout) -> tuple[Tensor, Parts] | None:
    """Sums over the step of the last dimension's vectors; None where ranks have another number of these."""
    every = whole, *parts.values()
    full, *own = ([t.flatten(0, -2) for t in calls.values() if t.ndim > 1] for calls in every)
    copies = sum(map(len, full)) * len(parts) / layout["dp"] / max(sum(len(t) for ts in own for t in ts), 1)
    if not may_be_copies(copies, layout):
        return None
    total, *each = (torch.cat(tensors).sum(0) for tensors in (full, *own))
    return total, add_over(dict(zip(parts, each, strict=True)), "dp")


def may_be_copies(ratio: float, layout: Layout) -> bool:
    """True if a replica's ranks may hold a tensor of this size, relative to their parts, once or in parts."""
    return ratio in (1, layout["cp"], layout["tp"], layout["cp"] * layout["tp"])
