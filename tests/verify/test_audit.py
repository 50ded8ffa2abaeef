"""`mlm audit`: what it finds in small subjects and in code that is not ours, and what it cannot judge."""

import sys
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from audit import table

from mlm.cli.entry import main
from mlm.cli.verify import check_audit
from mlm.parallel.mesh import ParallelContext
from mlm.util.errors import UserError
from mlm.verify.audit import host, search
from mlm.verify.audit.api import audit, content
from mlm.verify.audit.diagnose import MASK, Finding
from mlm.verify.audit.host import Outcome, audit_layouts, load_build
from mlm.verify.audit.record import KINDS
from mlm.verify.config import AuditConfig
from tests.ranks import run_on_ranks
from tests.slow import slow_but, thinned
from tests.verify import audited as audited_code

SUBJECTS = Path(__file__).parent / "audited.py"
STEPS = Path(__file__).parent / "audited_steps.py"


def outcomes(
    subject: str,
    *,
    file: Path = SUBJECTS,
    steps: int = 1,
    timeout_s: float = 30.0,
    **layout: int,
) -> list[Outcome] | UserError:
    """The audit of a subject, by a borrowed process that has imported torch."""
    config = AuditConfig(build=f"{file}:{subject}", steps=steps, timeout_s=timeout_s, **layout)
    (found,) = run_on_ranks(audited, config)
    return found


def first_outcome(subject: str, **options: Any) -> Outcome:
    """That of the smallest layout that parts, or of the layout."""
    found = outcomes(subject, **options)
    assert isinstance(found, list), found
    return found[0]


def audited(_: ParallelContext, config: AuditConfig) -> list[Outcome] | UserError:
    dist.destroy_process_group()  # ranks that are forked make their own
    try:
        return audit_layouts(load_build(config.build), config)
    except UserError as error:
        return error
    finally:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_audit_of_a_healthy_layout_finds_nothing() -> None:
    outcome = first_outcome("build", steps=2, tp=2, dp=2)
    assert outcome.finding is None
    assert outcome.compared > 60
    assert outcome.precision == "fp64"
    assert not outcome.skipped


@pytest.mark.parametrize(
    ("subject", "layout"),
    slow_but(
        {0, 2}, [("one_f_one_b", {"pp": 2}), ("dual_pipe_v", {"pp": 2}), ("one_sample_each", {"dp": 2})]
    ),
)
def test_micro_batches_are_compared_by_their_samples(subject: str, layout: dict[str, int]) -> None:
    """A pass that infers shapes, two micro-batches of four: the trainers are right, and all is compared."""
    outcome = first_outcome(subject, file=table.HERE / "schedules.py", **layout)
    assert outcome.finding is None
    assert outcome.compared > 240
    assert not outcome.skipped


@pytest.mark.slow
@pytest.mark.parametrize(
    ("subject", "layout", "kind"),
    [
        ("stage_adds_input", {"pp": 2}, "output"),
        ("gradients_not_scaled", {"pp": 2}, "reduced gradient"),
        ("replicas_read_the_same", {"dp": 2}, "output"),
        ("last_micro_batch_lost", {"dp": 2}, "reduced gradient"),
    ],
)
def test_mistakes_among_micro_batches_are_found(subject: str, layout: dict[str, int], kind: str) -> None:
    finding = first_outcome(subject, file=table.HERE / "schedules.py", **layout).finding
    assert finding is not None
    assert finding.kind == kind


def test_an_output_without_elements_is_compared() -> None:
    assert first_outcome("no_elements", tp=2).finding is None


def test_replicas_that_skip_other_samples_are_right() -> None:
    assert first_outcome("stochastic_depth", dp=2).finding is None


@pytest.mark.parametrize(
    ("mistake", "layout", "place", "cause"),
    slow_but(
        {1, 3, 6, 8, 10, 11},
        [
            ("forward", {"tp": 2}, "0", "missing all-reduce"),
            ("backward", {"tp": 2}, "1.norm", "missing all-reduce of a gradient"),
            ("replicas", {"dp": 2}, "all parameters", "gradients not reduced"),
            ("norm", {"tp": 2}, "norm", "norm misses parameters"),
            ("loss", {"dp": 2}, "loss", "wrong divisor"),  # alone: every gradient is right
            ("width", {"tp": 2}, "0.down", "another number"),  # by the line that divides
            ("statistics", {"tp": 2}, "0.down", "local statistics"),
            ("slice_", {"tp": 2}, "1", "missing all-reduce of a gradient"),
            ("slice_of_micro_batches", {"tp": 2}, "1", "missing all-reduce of a gradient"),
            ("mixed", {"tp": 2}, "1.norm", "missing all-reduce of a gradient"),
            ("doubled", {"tp": 2}, "1.norm", "doubled all-reduce of a gradient"),
            ("crossed_micro_batches", {"dp": 2}, "1", "other micro-batches"),
            ("other_heads", {"tp": 4}, "weight", "parts on other ranks"),
            ("paired_heads", {"tp": 2}, "out", "depends on the layout"),
        ],
    ),
)
def test_audit_names_the_place_and_the_cause(
    mistake: str, layout: dict[str, int], place: str, cause: str, tmp_path: Path
) -> None:
    finding = first_outcome(mistake, **layout).finding
    assert finding is not None
    assert (finding.place, finding.cause) == (place, cause)


@pytest.mark.parametrize(
    ("mistake", "place", "cause", "words"),
    slow_but(
        {0, 2, 4, 8},
        [
            (
                "seed",
                "embedding",
                "other samples",
                "2 of 2 samples of dp rank 1 occur nowhere on one process",
            ),
            ("micro_seed", "embedding", "other samples", "look at seeds and samplers"),
            ("micro_depth_local", "mixture.router", "random numbers", "the result of rand"),
            ("depth_local", "mixture.router", "random numbers", "the result of stack"),
            (
                "auxiliary_twice",
                "mixture",
                "another number",
                "mul at audited_steps.py:45 takes 2 in place of 1",
            ),
            ("temperature", "loss", "another number", "div at audited_steps.py:114 takes 2 in place of 1"),
            ("scale_part", "loss", "another number", "div at audited_steps.py:118 takes 2 in place of 1"),
            ("local_fractions", "loss", "local statistics", "the result of mean at audited_steps.py:38"),
            ("micro_count", "loss", "count of a rank", "18, 24 in place of 21: a count of this rank's"),
        ],
    ),
)
def test_samples_scalars_and_losses_of_a_step_get_their_cause(
    mistake: str, place: str, cause: str, words: str
) -> None:
    """With replicas and one process, whose step returns the loss of all."""
    finding = first_outcome(mistake, file=STEPS, dp=2).finding
    assert finding is not None
    assert (finding.place, finding.cause) == (place, cause)
    assert words in finding.sentence


@pytest.mark.parametrize(("subject", "layout"), [("build", {"tp": 2, "dp": 2}), ("micro", {"dp": 2})])
def test_scalars_that_modules_return_are_compared_and_right(subject: str, layout: dict[str, int]) -> None:
    outcome = first_outcome(subject, file=STEPS, **layout)
    assert outcome.finding is None
    assert not outcome.skipped


def audited_until_stopped(
    _: ParallelContext, config: AuditConfig, request: type[BaseException]
) -> list[Outcome] | UserError:
    def stop(*_: object) -> list[object]:
        raise request

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(host, "locations_to_trace", stop)
        return audited(_, config)


@pytest.mark.parametrize("request_", [KeyboardInterrupt, SystemExit])  # of Ctrl-C, and of SIGTERM
def test_an_audit_that_is_stopped_says_what_it_had_found_and_lists_wrong_tensors(
    request_: type[BaseException],
) -> None:
    config = AuditConfig(build=f"{SUBJECTS}:forward", steps=1, timeout_s=30.0, tp=2, dp=2)
    ((first, *others),) = run_on_ranks(audited_until_stopped, config, request_)
    assert first.sentence.startswith("PARTS at 0 (output, step 1")
    assert first.sentence.endswith("stopped before a cause was found")
    assert not others
    report = content(config, [first])
    assert isinstance(report, dict)
    listed = report["layouts"][0]["differences"]  # type: ignore[index]
    assert len(listed) == min(first.wrong, 50)
    assert (listed[0]["name"], listed[0]["kind"], listed[0]["step"]) == ("0", "output", 1)
    assert 0 < listed[0]["error"] < 10


class Terminal(StringIO):
    def isatty(self) -> bool:
        return True


def audited_without_time(_: ParallelContext, config: AuditConfig) -> tuple[list[Outcome] | UserError, str]:
    screen = Terminal()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MOST_STEPS", 0)
        patch.setattr(sys, "stderr", screen)
        patch.setenv("TERM", "xterm")
        return audited(_, config), screen.getvalue()


def test_search_that_its_limit_ends_at_once_says_so_and_a_terminal_shows_what_runs() -> None:
    config = AuditConfig(build=f"{SUBJECTS}:paired_heads", steps=1, timeout_s=30.0, tp=2)
    ((found, shown),) = run_on_ranks(audited_without_time, config)
    assert found[0].sentence.endswith("; the search ended at its limit of time, after 0 tries")
    assert "2 ranks: " in shown
    assert "1 rank: " in shown


def test_one_narrow_format_does_not_hide_an_error_elsewhere() -> None:
    outcome = first_outcome("decay_twice_beside_bf16_norms", file=table.HERE / "gqa_trainer.py", tp=2)
    assert outcome.finding is not None
    assert outcome.finding.cause == "weight decay"
    assert "bf16" in outcome.rounding


@pytest.mark.slow
def test_axes_are_audited_alone_where_the_layout_parts() -> None:
    found = outcomes("replicas", tp=2, dp=2)
    assert isinstance(found, list)
    parts = [(o.layout["dp"], o.layout["tp"], o.finding is not None) for o in found]
    assert parts == [(2, 1, True), (2, 2, True), (1, 2, False)]


def test_wrong_numbers_come_before_masks_and_smaller_layouts_before_larger(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def audit_one(_: object, layout: dict[str, int], *__: object) -> Outcome:
        kind = MASK if layout["cp"] == 1 else KINDS["output"]
        return Outcome(dict(layout), Finding("a", kind, 1, 1.0, "b", "c"))

    monkeypatch.setattr(host, "audit_layout", audit_one)
    found = audit_layouts(audited_code.build, AuditConfig(build="a.py:f", dp=2, cp=2))
    assert [(o.layout["dp"], o.layout["cp"]) for o in found] == [(1, 2), (2, 2), (2, 1)]


@pytest.mark.parametrize(
    ("subject", "words"),
    thinned(
        [
            ("needs_cuda", "the subject needs CUDA"),
            ("random", "the subject is not deterministic: the input of the whole module in step 1"),
            ("changes_batch", "the subject changes its batch in place"),
            ("absent", " has no absent; type FILE.py:FUNCTION"),
            ("HIDDEN", "the subject fails in build on one process: TypeError: 'int' object is not callable"),
            ("always_float64", "got Double; build it in torch.get_default_dtype()"),
            ("not_finite", "the output of 1 in step 1 is not finite on one process either"),
            (
                "no_loss",
                "fails in backward on one process: RuntimeError: grad can be implicitly created only",
            ),
        ],
        3,
    ),
)
def test_a_subject_that_cannot_be_judged_gets_one_line(subject: str, words: str) -> None:
    error = outcomes(subject, tp=2)
    assert isinstance(error, UserError)
    assert words in str(error)
    assert "\n" not in str(error)


@pytest.mark.parametrize(("mistake", "cause"), [("", ""), ("forward", "missing all-reduce")])
def test_a_subject_without_float64_runs_in_float32_and_says_what_that_hides(mistake: str, cause: str) -> None:
    outcome = first_outcome(f"grouped_{mistake}" if mistake else "grouped", tp=2)
    assert ("" if outcome.finding is None else outcome.finding.cause) == cause
    assert outcome.rounding.startswith("in float32, since the subject fails in forward of 2 on one process")
    assert "which hides errors below" in outcome.rounding


def test_a_parameter_whose_shapes_do_not_tell_gets_the_line_to_write() -> None:
    error = outcomes("uneven", tp=2)
    assert isinstance(error, UserError)
    assert str(error).startswith(
        "parameter 0.weight: [4, 3] on each rank does not make [4, 8] on one process"
    )
    assert str(error).endswith('placements={"0.weight": mlm.Split(1, "tp")}')


def test_a_file_that_cannot_be_imported_says_why(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import nosuchmodule\n\n\ndef build(mesh): ...\n")
    with pytest.raises(UserError, match="importing it fails: ModuleNotFoundError: No module named 'nosuch"):
        load_build(f"{tmp_path}/broken.py:build")


@pytest.mark.parametrize("sizes", [{}, {"tp": 40, "dp": 2}], ids=str)
def test_one_rank_and_more_than_a_host_runs_are_errors(sizes: dict[str, int]) -> None:
    (problem,) = check_audit(AuditConfig(build="a.py:f", **sizes))
    assert "an audit compares 2 to 64 ranks with one process" in problem


@pytest.mark.parametrize(
    ("subject", "words"),
    [
        ("crashes", ("rank 1 of 2 fails in loss", "IndexError", "other ranks do not")),
        pytest.param("dies", ("rank 1 of 2 died in build",), marks=pytest.mark.slow),
        pytest.param("deadlocks", ("deadlock", "rank 0: allreduce", "rank 1: loss"), marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_fails_is_named(subject: str, words: tuple[str, ...]) -> None:
    finding = first_outcome(subject, tp=2, timeout_s=10.0).finding
    assert finding is not None
    assert all(each in finding.sentence for each in words), finding.sentence


def test_what_is_wrong_before_ranks_end_is_told_first() -> None:
    finding = first_outcome("dies_after_a_wrong_step", tp=2).finding
    assert finding is not None
    assert (finding.cause, finding.kind, finding.step) == ("missing all-reduce", "output", 1)
    assert finding.sentence.endswith("; later rank 1 of 2 died in loss")


def test_what_a_trainer_counts_and_draws_itself_is_as_before_in_each_try() -> None:
    finding = first_outcome("counts_micro_batches", dp=2).finding
    assert finding is not None
    assert (finding.cause, finding.kind) == ("another number", "updated weight")
    assert "takes 0.3439 in place of 0.569533" in finding.sentence


def test_command_prints_a_table_writes_a_page_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    page = tmp_path / "audit.html"
    assert main(["audit", f"{SUBJECTS}:forward", "--tp", "2", f"out={page}"]) == 1
    shown = capsys.readouterr()
    assert "missing" in shown.out
    assert "PARTS at 0 (output" in shown.err
    assert "missing all-reduce" in page.read_text()


@pytest.mark.slow
def test_function_returns_the_report_of_the_command_and_raises_its_error() -> None:
    outcome = audit(audited_code.crashes, tp=2, steps=1)
    assert outcome.sentence.startswith(
        "PARTS at the layout's ranks (run, step 1) with tp=2: failed: rank 1 of 2"
    )
    with pytest.raises(UserError, match="the subject changes its batch in place"):
        audit(audited_code.changes_batch, tp=2, steps=1)
    with pytest.raises(UserError, match="no function of a module"):
        audit(audited_code.norm, tp=2)


JUDGED = {
    *("missing all-reduce", "missing all-reduce of a gradient", "gradients not reduced", "wrong divisor"),
    *("norm misses parameters", "norm repeats parameters", "norm of roots", "weight decay", "unscaled mean"),
    *("gradients not summed", "averaged instead of summed", "tied weights not summed", "other samples"),
    "micro-batches counted unequally",
}
"""Causes of other tests here, in test_patterns.py and in test_hypotheses.py."""
CASES = {case[-1]: case for case in table.BUGS if case[-1] not in JUDGED} | {
    case[0]: (*case, "") for case in table.HEALTHY if not case[0].startswith("held_out")
}


@pytest.mark.slow
@pytest.mark.parametrize(("file", "function", "layout", "cause"), CASES.values())
def test_audit_of_other_code_names_its_bugs_and_nothing_of_what_is_right(
    file: str, function: str, layout: dict[str, int], cause: str
) -> None:
    """A bug of each cause and a layout of each file; `scripts/audit/table.py` judges all."""
    row = table.judge(file, function, layout, cause)
    assert row["holds"], row["sentence"]
