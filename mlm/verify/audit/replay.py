"""One process's step run again under hypotheses; those that give what ranks have are causes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.utils._pytree import tree_leaves, tree_map

from mlm.verify.audit.compare import Comparison, Layout, Location, magnitude
from mlm.verify.audit.parts import difference, region
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import REPLAY, Cause, Key, Record, Recorder, local

BLOCKS = (2, 3)
"""Of fused rows: gate and up; q, k and v."""
ORDER = "rows of {} are taken in another order: look at q, k, v or gate, up, and heads"
SAME = "tp ranks compute with the first rank's part of {}: look at offsets of heads and parts"
COUNT = "tokens of {} count from 0 on each cp rank: look at masks and positions"
ALONE = "each {1} rank computes {0} as if its part were all: look at keys and values, masks, statistics"
SHARE = (
    "each {1} rank has the gradient of its own outputs of {0}: sum it over {1} in backward (keys and values, "
    "statistics)"
)
LAYER = "it computes what {} does: look at the numbers of layers on stages"
PART = "each rank updates its part as if that were the whole parameter: look at norms and orthogonalisation"
Hook = Callable[..., Any]


def task_of(comparison: Comparison) -> Callable[[Recorder], None] | None:
    """Return what one process is to run again to learn the cause: an update, a part of a step, or nothing."""
    first = comparison.wrong[0]
    if first.key.kind not in ("output", "backward", "weight"):
        return None
    if first.key.kind == "weight":
        return partial(replay_update, wrong=[p for p in comparison.wrong if p.key[:2] == first.key[:2]])
    same = [p.key.name for p in comparison.locations if p.key[:2] == first.key[:2]]
    before = same[max(same.index(first.key.name) - 1, 0)]
    return lambda recorder: Replay(recorder, comparison.layout, before, first.key).run()


class Hypothesis(NamedTuple):
    """Changes of a step by which the output of a module, or its gradient, may be what ranks have."""

    cause: Cause
    target: str
    """The module."""
    hooks: Sequence[Mapping[str, Hook]]
    """Forward hooks by module, of each run; several runs are of one rank each."""
    dim: int = 0
    """Dimension in which these are put together from their first parts."""


class Replay:
    """Steps of one process; a layout parts first at `key`, and `before` is the last right module."""

    def __init__(self, recorder: Recorder, layout: Layout, before: str, key: Key) -> None:
        self.recorder, self.layout, self.before, self.key = recorder, layout, before, key
        named = recorder.subject.module.named_modules()
        self.modules = {recorder._name(name): module for name, module in named}
        self.outputs: dict[str, Tensor] = {}
        self.rows: Tensor | None = None
        """Mask of the rank whose gradients of a module are computed."""

    def run(self) -> None:
        """Record what hypotheses predict, under the names of their targets."""
        record = self.recorder.record
        with self.recorder._dropout(lambda x, *_, **__: x):
            self.recorder._compute()
            self.outputs = {k.name: x for k, x in record.tensors.items() if k.kind == "output" and not k.call}
            self.recorder.step = -1  # of which nothing is recorded
            for hypothesis in self._hypotheses():
                # of a module that takes no part
                with suppress(RuntimeError, IndexError, TypeError, ValueError):
                    runs = [self._observe(hooks, hypothesis.target) for hooks in hypothesis.hooks]
                    firsts = [x.chunk(len(runs), hypothesis.dim)[0] for x in runs]
                    key = Key(0, REPLAY, hypothesis.target, len(record.causes))
                    record.tensors[key] = torch.cat(firsts, hypothesis.dim)
                    record.causes.append(hypothesis.cause)

    def _hypotheses(self) -> Iterator[Hypothesis]:
        name = self.key.name
        if self.key.kind == "output":
            yield from self._orders()
            yield from self._first_parts()
            yield from self._counts()
            for outer in self._around(name):
                yield from self._parts("part taken for all", ALONE, outer, outer)
                yield from self._layers(outer)
        else:
            for outer in dict.fromkeys([*self._around(name), *self._around(self.before)]):
                if outer != name:
                    yield from self._parts("gradients not summed", SHARE, outer, name)

    def _around(self, name: str) -> list[str]:
        """The module and those that hold it, the innermost first."""
        path = name.split(".")
        outer = [".".join(path[:n]) for n in range(len(path), 0, -1)]
        return [each for each in outer if each in self.modules]

    def _orders(self) -> Iterator[Hypothesis]:
        """Rows of the last right module in another order."""
        tp = self.layout["tp"]
        width = self.outputs[self.before].shape[-1] if self.before in self.outputs and tp > 1 else 0
        rows = torch.arange(width)
        for blocks in (n for n in BLOCKS if width and width % (n * tp) == 0):
            size = width // tp // blocks
            shapes = [(1, tp, blocks), *((tp, n, blocks) for n in range(2, size + 1) if size % n == 0)]
            for first, a, b in (shape for one, x, y in shapes for shape in ((one, x, y), (one, y, x))):
                order = rows.view(first, a, b, -1).transpose(1, 2).flatten()
                cause = Cause("shards permuted", ORDER.format(self.before))
                yield Hypothesis(cause, self.key.name, [{self.before: partial(_reorder, order, -1)}])

    def _first_parts(self) -> Iterator[Hypothesis]:
        """Weights of which each rank has the first rank's part."""
        tp, place = self.layout["tp"], self.key.name
        inside = {n: p for n, p in self.recorder.parameters.items() if n.startswith(f"{place}.")}
        split = {n: p for n, p in inside.items() if tp > 1 and len(p) % tp == 0}
        pairs = [pair for pair in combinations(split, 2) if len({split[n].shape for n in pair}) == 1]
        for names in [*((name,) for name in split), *pairs]:
            cause = Cause("the same part on each rank", SAME.format(" and ".join(names)))
            hook = partial(_with_first_part, [split[n] for n in names], tp)
            yield Hypothesis(cause, place, [{place: hook}])

    def _counts(self) -> Iterator[Hypothesis]:
        """Tokens of a module beside the first wrong one, counted from 0 on each rank."""
        cp, parent = self.layout["cp"], self.key.name.rpartition(".")[0]
        beside = [n for n in self.outputs if n.rpartition(".")[0] == parent and n != self.key.name]
        for name in beside[-4:] if cp > 1 else ():
            for dim, size in enumerate(self.outputs[name].shape[:2]):
                if size % cp == 0:
                    orders = [torch.arange(size).roll(-size // cp * rank) for rank in range(cp)]
                    hooks = [{name: partial(_reorder, order, dim)} for order in orders]
                    cause = Cause("positions begin again", COUNT.format(name))
                    yield Hypothesis(cause, self.key.name, hooks, dim)

    def _layers(self, name: str) -> Iterator[Hypothesis]:
        """Layers of other numbers with the weights of this one, in pipelines."""
        parent, _, number = name.rpartition(".")
        for other, layer in self.modules.items() if number.isdigit() and self.layout["pp"] > 1 else ():
            above, _, another = other.rpartition(".")
            if above == parent and another.isdigit() and another != number:
                cause = Cause("another layer's function", LAYER.format(other))
                yield Hypothesis(cause, name, [{name: partial(_as_layer, layer)}])

    def _parts(self, cause: str, why: str, name: str, target: str) -> Iterator[Hypothesis]:
        """A module whose ranks have parts of the input alone, in order or from both ends."""
        shape = self.outputs[name].shape if name in self.outputs else ()
        for axis in (axis for axis in ("cp", "tp") if self.layout[axis] > 1):
            n = self.layout[axis]
            for dim, size in enumerate(shape):
                rows, choices = torch.arange(size), []
                if size > 1 and size % n == 0:
                    choices.append(list(rows.chunk(n)))
                if axis == "cp" and size % (2 * n) == 0:
                    pieces = rows.chunk(2 * n)
                    choices.append([torch.cat([pieces[i], pieces[-1 - i]]) for i in range(n)])
                for ranks in choices:
                    hook = {name: partial(self._by_parts, dim, ranks)}
                    yield Hypothesis(Cause(cause, why.format(name, axis)), target, [hook])

    def _observe(self, hooks: Mapping[str, Hook], target: str) -> Tensor:
        """The output of a module in all micro-batches, or its gradient, in a step with these hooks."""
        found: list[Tensor] = []

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            y, own = _first(output), self.rows
            if self.key.kind == "output":
                found.append(local(y))
            elif y.requires_grad:
                y.register_hook(lambda grad: found.append(local(grad) if own is None else local(grad) * own))

        handles = [self.modules[n].register_forward_hook(h, with_kwargs=True) for n, h in hooks.items()]
        handles.append(self.modules[target].register_forward_hook(watch))
        try:
            self.recorder._compute()
        finally:
            for handle in handles:
                handle.remove()
            self.recorder.where.clear()
            self.recorder.subject.module.zero_grad()
        return torch.cat(found) if self.key.kind == "output" else torch.stack(found).sum(0)

    def _by_parts(
        self, dim: int, ranks: list[Tensor], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """A module's output put together from those of ranks: of their own rows of the input alone.

        Where a gradient is wrong, they read all rows, and have no gradient in others.
        """
        shape, parts = _first(output).shape, list[Tensor]()
        for own in ranks:
            mask = torch.zeros(shape[dim], dtype=torch.bool).index_fill(0, own, True)
            mask = mask.view([-1 if d == dim else 1 for d in range(len(shape))])

            def restrict(x: Any, own: Tensor = own, mask: Tensor = mask) -> Any:
                if not (isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] == shape[dim]):
                    return x
                if self.key.kind == "output":
                    return x.index_select(dim, own)
                return torch.where(mask, x, x.detach()) if x.is_floating_point() else x

            self.rows = None if self.key.kind == "output" else mask
            part = _first(module.forward(*tree_map(restrict, args), **tree_map(restrict, kwargs)))
            parts.append(part if self.rows is None else part.index_select(dim, own))
        self.rows = None
        y = torch.cat(parts, dim).index_select(dim, torch.cat(ranks).argsort())
        return y if isinstance(output, Tensor) else type(output)((y, *output[1:]))


def _first(tree: Any) -> Tensor:
    return next(x for x in tree_leaves(tree) if isinstance(x, Tensor))


def _reorder(order: Tensor, dim: int, _module: nn.Module, _args: Any, _kwargs: Any, y: Any) -> Any:
    return y.index_select(dim, order) if isinstance(y, Tensor) else y


def _with_first_part(
    parameters: list[Tensor], tp: int, module: nn.Module, args: Any, kwargs: Any, _: Any
) -> Any:
    before = [p.data for p in parameters]
    for p in parameters:
        p.data = p.data.chunk(tp)[0].repeat(tp, *[1] * (p.ndim - 1))
    output = module.forward(*args, **kwargs)
    for p, data in zip(parameters, before, strict=True):
        p.data = data
    return output


def _as_layer(other: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
    """The output of another layer with the weights of this one."""
    return functional_call(other, dict(module.named_parameters()), args, kwargs)


def explain_replay(comparison: Comparison, place: Location) -> Cause | None:
    """The hypothesis of a replay whose prediction is what ranks have."""
    replayed = comparison.replayed or Record()
    for key, predicted in replayed.tensors.items():
        target = (*place.key[:2], key.name)
        for other in (p for p in comparison.wrong if p.key[:3] == target and key.kind == REPLAY):
            parts = {at: comparison.ranks[other.stage, *at].tensors[other.key] for at in other.match.pairs}
            whole = comparison.reference.tensors[other.key]
            predicted = predicted[: len(whole)]  # of the first micro-batch, where each is compared
            bound = max(FIT, 10 * other.limit) * magnitude(predicted)
            if predicted.shape == whole.shape and bool(predicted.any()):
                found = comparison._activation(other.key, parts, predicted, bound)
                if found is not None and found.error <= bound:
                    return replayed.causes[key.call]
    return None


def replay_update(recorder: Recorder, wrong: Sequence[Location]) -> None:
    """Record updates of parameters' parts, each computed as if the part were the parameter."""
    optimizer, places = recorder.subject.optimizer, [p for p in wrong if p.key.step == 0]
    if optimizer is None or any(isinstance(p, DTensor) for p in recorder.parameters.values()):
        return
    places = [p for p in places if recorder.updates.get((0, p.key.name)) is not None]
    recorder.step = -1  # of which nothing is recorded
    for (step, name), update in recorder.updates.items():
        if step == 0:
            recorder.parameters[name].grad = update.clone()
    if recorder.subject.clip is not None:
        recorder.subject.clip()
    before = [(p, p.detach().clone(), p.grad) for p in recorder.parameters.values()]
    for number, at in enumerate(places[0].match.pairs if places else ()):
        for place in places:
            parameter, match = recorder.parameters[place.key.name], place.match
            assert parameter.grad is not None
            own = (region(x, match.placement, at, match.parts) for x in (parameter.detach(), parameter.grad))
            _set_data(parameter, *own)
        optimizer.state.clear()
        optimizer.step()
        for place in places:
            updated = recorder.parameters[place.key.name].detach().clone()
            recorder.record.tensors[place.key._replace(kind=REPLAY, call=number)] = updated
        for parameter, data, grad in before:
            _set_data(parameter, data.clone(), grad)


def _set_data(parameter: nn.Parameter, data: Tensor, grad: Tensor | None) -> None:
    """Give a parameter data and a gradient of another shape."""
    parameter.grad = None
    parameter.data, parameter.grad = data, grad


def explain_part_update(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """Updates of a rank's parts that are those of no larger parameter."""
    replayed = (comparison.replayed or Record()).tensors
    for place in wrong:
        for number, (part, _) in enumerate(place.match.pairs.values()):
            predicted = replayed.get(place.key._replace(kind=REPLAY, call=number))
            bound = max(FIT, 10 * place.limit) * place.largest
            if predicted is None or not difference(predicted, part) <= bound:
                return None
    return Cause("part taken for all", PART)
