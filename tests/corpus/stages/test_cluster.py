"""Builds on SLURM, with fakes of its commands that run a job array at once, in order."""

import os
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.sections import ExecutorConfig
from mlm.errors import UserError
from tests.corpus.texts import output, plain, quiet, write_jsonl

pytest.importorskip("datatrove")

SLURM = ExecutorConfig(kind="slurm", partition="cpu", workers=4)
SBATCH = """#!/bin/bash
echo "$@" >> {log}
script="${{@: -1}}"
tasks=$(sed -n 's/^#SBATCH --array=0-\\([0-9]*\\).*/\\1/p' "$script")
for ((task = 0; task <= tasks; task++)); do
  [ -e {log}.failed ] || SLURM_ARRAY_TASK_ID=$task RUN_OFFSET=0 \\
    bash "$script" >> {log}.out 2>&1 || touch {log}.failed
done
echo "Submitted batch job $((100 + $(wc -l < {log})))"
"""


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of text, and SLURM's commands on the PATH."""
    for i in range(3):
        write_jsonl(tmp_path / f"text/{i}.jsonl", [f"document {i} {j}" for j in range(5)])
    commands = tmp_path / "bin"
    commands.mkdir()
    scripts = {
        "sbatch": SBATCH.format(log=tmp_path / "sbatch.log"),
        "srun": '#!/bin/bash\nshift 3\nexec "$@"\n',
        "squeue": f"#!/bin/bash\ncat {tmp_path / 'queue'} 2>/dev/null\n",
        "scancel": f'#!/bin/bash\necho "$@" > {tmp_path / "cancelled"}\n',
    }
    for name, text in scripts.items():
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    return tmp_path / "text"


def test_submitted_jobs_write_the_same_bytes(source: Path) -> None:
    run_build(plain(source), quiet())
    submitted = replace(plain(source, out=str(source.parent / "slurm")), executor=SLURM)
    assert run_build(submitted, quiet()) is None
    assert run_build(submitted, quiet()) is not None
    assert output(source.parent / "slurm") == output(source.parent / "out")


def test_each_job_waits_for_the_one_before(source: Path) -> None:
    run_build(plain(source, executor=SLURM), quiet())
    calls = (source.parent / "sbatch.log").read_text().splitlines()
    assert len(calls) == 3
    assert "dependency" not in calls[0]
    assert "--dependency=afterok:101" in calls[1]
    assert "--dependency=afterok:102" in calls[2]


def test_no_pickle_stays_in_the_work_folder(source: Path) -> None:
    run_build(plain(source, executor=SLURM), quiet())
    assert not list((source.parent / "out/work").rglob("*.pik"))


def test_jobs_in_the_queue_are_not_submitted_again(source: Path) -> None:
    config = plain(source, executor=SLURM)
    run_build(config, quiet())
    (source.parent / "queue").write_text("101\n102\n103\n")
    for marker in (source.parent / "out/work").glob("merge-*/*.done.json"):
        marker.unlink()
    assert run_build(config, quiet()) is None
    assert len((source.parent / "sbatch.log").read_text().splitlines()) == 3


def test_bad_input_found_by_a_job_is_reported_and_dependent_jobs_cancelled(source: Path) -> None:
    (source / "1.jsonl").write_text("nonsense\n")
    config = plain(source, executor=SLURM)
    assert run_build(config, quiet()) is None
    (source.parent / "queue").write_text("102\n103\n")
    with pytest.raises(UserError, match=r"1\.jsonl:1: "):
        run_build(config, quiet())
    assert (source.parent / "cancelled").read_text() == "102 103\n"


def test_slurm_without_its_commands_is_a_users_mistake(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(UserError, match=r"executor\.kind=slurm needs sbatch"):
        run_build(plain(source, executor=SLURM), quiet())


def test_ray_without_its_package_is_a_users_mistake(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ray", None)
    with pytest.raises(UserError, match=r"executor\.kind=ray needs the package ray"):
        run_build(plain(source, executor=ExecutorConfig(kind="ray")), quiet())
