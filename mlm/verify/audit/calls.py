"""Matching of module calls on ranks with calls on one process, by their samples.

A layout runs other micro-batches than one process: other numbers, samples and orders, and passes that do not
belong to the step, such as the one in which PipelineStage infers shapes.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import reduce
from itertools import chain, product

import torch
from torch import Tensor

from mlm.verify.audit.compare import Layout, Ranks, magnitude
from mlm.verify.audit.parts import Coordinates, Parts, add_over, difference, placements, region, scale_of
from mlm.verify.audit.record import MODULE_KINDS, Cause, Key, Record

MARGIN = 0.1
"""A row matches the nearest of one process if this is nearer than this fraction of the second's distance."""
MOST_COMPARED = 10**8
"""Limit of comparisons of elements when samples are searched."""
FIT = 1e-6
"""Tolerance of gradients equal to another micro-batch's, as a fraction of the largest element."""
SWAP = "micro-batch {}'s gradient is micro-batch {}'s"
SUMMED = "{name}: its rows, in which no samples of one process are found; their sums over a step are"

CONSTANT, SUMS = "constant", "sums"
"""Ways to compare outputs without matching samples."""
Calls = dict[int, Tensor]
"""Tensors of a module by micro-batch."""
RankCalls = Mapping[Coordinates, Calls]
Table = dict[Key, Calls]
"""Calls by key; the micro-batch of keys is 0."""
Matched = tuple[Record, Ranks, list[str], dict[Key, Cause]]


@dataclass(frozen=True)
class Samples:
    """Rows of one process's tensors on the ranks of a stage."""

    dim: int
    """Dimension of the rows, which are samples or tokens."""
    ids: Mapping[Coordinates, Mapping[int, list[int]]]
    """By rank and micro-batch, without passes outside the step."""

    rows: Mapping[int, Sequence[int]]
    """Ids of one process's rows by micro-batch."""

    def select(self, reference: Calls, parts: RankCalls) -> "tuple[Tensor, Samples]":
        """One process's rows of a tensor, and the samples among them, without passes that lack the tensor.

        A pass of a frozen reference model has no gradients. Raises KeyError for rows that ranks alone have.
        """
        present = [i for micro, ids in self.rows.items() if micro in reference for i in ids]
        index_of = {i: index for index, i in enumerate(present)}
        ids = {
            rank: {m: [index_of[i] for i in row_ids] for m, row_ids in calls.items() if m in parts[rank]}
            for rank, calls in self.ids.items()
        }
        return rows_of(reference.values(), self.dim), replace(self, ids=ids)

    def join(self, reference: Calls, parts: RankCalls) -> tuple[Tensor, Parts]:
        """Tensors [N, ...] of one process and of ranks: replica by replica, rows in one process's order.

        Raises RuntimeError, ValueError, IndexError or KeyError for tensors without these rows.
        """
        full_rows, samples = self.select(reference, parts)
        ids_of = {rank: [*chain.from_iterable(calls.values())] for rank, calls in samples.ids.items()}
        rows = {
            rank: rows_of((parts[rank][m] for m in calls), self.dim) for rank, calls in samples.ids.items()
        }
        sorted_ids = {rank[0]: sorted(ids) for rank, ids in sorted(ids_of.items())}
        order = [i for ids in sorted_ids.values() for i in ids]
        if len(full_rows) != len(order) or any(len(x) != len(ids_of[rank]) for rank, x in rows.items()):
            raise RuntimeError("other rows")
        return full_rows[order], {rank: x[torch.tensor(ids_of[rank]).argsort()] for rank, x in rows.items()}

    def explain_swap(self, reference: Calls, parts: RankCalls) -> Cause | None:
        """The cause of gradients that belong to other micro-batches, but for one scale."""
        full_rows, samples = self.select(reference, parts)
        for rank, calls in samples.ids.items():
            own_rows = [rows_of([parts[rank][m]], self.dim) for m in calls]
            pairs = product(enumerate(own_rows), enumerate(full_rows[ids] for ids in calls.values()))
            scales = ((m, n, x, y, scale_of(x, y)) for (m, x), (n, y) in pairs if x.shape == y.shape)
            matches = [(m, n, s) for m, n, x, y, s in scales if difference(x, s * y) <= FIT * magnitude(x)]
            swaps = [SWAP.format(m + 1, n + 1) for m, n, _ in matches if m != n]
            is_scaled_alike = all(math.isclose(s, matches[0][2], rel_tol=FIT) for *_, s in matches)
            if swaps and is_scaled_alike and [m for m, *_ in matches] == [*range(len(own_rows))]:
                advice = "look at which activations the schedule's backward takes, and which gradient"
                return Cause("other micro-batches", f"{', '.join(swaps[:2])}: {advice}")
        return None


def match_calls(reference: Record, ranks: Ranks, layout: Layout) -> Matched:
    """Join micro-batches so that tensors of equal keys hold the same samples.

    Returns the records of one process and of ranks, problems in words, and causes of swapped gradients.
    """
    records = {(): reference, **ranks}
    tensors: dict[Coordinates, dict[Key, Tensor]] = {}
    for rank, record in records.items():
        tensors[rank] = {k: x for k, x in record.tensors.items() if k.kind not in MODULE_KINDS}
    problems, swap_causes = list[str](), dict[Key, Cause]()
    for step in sorted({key.step for key in reference.tensors}):
        tables = {rank: tabulate(record, step) for rank, record in records.items()}
        if any(micro for table in tables.values() for calls in table.values() for micro in calls):
            tables = match_step(tables, layout, problems, swap_causes)
        for rank, table in tables.items():
            tensors[rank] |= {key: calls[0] for key, calls in table.items() if key.kind != "input"}
    matched_records = {rank: replace(record, tensors=tensors[rank]) for rank, record in records.items()}
    return matched_records.pop(()), matched_records, problems, swap_causes


def explain_samples(reference: Record, ranks: Ranks, layout: Layout) -> dict[int, Cause]:
    """By step, the cause of samples that are missing, repeated or unknown in inputs of the first module."""
    causes: dict[int, Cause] = {}
    for step in sorted({key.step for key in reference.tensors if key.kind == "input"}):
        first_key = next(key for key in reference.tensors if key[:2] == (step, "input"))
        inputs = {
            rank[1:]: [x for key, x in record.tensors.items() if key[:3] == first_key[:3]]
            for rank, record in {(0,): reference, **ranks}.items()
            if not rank[0]
        }
        shapes = [{x.shape[1:] for x in tensors} for tensors in inputs.values()]
        # inputs that require gradients are activations
        if not first_key.item and all(len(sample_shapes) == 1 for sample_shapes in shapes):
            parts = {rank: torch.cat(tensors)[:, None] for rank, tensors in inputs.items()}
            if cause := _explain_inputs(parts.pop(()), parts, layout):
                causes[step] = cause
    return causes


def _explain_inputs(full: Tensor, inputs: Parts, layout: Layout) -> Cause | None:
    prototypes = {rank: x.new_empty(len(full), *x.shape[1:]) for rank, x in inputs.items()}
    if full.numel() * max(map(len, [full, *inputs.values()])) > MOST_COMPARED:
        return None
    best: Parts = {}
    for placement in placements(prototypes, full, {**layout, "dp": 1, "tp": 1}, blocks={}):
        regions = {rank: region(full, placement, rank, prototypes) for rank in inputs}
        masks = {rank: (x[:, None] == regions[rank]).flatten(2).all(-1) for rank, x in inputs.items()}
        best = max(best, masks, key=lambda candidate: sum(int(x.any(1).sum()) for x in candidate.values()))
    if not best or (layout["cp"] > 1 and any(bool((x.sum(1) != 1).any()) for x in best.values())):
        return None  # cp: parts of sequences, or equal ones
    first_equal = (full[:, None] == full).flatten(2).all(-1).int().argmax(1).tolist()
    ids = {rank: [first_equal[n] for n in x.int().argmax(1)[x.any(1)].tolist()] for rank, x in best.items()}
    counts = {rank[1:]: Counter(n for b in ids if b[1:] == rank[1:] for n in ids[b]) for rank in ids}
    unread = [n for n in dict.fromkeys(first_equal) if not all(count[n] for count in counts.values())]
    unknown = [rank for rank, x in best.items() if len(x) > len(ids[rank])]
    inconsistent = [rank for rank in ids if sorted(ids[rank]) != sorted(ids[rank[0], 0, 0])]
    reason = ""
    if unknown and unread:
        rank, count = unknown[0], len(best[unknown[0]])
        reason = (
            f"{count - len(ids[rank])} of {count} samples of dp rank {rank[0]} occur nowhere on one process: "
            "look at seeds and samplers that depend on the rank, and at what changes samples before a module"
        )
    elif inconsistent and not unknown:
        rank = inconsistent[0]
        reason = f"ranks of one replica, dp rank {rank[0]}, read samples {ids[rank[0], 0, 0]} and "
        reason += f"{ids[rank]}: look at how the number of a replica follows from the rank"
    elif unread and not unknown:
        repeated = [n for n, count in sorted(counts[0, 0].items()) if count > 1]
        replicas = " and ".join(str(sample_ids) for rank, sample_ids in ids.items() if not any(rank[1:]))
        reason = f"replicas read samples {replicas} of {len(full)}: {unread} are read by none"
        reason += f", {repeated} by several" if repeated else ""
    return Cause("other samples", reason) if reason else None


def tabulate(record: Record, step: int) -> Table:
    """Tensors of modules in a step, in the order of micro-batches rather than of backward passes."""
    table: Table = {}
    for key, tensor in sorted(record.tensors.items(), key=lambda item: item[0].micro):
        if key.step == step and key.kind in MODULE_KINDS:
            table.setdefault(key._replace(micro=0), {})[key.micro] = tensor
    return table


def match_step(
    tables: Mapping[Coordinates, Table], layout: Layout, problems: list[str], swap_causes: dict[Key, Cause]
) -> dict[Coordinates, Table]:
    """Tables of one process, at (), and of ranks, with one tensor of the same samples by key."""
    reference, stages = tables[()], dict[int, dict[Coordinates, Table]]()
    for rank in filter(None, tables):
        stages.setdefault(rank[0], {})[rank[1:]] = tables[rank]
    pairs = product(stages, reference)
    shared = [(stage, key) for stage, key in pairs if all(key in table for table in stages[stage].values())]
    calls = {(stage, key): {rank: t[key] for rank, t in stages[stage].items()} for stage, key in shared}
    # samples of the first module whose inputs can be matched
    inputs = [(stage, key) for stage, key in shared if key.kind == "input"]
    matches = (samples_of(reference[key], calls[stage, key], layout) for stage, key in inputs)
    input_samples = next(filter(None, matches), None)
    matched: dict[Coordinates, Table] = {rank: {} for rank in tables}
    choices: dict[tuple[int, Key], Samples | str] = {}
    for stage, key in ((stage, key) for stage, key in shared if key.kind != "input"):
        output = stage, key._replace(kind="output")
        if key.kind == "output":
            choices[output] = choose(reference[key], calls[stage, key], input_samples, layout)
        choice, joined = choices.get(output, SUMS), None
        if key.kind == "scalar":
            joined, choice = scalars(reference[key], calls[stage, key], layout), ""
        if isinstance(choice, Samples):
            try:
                joined = choice.join(reference[key], calls[stage, key])
                is_backward = key.kind == "backward"
                if is_backward and (cause := choice.explain_swap(reference[key], calls[stage, key])):
                    swap_causes[key] = cause
            except (RuntimeError, ValueError, IndexError, KeyError):
                choice = choices[output] = SUMS
        if choice == CONSTANT:
            joined = constants(key, reference[key], calls[stage, key])
        elif choice == SUMS and key.kind == "output":
            joined = sums(reference[key], calls[stage, key], layout)
            problems.append(SUMMED.format(name=key.name or "the whole module"))
        if joined is not None:
            matched[()][key] = {0: joined[0]}
            for rank, part in joined[1].items():
                matched[stage, *rank][key] = {0: part}
    return matched


def scalars(reference: Calls, parts: RankCalls, layout: Layout) -> tuple[Tensor, Parts] | None:
    """Scalars by micro-batch, sorted if replicas run different ones; None if their counts differ."""
    full = torch.stack([*reference.values()])
    values = {rank: torch.stack([*calls.values()]) for rank, calls in parts.items()}
    counts = {len(x) for x in values.values()}
    if counts == {len(full)}:
        return full, values
    if {count * layout["dp"] for count in counts} != {len(full)}:
        return None
    joined = {a: torch.cat([x for b, x in values.items() if a[1:] == b[1:]]).sort().values for a in values}
    return full.sort().values, joined


def constants(key: Key, reference: Calls, parts: RankCalls) -> tuple[Tensor, Parts]:
    """A constant output once for all micro-batches, or the sum of its gradients."""
    count = 1 if key.kind == "output" else None
    full, *sums = (torch.stack([*x.values()][:count]).sum(0) for x in (reference, *parts.values()))
    return full, dict(zip(parts, sums, strict=True))


def choose(
    reference: Calls, parts: RankCalls, input_samples: Samples | None, layout: Layout
) -> Samples | str:
    """Choose how to match outputs: as a constant, by their own rows, by rows of inputs, or by sums."""
    calls = [[*tensors.values()] for tensors in (reference, *parts.values())]
    is_constant = all(torch.equal(tensors[0], x) for tensors in calls for x in tensors)  # as rotary angles
    if is_constant and may_be_copies(calls[0][0].numel() / max(calls[1][0].numel(), 1), layout):
        return CONSTANT
    return samples_of(reference, parts, layout) or input_samples or SUMS


def samples_of(reference: Calls, parts: RankCalls, layout: Layout) -> Samples | None:
    """Samples along the first dimension whose rows are each on exactly one replica; None if there is none."""
    for dim in range(next(iter(reference.values())).ndim):
        with suppress(RuntimeError, IndexError):  # shapes that do not fit
            full = rows_of(reference.values(), dim)
            rows = {rank: rows_of(calls.values(), dim) for rank, calls in parts.items()}
            prototypes = {rank: x.new_empty(len(full), *x.shape[1:]) for rank, x in rows.items()}
            sizes, blocks = {**layout, "dp": 1}, {"tp": sorted({1, *full.shape[1:]})}
            for placement in placements(prototypes, full, sizes, blocks=blocks, sums=("cp", "tp")):
                axes = (axis for axis, sharding in placement.items() if sharding == "sum")
                summed, ids = reduce(add_over, axes, rows), dict[Coordinates, dict[int, list[int]]]()
                for rank in parts:
                    nearest = nearest_rows(summed[rank], region(full, placement, rank, prototypes))
                    ids[rank] = match_micro_batches(nearest, dim, parts[rank], len(full))
                replicas = {rank[0]: calls for rank, calls in ids.items()}
                all_ids = [i for calls in replicas.values() for i in chain.from_iterable(calls.values())]
                is_complete = sorted(all_ids) == [*range(len(full))]
                if is_complete and all(ids[rank] == replicas[rank[0]] for rank in ids):
                    row_ids = torch.arange(len(full)).split([x.shape[dim] for x in reference.values()])
                    rows_by_micro = dict(zip(reference, (x.tolist() for x in row_ids), strict=True))
                    return Samples(dim, ids, rows_by_micro)
    return None


def match_micro_batches(nearest: Tensor, dim: int, calls: Calls, missing: int) -> dict[int, list[int]]:
    """Rows by micro-batch; the last of micro-batches with equal rows, since earlier ones are trial passes."""
    split = nearest.split([tensor.shape[dim] for tensor in calls.values()])
    ids_by_micro: dict[int, list[int]] = {}
    for micro, ids in reversed([*zip(calls, (row_ids.tolist() for row_ids in split), strict=True)]):
        if missing not in ids and not any(set(ids) & set(row_ids) for row_ids in ids_by_micro.values()):
            ids_by_micro[micro] = ids
    return dict(sorted(ids_by_micro.items()))


def nearest_rows(part: Tensor, full: Tensor) -> Tensor:
    """Index of the nearest full row to each row of a part, or the number of rows if none is near."""
    full_rows = full.flatten(1).double()
    full_rows = torch.cat([full_rows, torch.zeros_like(full_rows[:1])])  # a match is nearer than zero
    distances, numbers = torch.cdist(part.flatten(1).double(), full_rows, p=torch.inf).topk(2, largest=False)
    return numbers[:, 0].where(distances[:, 0] < MARGIN * distances[:, 1], len(full))


def rows_of(tensors: Iterable[Tensor], dim: int) -> Tensor:
    return torch.cat([*tensors], dim).movedim(dim, 0)


def sums(reference: Calls, parts: RankCalls, layout: Layout) -> tuple[Tensor, Parts] | None:
    """Sums over a step of vectors of the last dimension; None if ranks have another number of them."""
    sides = reference, *parts.values()
    full, *rank_tensors = ([t.flatten(0, -2) for t in calls.values() if t.ndim > 1] for calls in sides)
    count = max(sum(len(x) for tensors in rank_tensors for x in tensors), 1)
    if not may_be_copies(sum(map(len, full)) * len(parts) / layout["dp"] / count, layout):
        return None
    total, *totals = (torch.cat(tensors).sum(0) for tensors in (full, *rank_tensors))
    return total, add_over(dict(zip(parts, totals, strict=True)), "dp")


def may_be_copies(ratio: float, layout: Layout) -> bool:
    """True if a full tensor of `ratio` times the size of a part may be split over cp or tp, or copied."""
    return ratio in (1, layout["cp"], layout["tp"], layout["cp"] * layout["tp"])
