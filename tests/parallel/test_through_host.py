"""Communication of device tensors over gloo: through host memory, since gloo sends none from a device.

No GPU here: the axis is told that its transport reads host memory only, and tensors that are on the CPU
already must reach it as copies.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from mlm.parallel import collectives, mesh
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.verify.verdict import Verdict
from tests.ranks import on_ranks, run_on_ranks
from tests.verify.parity_layouts import Layout, verdict_of

OPERATIONS = ("dist.all_reduce", "dist.broadcast", "dist.isend", "dist.irecv", "gather_flat", "scatter_flat")


def exchange(x: Tensor, axis: Axis) -> Tensor:
    """Each of two ranks sends x to the other, and returns what it receives."""
    peer, out = 1 - axis.rank, torch.full_like(x, -1)
    arriving, leaving = (collectives.start_receive(out, axis, peer), collectives.start_send(x, axis, peer))
    leaving.wait()
    return arriving.wait()


OPERATION: dict[str, Callable[[Tensor, Axis], Tensor]] = {
    "all_reduce": collectives.all_reduce,
    "all_gather": collectives.all_gather,
    "reduce_scatter": collectives.reduce_scatter,
    "broadcast": lambda x, axis: collectives.broadcast(x, axis, 1),
    "send and receive": exchange,
}


@contextmanager
def transported() -> Iterator[set[int]]:
    """Addresses of the tensors that the transport is given."""
    seen: set[int] = set()

    def noted(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            seen.update(x.data_ptr() for x in args if isinstance(x, Tensor))
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for name in OPERATIONS:
            module, _, attribute = name.rpartition(".")
            owner = getattr(collectives, module) if module else collectives
            stack.enter_context(patch.object(owner, attribute, noted(getattr(owner, attribute))))
        yield seen


@on_ranks(tp=2)
def test_every_operation_gives_the_same_through_host_memory(ctx: ParallelContext) -> None:
    staged = replace(ctx.tp, through_host=True, mailbox=None)  # which is written without it
    for name, run in OPERATION.items():
        x = torch.arange(8.0).view(4, 2) + 10 * ctx.rank
        expected = run(x.clone(), ctx.tp)
        with transported() as seen:
            found = run(x, staged)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, msg=name)
        assert seen, name
        assert not seen & {x.data_ptr(), found.data_ptr()}, f"{name}: the transport read device memory"


@pytest.mark.parametrize("layout", [Layout(pp=2, pipeline="zb_h1"), Layout(dp=2, zero=3)], ids=str)
def test_layout_trains_as_one_process_through_host_memory(layout: Layout) -> None:
    verdict = run_on_ranks(through_host, layout, **layout.sizes)[0]
    assert verdict.equal, verdict.sentence


def through_host(ctx: ParallelContext, layout: Layout) -> Verdict:
    axes = {
        name: replace(getattr(ctx, name), through_host=getattr(ctx, name).group is not None)
        for name in ("tp", "pp", "dp", "tied")
    }
    return verdict_of(replace(ctx, **axes), layout)[0]


@pytest.mark.parametrize(
    ("device", "backend", "expected"),
    [("cuda", "gloo", True), ("cuda", "nccl", False), ("cpu", "gloo", False)],
)
def test_device_tensors_go_through_the_host_over_gloo_only(
    device: str, backend: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        mesh.dist, "new_group", lambda *_, **__: cast(Any, SimpleNamespace(group_name="stub"))
    )
    monkeypatch.setattr(mesh.dist, "get_backend", lambda *_: backend)
    monkeypatch.setattr(mesh, "open_mailbox", lambda *_: None)
    axis = mesh._make_axis("tp", [[0, 1]], 0, 1.0, mesh.Watch(), torch.device(device))
    assert axis.through_host is expected
