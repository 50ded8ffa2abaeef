"""`mlm audit` of small subjects: what it finds, what it does not, and what it cannot judge."""

from pathlib import Path

import pytest

from mlm.config.cli.entry import main
from mlm.util.errors import UserError
from mlm.verify.audit.api import AuditReport, audit

HERE = Path(__file__).parent


def report(name: str, *, timeout_s: float = 30.0, **layout: int) -> AuditReport:
    return audit(f"{HERE / 'audited.py'}:{name}", timeout_s=timeout_s, **layout)


def test_audit_of_a_healthy_layout_finds_nothing() -> None:
    found = report("build", tp=2, dp=2)
    assert found.equal
    assert found.outcomes[0].compared > 60
    assert found.outcomes[0].precision == "fp64"
    assert not found.outcomes[0].skipped


@pytest.mark.parametrize(
    ("mistake", "layout", "place", "cause"),
    [
        ("forward", {"tp": 2}, "0.down", "missing all-reduce"),
        ("backward", {"tp": 2}, "1.norm", "missing all-reduce of a gradient"),
        ("replicas", {"dp": 2}, "all parameters", "gradients not reduced"),
        ("norm", {"tp": 2}, "norm", "norm misses parameters"),
    ],
)
def test_audit_names_the_place_and_the_cause(
    mistake: str, layout: dict[str, int], place: str, cause: str
) -> None:
    finding = report(mistake, **layout).smallest.finding
    assert finding is not None
    assert (finding.place, finding.cause) == (place, cause)


def test_the_smallest_layout_that_parts_is_named() -> None:
    found = report("replicas", tp=2, dp=2)
    assert not found.equal
    assert {axis: n for axis, n in found.smallest.layout.items() if n > 1} == {"dp": 2}


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("needs_cuda", "the subject needs CUDA"),
        ("random", "the subject is not deterministic: output of the module"),
        ("changes_batch", "the subject changes its batch in place"),
        ("absent", "name FILE.py:FUNCTION"),
    ],
)
def test_a_subject_that_cannot_be_judged_gets_one_line(subject: str, words: str) -> None:
    with pytest.raises(UserError, match=words) as error:
        report(subject, tp=2)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("crashes", ("rank 1 of 2 fails in", "IndexError", "other ranks do not")),
        ("dies", ("rank 1 of 2 died in build",)),
        ("deadlocks", ("deadlock", "rank 0: allreduce", "rank 1: loss")),
    ],
)
def test_a_rank_that_fails_is_named(subject: str, words: tuple[str, ...]) -> None:
    finding = report(subject, tp=2, timeout_s=3.0).smallest.finding
    assert finding is not None
    assert all(each in finding.sentence for each in words), finding.sentence


def test_command_prints_a_table_writes_a_page_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "audit.html"
    assert main(["audit", f"{HERE / 'audited.py'}:forward", "--tp", "2", f"out={page}"]) == 1
    shown = capsys.readouterr()
    assert "missing all-reduce" in shown.out
    assert "PARTS at 0.down" in shown.err
    assert "missing all-reduce" in page.read_text()
