"""Versions that the ranks of a run must have in common."""

import platform
from collections.abc import Mapping, Sequence

import torch

import mlm
from mlm.parallel.watch import name_ranks

SAME_VERSIONS = "install the same version on every host"


def versions() -> dict[str, str]:
    """Return the versions that numbers depend on."""
    return {"mlm": mlm.__version__, "torch": torch.__version__, "python": platform.python_version()}


def different_versions(hosts: Sequence[str], found: Sequence[Mapping[str, str]]) -> str:
    """Return what differs from rank 0: `torch 2.12 on rank 3 (host b), 2.11 on rank 0 (host a)`.

    Empty if nothing does. Both arguments are in rank order.
    """
    for name, ours in found[0].items():
        others = [rank for rank, theirs in enumerate(found) if theirs.get(name) != ours]
        if others:
            theirs = found[others[0]].get(name)
            same = [rank for rank in others if found[rank].get(name) == theirs]
            return f"{name} {theirs} on {named(same, hosts)}, {ours} on {named([0], hosts)}"
    return ""


def named(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    """Return ranks with their hosts: `ranks 2, 3 (host b)`."""
    where = list(dict.fromkeys(hosts[rank] for rank in ranks))
    shown = ", ".join(where[:3]) + (", …" if len(where) > 3 else "")
    return f"{name_ranks(ranks)} (host{'s' * (len(where) > 1)} {shown})"
