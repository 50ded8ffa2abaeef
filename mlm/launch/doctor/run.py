"""`mlm doctor`: every check on every rank, one table."""

import os
import sys
from dataclasses import asdict
from typing import Any

import torch

from mlm.config.build import to_dict
from mlm.launch.config import DoctorConfig
from mlm.launch.doctor import host
from mlm.launch.doctor.findings import (
    SAME_VERSIONS,
    Control,
    Finding,
    different_versions,
    rows_of,
    versions,
)
from mlm.launch.doctor.folder import check_folder, folder_of
from mlm.launch.doctor.traffic import check_traffic, judge
from mlm.launch.environment import read_rank_place
from mlm.launch.network import LOOPBACK
from mlm.launch.rules.layout import Launch
from mlm.launch.start import choose_world_size
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.results import target_name, write_result
from mlm.util.system import available_cores, available_memory
from mlm.util.terminal import add_row, console, table


def lines(config: DoctorConfig, facts: Launch) -> list[str]:
    """Line to print before this host's ranks are started; none for one rank, or for a launcher's."""
    ranks = choose_world_size(config.parallel, facts)
    return [] if facts.world_size is not None or ranks == 1 else [f"starting {ranks} ranks on this host"]


def note(ctx: ParallelContext, text: str) -> None:
    """Say on rank 0 what is examined next, where others are waited for."""
    if ctx.is_main and ctx.world_size > 1:
        print(f"mlm doctor: {text}", file=sys.stderr, flush=True)


def run(config: DoctorConfig, ctx: ParallelContext) -> None:
    """Check; rank 0 prints the table and writes `out`. Raises CheckFailedError if a check failed.

    Every rank calls this.
    """
    place = read_rank_place(os.environ) if ctx.world_size > 1 else None
    control = Control.of(ctx, place.master_addr if place is not None else LOOPBACK, config.timeout_s)
    folder = folder_of(config)
    note(ctx, f"{ctx.world_size} ranks are connected; looking at hosts and {folder}")
    ranks_here = 1 if place is None else place.local_world_size
    on_gpu = ctx.device.type == "cuda"
    mine = [
        *host.check_device(ctx.device),
        host.memory(available_memory(), ranks_here),
        host.disk(folder),
        host.open_files(ctx.world_size),
        host.locked_memory(on_gpu),
        host.shared_memory(on_gpu),
        host.names(place, os.environ),
        *host.environment(os.environ, ranks_here),
        *check_folder(folder, control),
    ]
    device = f"CPU, {available_cores()} cores, {torch.get_num_threads()} threads a rank"
    facts = {"versions": versions(), "device": torch.cuda.get_device_name(ctx.device) if on_gpu else device}
    each = control.all_gather("the host", [facts, [asdict(finding) for finding in mine]])
    note(ctx, "comparing and timing collectives over each axis")
    traffic = check_traffic(ctx, control, config.timeout_s)
    findings = [
        [*(Finding(**one) for one in own), *communication]
        for (_, own), communication in zip(each, judge(traffic), strict=True)
    ]
    all_facts = [fact for fact, _ in each]
    findings[0] = [*check_equal(all_facts, control.hosts), *findings[0]]
    rows = rows_of(findings, control.hosts)
    problem = report(config, control.hosts, all_facts, rows, traffic) if ctx.is_main else ""
    problem = control.all_gather("the report", problem)[0]
    control.close()
    if problem:
        raise CheckFailedError(problem)


def check_equal(facts: list[dict[str, Any]], hosts: list[str]) -> list[Finding]:
    """Judge what must be the same on all ranks."""
    each = [fact["versions"] for fact in facts]
    said = ", ".join(f"{name} {version}" for name, version in each[0].items())
    differ = different_versions(hosts, each)
    devices = list(dict.fromkeys(fact["device"] for fact in facts))
    return [
        Finding("versions", "fail", differ, SAME_VERSIONS) if differ else Finding("versions", "ok", said),
        Finding("devices", "warn", "; ".join(devices[:3]), "the slowest sets the pace: start equal hosts")
        if devices[1:]
        else Finding("devices", "ok", devices[0]),
    ]


def report(
    config: DoctorConfig,
    hosts: list[str],
    facts: list[dict[str, Any]],
    rows: list[Finding],
    traffic: list[dict[str, Any]],
) -> str:
    """Print the table and write the result; return what failed, empty if nothing did."""
    failed = [row.check for row in rows if row.status == "fail"]
    names = ", ".join(failed)
    problem = f"{len(failed)} of {len(rows)} checks failed: {names} (see the table)" if failed else ""
    warned = [row.check for row in rows if row.status == "warn"]
    ranks = f"{len(hosts)} rank{'s' * (len(hosts) > 1)} on {', '.join(dict.fromkeys(hosts))}"
    made, out = table(ranks, "", "check", "result"), console()
    for row in rows:
        add_row(made, row.status, row.check, row.result)
    out.print(made)
    for row in rows:
        if row.remedy:
            out.print(f"{row.status}: {row.check}: {row.remedy}")
    if config.out is not None:
        ranks_facts = [{"rank": n, "host": host, **facts[n]} for n, host in enumerate(hosts)]
        result = {"task": "doctor", "ok": not failed, "checks": [asdict(row) for row in rows]}
        own = {"versions": facts[0]["versions"], "config": to_dict(config)}
        try:
            write_result(config.out, {**result, "ranks": ranks_facts, "communication": traffic, **own})
        except UserError as error:  # other ranks wait for what is returned here
            return "; ".join(filter(None, (problem, str(error))))
        out.print(f"written to {target_name(config.out)}")
    if problem:
        return problem
    out.print(
        f"{len(rows)} checks without a failure" + (f"; warnings: {', '.join(warned)}" if warned else "")
    )
    return ""
