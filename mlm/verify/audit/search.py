"""Search for the operation that makes a tensor wrong.

One process runs its step again with tensors of ranks in place of its own. The first that reproduce the ranks'
wrong tensor are the cause.
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

from mlm.verify.audit.compare import Comparison, Location, Ranks, magnitude, sums_over_axes
from mlm.verify.audit.operations import JOINED, PER_RANK, Hypothesis, Operations, Tensors, Traced
from mlm.verify.audit.parts import Coordinates, difference, match, region, unscaled
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import Cause, Key, Recorder
from mlm.verify.audit.trace import NUMBERS, READ, RESULT, State, advance, trace

PHASES = ("step", "forward", "loss", "backward")
"""Places of operations outside modules."""
MOST_STEPS = 40
"""Limit of the search in processor time, in traced steps of one process."""
PREDICTION_ERROR = 0.1
"""Error of a prediction as a fraction of the difference that it explains."""


def find_operation(recorder: Recorder, comparison: Comparison, location: Location, ranks: Ranks) -> None:
    """Record the cause of a wrong tensor, if a hypothesis on operations reproduces it."""
    traced: Traced = {rank[1:]: record.tensors for rank, record in ranks.items() if rank[0] == location.stage}
    advance(recorder, location.key.step)
    state, record, report, start = State(recorder), recorder.record, recorder.report, time.process_time()
    sources = trace(recorder, location).sources
    limit = time.process_time() + MOST_STEPS * (time.process_time() - start)
    reference = dict(record.tensors)
    kind = location.key.kind
    wrong = {k for k in reference if k.kind == kind}
    if kind == "backward":  # the trace ends with one micro-batch
        wrong = {k for k in wrong if k.micro == location.key.micro}
    is_staged = kind == "output" and comparison.layout["pp"] > 1
    if is_staged and (cause := _explain_layer(recorder, state, comparison, location)) is not None:
        record.causes.append(cause)
        return
    micro_batches = [{k.micro for k in side if k.kind == "input"} for side in (reference, *traced.values())]
    is_of_step = kind in ("gradient", "weight") or (kind == "loss" and comparison.replicas == 1)
    joined = traced
    if any(numbers != micro_batches[0] for numbers in micro_batches) and not is_of_step:
        joined = join_replicas(reference, traced)
        if not joined or not all(wrong & {*tensors} for tensors in joined.values()):
            return
    operations = Operations(comparison, reference, sources, joined, traced)
    # the right tensor must not pass for the wrong one, as a loss between replicas' losses would
    undecidable = {
        mode
        for mode, runs in ((JOINED, [*joined][:1]), (PER_RANK, [*joined]))
        if all(_is_predicted(operations, location, k, dict.fromkeys(runs, reference)) for k in wrong)
    }
    predicts_target = partial(predicts, state, operations, location, wrong)
    for number, hypothesis in enumerate(operations.hypotheses(location.key)):
        if time.process_time() > limit:
            record.tries_at_limit = number
            return
        recorder.report = lambda text, head=f"cause {number + 1}: ": report(head + text)  # type: ignore[misc]
        if (PER_RANK if hypothesis.mode == PER_RANK else JOINED) in undecidable:
            continue
        if predicts_target(hypothesis):
            # the cause names the first: drop those that the prediction does not need
            while names := hypothesis.names[1:]:
                if not predicts_target(shorter := hypothesis._replace(names=names)):
                    break
                hypothesis = shorter
            record.causes.append(operations.explain(hypothesis))
            return


def predicts(
    state: State, operations: Operations, location: Location, wrong: Collection[Key], hypothesis: Hypothesis
) -> bool:
    """True if one process with the replacements of a hypothesis gives the ranks' wrong tensors."""
    ranks = [*operations.traced][: None if hypothesis.mode == PER_RANK else 1]
    replacements = {rank: operations.values(hypothesis, rank) for rank in ranks}
    runs: dict[Coordinates, Tensors] = {}
    with suppress(RuntimeError, IndexError, ValueError):  # the next operation may reject values
        for rank, values in replacements.items() if all(replacements.values()) else ():
            state.restore()
            trace(state.recorder, location, values)
            runs[rank] = dict(state.recorder.record.tensors)
        return bool(runs) and all(_is_predicted(operations, location, k, runs) for k in wrong)
    return False


def join_replicas(reference: Tensors, traced: Mapping[Coordinates, Tensors]) -> Traced:
    """Join the operations of replicas under one process's micro-batches with the same input.

    Empty if a micro-batch has no counterpart. The call of an operation outside modules tells its micro-batch.
    """
    first_input = next(k for k in reference if k.kind == "input")
    full_inputs = {k.micro: x for k, x in reference.items() if k[:5] == first_input[:5]}
    sides = reference, *traced.values()
    counts = [Counter(k._replace(call=0) for k in side if is_outside(k)) for side in sides]
    joined: dict[Coordinates, dict[Key, Tensor]] = {}
    conflicts: set[tuple[Coordinates, Key]] = set()
    for count, (rank, tensors) in zip(counts[1:], traced.items(), strict=True):
        inputs = {k.micro: x for k, x in tensors.items() if k[:5] == first_input[:5]}
        micro_of = {m: [n for n, y in full_inputs.items() if torch.equal(x, y)] for m, x in inputs.items()}
        if not inputs or any(len(matches) != 1 for matches in micro_of.values()):
            return {}
        union = joined.setdefault((0, *rank[1:]), {})
        for key, x in tensors.items():
            all_calls = key._replace(call=0)
            calls, reference_calls = count[all_calls] // len(inputs), counts[0][all_calls] / len(full_inputs)
            if not is_outside(key):
                key = key if key.kind == "loss" else key._replace(micro=micro_of[key.micro][0])
            elif calls == reference_calls:
                key = key._replace(call=micro_of[key.call // calls][0] * calls + key.call % calls)
            if not torch.equal(union.setdefault(key, x), x):
                conflicts.add(((0, *rank[1:]), key))
    for rank, key in conflicts:
        del joined[rank][key]
    micro_batches = [{k.micro for k in union if k[:5] == first_input[:5]} for union in joined.values()]
    return dict(joined) if all(numbers == {*full_inputs} for numbers in micro_batches) else {}


def is_outside(key: Key) -> bool:
    """True for an operation outside modules; its key names no micro-batch."""
    return key.kind in (READ, RESULT, NUMBERS) and key.name.split("|")[0] in PHASES


def _explain_layer(
    recorder: Recorder, state: State, comparison: Comparison, location: Location
) -> Cause | None:
    """The cause of a stage's layer that computes the function of a layer with another number."""
    named_modules = recorder.subject.module.named_modules()
    modules = {recorder.reference_name(name): module for name, module in named_modules}
    wrong = {p.key.name: p for p in comparison.wrong_locations if p.key[:2] == location.key[:2]}
    for name, other_name in product(wrong, modules):
        parent, _, number = name.rpartition(".")
        other_parent, _, other_number = other_name.rpartition(".")
        is_outer = f"{location.key.name}.".startswith(f"{name}.") and number.isdigit()
        if not (is_outer and other_number.isdigit() and parent == other_parent and name != other_name):
            continue
        state.restore()  # would remove a hook that it finds
        forward = partial(_as_layer, modules[other_name])
        hook = modules[name].register_forward_hook(forward, prepend=True, with_kwargs=True)
        with suppress(RuntimeError, TypeError):  # layers may have other shapes
            trace(recorder, wrong[name], {})
            outputs = torch.cat([x for k, x in recorder.record.tensors.items() if k.kind == "output"])
            outputs = outputs.flatten(1).double()
            records = [r for rank, r in comparison.ranks.items() if rank[0] == wrong[name].stage]
            rows = (record.tensors[wrong[name].key].flatten(1).double() for record in records)
            distances = [torch.cdist(x, outputs, p=torch.inf).amin(1).amax() for x in rows]
            if max(map(float, distances)) <= FIT * magnitude(outputs):
                reason = f"{name} computes what {other_name} does: look at the numbers of layers on stages"
                return Cause("another layer's function", reason, name)
        hook.remove()
    return None


def _as_layer(other: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
    """Output of another layer with the weights of this one."""
    return functional_call(other, dict(module.named_parameters()), args, kwargs)


def _is_predicted(
    operations: Operations, location: Location, key: Key, runs: Mapping[Coordinates, Tensors]
) -> bool:
    """True if the ranks' tensor is predicted by one run, or by one for each rank."""
    comparison, parts = operations.comparison, operations.parts(key)
    if not parts:
        return location.key.kind == "weight"  # on another stage
    full, *other_runs = (run[key] for run in runs.values())
    sizes = (other.unit for other in comparison.locations if other.key == key)
    size = next(sizes) if key.kind == "weight" else magnitude(full)
    # also much nearer than one process's own tensor
    bound = max(FIT * size, min(10 * location.limit * size, PREDICTION_ERROR * location.match.error))
    if other_runs:
        for placement in operations.placements(parts, full, ()):
            regions = {rank: region(runs[rank][key], placement, rank, parts) for rank in parts}
            pairs = {rank: (part, regions[rank]) for rank, part in parts.items()}
            is_scaled = key.kind == "backward" and comparison.replicas * comparison.layout["pp"] > 1
            pairs = unscaled(pairs) if is_scaled else pairs
            if all(difference(*pair) <= bound for pair in pairs.values()):
                return True
        return False
    if key.kind == "output":
        best = match(parts, full, operations.placements(parts, full, ("cp", "tp")), bound, is_scaled=False)
        return best is not None and best.error <= bound
    if key.kind == "weight":
        return comparison.match_parameter(key, full, location.stage, parts).error <= bound
    if key.kind in ("loss", "scalar"):  # equal weights: a weighted mean could be anything between
        sums = [[*values.values()] for values in sums_over_axes(parts)]
        means = (torch.stack(values).mean(0) for values in sums)
        candidates = [torch.stack(values) for values in sums] + [x[None] for x in means]
        return any(difference(x, full.expand_as(x)) <= bound for x in candidates)
    best = comparison.match_activation(key, parts, full, bound)
    return best is not None and best.error <= bound
