"""scripts/reproduce.py: its commands compose, finished steps are kept, verdicts follow from the numbers."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from reproduce import norm_order, pipelines, pretraining, recomputation, report, runner, scaling
from reproduce.catalogue import EXPERIMENTS
from reproduce.experiment import Conclusion, Curves, Experiment, Settings, Step, Table, Verdict
from reproduce.main import main
from reproduce.main import reproduce as run_experiment
from reproduce.nanogpt import INPUT
from reproduce.results import (
    Record,
    Results,
    above,
    batch,
    change,
    is_lower,
    read_metrics,
    small_gpt2,
    spread,
    timed_stages,
)
from reproduce.runner import Runner

from mlm.cli.commands import COMMANDS
from mlm.cli.compose.composition import load_config
from mlm.util.errors import CheckFailedError, UserError
from tests.slow import thinned

ROOT = Path(__file__).resolve().parents[2]


def settings_in(folder: Path, **fields: Any) -> Settings:
    return Settings(**{"out": folder / "out", "cores": 2, **fields})


def all_settings(folder: Path) -> Settings:
    """Settings with which every experiment has steps."""
    (folder / INPUT).parent.mkdir(parents=True)
    (folder / INPUT).touch()
    return settings_in(folder, peer=folder)


def steps_of(experiment: Experiment, settings: Settings) -> list[Step]:
    return [step for stage in experiment.stages(settings) for step in stage]


# The catalogue.


@pytest.mark.parametrize("experiment", thinned(EXPERIMENTS, 2), ids=lambda each: each.name)
def test_steps_are_commands_that_compose(experiment: Experiment, tmp_path: Path) -> None:
    """One of all steps that set the same keys: they differ in numbers alone."""
    steps = steps_of(experiment, replace(all_settings(tmp_path), seeds=1))
    by_keys = {tuple(word.partition("=")[0] for word in step.words): step for step in steps}
    for step in by_keys.values():
        if step.words[0] != "mlm":
            continue
        commands = [each for each in COMMANDS if each.words == step.words[1 : 1 + len(each.words)]]
        command = max(commands, key=lambda each: len(each.words))
        load_config(command.config, list(step.words[1 + len(command.words) :]))


def test_a_name_stands_for_one_step_in_all_experiments(tmp_path: Path) -> None:
    settings, known = all_settings(tmp_path), dict[str, Step]()
    for experiment in EXPERIMENTS:
        for step in steps_of(experiment, settings):
            assert known.setdefault(step.name, step) == step


def test_timed_runs_take_turns_alone(tmp_path: Path) -> None:
    stages = timed_stages("made", {"a": (), "b": ()}, settings_in(tmp_path, seeds=2), 1)
    assert [[step.name for step in stage] for stage in stages] == [
        [f"made-{contender}-round{n}"] for n in (1, 2) for contender in "ab"
    ]


def test_without_a_name_the_experiments_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [e.name for e in EXPERIMENTS]


def test_a_dry_run_prints_commands_and_runs_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ptdp-bubble", "--dry-run", f"--out={tmp_path}"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1 + 3 * (len(pipelines.COUNTS) + len(pipelines.ALONE))
    assert lines[1].startswith("mlm pretrain model=gpt2_tiny ")
    assert not list(tmp_path.iterdir())


def test_all_skips_what_needs_files_of_the_users(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["all", "--dry-run", f"--out={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    assert "nanogpt-shakespeare is skipped" in printed
    assert main(["nanogpt-shakespeare", f"--out={tmp_path}"]) == 2


def test_an_unknown_name_is_an_error_that_lists_the_known() -> None:
    with pytest.raises(SystemExit) as caught:
        main(["v1-figure99"])
    assert caught.value.code == 2


@pytest.mark.slow
def test_the_entry_runs_from_another_folder(tmp_path: Path) -> None:
    """The script and the package beside it have one name: Python must take the package."""
    command = [sys.executable, ROOT / "scripts" / "reproduce.py", "ptdp-bubble", "--dry-run"]
    ran = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True)
    assert ran.stdout.count("\nmlm pretrain ") == 21


# Running: each step once, kept, continued.

WRITE = "import sys; open(sys.argv[1], 'x').write(sys.argv[2])"


def writing(name: str, content: str = "{}") -> Step:
    """A step that writes a file, and fails if it is there already."""
    result = f"results/{name}.json"
    return Step(name, ("python", "-c", WRITE, result, content), result, 1)


def ran(folder: Path, *stages: Sequence[Step]) -> list[str]:
    """Run what is left of stages; return the lines that were told."""
    lines = list[str]()
    Runner(folder, stages, 2, lines.append).run()
    return lines


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "POLL_S", 0.01)


def test_finished_steps_are_kept(tmp_path: Path) -> None:
    stages = [writing("one"), writing("two")], [writing("three")]
    assert len(ran(tmp_path, *stages)) == 3
    assert ran(tmp_path, *stages) == []
    (tmp_path / "results/two.json").unlink()
    assert [line.partition(":")[0] for line in ran(tmp_path, *stages)] == ["two"]


def test_a_stage_waits_for_the_one_before(tmp_path: Path) -> None:
    slow = Step("slow", ("python", "-c", "import time; time.sleep(0.3); open('first', 'w')"), "first", 1)
    after = Step("after", ("python", "-c", "open('first'); open('second', 'w')"), "second", 1)
    ran(tmp_path, [slow], [after])


def test_a_step_with_other_settings_is_not_taken_for_the_same(tmp_path: Path) -> None:
    ran(tmp_path, [writing("one", "1")])
    with pytest.raises(UserError, match="step one ran with other settings"):
        ran(tmp_path, [writing("one", "2")])


@pytest.mark.parametrize(
    "program,message",
    [("import sys; print('tp=7: no'); sys.exit(2)", "ended with 2: tp=7: no"), ("pass", "stopped")],
)
def test_a_step_that_fails_or_leaves_nothing_is_not_remembered(
    tmp_path: Path, program: str, message: str
) -> None:
    with pytest.raises(CheckFailedError, match=message):
        ran(tmp_path, [Step("one", ("python", "-c", program), "result", 1)])
    assert not (tmp_path / "steps/one.json").exists()


@pytest.mark.parametrize("code,kept", [(1, True), (143, False)])
def test_a_run_that_diverges_is_a_result_and_a_killed_one_is_not(
    tmp_path: Path, code: int, kept: bool
) -> None:
    program = f"import sys; print('step 3: gradients are not finite'); sys.exit({code})"
    step = Step("deep", ("python", "-c", program), "runs/deep", 1, may_diverge=True)
    if kept:
        assert "diverged" in ran(tmp_path, [step])[0]
        assert Runner(tmp_path, [[step]], 2, print).records["deep"].code == code
    else:
        with pytest.raises(CheckFailedError):
            ran(tmp_path, [step])


def test_an_unfinished_training_run_continues(tmp_path: Path) -> None:
    step = Step("run", ("mlm", "pretrain", "train.steps=12"), "run", 1)
    write_run(tmp_path / "run", losses=[1.0] * 11)
    assert not runner.is_complete(step, tmp_path / "run")
    write_run(tmp_path / "run", losses=[1.0] * 12)
    assert runner.is_complete(step, tmp_path / "run")


@pytest.mark.slow
def test_a_signal_stops_what_runs(tmp_path: Path) -> None:
    """SIGTERM reaches the step, and the script says how to continue."""
    program = (
        "import sys; sys.path[:0] = [sys.argv[1]]; from reproduce import main, experiment, catalogue; "
        "text = \"import os, time; open('pid', 'w').write(str(os.getpid())); time.sleep(60)\"; "
        "words = ('python', '-c', text); "
        "stages = lambda settings: [[experiment.Step('sleeps', words, 'done', 1)]]; "
        "import dataclasses; first = dataclasses.replace(catalogue.EXPERIMENTS[0], stages=stages); "
        "main.EXPERIMENTS = (first,); sys.exit(main.main([first.name, '--out=' + sys.argv[2]]))"
    )
    command = [sys.executable, "-c", program, str(ROOT / "scripts"), str(tmp_path)]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 60
    while not ((tmp_path / "pid").exists() and (tmp_path / "pid").read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "the same command continues" in errors
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


# Results and reports.


def write_run(folder: Path, losses: Sequence[float] = (), **validation: Mapping[int, float]) -> None:
    """Write metrics of a run: a record for each step, and validations by key."""
    folder.mkdir(parents=True, exist_ok=True)
    records: list[dict[str, Any]] = [
        {"kind": "step", "step": step, "loss": loss, "step_time_s": 0.5, "tflops": 2.0, "grad_norm": 3.0}
        for step, loss in enumerate(losses, 1)
    ]
    for key, values in validation.items():
        records += [{"kind": "validation", "step": step, key: loss} for step, loss in values.items()]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    read_metrics.cache_clear()


def results_of(experiment: Experiment, settings: Settings) -> Results:
    """Results of an experiment whose steps are all done."""
    stages = experiment.stages(settings)
    names = [step.name for stage in stages for step in stage]
    return Results(experiment.name, settings, stages, dict.fromkeys(names, Record((), 0, 1.0, "", "")))


def test_steps_that_a_resumed_run_repeats_count_once(tmp_path: Path) -> None:
    write_run(tmp_path, losses=[1.0, 2.0])
    line = json.dumps({"kind": "step", "step": 2, "loss": 5.0})
    (tmp_path / "metrics.jsonl").open("a").write(line + "\n")
    assert [record["loss"] for record in read_metrics(tmp_path)["step"]] == [1.0, 5.0]


@pytest.mark.parametrize(
    "rounds,expected",
    [((1.1, 1.2, 1.3), True), ((0.9, 0.8, 0.7), False), ((0.9, 1.1, 1.2), None), ((1.1, 1.2), None)],
)
def test_a_difference_counts_if_three_rounds_all_show_it(
    rounds: tuple[float, ...], expected: bool | None
) -> None:
    assert above(rounds, 1.0) is expected
    assert is_lower([1.0] * len(rounds), rounds) is expected


def test_numbers_are_shown_with_their_spread() -> None:
    assert spread([1.0, 3.0, 2.0]) == "2 (1 to 3)"
    assert change([1.1, 1.12, 1.2]) == "+12.0 % (+10.0 to +20.0)"
    assert change([0.9]) == "-10.0 %"


def made_conclusion(results: Results) -> Conclusion:
    value = results.json("one")["value"]
    return Conclusion(
        verdict=Verdict.NOTHING,
        seen=f"the value is {value}",
        limits=["nothing else"],
        tables=[Table(title="Values", headings=("a | b", "value"), rows=[("x|y", 0.123456), ("n", 1234)])],
        curves=Curves(
            name="values", title="Values", x_label="x", y_label="y", lines={"ours": [(1, [1.0, 2.0, 3.0])]}
        ),
    )


MADE = Experiment(
    name="v1-made",
    title="A made experiment",
    source="a paper, figure 1",
    claim="Values are 3.",
    minutes=0.1,
    stages=lambda settings: [[writing("one", '{"value": 3}')]],
    conclude=made_conclusion,
)


def test_a_report_has_the_verdict_the_tables_and_the_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = settings_in(tmp_path)
    run_experiment(MADE, MADE.stages(settings), settings, dry=False)
    folder = tmp_path / "out/v1-made"
    text = (folder / "report.md").read_text()
    assert "**Verdict:** shows nothing about the paper's claim." in text
    assert "| x\\|y | 0.1235 |\n| n | 1,234 |" in text
    assert "![Values](values.png)" in text
    assert (folder / "values.png").read_bytes().startswith(b"\x89PNG")
    result = json.loads((folder / "result.json").read_text())
    assert (result["verdict"], result["seen"]) == ("nothing", "the value is 3")
    assert list(result["steps"]) == ["one"]

    monkeypatch.setattr(report, "KEPT", tmp_path / "kept")
    (tmp_path / "kept").mkdir()
    report.keep(tmp_path / "out", ["v1-made", "v1-other"])
    assert {path.name for path in (tmp_path / "kept/v1-made").iterdir()} == {
        *("report.md", "result.json", "values.png")
    }
    assert "**[v1-made](v1-made/report.md)**: a paper, figure 1. Values are 3." in report.index(["v1-made"])


def test_kept_reports_are_those_of_the_experiments() -> None:
    names = [experiment.name for experiment in EXPERIMENTS]
    assert {path.parent.name for path in report.KEPT.glob("*/result.json")} <= set(names)
    assert (report.KEPT / "README.md").read_text() == report.index(names)
    for name in names:
        if (report.KEPT / name).is_dir():
            kept = json.loads((report.KEPT / name / "result.json").read_text())
            assert (report.KEPT / name / "report.md").read_text() == report.markdown(kept)


# Verdicts, and tables from known runs.

N, A, P, C = Verdict.NOTHING, Verdict.AGREES, Verdict.PARTLY, Verdict.CONTRADICTS
LOW, MID, HIGH = [1.0, 1.1, 1.2], [2.0, 2.1, 2.2], [3.0, 3.1, 3.2]


@pytest.mark.parametrize(
    "verdict,expected",
    [
        (scaling.verdict({(1, 1): [1.0] * 3, (2, 1): [0.8] * 3}, 2), P),
        (scaling.verdict({(1, 1): [1.0] * 3, (2, 1): [0.4] * 3}, 2), C),
        (scaling.verdict({(1, 1): [1.0] * 3, (4, 1): [0.8] * 3}, 2), N),
        (scaling.verdict({(2, 1): [0.9] * 3, (2, 2): [0.8] * 3}, 4), A),
        (pretraining.figure6_verdict([HIGH, MID, LOW]), A),
        (pretraining.figure6_verdict([HIGH, LOW, LOW]), P),
        (pretraining.figure6_verdict([LOW, HIGH]), C),
        (pretraining.figure6_verdict([HIGH[:2], LOW[:2]]), N),
        (pipelines.bubble_verdict({1: [1.0] * 3, 16: [0.06] * 3}, [1.0] * 3), A),
        (pipelines.bubble_verdict({1: [1.0] * 3, 16: [0.06] * 3}, [1.5] * 3), P),
        (pipelines.bubble_verdict({1: [0.1] * 3, 16: [0.2] * 3}, [1.0] * 3), C),
        (pipelines.bubble_verdict({1: [1.0], 16: [0.06]}, [1.0]), N),
        (pipelines.interleaving_verdict([1.1] * 3, [1.02] * 3), A),
        (pipelines.interleaving_verdict([1.1] * 3, [1.2] * 3), P),
        (pipelines.interleaving_verdict([0.9] * 3, [1.0] * 3), C),
        (pipelines.micro_batch_verdict([1.5] * 3, [1.1] * 3, 4), A),
        (pipelines.micro_batch_verdict([1.5] * 3, [1.0] * 3, 8), P),
        (pipelines.micro_batch_verdict([0.9] * 3, [1.0] * 3, 8), C),
        (recomputation.time_verdict([1.36] * 3, [1.04] * 3, [1.14] * 3), P),
        (recomputation.time_verdict([1.36] * 3, [1.04] * 3, [1.02] * 3), A),
        (recomputation.time_verdict([1.36] * 3, [1.4] * 3, [1.02] * 3), C),
        (recomputation.memory_verdict({"a": 0.001, "b": -0.006}, 6.2), A),
        (recomputation.memory_verdict({"a": 0.001, "b": 0.2}, 6.2), P),
    ],
)
def test_the_verdict_follows_from_the_numbers(verdict: Verdict, expected: Verdict) -> None:
    assert verdict is expected


def norm_outcomes(post: float, pre: float, shared_post: str = "learn") -> norm_order.Outcomes:
    """Outcomes of all runs that end with these losses, those of 48 layers with norm=post as given."""
    outcomes = {}
    for trial in norm_order.trials(1):
        loss = post if trial.order == "post" else pre
        is_deep = (trial.layers, trial.order, trial.rate) == (48, "post", norm_order.SHARED)
        each = norm_order.Outcome(loss, 1.0, shared_post if is_deep else "learn")
        outcomes[trial.layers, trial.order, trial.rate] = [each] * 3
    return outcomes


@pytest.mark.parametrize(
    "outcomes,expected",
    [
        (norm_outcomes(6.0, 5.9, "diverge"), A),
        (norm_outcomes(5.9, 6.0, "diverge"), P),
        (norm_outcomes(6.0, 5.9), P),
        (norm_outcomes(5.9, 6.0), C),
        (norm_outcomes(6.0, 6.0), N),
    ],
)
def test_norm_order_agrees_if_pre_alone_trains_and_is_better(
    outcomes: norm_order.Outcomes, expected: Verdict
) -> None:
    assert norm_order.verdict(outcomes) is expected


@pytest.mark.parametrize(
    "losses,failed,kind",
    [
        ([6.3, 5.9], False, "learn"),
        ([6.3, 6.22], False, "stay at token frequencies"),
        ([5.9, 6.3], False, "diverge"),
        ([5.9, float("nan")], False, "diverge"),
        ([5.9], True, "diverge"),
        ([], False, "diverge"),
    ],
)
def test_a_run_learns_if_it_is_below_token_frequencies(losses: list[float], failed: bool, kind: str) -> None:
    assert norm_order.outcome(losses, [1.0], 6.24, failed=failed).kind == kind


def test_bubbles_follow_from_step_times() -> None:
    """A step of c/2 + (m + 1) b idles one micro-batch: the optimizer's c is of one rank."""
    times = {m: [0.5 + (m + 1) * 2.0] for m in pipelines.COUNTS}
    shares, idle = pipelines.bubbles(times, {m: [1.0 + m * 4.0] for m in pipelines.ALONE})
    assert idle == pytest.approx([1.0])
    assert [each for m in pipelines.COUNTS for each in shares[m]] == pytest.approx(
        [1 / m for m in pipelines.COUNTS]
    )


def test_figure6_compares_perplexities_at_equal_tokens(tmp_path: Path) -> None:
    settings = settings_in(tmp_path)
    for n, size in enumerate(pretraining.MODELS):
        for seed in (1, 2, 3):
            curve = {500: 6.0 - n, 2500: 5.0 - n + seed / 1000}
            write_run(settings.out / "runs" / size.run(seed), loss=curve)
    conclusion = pretraining.figure6_conclusion(results_of(EXPERIMENTS[1], settings))
    assert conclusion.verdict is Verdict.AGREES
    assert conclusion.seen.endswith("with 20 % of its tokens.")
    assert conclusion.tables[0].rows[2][1] == "149 (149 to 149)"


@pytest.mark.slow
def test_an_experiment_runs_from_end_to_end(tmp_path: Path) -> None:
    """A run of `mlm pretrain` and what follows from its step times; at the second call nothing runs."""
    tiny = small_gpt2(num_layers=1, hidden_size=8, num_heads=1, max_positions=8, vocab_size=32)

    def conclude(results: Results) -> Conclusion:
        table = Table(title="Seconds", headings=["run", "s"], rows=[["one", results.seconds("one")[0]]])
        return Conclusion(verdict=Verdict.NOTHING, seen="one run", limits=[], tables=[table])

    experiment = replace(
        MADE,
        stages=lambda settings: timed_stages(MADE.name, {"one": (*tiny, *batch(1))}, settings, 0.1),
        conclude=conclude,
    )
    settings = settings_in(tmp_path, seeds=1)
    run_experiment(experiment, experiment.stages(settings), settings, dry=False)
    result = json.loads((settings.out / MADE.name / "result.json").read_text())
    assert 0 < result["tables"][0]["rows"][0][1] < 10
    logged = (settings.out / "steps" / "v1-made-one-round1.log").stat().st_mtime_ns
    run_experiment(experiment, experiment.stages(settings), settings, dry=False)
    assert (settings.out / "steps" / "v1-made-one-round1.log").stat().st_mtime_ns == logged
