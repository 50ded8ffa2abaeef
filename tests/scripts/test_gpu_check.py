"""The check of a GPU: order, time limits, resuming and records with fake steps; one for real on the CPU."""

import json
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import gpu_check
import pytest
import torch
from gpu import speed
from gpu.catalogue import STEPS, Step
from gpu.child import Case
from gpu.record import Record
from gpu.runner import run_steps
from gpu.waits import noted_waits

from mlm.cli.compose.composition import load_config
from mlm.models.shape import count_parameters
from mlm.parallel import collectives
from mlm.parallel.mesh import Axis
from mlm.runs.config import PretrainConfig

IDENTITY = {"code": "a", "torch": "2.11"}
FAST = "import sys, json; print(json.dumps({'table': 't', 'row': {'x': 1}}), file=open(sys.argv[1], 'a'))"
HANGING = FAST + "\nimport time; time.sleep(60)"


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


def case_in(folder: Path) -> Case:
    return Case("cpu", True, folder / "gpu_check.json", folder / "results")


def test_every_step_names_a_function_that_exists() -> None:
    for one in STEPS:
        module, _, name = one.run.partition(":")
        assert callable(getattr(import_module(module), name)), one.name


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


def entries_of(case: Case) -> list[dict[str, Any]]:
    return [json.loads(line) for line in case.results.read_text().splitlines()]


def test_out_of_memory_is_a_result_and_ends_the_sizes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With memory for two samples, at which a step is faster by far more than a busy host changes."""

    def own_step(config: PretrainConfig, device: torch.device) -> Callable[[object], None]:
        size = config.train.micro_batch_size
        if size > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return lambda batches: time.sleep(0.02 / size**2)

    monkeypatch.setattr(speed, "own_step", own_step)
    case = case_in(tmp_path)
    assert speed.measure_sizes(case, "124m", [1, 2, 4, 8], compiled=False) == 2
    rows = [entry["row"] for entry in entries_of(case)]
    found = [(row["micro-batch"], row["result"]) for row in rows]
    assert found == [(1, "ok"), (2, "ok"), (4, "out of memory")]


def test_waits_for_the_device_are_named_by_the_line_of_mlm(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> bool:
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        return True

    with noted_waits(True) as places:
        for _ in range(2):
            collectives.Pending(
                "op", Axis("tp"), torch.ones(1), cast(Any, SimpleNamespace(wait=waits))
            ).wait()
        warnings.warn("another warning", stacklevel=1)
    ((place, count),) = places.items()
    assert place.startswith("mlm/parallel/collectives.py:")
    assert (count, modes) == (2, ["warn", "default"])


def test_stacks_are_settings_of_runs_and_fit_one_gpu() -> None:
    """Weights, gradients and moments in float32, with a copy in half: 18 bytes a parameter of 139 GiB."""
    for name, words in speed.STACKS.items():
        config = load_config("pretrain", [*words.split(), "data=synthetic", "dist.device=cpu"])
        assert config.train.micro_batch_size == config.train.global_batch_size
        assert 18 * count_parameters(config.model) < 100 * 2**30, name
