"""One process's step run again under hypotheses; those that give what ranks have are causes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import combinations
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from mlm.verify.audit.compare import Cause, Comparison, Layout, Location, magnitude
from mlm.verify.audit.parts import difference, region
from mlm.verify.audit.patterns import FIT
from mlm.verify.audit.record import Key, Recorder, local

PART = "part"
"""Type of a weight that is updated as if it were a part."""
BLOCKS = (2, 3)
"""Of fused rows: gate and up; q, k and v."""
CAUSES = {
    "order": (
        "shards permuted",
        "rows of {of} are taken in another order: look at q, k, v or gate, up, and heads",
    ),
    "same": (
        "the same part on each rank",
        "{axis} ranks compute with the first rank's part of {of}: look at offsets of heads and parts",
    ),
    "count": (
        "positions begin again",
        "tokens of {of} count from 0 on each {axis} rank: look at masks and positions",
    ),
    "alone": (
        "part taken for all",
        "each {axis} rank computes {of} as if its part were all: look at keys and values, masks, positions, "
        "statistics",
    ),
    "share": (
        "gradients not summed",
        "each {axis} rank has the gradient of its own outputs of {of}: sum it over {axis} in backward "
        "(keys and values, statistics)",
    ),
    "layer": (
        "another layer's function",
        "it computes what {of} does: look at the numbers of layers on stages",
    ),
}


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

    kind: str
    axis: str
    of: str
    hooks: Sequence[Mapping[str, Callable[..., Any]]]
    """Forward hooks by module, of each run; several runs are of one rank each."""
    target: str
    dim: int = 0
    """Dimension in which these are put together from their first parts."""
    weights: Mapping[str, Tensor] = {}
    """Rows of parameters, by name."""


class Replay:
    """Steps of one process; a layout parts first at `key`, and `before` is the last right module."""

    def __init__(self, recorder: Recorder, layout: Layout, before: str, key: Key) -> None:
        self.recorder, self.layout, self.before, self.key = recorder, layout, before, key
        named = recorder.subject.module.named_modules()
        self.modules = {recorder._name(name): module for name, module in named}
        self.outputs: dict[str, Tensor] = {}
        self.rows: Tensor | None = None
        """Positions of the rank whose part of a module is computed."""

    def run(self) -> None:
        """Record what hypotheses predict, under the names of their targets."""
        tensors = self.recorder.record.tensors
        with self.recorder._dropout(lambda x, *_, **__: x):
            self.recorder._compute()
            self.outputs = {k.name: x for k, x in tensors.items() if k.kind == "output" and k.call == 0}
            self.recorder.step = -1  # of which nothing is recorded
            for number, hypothesis in enumerate(self._hypotheses()):
                with suppress(
                    RuntimeError, IndexError, TypeError, ValueError
                ):  # of a module that takes no part
                    predicted = self._predict(hypothesis)
                    kind = f"{hypothesis.kind} {hypothesis.axis} {hypothesis.of}"
                    tensors[Key(0, kind, hypothesis.target, number)] = predicted

    def _hypotheses(self) -> Iterator[Hypothesis]:
        path = self.key.name.split(".")
        around = [name for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in self.modules]
        if self.key.kind == "output":
            yield from self._orders()
            yield from self._counts()
            for name in around:
                for axis, dim, rows in self._parts(name):
                    yield Hypothesis("alone", axis, name, [{name: partial(self._alone, dim, rows)}], name)
                yield from self._layers(name)
        else:
            path = self.before.split(".")
            around += [name for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in self.modules]
            for name in (name for name in dict.fromkeys(around) if name != self.key.name):
                for axis, dim, rows in self._parts(name):
                    hook = {name: partial(self._share, dim, rows)}
                    yield Hypothesis("share", axis, name, [hook], self.key.name)

    def _orders(self) -> Iterator[Hypothesis]:
        """Rows of the last right module in another order, or of weights as the first rank has them."""
        tp, place = self.layout["tp"], self.key.name
        width = self.outputs[self.before].shape[-1] if self.before in self.outputs and tp > 1 else 0
        rows = torch.arange(width)
        for blocks in (n for n in BLOCKS if width and width % (n * tp) == 0):
            size = width // tp // blocks
            shapes = [(1, tp, blocks), *((tp, n, blocks) for n in range(2, size + 1) if size % n == 0)]
            for first, a, b in (shape for one, x, y in shapes for shape in ((one, x, y), (one, y, x))):
                order = rows.view(first, a, b, -1).transpose(1, 2).flatten()
                hook = {self.before: partial(_reorder, order, -1)}
                yield Hypothesis("order", "tp", self.before, [hook], place)
        inside = {n: p for n, p in self.recorder.parameters.items() if n.startswith(f"{place}.")}
        whole = {n: p for n, p in inside.items() if tp > 1 and len(p) % tp == 0}
        pairs = [(a, b) for a, b in combinations(whole, 2) if whole[a].shape == whole[b].shape]
        for names in [*((name,) for name in whole), *pairs]:
            same = {n: torch.arange(len(whole[n])).chunk(tp)[0].repeat(tp) for n in names}
            yield Hypothesis("same", "tp", " and ".join(names).replace(" ", "_"), [{}], place, weights=same)

    def _counts(self) -> Iterator[Hypothesis]:
        """Tokens of a module beside the first wrong one, counted from 0 on each rank."""
        cp, parent = self.layout["cp"], self.key.name.rpartition(".")[0]
        beside = [n for n in self.outputs if n.rpartition(".")[0] == parent and n != self.key.name]
        for name in beside[-4:] if cp > 1 else ():
            for dim, size in enumerate(self.outputs[name].shape[:2]):
                if size % cp == 0:
                    orders = [torch.arange(size).roll(-size // cp * rank) for rank in range(cp)]
                    hooks = [{name: partial(_reorder, order, dim)} for order in orders]
                    yield Hypothesis("count", "cp", name, hooks, self.key.name, dim)

    def _layers(self, name: str) -> Iterator[Hypothesis]:
        """Layers of other numbers with the weights of this one, in pipelines."""
        parent, _, number = name.rpartition(".")
        for other in self.modules if number.isdigit() and self.layout["pp"] > 1 else ():
            above, _, another = other.rpartition(".")
            if above == parent and another.isdigit() and another != number:
                hook = {name: partial(_as_layer, self.modules[other])}
                yield Hypothesis("layer", "pp", other, [hook], name)

    def _parts(self, name: str) -> Iterator[tuple[str, int, list[Tensor]]]:
        """Axes, dimensions and positions of ranks in them, in order or from both ends."""
        shape = self.outputs[name].shape if name in self.outputs else ()
        for axis in (axis for axis in ("cp", "tp") if self.layout[axis] > 1):
            n = self.layout[axis]
            for dim, size in enumerate(shape):
                rows = torch.arange(size)
                if size > 1 and size % n == 0:
                    yield axis, dim, list(rows.chunk(n))
                if axis == "cp" and size % (2 * n) == 0:
                    pieces = rows.chunk(2 * n)
                    yield axis, dim, [torch.cat([pieces[i], pieces[-1 - i]]) for i in range(n)]

    def _predict(self, hypothesis: Hypothesis) -> Tensor:
        parameters = self.recorder.parameters
        before = {name: parameters[name].data for name in hypothesis.weights}
        for name, rows in hypothesis.weights.items():
            parameters[name].data = before[name][rows]
        try:
            predicted = [self._observe(hooks, hypothesis.target) for hooks in hypothesis.hooks]
        finally:
            for name, data in before.items():
                parameters[name].data = data
        if len(predicted) > 1:
            predicted = [
                torch.cat([x.chunk(len(predicted), hypothesis.dim)[0] for x in predicted], hypothesis.dim)
            ]
        return predicted[0]

    def _observe(self, hooks: Mapping[str, Callable[..., Any]], target: str) -> Tensor:
        """The output of a module in all micro-batches, or its gradient, in a step with these hooks."""
        found: list[Tensor] = []

        def watch(module: nn.Module, args: Any, output: Any) -> None:
            y, own = _first(output), self.rows
            if self.key.kind == "output":
                found.append(local(y))
            elif y.requires_grad:
                y.register_hook(lambda grad: found.append(local(grad) if own is None else local(grad) * own))

        handles = [
            self.modules[name].register_forward_hook(hook, with_kwargs=True) for name, hook in hooks.items()
        ]
        handles.append(self.modules[target].register_forward_hook(watch))
        try:
            self.recorder._compute()
        finally:
            for handle in handles:
                handle.remove()
            self.recorder.where.clear()
            self.recorder.subject.module.zero_grad()
        return torch.cat(found) if self.key.kind == "output" else torch.stack(found).sum(0)

    def _alone(
        self, dim: int, rows: list[Tensor], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """A module's output put together from those of each rank's part of the input."""
        size = _first(output).shape[dim]

        def take(own: Tensor, x: Any) -> Any:
            return x.index_select(dim, own) if _has_rows(x, dim, size) else x

        parts = [
            module.forward(*tree_map(partial(take, own), args), **tree_map(partial(take, own), kwargs))
            for own in rows
        ]
        return _replace_first(output, _join([_first(part) for part in parts], rows, dim))

    def _share(
        self, dim: int, rows: list[Tensor], module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> Any:
        """A module's output, where that of a rank's rows has no gradient in others."""
        size, parts = _first(output).shape[dim], list[Tensor]()

        def hold(own: Tensor, x: Any) -> Any:
            return torch.where(own, x, x.detach()) if _has_rows(x, dim, size) and x.is_floating_point() else x

        for own in rows:
            mask = torch.zeros(size, dtype=torch.bool).index_fill(0, own, True)
            self.rows = mask.view([size if d == dim else 1 for d in range(_first(output).ndim)])
            args_, kwargs_ = (tree_map(partial(hold, self.rows), tree) for tree in (args, kwargs))
            parts.append(_first(module.forward(*args_, **kwargs_)).index_select(dim, own))
            self.rows = None
        return _replace_first(output, _join(parts, rows, dim))


def _first(tree: Any) -> Tensor:
    return next(x for x in tree_leaves(tree) if isinstance(x, Tensor))


def _has_rows(x: Any, dim: int, size: int) -> bool:
    return isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] == size


def _join(parts: Sequence[Tensor], rows: Sequence[Tensor], dim: int) -> Tensor:
    return torch.cat([*parts], dim).index_select(dim, torch.cat([*rows]).argsort())


def _replace_first(output: Any, y: Tensor) -> Any:
    return y if isinstance(output, Tensor) else type(output)((y, *output[1:]))


def _reorder(order: Tensor, dim: int, _module: nn.Module, _args: Any, _kwargs: Any, y: Any) -> Any:
    return y.index_select(dim, order) if isinstance(y, Tensor) else y


def _as_layer(other: nn.Module, module: nn.Module, args: Any, kwargs: Any, _: Any) -> Any:
    """The output of another layer with the weights of this one."""
    pairs = [*zip(other.parameters(), module.parameters(), strict=True)]
    before = [a.data for a, _ in pairs]
    for a, b in pairs:
        a.data = b.data
    output = other.forward(*args, **kwargs)
    for (a, _), data in zip(pairs, before, strict=True):
        a.data = data
    return output


def explain_replay(comparison: Comparison, place: Location) -> Cause | None:
    """The hypothesis of a replay whose prediction is what ranks have."""
    for key, predicted in comparison.replayed.items():
        hypothesis, axis, of = (*key.kind.split(" "), "", "")[:3]
        target = place.key[:2], key.name
        for other in (
            p for p in comparison.wrong if (p.key[:2], p.key.name) == target and hypothesis in CAUSES
        ):
            parts = {at: comparison.ranks[other.stage, *at].tensors[other.key] for at in other.match.pairs}
            whole = comparison.reference.tensors[other.key]
            predicted = predicted[: len(whole)]  # of the first micro-batch, where each is compared
            bound = max(FIT, 10 * other.limit) * magnitude(predicted)
            if predicted.shape == whole.shape and bool(predicted.any()):
                found = comparison._activation(other.key, parts, predicted, bound)
                if found is not None and found.error <= bound:
                    cause, why = CAUSES[hypothesis]
                    return cause, why.format(of=of.replace("_and_", " and "), axis=axis, target=key.name)
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
            recorder.record.tensors[place.key._replace(kind=PART, call=number)] = updated
        for parameter, data, grad in before:
            _set_data(parameter, data.clone(), grad)


def _set_data(parameter: nn.Parameter, data: Tensor, grad: Tensor | None) -> None:
    """Give a parameter data and a gradient of another shape."""
    parameter.grad = None
    parameter.data, parameter.grad = data, grad


def explain_part_update(comparison: Comparison, wrong: Sequence[Location]) -> Cause | None:
    """Updates of a rank's parts that are those of no larger parameter."""
    for place in wrong:
        for number, (part, _) in enumerate(place.match.pairs.values()):
            predicted = comparison.replayed.get(place.key._replace(kind=PART, call=number))
            bound = max(FIT, 10 * place.limit) * place.largest
            if predicted is None or not difference(predicted, part) <= bound:
                return None
    return "part taken for all", (
        "each rank updates its part as if that were the whole parameter: look at norms, orthogonalisation "
        "and factors of matrices"
    )
