"""A rank that does not answer is named with its host; clocks are compared through the exchange itself."""

import time

import pytest

from mlm.launch.doctor.findings import Control, different_versions
from mlm.util.errors import CheckFailedError
from tests.launch.doctor.trials import on_threads


def test_every_rank_gets_the_values_of_all() -> None:
    assert on_threads(lambda control: control.all_gather("x", control.rank)) == [[0, 1, 2]] * 3


def test_a_rank_that_hangs_is_named_on_all_others_within_the_time_out() -> None:
    def work(control: Control) -> str:
        control.all_gather("one", None)
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


def test_rank_0_is_named_by_the_others_where_its_store_does_not_answer() -> None:
    class Silent:
        def set(self, *_: object) -> None:
            pass

        def wait(self, *_: object) -> None:
            raise RuntimeError("wait timeout")

    control = Control(Silent(), 1, 2, 0.1)  # type: ignore[arg-type]
    control.hosts = ["a", "b"]
    with pytest.raises(CheckFailedError, match=r"^rank 0 \(host a\): no answer for 0.1 s"):
        control.all_gather("the disk", None)


@pytest.mark.parametrize("off", [-100.0, 0.0, 100.0])
def test_a_clock_that_is_off_is_measured_and_one_that_is_right_never_seems_off(off: float) -> None:
    def work(control: Control) -> float:
        if control.rank == 1:
            control.clock = lambda: time.time() + off
        return control.skew()

    right, wrong, other = on_threads(work)
    assert (right, other) == (0.0, 0.0)
    assert wrong == pytest.approx(off, abs=5)


def test_versions_that_differ_name_both_and_the_hosts() -> None:
    ours = {"mlm": "1", "torch": "2.11", "python": "3.12"}
    assert different_versions(["a", "b"], [ours, ours]) == ""
    found = different_versions(["a", "b", "b"], [ours, {**ours, "torch": "2.12"}, {**ours, "torch": "2.12"}])
    assert found == "torch 2.12 on ranks 1, 2 (host b), 2.11 on rank 0 (host a)"
