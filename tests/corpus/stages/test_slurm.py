"""Builds on SLURM, with fakes of its commands that run a job array at once, in order."""

import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.config import DataBuildConfig, ExecutorConfig
from mlm.corpus.stages import slurm
from mlm.corpus.stages.plan import PLAN
from mlm.util.errors import UserError
from tests.corpus.texts import output, plain, quiet, write_jsonl

SLURM = ExecutorConfig(kind="slurm", partition="cpu", workers=4)
SBATCH = """#!/bin/bash
echo "$@" >> {log}
script=$(cat)
tasks=$(sed -n 's/.*--array=0-\\([0-9]*\\).*/\\1/p' <<< "$@")
for ((task = 0; task <= tasks; task++)); do
  [ -e {log}.failed ] || SLURM_ARRAY_TASK_ID=$task bash -c "$script" >> {log}.out 2>&1 || touch {log}.failed
done
echo "$((100 + $(wc -l < {log})))"
"""


def make_source(folder: Path, patch: pytest.MonkeyPatch) -> Path:
    """Three files of text, and SLURM's commands on the PATH."""
    for i in range(3):
        write_jsonl(folder / f"text/{i}.jsonl", [f"document {i} {j}" for j in range(5)])
    commands = folder / "bin"
    commands.mkdir()
    scripts = {
        "sbatch": SBATCH.format(log=folder / "sbatch.log"),
        "squeue": f"#!/bin/bash\ncat {folder / 'queue'} 2>/dev/null\n",
        "scancel": f'#!/bin/bash\necho "$@" > {folder / "cancelled"}\n',
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    patch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    patch.setenv("PYTHONPATH", os.getcwd())
    return folder / "text"


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    return make_source(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def submitted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[DataBuildConfig, Path]]:
    """A build whose jobs have run, and the folder of its source and of the commands' logs."""
    with pytest.MonkeyPatch.context() as patch:
        source = make_source(tmp_path_factory.mktemp("submitted"), patch)
        config = plain(source, out=str(source.parent / "slurm"), executor=SLURM)
        assert run_build(config, quiet()) is None
        yield config, source.parent


def test_each_job_waits_for_the_one_before(submitted: tuple[DataBuildConfig, Path]) -> None:
    calls = (submitted[1] / "sbatch.log").read_text().splitlines()
    assert len(calls) == 3
    assert all("--array=0-" in call and "%4" in call for call in calls)
    assert "dependency" not in calls[0]
    assert "--dependency=afterok:101" in calls[1]
    assert "--dependency=afterok:102" in calls[2]


def test_jobs_in_the_queue_are_not_submitted_again(
    submitted: tuple[DataBuildConfig, Path],
) -> None:
    config, folder = submitted
    markers = {path: path.read_bytes() for path in (folder / "slurm/work").glob("merge-*/*.done.json")}
    assert markers
    for marker in markers:
        marker.unlink()
    (folder / "queue").write_text("101\n102\n103\n")
    assert run_build(config, quiet()) is None
    assert len((folder / "sbatch.log").read_text().splitlines()) == 3
    (folder / "queue").unlink()
    for marker, content in markers.items():
        marker.write_bytes(content)


def test_submitted_jobs_write_the_same_bytes(submitted: tuple[DataBuildConfig, Path]) -> None:
    config, folder = submitted
    run_build(replace(config, out=str(folder / "out"), executor=ExecutorConfig(workers=1)), quiet())
    assert run_build(config, quiet()) is not None
    assert output(folder / "slurm") == output(folder / "out")


def test_bad_input_found_by_a_job_is_reported_and_dependent_jobs_cancelled(source: Path) -> None:
    (source / "1.jsonl").write_text("nonsense\n")
    config = plain(source, executor=SLURM)
    assert run_build(config, quiet()) is None
    (source.parent / "queue").write_text("102\n103\n")
    with pytest.raises(UserError, match=r"1\.jsonl:1: "):
        run_build(config, quiet())
    assert (source.parent / "cancelled").read_text() == "102 103\n"


@pytest.mark.parametrize("damage", [b"", b"{", b"[1, 2]\n"])
def test_a_job_with_a_damaged_plan_says_one_line(
    damage: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / PLAN
    if damage:
        plan.write_bytes(damage)
    monkeypatch.setattr(sys, "argv", ["slurm", str(plan), "clean", "0", "1"])
    assert slurm.main() == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert str(plan) in line
    assert "build again" in line
