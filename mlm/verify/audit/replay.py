"""Modules of one process run again under hypotheses, for the tensors that these predict."""

from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mlm.verify.audit.compare import Comparison, Layout, Location, magnitude
from mlm.verify.audit.hypotheses import FIT
from mlm.verify.audit.record import Key, Recorder, local

BLOCKS = (2, 3)
"""Of fused rows: gate and up; q, k and v."""
CAUSES = {
    "order": (
        "shards permuted",
        "rows of {of} are taken in another order: look at q, k, v or gate, up, and heads",
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
        "each {axis} rank has the share of its own outputs of {of}: sum it over {axis} (keys and values)",
    ),
}


class EndOfForwardError(Exception):
    """Ends a forward pass after the output that is asked for."""


def question_of(comparison: Comparison) -> tuple[str, str]:
    """The last module that is right, and the first that is not."""
    place = comparison.wrong[0].key
    same = [p.key.name for p in comparison.locations if p.key[:2] == place[:2]]
    return same[max(same.index(place.name) - 1, 0)], place.name


def replay(recorder: Recorder, before: str, place: str, layout: Layout) -> None:
    """Record whole tensors that hypotheses predict, under their names in CAUSES and an axis as kind.

    The output of `place`, the first module that is wrong: if the rows of `before` are in another order, or
    tokens of a module beside it are counted from 0 on each rank. Of it and of modules around it, the output
    if each rank's part of the input is all there is, or the gradient of its input if only that part counts.
    """
    modules = {recorder._name(name): module for name, module in recorder.subject.module.named_modules()}
    path, tensors, arguments = place.split("."), recorder.record.tensors, dict[str, Any]()
    around = [name for n in range(len(path), 0, -1) if (name := ".".join(path[:n])) in modules]
    hooks = [modules[name].register_forward_pre_hook(partial(_note, arguments, name)) for name in around]
    with recorder._dropout(lambda x, *_, **__: x):
        recorder._compute()
        outputs, grads = (
            {key.name: x for key, x in tensors.items() if key.kind == kind and key.call == 0}
            for kind in ("output", "backward")
        )
        recorder.step = -1  # of which nothing is recorded
        found: list[Tensor] = []
        for hook in hooks:
            hook.remove()
        for name, axis, dim, orders in (
            _changes(outputs, before, place, layout) if around[:1] == [place] else ()
        ):
            for order in orders:
                change = modules[name].register_forward_hook(partial(_reorder, order, dim))
                end = modules[place].register_forward_hook(partial(_end, found))
                with suppress(EndOfForwardError):
                    recorder._compute()
                change.remove()
                end.remove()
            predicted = [found.pop() for _ in orders][::-1]
            if axis:  # of each rank's order, the first part
                predicted = [torch.cat([x.chunk(len(orders), dim)[0] for x in predicted], dim)]
            key = Key(0, f"count {axis}" if axis else "order", name, len(tensors))
            tensors[key] = predicted[0]
        for name, args in arguments.items():
            for axis in (axis for axis in ("cp", "tp") if layout[axis] > 1):
                for kind, x in _alone(modules[name], args, layout[axis], grads.get(name)):
                    tensors[Key(0, f"{kind} {axis}", name, len(tensors))] = x


def _note(arguments: dict[str, Any], name: str, _: nn.Module, args: Any) -> None:
    arguments.setdefault(name, args)


def _end(found: list[Tensor], _module: nn.Module, _args: Any, output: Any) -> None:
    found.append(local(_first(output)))
    raise EndOfForwardError


def _reorder(order: Tensor, dim: int, _module: nn.Module, _args: Any, y: Any) -> Any:
    return y.index_select(dim, order) if isinstance(y, Tensor) else y


def _first(tree: Any) -> Tensor:
    return next(x for x in tree_leaves(tree) if isinstance(x, Tensor))


def _changes(
    outputs: dict[str, Tensor], before: str, place: str, layout: Layout
) -> Iterator[tuple[str, str, int, list[Tensor]]]:
    """Of a module, an axis or none, a dimension, and orders in it: of all ranks, or one for each."""
    tp, cp = layout["tp"], layout["cp"]
    width = outputs[before].shape[-1] if before in outputs and tp > 1 else 0
    rows = torch.arange(width)
    for blocks in (n for n in BLOCKS if width and width % (n * tp) == 0):
        size = width // tp // blocks
        shapes = [(1, tp, blocks), *((tp, n, blocks) for n in range(2, size + 1) if size % n == 0)]
        for first, a, b in (shape for one, x, y in shapes for shape in ((one, x, y), (one, y, x))):
            yield before, "", -1, [rows.view(first, a, b, -1).transpose(1, 2).flatten()]
    beside = [
        name for name in outputs if name.rpartition(".")[0] == place.rpartition(".")[0] and name != place
    ]
    for name in beside[-4:] if cp > 1 else ():
        for dim, size in enumerate(outputs[name].shape[:2]):
            if size % cp == 0:
                yield name, "cp", dim, [torch.arange(size).roll(-size // cp * rank) for rank in range(cp)]


def _alone(module: nn.Module, args: Any, ranks: int, grad: Tensor | None) -> Iterator[tuple[str, Tensor]]:
    """By dimension, outputs of parts of the arguments, and shares of these outputs in the gradient."""
    x = _first(args).detach()
    for dim in (d for d in range(x.ndim) if x.shape[d] % ranks == 0 and x.shape[d] > 1):
        with suppress(RuntimeError, IndexError, TypeError, ValueError):  # of a module that takes no part
            own = [tree_map(partial(_part, x.shape[dim], dim, ranks, rank), args) for rank in range(ranks)]
            yield "alone", torch.cat([local(_first(module.forward(*each))) for each in own], dim)
            if grad is not None and x.is_floating_point() and grad.shape == x.shape:
                y, shares = _first(module.forward(x.requires_grad_(), *args[1:])), list[Tensor]()
                for rank in range(ranks):
                    masked = torch.zeros_like(grad)
                    _part(x.shape[dim], dim, ranks, rank, masked).copy_(
                        _part(x.shape[dim], dim, ranks, rank, grad)
                    )
                    (share,) = torch.autograd.grad(y, x, masked, retain_graph=True)
                    shares.append(_part(x.shape[dim], dim, ranks, rank, share))
                yield "share", torch.cat(shares, dim)


def _part(size: int, dim: int, ranks: int, rank: int, x: Any) -> Any:
    is_split = isinstance(x, Tensor) and x.ndim > dim and x.shape[dim] == size
    return x.chunk(ranks, dim)[rank] if is_split else x


def explain_replay(comparison: Comparison, place: Location) -> tuple[str, str] | None:
    """The hypothesis of a replay whose prediction is what ranks have."""
    wrong = [p for p in comparison.wrong if p.key[:2] == place.key[:2]]
    for key, predicted in comparison.replayed.items():
        kind, _, axis = key.kind.partition(" ")
        if (kind == "share") != (place.key.kind == "backward"):
            continue
        for other in wrong:
            of_module = key.name == other.key.name if kind == "alone" else kind == "share" or other is place
            parts = {at: comparison.ranks[other.stage, *at].tensors[other.key] for at in other.match.pairs}
            bound = max(FIT, 10 * other.limit) * magnitude(predicted)
            whole = comparison.reference.tensors[other.key]
            if of_module and predicted.shape == whole.shape and bool(predicted.any()):
                found = comparison._activation(other.key, parts, predicted, bound)
                if found is not None and found.error <= bound:
                    return CAUSES[kind][0], CAUSES[kind][1].format(of=key.name, axis=axis)
    return None
