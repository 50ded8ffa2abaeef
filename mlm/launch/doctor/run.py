"""`mlm doctor`: every check on every rank, one table."""

import os
import socket
import sys
from dataclasses import asdict
from typing import Any

import torch

from mlm.checkpoint.native.exchange import Ranks
from mlm.config.build import to_dict
from mlm.launch.config import DoctorConfig
from mlm.launch.doctor import host
from mlm.launch.doctor.findings import (
    SAME_VERSIONS,
    CheckResult,
    check_result,
    different_versions,
    rows_of,
    versions,
)
from mlm.launch.doctor.folder import check_folder, folder_of
from mlm.launch.doctor.traffic import judge, measure
from mlm.launch.environment import read_rank_position
from mlm.launch.rules.layout import Launch
from mlm.launch.start import choose_world_size
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import CheckFailedError, UserError
from mlm.util.results import target_name, write_result
from mlm.util.system import available_cores, available_memory
from mlm.util.terminal import add_row, console, table


def lines(config: DoctorConfig, facts: Launch) -> list[str]:
    """Lines to print before this host's ranks start; empty for one rank, or under a launcher."""
    ranks = choose_world_size(config.parallel, facts)
    return [] if facts.world_size is not None or ranks == 1 else [f"starting {ranks} ranks on this host"]


def run(config: DoctorConfig, ctx: ParallelContext) -> None:
    """Check; rank 0 prints the table and writes `out`. Every rank calls this.

    Raises CheckFailedError if a check failed. A rank that hangs is named after dist.timeout_s.
    """

    def note(text: str) -> None:
        if ctx.is_main and ctx.world_size > 1:  # the last line names the phase of a hang
            print(f"mlm doctor: {text}", file=sys.stderr, flush=True)

    position = read_rank_position(os.environ) if ctx.world_size > 1 else None
    ranks, folder, on_gpu = Ranks.of(ctx), folder_of(config), ctx.device.type == "cuda"
    note(f"{ctx.world_size} ranks are connected; looking at hosts and {folder}")
    ranks_here = 1 if position is None else position.local_world_size
    findings = [
        *host.check_device(ctx.device),
        host.memory(available_memory(), ranks_here),
        host.disk(folder),
        host.open_files(ctx.world_size),
        host.locked_memory(on_gpu),
        host.shared_memory(on_gpu),
        host.names(position, os.environ),
        *host.environment(os.environ, ranks_here),
        *check_folder(folder, ctx, is_first_of_host=position is None or position.local_rank == 0),
    ]
    device = f"CPU, {available_cores()} cores, {torch.get_num_threads()} threads a rank"
    facts = {"versions": versions(), "device": torch.cuda.get_device_name(ctx.device) if on_gpu else device}
    note("timing collectives over each axis, and comparing their numbers")
    traffic = measure(ctx)
    answers = ranks.all_gather([socket.gethostname(), facts, list(map(asdict, findings)), traffic])
    hosts, all_facts, all_findings, all_traffic = map(list, zip(*answers, strict=True))
    by_rank = [
        [*(CheckResult(**fields) for fields in of_host), *of_links]
        for of_host, of_links in zip(all_findings, judge(all_traffic), strict=True)
    ]
    by_rank[0] = [*check_equal(all_facts, hosts), *by_rank[0]]
    problem = report(config, hosts, all_facts, rows_of(by_rank, hosts), all_traffic) if ctx.is_main else ""
    if problem := ranks.broadcast(problem):
        raise CheckFailedError(str(problem))


def check_equal(facts: list[dict[str, Any]], hosts: list[str]) -> list[CheckResult]:
    """Judge versions and devices, which must be equal on all ranks."""
    by_rank = [fact["versions"] for fact in facts]
    difference = different_versions(hosts, by_rank)
    text = difference or ", ".join(f"{name} {version}" for name, version in by_rank[0].items())
    devices = list(dict.fromkeys(fact["device"] for fact in facts))
    remedy = "the slowest sets the pace: start equal hosts"
    return [
        check_result("versions", text, SAME_VERSIONS, fails=bool(difference)),
        check_result("devices", "; ".join(devices[:3]), remedy, warns=len(devices) > 1),
    ]


def report(
    config: DoctorConfig,
    hosts: list[str],
    facts: list[dict[str, Any]],
    rows: list[CheckResult],
    traffic: list[dict[str, Any]],
) -> str:
    """Print the table and write the result; return the failed checks in words, or ""."""
    failed = [row.check for row in rows if row.status == "fail"]
    warned = [row.check for row in rows if row.status == "warn"]
    ranks = f"{len(hosts)} rank{'s' * (len(hosts) > 1)} on {', '.join(dict.fromkeys(hosts))}"
    results, out = table(ranks, "", "check", "result"), console()
    for row in rows:
        add_row(results, row.status, row.check, row.result)
    out.print(results)
    for row in rows:
        if row.remedy:
            out.print(f"{row.status}: {row.check}: {row.remedy}")
    problems = []
    if failed:
        problems.append(f"{len(failed)} of {len(rows)} checks failed: {', '.join(failed)} (see the table)")
    if config.out is not None:
        content = {
            "task": "doctor",
            "ok": not failed,
            "checks": [asdict(row) for row in rows],
            "ranks": [{"rank": n, "host": host, **facts[n]} for n, host in enumerate(hosts)],
            "communication": traffic,
            "versions": facts[0]["versions"],
            "config": to_dict(config),
        }
        try:
            write_result(config.out, content)
            out.print(f"written to {target_name(config.out)}")
        except UserError as error:  # return it: other ranks wait for this broadcast
            problems.append(str(error))
    if not problems:
        warnings = f"; warnings: {', '.join(warned)}" if warned else ""
        out.print(f"{len(rows)} checks without a failure{warnings}")
    return "; ".join(problems)
