"""The part of `mlm doctor` that every training run begins with, in less than a second."""

import socket
from contextlib import ExitStack
from pathlib import Path

from mlm.checkpoint.native.exchange import Ranks
from mlm.launch.doctor.findings import SAME_VERSIONS, different_versions, ranks_with_hosts, versions
from mlm.launch.doctor.folder import SEEN_S, SHARE, trial_file, trial_path, wait_for_content
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError


def check_start(out: str, ctx: ParallelContext) -> None:
    """Raise UserError on every rank unless all have the same versions and share the folder `out`.

    Each writes a file there and looks for that of rank 0. Addresses and the port were checked when the ranks
    came. Collective.
    """
    if ctx.world_size == 1:
        return
    ranks, folder = Ranks.of(ctx), Path(out)
    with ExitStack() as stack:
        problem, content = "", b""
        try:
            content = stack.enter_context(trial_file(folder, ctx.rank))
        except OSError as error:
            problem = f"cannot write to it: {error.strerror}"
        first = str(ranks.broadcast(content.decode())).encode()
        if not problem and not wait_for_content(trial_path(folder, 0), first):
            problem = f"does not see what rank 0 wrote there within {SEEN_S:g} s"
        each = ranks.all_gather([socket.gethostname(), versions(), problem])
    hosts = [host for host, _, _ in each]
    if differ := different_versions(hosts, [own for _, own, _ in each]):
        raise UserError(f"{differ}: the ranks of a run need the same versions; {SAME_VERSIONS}")
    bad = [rank for rank, (_, _, problem) in enumerate(each) if problem]
    if bad:
        same = [rank for rank in bad if each[rank][2] == each[bad[0]][2]]
        raise UserError(f"out={out}: {ranks_with_hosts(same, hosts)}: {each[bad[0]][2]}; {SHARE}")
