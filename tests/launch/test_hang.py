"""No silent hang of a stopped or killed rank, and one cause among several failures."""

import json
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import DistBackendError, HashStore, TCPStore

from mlm.cli.generate.settings import GenerateConfig
from mlm.launch import failure as failures
from mlm.launch import process
from mlm.launch.config import DistConfig
from mlm.launch.failure import (
    Failure,
    FailureReporter,
    ProcessEnd,
    Watchdog,
    describe,
    flight_recorder,
    log_path,
    report,
)
from mlm.launch.process import ALONE, run_rank
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.watch import LostPeer, Watch
from mlm.util.errors import UserError
from tests.launch import jobs as launch_jobs
from tests.launch.ranks_of_jobs import wait_gone

TIMEOUT_S = 2
GONE = threading.Event()
LOST = replace(
    describe(LostPeer("rank 2: step 5: all_reduce over tp (ranks 2, 3) did not finish"), 2), time=1.0
)


def lose_rank_1(axis: str, signal_name: str, folder: Path) -> tuple[int, list[dict[str, Any]]]:
    """Exit code of a 2x2 job whose rank 1 gets the signal, and what its ranks told."""
    layout = {"pp": 2} if axis == "pp" else {"dp": 2}
    prompt = f"{axis} {signal_name}"
    code = launch_jobs.start("lose_rank_1", folder, **layout, timeout_s=TIMEOUT_S, prompt=prompt)
    return code, [json.loads(path.read_text()) for path in sorted(folder.glob("rank-*.json"))]


@pytest.mark.slow
@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    "axis, rank, op, ranks",
    [
        ("dp", 3, "all_reduce", "1, 3"),
        ("pp", 3, "receive from rank 1", "1, 3"),
    ],
)
def test_stopped_rank_ends_the_job_with_a_line_on_what_waited_for_it(
    axis: str, rank: int, op: str, ranks: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    code, facts = lose_rank_1(axis, "SIGSTOP", tmp_path)
    assert code == 1
    assert capfd.readouterr().err == (
        f"mlm: rank {rank}: step 2: {op} over {axis} (ranks {ranks}) did not finish in {TIMEOUT_S} s "
        "(dist.timeout_s): rank 1 is stuck, gone or waiting for another\n"
        f"mlm: rank 1 waited for nobody: look there first, and in {tmp_path / 'logs'}; "
        "no checkpoint was saved\n"
    )
    wait_gone(facts)


@pytest.mark.timeout(60)
def test_killed_rank_is_named_with_what_broke(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    code, facts = lose_rank_1("pp", "SIGKILL", tmp_path)
    lines = capfd.readouterr().err.splitlines()
    assert code == 1
    assert lines[0].startswith(f"mlm: rank 1 (pid {facts[1]['pid']}) was killed by signal 9 (SIGKILL)")
    assert lines[1:] == [
        "mlm: rank 3: step 2: receive from rank 1 over pp (ranks 1, 3) broke: rank 1 is gone"
    ]
    wait_gone(facts)


def test_watchdog_asks_the_device_of_its_own_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The current device of a new thread is the first GPU: each rank's watchdog would take memory there."""
    taken, begun = dict[str, torch.device](), threading.Event()

    def take(device: torch.device) -> None:
        taken[threading.current_thread().name] = device
        if len(taken) == 2:
            begun.set()

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", take)
    monkeypatch.setattr(process, "resolve", lambda _: lambda config, ctx: begun.wait(5) and 0)
    config = SimpleNamespace(dist=DistConfig(threads_per_rank=torch.get_num_threads()))
    reporter = FailureReporter(0, lambda failure: None)
    process.run_rank("", config, position=replace(process.ALONE, local_rank=3), reporter=reporter)
    assert taken == dict.fromkeys(("MainThread", "watchdog"), torch.device("cuda", 3))


@pytest.mark.parametrize("others_failed", [False, True])
def test_watchdog_leaves_a_rank_alone_that_computes(
    monkeypatch: pytest.MonkeyPatch, others_failed: bool
) -> None:
    monkeypatch.setattr(failures, "WATCH_POLL_S", 0.01)
    monkeypatch.setattr(failures, "GRACE_S", 0.0)
    told, left = list[Failure](), threading.Event()
    monkeypatch.setattr(failures, "exit_now", lambda code: left.set())
    watch = Watch(timeout_s=0.05)
    with Watchdog(watch, FailureReporter(watch.rank, told.append, lambda: others_failed)):
        assert not left.wait(0.5)
    assert told == []


def wait_long(config: GenerateConfig, ctx: ParallelContext) -> None:
    with ctx.watch.waiting("all_reduce", "tp", (0, 1)):
        assert GONE.wait(10)


def test_rank_runs_under_a_watchdog(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(failures, "GRACE_S", 0.0)
    monkeypatch.setattr(failures, "exit_now", lambda code: GONE.set())
    told: list[Failure] = []
    run_rank(
        f"{__name__}:wait_long",
        GenerateConfig(ckpt="", prompt="", dist=DistConfig(device="cpu", timeout_s=0.1)),
        position=ALONE,
        store=HashStore(),
        reporter=FailureReporter(0, told.append),
    )
    assert [failure.lost_peer for failure in told] == [True]


def test_deadlock_shows_the_waits_of_all(tmp_path: Path) -> None:
    others = [
        replace(LOST, rank=rank, time=2.0, message=f"rank {rank}: barrier over world") for rank in (0, 1)
    ]
    text, _ = report([*others, LOST], [], world_size=3, logs=tmp_path)
    assert text.splitlines()[:3] == [f"mlm: {f.message}" for f in (LOST, *others)]
    assert "every rank was waiting" in text


def test_a_rank_that_wakes_when_the_store_is_gone_reports_without_frames_of_torch(
    capfd: pytest.CaptureFixture[str],
) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False)
    del server
    assert process._must_report(LOST, store, ALONE)
    print("here", file=sys.stderr)
    assert capfd.readouterr().err == "here\n"


def test_flight_recorder_writes_beside_the_logs(tmp_path: Path) -> None:
    variables = flight_recorder({}, tmp_path)
    assert Path(variables["TORCH_FR_DUMP_TEMP_FILE"]).parent == tmp_path
    assert variables["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    set_by_user = {
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        "TORCH_NCCL_TRACE_BUFFER_SIZE": "9",
        "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/elsewhere/",
    }
    assert flight_recorder(set_by_user, tmp_path) == {}


LOST_PEER = replace(describe(RuntimeError("[gloo/pair.cc:537] Connection reset by peer"), 0), time=1.0)
KILLED = ProcessEnd(rank=2, pid=99, exit_code=-9)


def test_the_cause_is_an_exception_before_a_death_before_a_lost_peer(tmp_path: Path) -> None:
    crash = replace(describe(KeyError("bug"), 1), time=2.0)
    mistake = replace(describe(UserError("seed=x"), 3), time=3.0)
    for failed, deaths, first in (
        ([LOST_PEER, crash, mistake], [KILLED], "mlm: rank 1 failed:"),
        (
            [LOST_PEER],
            [ProcessEnd(0, 98, 1), KILLED],
            "mlm: rank 2 (pid 99) was killed by signal 9 (SIGKILL)",
        ),
        ([LOST_PEER], [ProcessEnd(0, 98, 1)], "mlm: rank 0 failed, probably because another rank is gone:"),
    ):
        text, code = report(failed, deaths, world_size=4, logs=tmp_path)
        assert text.splitlines()[0].startswith(first)
        assert code == 1


def test_rank_that_leaves_silently_is_named_with_its_exit_code_and_last_lines(tmp_path: Path) -> None:
    log_path(tmp_path, 1).write_text("about to allocate too much\n")
    text, code = report(
        [], [ProcessEnd(rank=1, pid=99, exit_code=7)], world_size=2, logs=tmp_path, note="; none was saved"
    )
    first, *rest = text.splitlines()
    assert first == "mlm: rank 1 (pid 99) left with exit code 7; none was saved"
    assert (rest, code) == (["its last lines:", "  about to allocate too much"], 1)


def test_a_command_without_checkpoints_promises_none(tmp_path: Path) -> None:
    waiting = replace(describe(LostPeer("rank 0 waits for rank 1"), 0), time=1.0)
    for failed, deaths in (([], [KILLED]), ([waiting], []), ([], [])):
        text, _ = report(failed, deaths, world_size=2, logs=tmp_path)
        assert "checkpoint" not in text
        assert str(tmp_path) not in text  # the folder of the launch, which is removed


@pytest.mark.parametrize(
    "error, lost",
    [
        (DistBackendError("NCCL error"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (UserError("nccl is not available: set dist.backend=gloo"), False),
    ],
)
def test_lost_peer_is_reported_by_type_and_text(error: Exception, lost: bool) -> None:
    assert describe(error, 0).lost_peer is lost
