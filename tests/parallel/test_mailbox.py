"""Messages between two ranks through shared memory: gloo's bits, and an end when the other rank has gone."""

import os
import subprocess
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from mlm.parallel import collectives, mailbox
from mlm.parallel.mailbox import SLOT_BYTES, open_mailbox
from mlm.parallel.mesh import ParallelContext
from tests.ranks import on_ranks

pytestmark = pytest.mark.skipif(not mailbox.IS_SUPPORTED, reason="memory is shared on x86 with Linux")
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64)


@on_ranks(tp=2)
def test_messages_have_the_bits_of_gloos_collectives(ctx: ParallelContext) -> None:
    box, gloo = ctx.tp.mailbox, replace(ctx.tp, swaps=False)
    torch.manual_seed(ctx.rank)
    for dtype in DTYPES:
        for shape in ((2, 33, 7), (2, 1), (4096, 64), (0, 3)):
            x = (torch.randn(shape) * 100).to(dtype)
            before = box.count
            for collective in (collectives.all_reduce, collectives.all_gather, collectives.reduce_scatter):
                assert torch.equal(collective(x.clone(), ctx.tp), collective(x.clone(), gloo)), (dtype, shape)
            assert box.count == before + (3 if x.numel() else 0)
    transposed = torch.randn(6, 5).t()
    assert torch.equal(collectives.all_gather(transposed, ctx.tp), collectives.all_gather(transposed, gloo))


@on_ranks(tp=2)
def test_more_messages_than_slots_and_larger_ones_go_by_gloo(ctx: ParallelContext) -> None:
    box = ctx.tp.mailbox
    sizes = (5, SLOT_BYTES // 4, 7, 11, SLOT_BYTES // 4 + 1)  # of the last and the first are not pending
    for order in ((0, 1, 2, 3, 4), (4, 3, 2, 1, 0)):
        before = box.count
        pending = [collectives.start_all_reduce(torch.full((n,), ctx.rank + float(n)), ctx.tp) for n in sizes]
        assert box.count == before + 2
        for i in order:
            assert (pending[i].wait() == 2 * sizes[i] + 1).all(), i
        assert not any(box.is_pending)
    pending = [collectives.start_all_reduce(torch.tensor([ctx.rank, n]), ctx.tp) for n in (1, 2)]
    assert pending.pop().wait().tolist() == [1, 4]
    pending.append(
        collectives.start_all_reduce(torch.tensor([ctx.rank, 3]), ctx.tp)
    )  # whose slot is not free
    assert [work.wait().tolist() for work in pending] == [[1, 2], [1, 6]]
    weight = torch.ones(3, requires_grad=True)
    assert collectives.all_gather(weight * 2, ctx.tp).sum() == 12
    for n in range(1000):  # slots are written again when they have been read
        if n % 97 == ctx.rank:
            time.sleep(2e-3)
        assert collectives.all_reduce(torch.tensor([n, ctx.rank]), ctx.tp).tolist() == [2 * n, 1]


@on_ranks(tp=2)
def test_one_rank_without_shared_memory_leaves_both_without(ctx: ParallelContext) -> None:
    group = ctx.tp.group
    assert group is not None
    for blind in (0, 1):
        with mock.patch.object(mailbox, "IS_SUPPORTED", mailbox.IS_SUPPORTED and ctx.rank != blind):
            assert open_mailbox(group, ctx.rank, 10.0) is None
    for name, problem in (("readlink", "pipe:[3]"), ("pread", b"otherhst")):  # what another host has there
        with mock.patch.object(mailbox.os, name, lambda *_, found=problem: found):
            assert open_mailbox(group, ctx.rank, 10.0) is None
    with mock.patch.object(mailbox.os, "memfd_create", side_effect=PermissionError(1, "as by seccomp")):
        assert open_mailbox(group, ctx.rank, 10.0) is None
    with mock.patch.object(mailbox.mmap, "mmap", side_effect=OSError(12, "no memory")):
        assert open_mailbox(group, ctx.rank, 10.0) is None
    files = set(os.listdir("/proc/self/fd"))
    box = open_mailbox(group, ctx.rank, 10.0)
    assert box is not None
    del box
    assert set(os.listdir("/proc/self/fd")) == files


LOST = """
import os, signal, sys, time
import torch, torch.distributed as dist
from mlm.parallel.collectives import all_reduce
from mlm.parallel.mesh import CPU, build_mesh
rank, how = int(sys.argv[1]), sys.argv[2]
store = dist.FileStore(sys.argv[3], 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
ctx = build_mesh(tp=2, pp=1, dp=1, device=CPU, timeout_s=600.0 if how == "ends" else 1.0)
assert ctx.tp.mailbox is not None
assert all_reduce(torch.ones(3), ctx.tp).tolist() == [2.0, 2.0, 2.0]
if rank == 1:
    if how == "ends":
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(30)
begin = time.monotonic()
try:
    all_reduce(torch.ones(3), ctx.tp)
except Exception as error:
    print(type(error).__name__, error, round(time.monotonic() - begin), flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ("ends", "broke: rank 1 is gone"),
        pytest.param("hangs", "did not finish in 1 s", marks=pytest.mark.slow),
    ],
)
def test_wait_for_a_rank_ends_when_it_does_or_at_the_timeout(how: str, says: str, tmp_path: object) -> None:
    command = [sys.executable, "-c", LOST]
    other = subprocess.Popen([*command, "1", how, f"{tmp_path}/store"])
    try:
        first = subprocess.run(
            [*command, "0", how, f"{tmp_path}/store"], capture_output=True, text=True, timeout=120
        )
    finally:
        other.kill()
        other.wait()
    kind, *words = first.stdout.split()
    assert kind == "LostPeer", first.stdout + first.stderr
    assert says in " ".join(words)
    assert int(words[-1]) < 20
