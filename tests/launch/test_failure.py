"""The report of the cause among several failures."""

from dataclasses import replace
from pathlib import Path

import pytest
from torch.distributed import DistBackendError

from mlm.launch.failure import (
    ProcessEnd,
    describe,
    load_failures,
    log_path,
    report,
    save_failure,
)
from mlm.parallel.watch import LostPeer
from mlm.util.errors import ConfigError, UserError

CRASH = replace(describe(KeyError("bug"), 1), time=2.0)
LOST = replace(describe(RuntimeError("[gloo/pair.cc:537] Connection reset by peer"), 0), time=1.0)
MISTAKE = replace(describe(UserError("seed=x"), 3), time=3.0)
KILLED = ProcessEnd(rank=2, pid=99, exit_code=-9)


def test_exception_is_the_cause_before_deaths_and_lost_peers(tmp_path: Path) -> None:
    text, code = report([LOST, CRASH, MISTAKE], [KILLED], world_size=4, logs=tmp_path)
    assert (text.splitlines()[0], code) == ("mlm: rank 1 failed:", 1)


def test_death_is_the_cause_before_a_lost_peer(tmp_path: Path) -> None:
    text, code = report([LOST], [ProcessEnd(0, 98, 1), KILLED], world_size=4, logs=tmp_path)
    assert text.startswith("mlm: rank 2 (pid 99) was killed by signal 9 (SIGKILL)")
    assert code == 1


def test_lost_peer_is_reported_if_there_is_nothing_else(tmp_path: Path) -> None:
    text, _ = report([LOST], [ProcessEnd(0, 98, 1)], world_size=4, logs=tmp_path)
    assert text.splitlines()[0] == "mlm: rank 0 failed, probably because another rank is gone:"


def test_rank_that_leaves_silently_is_named_with_its_exit_code_and_last_lines(tmp_path: Path) -> None:
    log_path(tmp_path, 1).write_text("about to allocate too much\n")
    text, code = report(
        [], [ProcessEnd(rank=1, pid=99, exit_code=7)], world_size=2, logs=tmp_path, kept="; none was saved"
    )
    first, *rest = text.splitlines()
    assert first == "mlm: rank 1 (pid 99) left with exit code 7; none was saved"
    assert (rest, code) == (["its last lines:", "  about to allocate too much"], 1)


def test_a_command_without_checkpoints_promises_none(tmp_path: Path) -> None:
    waiting = replace(describe(LostPeer("rank 0 waits for rank 1"), 0), time=1.0)
    for failures, deaths in (([], [KILLED]), ([waiting], []), ([], [])):
        text, _ = report(failures, deaths, world_size=2, logs=tmp_path)
        assert "checkpoint" not in text
        assert str(tmp_path) not in text  # the folder of the launch, which is removed


def test_failure_survives_the_way_to_the_parent(tmp_path: Path) -> None:
    failure = describe(ConfigError(["tp=3", "dp=0"]), 7)
    save_failure(failure, tmp_path)
    assert load_failures(tmp_path) == [failure]


@pytest.mark.parametrize(
    "error, lost",
    [
        (DistBackendError("NCCL error"), True),
        (RuntimeError("Connection closed by peer [127.0.0.1]:1"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("no gloo here"), False),
        (UserError("nccl is not available: set dist.backend=gloo"), False),
    ],
)
def test_lost_peer_is_reported_by_type_and_text(error: Exception, lost: bool) -> None:
    assert describe(error, 0).lost_peer is lost
