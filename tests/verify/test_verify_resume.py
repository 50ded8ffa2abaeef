"""`mlm verify-resume`: real runs that are killed and resumed, its settings, its folder and its exit codes."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.folders import step_name
from mlm.cli import main
from mlm.cli.compose.composition import load_config
from mlm.cli.verify import check_verify_resume
from mlm.launch import child_run
from mlm.optim.schedule import learning_rate
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError
from mlm.util.ownership import claim_folder
from mlm.verify import resume as resume_runs
from mlm.verify.config import KillPlan, VerifyResumeConfig
from mlm.verify.resume import Rehearsal, first_step, preflight
from tests.checkpoint.native.helpers import edit_manifest, save, weights
from tests.cli.doubles import Cli, make_cli

cli = pytest.fixture(make_cli)

SMALL = [
    *("model.hidden_size=16", "model.vocab_size=61", "data.seq_length=16", "train.global_batch_size=8"),
    *("steps=2", "optimizer.lr=1e-3", "dist.threads_per_rank=1"),
]
EXPERTS = ["model=moe_tiny", "model.num_heads=4", "model.max_positions=32"]
DROPOUT = ["model.hidden_dropout=0.1", "model.attention_dropout=0.1"]
KILL = 30
"""Steps to the kill, and again to the end: in fewer a run is often over before it is killed."""


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in [*child_run.LAUNCHER_VARIABLES, *(k for k in os.environ if k.startswith("SLURM_"))]:
        monkeypatch.delenv(key, raising=False)


def verify_resume(*overrides: str) -> VerifyResumeConfig:
    config = load_config("verify_resume", overrides)
    assert isinstance(config, VerifyResumeConfig)
    return config


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that the real command left with dropout, and in `killed` what it resumed."""
    out = tmp_path_factory.mktemp("verify") / "out"
    run_to_end = Rehearsal.run_to_end

    def keep_and_run(self: Rehearsal, name: str) -> None:
        if name == "resumed":
            shutil.copytree(out / "resumed", out.parent / "killed")
        run_to_end(self, name)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Rehearsal, "run_to_end", keep_and_run)
        for key in child_run.LAUNCHER_VARIABLES:
            patch.delenv(key, raising=False)
        assert main(["verify-resume", *SMALL, *DROPOUT, f"steps={KILL}", f"out={out}"]) == 0
    return out


@pytest.mark.slow
def test_a_killed_run_with_dropout_resumes_bit_for_bit(checked: Path) -> None:
    killed = checked.parent / "killed/checkpoints/latest"  # with its second checkpoint unpublished
    assert killed.read_text().split()[0] == step_name(KILL)
    result = json.loads((checked / "verify-resume.json").read_text())
    assert result["equal"] is True
    assert result["verdict"].startswith("EQUAL bit for bit: ")
    assert result["starts_of_the_resumed_run"] == [0, KILL]
    numbers = result["numbers"]
    assert [each["step"] for each in numbers if each["name"] == "loss"] == list(range(1, 2 * KILL + 1))
    assert all(each["straight"] == each["resumed"] for each in numbers)
    (samples,) = (each for each in numbers if each["name"].startswith("consumed_samples"))
    assert samples["resumed"] == 2 * KILL * 8
    assert (result["tensors"]["compared"], result["tensors"]["differing"]) == (84, [])


@pytest.mark.slow
def test_a_counter_altered_before_resuming_is_different_from_the_first_step_on(
    checked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Eight samples further in the data: found at the step after the kill."""
    out = tmp_path / "out"

    run_to_end = Rehearsal.run_to_end

    def straight(self: Rehearsal, name: str) -> None:
        if name == "resumed":
            return run_to_end(self, name)
        shutil.copytree(checked / "straight", out / "straight")

    def killed(self: Rehearsal) -> str:
        shutil.copytree(checked.parent / "killed", out / "resumed")
        skip = out / "resumed/checkpoints" / step_name(KILL)
        edit_manifest(skip, lambda body: body["state"].update(consumed_samples=(KILL + 1) * 8))
        return "killed"

    monkeypatch.setattr(Rehearsal, "run_to_end", straight)
    monkeypatch.setattr(Rehearsal, "run_killed", killed)
    assert main(["verify-resume", *SMALL, *DROPOUT, f"steps={KILL}", f"out={out}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"DIFFERENT: the first difference is in loss of step {KILL + 1}" in line
    assert json.loads((out / "verify-resume.json").read_text())["equal"] is False


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["dp=2", "zero=2", *DROPOUT, "precision=fp16"],
        ["pp=2", *DROPOUT, "checkpoint.asynchronous=false", "schedule=cosine_v1", "schedule.warmup_steps=3"],
        [*EXPERTS, "dp=2", "ep=2"],
    ],
    ids=" ".join,
)
def test_runs_killed_and_resumed_at_other_settings_are_equal_bit_for_bit(
    tmp_path: Path, words: list[str]
) -> None:
    assert main(["verify-resume", *SMALL, *words, f"out={tmp_path / 'out'}"]) == 0
    result = json.loads((tmp_path / "out/verify-resume.json").read_text())
    assert result["verdict"].startswith("EQUAL bit for bit")


@pytest.mark.slow
def test_ctrl_c_ends_the_runs_and_leaves_with_130(tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["verify-resume", *SMALL, "dp=2", "steps=100000", f"out={out}"]
    process = subprocess.Popen([sys.executable, "-m", "mlm", *words], stderr=subprocess.PIPE, text=True)
    end = time.monotonic() + 100
    while not (out / "straight/metrics.jsonl").exists() and time.monotonic() < end:
        time.sleep(0.1)
    started = processes_with(str(out))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err) == (130, "")
    assert len(started) >= 2  # this command and the one it runs
    assert processes_with(str(out)) == []


def processes_with(words: str) -> list[int]:
    """Processes that have these words on their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if words in path.read_text(errors="replace"):
                found.append(int(path.parent.name))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("latest", [2, 4])
def test_a_run_that_is_always_over_before_the_kill_is_tried_again_then_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, latest: int
) -> None:
    """It ends well with its last checkpoint, or asked to stop with an earlier one: neither was killed."""
    started: list[list[str]] = []

    @contextmanager
    def over_at_once(words: list[str], log: Path) -> Iterator[Any]:
        started.append(words)
        checkpoints = tmp_path / "resumed/checkpoints"
        checkpoints.mkdir(parents=True)
        (checkpoints / "latest").write_text(step_name(latest))
        process = subprocess.Popen(["true"])
        process.wait()
        yield process

    monkeypatch.setattr(resume_runs, "child_run", over_at_once)
    claim_folder(tmp_path, "verify-resume")
    (tmp_path / "straight").mkdir()
    saved = [json.dumps({"kind": "saved", "step": step, "time": step / 100}) for step in (2, 4)]
    (tmp_path / "straight/metrics.jsonl").write_text("\n".join(saved) + "\n")
    rehearsal = Rehearsal(verify_resume("steps=2", f"out={tmp_path}"), KillPlan(0, 2, 4))
    with pytest.raises(UserError, match=r"steps=2: 5 runs were over .* such as steps=8"):
        rehearsal.run_killed()
    assert len(started) == 5


@pytest.mark.parametrize("first,kill,last", [(0, 4, 8), (1000, 1004, 1008), (1001, 1004, 1008)])
def test_the_kill_follows_a_step_that_is_saved(first: int, kill: int, last: int) -> None:
    """Checkpoints come at multiples of k, also if the run continues another's."""
    assert verify_resume("steps=4").plan(first) == KillPlan(first, kill, last)


def test_a_run_from_a_checkpoint_is_counted_from_its_step(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoints", 7, weights())
    assert first_step(verify_resume(f"checkpoint.from_run={tmp_path}")) == 7
    assert first_step(verify_resume(f"ckpt={tmp_path}")) == 0
    edit_manifest(path, lambda body: body["state"].update(weights_only=True))
    with pytest.raises(UserError, match="holds weights alone"):
        first_step(verify_resume(f"checkpoint.from_run={tmp_path}"))


@pytest.mark.parametrize(("warmup_steps", "decay_steps"), [("null", "60"), ("3", "null")])
def test_learning_rates_are_those_of_the_whole_run(warmup_steps: str, decay_steps: str) -> None:
    config = verify_resume(
        *("schedule=cosine_v1", f"schedule.warmup_steps={warmup_steps}", "train.steps=250"),
        *(f"schedule.decay_steps={decay_steps}", "steps=4"),
    )
    short = config.training_run("out", 8)
    for step in range(1, 9):
        rates = [learning_rate(step, c.optimizer, c.schedule, c.train.steps) for c in (config, short)]
        assert rates[0] == rates[1]


def test_a_training_run_is_saved_and_reported_as_the_check_needs() -> None:
    run = verify_resume("steps=4", "checkpoint.keep_every=3", "log.every=7").training_run("there", 8)
    assert type(run) is PretrainConfig
    assert (run.out, run.train.steps, run.train.validate_every, run.log.every) == ("there", 8, 0, 1)
    assert (run.checkpoint.save_every, run.checkpoint.keep_last, run.checkpoint.keep_every) == (4, 2, 0)


def test_a_named_corpus_is_read(tmp_path: Path) -> None:
    assert verify_resume(f"data.path={tmp_path}").training_run("x", 8).data.kind == "indexed"
    assert verify_resume().training_run("x", 8).data.kind == "synthetic"


def test_a_problem_ends_with_2_and_one_line(cli: Cli) -> None:
    assert cli("verify-resume --tp 3") == 2
    assert cli.err.startswith("mlm verify-resume: tp=3 does not divide")
    assert len(cli.err.splitlines()) == 1


def test_as_a_rank_of_a_launcher_it_is_rejected(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for key, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "h", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(key, value)
    (problem,) = preflight(verify_resume(f"out={tmp_path}"))
    assert "start this plainly" in problem


def test_a_folder_with_its_files_is_taken_again_and_a_users_own_are_not(tmp_path: Path) -> None:
    config = verify_resume(f"out={tmp_path}")
    (tmp_path / "straight").write_text("mine")
    assert "holds straight, which mlm did not write" in preflight(config)[0]
    (tmp_path / "straight").unlink()
    claim_folder(tmp_path, "verify-resume")
    (tmp_path / "straight").mkdir()
    assert preflight(config) == []


def test_other_hosts_are_no_remedy() -> None:
    """The ranks of a run that is killed are all on this one."""
    (problem,) = check_verify_resume(verify_resume("dp=128", "train.global_batch_size=256"))
    assert problem.startswith("tp=1 * pp=1 * dp=128 = 128 ranks, but a CPU host runs at most 64; use dp=")
    assert "torchrun" not in problem
