"""The operation that makes a tensor wrong: what it reads or returns on ranks gives their tensor.

One process runs its step again with numbers of ranks in place of its own. The first numbers that give what
ranks have are the cause.
"""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from contextlib import suppress
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from mlm.verify.audit.compare import Comparison, Location, Ranks, combined, magnitude
from mlm.verify.audit.operations import OWN, PARTS, Hypothesis, Operations, Tensors, Traced
from mlm.verify.audit.parts import Coordinates, difference, match, region, unscaled
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import Cause, Key, Recorder
from mlm.verify.audit.trace import NUMBERS, READ, RESULT, State, advance, trace

PHASES = ("step", "forward", "loss", "backward")
"""Places of operations of no module."""
MOST_STEPS = 40
"""Limit of the search in processor time: traced steps of one process."""
MARGIN = 0.1
"""Fraction of a difference that what is predicted may leave."""


def find_operation(recorder: Recorder, comparison: Comparison, place: Location, ranks: Ranks) -> None:
    """Record as a cause the first numbers of ranks that give their wrong tensor on one process."""
    traced: Traced = {at[1:]: record.tensors for at, record in ranks.items() if at[0] == place.stage}
    advance(recorder, place.key.step)
    state, record, note, start = State(recorder), recorder.record, recorder.note, time.process_time()
    own, sources = traced, trace(recorder, place).sources
    limit = time.process_time() + MOST_STEPS * (time.process_time() - start)
    right = dict(record.tensors)
    kind = place.key.kind
    wrong = {k for k in right if k.kind == kind}
    if kind == "backward":  # the trace ends with the first micro-batch's
        wrong = {k for k in wrong if k.micro == place.key.micro}
    is_staged = kind == "output" and comparison.layout["pp"] > 1
    if is_staged and (cause := _another_layer(recorder, state, comparison, place)) is not None:
        record.causes.append(cause)
        return
    micro = [{k.micro for k in own if k.kind == "input"} for own in (right, *traced.values())]
    is_of_step = kind in ("gradient", "weight") or (kind == "loss" and comparison.replicas == 1)
    if any(own != micro[0] for own in micro) and not is_of_step:
        traced = by_samples(right, traced)
        if not traced or not all(wrong & {*own} for own in traced.values()):
            return
    operations = Operations(comparison, right, sources, traced)
    operations.ranks = own
    # what is right must not pass for what is wrong, as a loss between those of replicas would
    blind = {
        how
        for how, count in ((PARTS, 1), (OWN, len(traced)))
        if all(_is_found(operations, place, k, dict.fromkeys([*traced][:count], right)) for k in wrong)
    }
    gives = partial(predicts, state, operations, place, wrong)
    for number, hypothesis in enumerate(operations.hypotheses(place.key)):
        if time.process_time() > limit:
            record.given_up = number
            return
        recorder.note = lambda text, head=f"cause {number + 1}: ": note(head + text)  # type: ignore[misc]
        if (OWN if hypothesis.how == OWN else PARTS) in blind:
            continue
        if gives(hypothesis):
            # the first name is the one reported: drop those that the prediction does not need
            while hypothesis.names[1:] and gives(rest := hypothesis._replace(names=hypothesis.names[1:])):
                hypothesis = rest
            record.causes.append(operations.explain(hypothesis))
            return


def predicts(
    state: State, operations: Operations, place: Location, wrong: Collection[Key], hypothesis: Hypothesis
) -> bool:
    """True if one process with the numbers of a hypothesis gives what ranks have."""
    ranks = [*operations.traced][: None if hypothesis.how == OWN else 1]
    own = {at: operations.values(hypothesis, at) for at in ranks}
    runs: dict[Coordinates, Tensors] = {}
    with suppress(RuntimeError, IndexError, ValueError):  # of values that the next operation rejects
        for at, values in own.items() if all(own.values()) else ():
            state.restore()
            trace(state.recorder, place, values)
            runs[at] = dict(state.recorder.record.tensors)
        return bool(runs) and all(_is_found(operations, place, k, runs) for k in wrong)
    return False


def by_samples(right: Tensors, traced: Mapping[Coordinates, Tensors]) -> Traced:
    """Join the operations of replicas, under the micro-batches of one process that have the same input.

    Empty if one has none. Operations outside modules belong to a micro-batch by the number of their call.
    """
    first = next(k for k in right if k.kind == "input")
    whole = {k.micro: x for k, x in right.items() if k[:5] == first[:5]}
    counts = [Counter(k._replace(call=0) for k in own if is_outside(k)) for own in (right, *traced.values())]
    joined: dict[Coordinates, dict[Key, Tensor]] = {}
    lost: set[tuple[Coordinates, Key]] = set()
    for count, (at, own) in zip(counts[1:], traced.items(), strict=True):
        inputs = {k.micro: x for k, x in own.items() if k[:5] == first[:5]}
        same = {m: [n for n, y in whole.items() if torch.equal(x, y)] for m, x in inputs.items()}
        if not inputs or any(len(found) != 1 for found in same.values()):
            return {}
        union = joined.setdefault((0, *at[1:]), {})
        for key, x in own.items():
            all_calls = key._replace(call=0)
            calls, share = count[all_calls] // len(inputs), counts[0][all_calls] / len(whole)
            if not is_outside(key):
                key = key if key.kind == "loss" else key._replace(micro=same[key.micro][0])
            elif calls == share:
                key = key._replace(call=same[key.call // calls][0] * calls + key.call % calls)
            if not torch.equal(union.setdefault(key, x), x):
                lost.add(((0, *at[1:]), key))
    for at, key in lost:
        del joined[at][key]
    is_whole = all({k.micro for k in own if k[:5] == first[:5]} == {*whole} for own in joined.values())
    return dict(joined) if is_whole else {}


def is_outside(key: Key) -> bool:
    """True for an operation of no module, whose keys do not name a micro-batch."""
    return key.kind in (READ, RESULT, NUMBERS) and key.name.split("|")[0] in PHASES


def _another_layer(recorder: Recorder, state: State, comparison: Comparison, place: Location) -> Cause | None:
    """The layer of a pipeline whose function, with the weights of another number, gives what ranks have."""
    modules = {recorder._name(name): module for name, module in recorder.subject.module.named_modules()}
    wrong = {p.key.name: p for p in comparison.wrong if p.key[:2] == place.key[:2]}
    for name, other in product(wrong, modules):
        (above, _, number), (parent, _, another) = name.rpartition("."), other.rpartition(".")
        is_outer = f"{place.key.name}.".startswith(f"{name}.") and number.isdigit()
        if not (is_outer and another.isdigit() and above == parent and name != other):
            continue
        as_other = partial(_as_layer, modules[other])
        hook = modules[name].register_forward_hook(as_other, prepend=True, with_kwargs=True)
        with suppress(RuntimeError, TypeError):  # of a layer of another shape
            state.restore()
            trace(recorder, wrong[name], {})
            every = torch.cat([x for k, x in recorder.record.tensors.items() if k.kind == "output"])
            ranks = (r for at, r in comparison.ranks.items() if at[0] == wrong[name].stage)
            rows = (record.tensors[wrong[name].key].flatten(1).double() for record in ranks)
            far = [torch.cdist(x, every.flatten(1).double(), p=torch.inf).amin(1).amax() for x in rows]
            if max(map(float, far)) <= FIT * magnitude(every):
                why = f"{name} computes what {other} does: look at the numbers of layers on stages"
                return Cause("another layer's function", why, name)
        hook.remove()
    return None


def _as_layer(other: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
    """The output of another layer with the weights of this one."""
    return functional_call(other, dict(module.named_parameters()), args, kwargs)


def _is_found(operations: Operations, place: Location, key: Key, runs: Mapping[Coordinates, Tensors]) -> bool:
    """True if ranks' tensor is predicted, by one run or by one for each rank."""
    comparison, parts = operations.comparison, operations.parts(key)
    if not parts:
        return place.key.kind == "weight"  # of another stage
    whole, *others = (run[key] for run in runs.values())
    sizes = (p.largest for p in comparison.locations if p.key == key)
    size = next(sizes) if key.kind == "weight" else magnitude(whole)
    # nearer than one process's by far, too
    bound = max(FIT * size, min(10 * place.limit * size, MARGIN * place.match.error))
    if others:
        for placement in operations.placements(parts, whole, ()):
            pairs = {at: (part, region(runs[at][key], placement, at, parts)) for at, part in parts.items()}
            is_scaled = key.kind == "backward" and comparison.replicas * comparison.layout["pp"] > 1
            pairs = unscaled(pairs) if is_scaled else pairs
            if all(difference(*pair) <= bound for pair in pairs.values()):
                return True
        return False
    if key.kind == "output":
        found = match(parts, whole, operations.placements(parts, whole, ("cp", "tp")), bound, is_scaled=False)
        return found is not None and found.error <= bound
    if key.kind == "weight":
        return comparison._parameter(key, whole, place.stage, parts).error <= bound
    if key.kind in ("loss", "scalar"):  # a mean with other weights could be anything
        sums = [[*own.values()] for own in combined(parts)]
        means = (torch.stack(own).mean(0) for own in sums)
        every = [torch.stack(own) for own in sums] + [x[None] for x in means]
        return any(difference(x, whole.expand_as(x)) <= bound for x in every)
    found = comparison._activation(key, parts, whole, bound)
    return found is not None and found.error <= bound
