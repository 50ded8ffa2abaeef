"""The check of a GPU: order, time limits, resuming and records with fake steps; one for real on the CPU."""

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, cast

import gpu_check
import pytest
import torch
from gpu import speed
from gpu.catalogue import STEPS, Step
from gpu.child import Case
from gpu.child import run as run_child
from gpu.commands import reason_in
from gpu.record import Record
from gpu.runner import python_environment, run_limited, run_steps
from gpu.shapes import freed, gpt2, spec_of
from gpu.stacks import STACKS
from gpu.waits import noted_waits

from mlm.cli.compose.composition import load_config
from mlm.models.shape import count_parameters
from mlm.parallel import collectives
from mlm.parallel.mesh import Axis

ROOT = Path(__file__).resolve().parents[2]
IDENTITY = {"code": "a", "torch": "2.11"}
FAST = "import sys, json; print(json.dumps({'table': 't', 'row': {'x': 1}}), file=open(sys.argv[1], 'a'))"
HANGING = FAST + "\nimport time; time.sleep(60)"
SPAWNING = """
import subprocess, sys
child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'], start_new_session=True)
print(child.pid, flush=True)
child.wait()
"""


def step(name: str, code: str = FAST, limit_s: float = 30.0, likely_s: float = 0.0) -> Step:
    """A fake step: its `run` is the program."""
    return Step(name, f"title of {name}", code, limit_s, likely_s)


def command(one: Step, results: Path) -> Sequence[str]:
    return [sys.executable, "-c", one.run, str(results)]


class Check:
    """Runs fake steps in a folder, as calls of the script one after the other."""

    def __init__(self, out: Path) -> None:
        self.out = out
        self.said: list[str] = []

    def run(
        self, *steps: Step, seconds: float = 60.0, again: Sequence[str] = (), code: str = "a"
    ) -> tuple[int, Record]:
        """One call; its exit code and the record as it is on disk afterwards."""
        self.said.clear()
        identity = {**IDENTITY, "code": code}
        exit_code = run_steps(
            steps,
            Record(self.out, steps, identity),
            command,
            environment={"PATH": "/usr/bin:/bin"},
            end=time.monotonic() + 5 + seconds,
            again=again,
            say=self.said.append,
            log=self.out / "log",
        )
        return exit_code, Record(self.out, steps, identity)

    def begun(self) -> list[str]:
        """Steps that ran in the last call."""
        return [line.split()[1].rstrip(":") for line in self.said if line.startswith("begins")]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    return Check(tmp_path)


def test_second_call_runs_what_is_not_recorded_for_this_code_or_named(check: Check) -> None:
    check.run(step("a"))
    assert check.run(step("a"), step("b"))[0] == 0
    assert check.begun() == ["b"]
    check.run(step("a"), step("b"), again=["b"])
    assert check.begun() == ["b"]
    check.run(step("a"), code="b")
    assert check.begun() == ["a"]


def test_failed_step_is_recorded_with_its_output_and_others_follow(check: Check) -> None:
    code, record = check.run(step("a", "print('why'); raise SystemExit(3)"), step("b"))
    assert (code, record.steps["a"]["state"], record.steps["a"]["tail"]) == (1, "failed", ["why"])
    assert record.steps["b"]["state"] == "ok"
    assert check.run(step("a"), step("b"))[0] == 1  # and stays so until it is repeated
    assert check.begun() == []


def test_step_over_its_limit_is_killed_and_keeps_its_rows(check: Check) -> None:
    code, record = check.run(step("a", HANGING, limit_s=1.0), step("b"))
    assert (code, record.steps["a"]["state"], record.rows("a", "t")) == (1, "timed out", [{"x": 1}])
    assert record.steps["b"]["state"] == "ok"


@pytest.mark.slow
def test_children_in_sessions_of_their_own_die_with_their_step(check: Check) -> None:
    _, record = check.run(step("a", SPAWNING, limit_s=1.5))
    (pid,) = record.steps["a"]["tail"]
    assert not _is_alive(int(pid))


def _is_alive(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"


def test_step_that_does_not_fit_is_not_reached_and_runs_in_the_next_call(check: Check) -> None:
    code, record = check.run(step("a", likely_s=100.0), step("b"), seconds=20.0)
    assert (code, record.steps["a"]["state"], check.begun()) == (0, "not reached", ["b"])
    check.run(step("a", likely_s=100.0), step("b"), seconds=120.0)
    assert check.begun() == ["a"]


@pytest.mark.slow
def test_step_cut_short_by_the_end_of_the_check_runs_in_the_next_call(check: Check) -> None:
    code, record = check.run(step("a", HANGING), seconds=1.0)
    assert (code, record.steps["a"]["state"]) == (0, "cut short")
    check.run(step("a"))
    assert check.begun() == ["a"]


def test_torn_last_line_of_a_killed_step_is_left_out(check: Check) -> None:
    torn = FAST + "; open(sys.argv[1], 'a').write('{\"table\": ')"
    _, record = check.run(step("a", torn))
    assert record.rows("a", "t") == [{"x": 1}]


def test_files_are_written_after_every_step(check: Check) -> None:
    there = f"import json; assert json.load(open({str(check.out / 'gpu_check.json')!r}))['steps']['a']"
    assert check.run(step("a"), step("b", there))[0] == 0
    assert "| a | ok |" in (check.out / "gpu_check.md").read_text()


def test_command_that_leaves_its_output_open_does_not_hang_the_check(tmp_path: Path) -> None:
    begin = time.monotonic()
    words = [
        sys.executable,
        "-c",
        "import os; os.fork() or (os.setsid(), __import__('time').sleep(60))",
    ]
    ended = run_limited(words, {"PATH": "/usr/bin:/bin"}, 30.0, print, tmp_path / "log")
    assert ended.code == 0
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("target", "problem"),
    [
        ("tests.scripts.test_gpu_check:needs_missing", "the package no_such_package is not installed"),
        ("tests.scripts.test_gpu_check:breaks", "ValueError: why"),
    ],
)
def test_step_names_a_missing_package_or_its_error_in_one_line(
    target: str, problem: str, tmp_path: Path
) -> None:
    assert run_child(target, case_in(tmp_path)) == 1
    assert json.loads((tmp_path / "results").read_text()) == {"problem": problem}


def needs_missing(case: Case) -> None:
    import no_such_package.part  # noqa: F401


def breaks(case: Case) -> None:
    raise ValueError("why\nmore")


def case_in(folder: Path) -> Case:
    return Case("cpu", True, folder / "gpu_check.json", folder / "results")


def test_numbers_that_are_not_finite_are_null_in_the_results(tmp_path: Path) -> None:
    case_in(tmp_path).row("t", loss=float("nan"))
    assert json.loads((tmp_path / "results").read_text()) == {"table": "t", "row": {"loss": None}}


def test_every_step_names_a_function_that_exists() -> None:
    for one in STEPS:
        module, _, name = one.run.partition(":")
        assert callable(getattr(import_module(module), name)), one.name


def test_steps_run_from_a_bare_checkout() -> None:
    path = python_environment(ROOT, {"PYTHONPATH": "/own"})["PYTHONPATH"].split(":")
    assert path == [str(ROOT / "scripts"), str(ROOT), "/own"]


def test_a_host_without_a_gpu_is_one_line_and_exit_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "probe", lambda _: ("2.11", False, "3.12", []))
    assert gpu_check.main(["--device", "cuda", "--out", str(tmp_path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "torch sees no GPU here" in line


def test_foreign_file_in_the_place_of_the_results_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu_check, "probe", lambda _: ("2.11", True, "3.12", []))
    (tmp_path / "gpu_check.json").write_text("mine")
    assert gpu_check.main(["--out", str(tmp_path)]) == 2
    assert "is no result of this check" in capsys.readouterr().err
    assert (tmp_path / "gpu_check.json").read_text() == "mine"


def test_fake_gpus_write_nothing_beside_a_gpu_s_results(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("MLM_FAKE_GPUS", "1")
    monkeypatch.setattr(gpu_check, "RESULTS", tmp_path / "gpu")
    monkeypatch.chdir(tmp_path)
    assert gpu_check.main(["--out", "gpu"]) == 2
    assert "--out gpu: holds a GPU's results" in capsys.readouterr().err
    assert not (tmp_path / "gpu").exists()
    monkeypatch.setattr(gpu_check, "probe", lambda _: ("2.11", True, "3.12", []))
    monkeypatch.setattr(gpu_check, "run_steps", lambda steps, record, *_, **__: print(record.identity) or 0)
    assert gpu_check.main(["--out", str(tmp_path)]) == 0
    assert "'device': 'fake'" in capsys.readouterr().out


@pytest.mark.slow
def test_rehearsal_of_the_cheapest_steps_writes_their_tables(tmp_path: Path) -> None:
    options = ["--device", "cpu", "--quick", "--minutes", "5", "--out", str(tmp_path)]
    assert gpu_check.main([*options, "--only", "facts", "nccl"]) == 0
    steps = json.loads((tmp_path / "gpu_check.json").read_text())["steps"]
    tables = {row.get("table") for step in steps.values() for row in step["entries"]}
    assert {"facts", "products", "over a group of one rank", "FSDP2 on one rank"} <= tables
    assert "TFLOP/s" in (tmp_path / "gpu_check.md").read_text()


class Fake:
    """A trainee of fixed speed, without memory for more than two samples."""

    micro_batches = 1

    def __init__(self, *_: object) -> None:
        self.spec = spec_of(gpt2("124m", quick=True), "cpu")
        self.device = torch.device("cpu")
        self.cleared = False

    def use(self, batch_size: int) -> None:
        self.size = batch_size
        self.spec = replace(self.spec, shape=replace(self.spec.shape, batch_size=batch_size))

    def step(self, index: int) -> None:
        if self.size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        time.sleep(0.02 / self.size**2)  # so much faster at two samples that a busy host changes nothing

    def clear(self) -> None:
        self.cleared = True

    def flops_per_token(self) -> float:
        return 1.0


class Uncompiled(Fake):
    """One whose compiler is not there."""

    def step(self, index: int) -> None:
        raise RuntimeError("\nFailed to find C compiler\nmore")


def entries_of(case: Case) -> list[dict[str, Any]]:
    return [json.loads(line) for line in case.results.read_text().splitlines()]


def test_out_of_memory_is_a_result_and_ends_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SpeedTrainee", Fake)
    case = case_in(tmp_path)
    best = speed.measure_shape(case, gpt2("124m", quick=True), [1, 2, 4, 8], compiled=False)
    rows = [entry["row"] for entry in entries_of(case)]
    found = [(row["micro-batch"], row["result"]) for row in rows]
    assert found == [(1, "ok"), (2, "ok"), (4, "out of memory")]
    assert best == 2


def test_compiler_that_fails_is_a_problem_and_no_crash(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speed, "SpeedTrainee", Uncompiled)
    case = case_in(tmp_path)
    assert speed.measure_shape(case, gpt2("124m", quick=True), [1], compiled=True) == 0
    assert entries_of(case) == [{"problem": "compiled 124m: RuntimeError: Failed to find C compiler"}]


class Compiled(Fake):
    """One that compiles its step anew for each size, as another setting would."""

    def step(self, index: int) -> None:
        self.layer(torch.ones(2), self.spec.shape.batch_size)

    layer = staticmethod(torch.compile(lambda x, n: x * n, backend="eager", dynamic=False))


@pytest.mark.slow
def test_compiled_steps_that_would_run_uncompiled_are_a_problem(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The compiler stops compiling a function after its eighth version, and runs it as it is."""
    monkeypatch.setattr(speed, "SpeedTrainee", Compiled)
    case, shape = case_in(tmp_path), gpt2("124m", quick=True)
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=False):
        speed.measure_shape(case, shape, [2**n for n in range(10)], compiled=True)
    assert "FailOnRecompileLimitHit" in entries_of(case)[-1]["problem"]


@pytest.mark.slow
def test_each_trainee_is_compiled_anew() -> None:
    with torch._dynamo.config.patch(fail_on_recompile_limit_hit=True):
        for n in range(20):
            with freed("cpu"):
                Compiled.layer(torch.ones(2), n)


def test_waits_for_the_device_are_named_by_the_line_of_mlm(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> bool:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return True

    with noted_waits(True) as places:
        for _ in range(2):
            collectives.Pending("op", Axis("tp"), torch.ones(1), cast(Any, Waiting(waits))).wait()
        warnings.warn("another warning", stacklevel=1)
    ((place, count),) = places.items()
    assert place.startswith("mlm/parallel/collectives.py:")
    assert (count, modes) == (2, ["warn", "default"])


class Waiting:
    """A communication whose wait calls a function."""

    def __init__(self, function: Callable[[], object]) -> None:
        self.wait = function


def test_reason_of_a_failed_command_is_that_of_its_rank() -> None:
    lines = ["mlm pretrain: tp=3 does not divide", "Traceback", "elastic.ChildFailedError:", "exitcode : 2"]
    assert reason_in(lines) == "mlm pretrain: tp=3 does not divide"


def test_stacks_are_settings_of_runs_and_fit_one_gpu() -> None:
    """Weights, gradients and moments in float32, with a copy in half: 18 bytes a parameter of 139 GiB."""
    for stack in STACKS:
        config = load_config("pretrain", [*stack.words.split(), "data=synthetic", "dist.device=cpu"])
        assert config.train.micro_batch_size == config.train.global_batch_size
        assert 18 * count_parameters(config.model) < 100 * 2**30, stack.name
