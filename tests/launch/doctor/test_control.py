"""A rank that does not answer is named with its host."""

import time

import pytest

from mlm.launch.doctor.findings import Control, different_versions
from mlm.parallel.watch import LostPeer
from mlm.util.errors import CheckFailedError
from tests.launch.doctor.trials import on_threads


def test_a_rank_that_hangs_is_named_on_all_others_within_the_time_out() -> None:
    def work(control: Control) -> str:
        assert control.all_gather("one", control.rank) == [0, 1, 2]
        if control.rank == 1:
            return ""
        with pytest.raises(CheckFailedError) as raised:
            control.all_gather("the disk", None)
        return str(raised.value)

    begin = time.monotonic()
    found = on_threads(work, timeout_s=0.3)
    assert time.monotonic() - begin < 10
    assert found[0] == found[2]
    assert found[0].startswith("rank 1 (host h1): no answer for 0.3 s (timeout_s) at the disk: hung or dead;")


def test_rank_0_stays_until_all_have_read_as_the_store_ends_with_it() -> None:
    def work(control: Control) -> float:
        control.all_gather("the report", None)
        if control.rank == 1:
            time.sleep(0.5)
        control.close()
        return time.monotonic()

    first, slow, _ = on_threads(work)
    assert first > slow - 0.1


def test_a_store_that_ended_with_rank_0_is_a_lost_peer() -> None:
    class Gone:
        def set(self, *_: object) -> None:
            raise RuntimeError("Connection reset by peer")

    control = Control(Gone(), 1, 2, 0.1)  # type: ignore[arg-type]
    with pytest.raises(LostPeer, match=r"rank 1: the disk over world \(ranks 0, 1\) broke: rank 0 is gone"):
        control.all_gather("the disk", None)


def test_versions_that_differ_name_both_and_the_hosts() -> None:
    ours = {"mlm": "1", "torch": "2.11", "python": "3.12"}
    assert different_versions(["a", "b"], [ours, ours]) == ""
    found = different_versions(["a", "b", "b"], [ours, {**ours, "torch": "2.12"}, {**ours, "torch": "2.12"}])
    assert found == "torch 2.12 on ranks 1, 2 (host b), 2.11 on rank 0 (host a)"
