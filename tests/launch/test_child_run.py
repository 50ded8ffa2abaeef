"""Commands that are killed whole, and what is told of those that fail."""

import subprocess
import sys
from pathlib import Path

import pytest

from mlm.launch import child_run
from mlm.util.errors import CheckFailedError, UserError


def test_a_run_starts_plainly_whatever_launcher_this_command_was_under() -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "SLURM_PROCID": "1", "MLM_LAUNCHED": "1", "HOME": "/home/u"}
    found = child_run.environment_without_launcher(environ)
    assert found.pop("PYTHONPATH")
    assert found == {"HOME": "/home/u"}


@pytest.mark.parametrize(
    "code,kind,how", [(2, UserError, "ended with 2"), (1, CheckFailedError, "ended with 1")]
)
def test_a_failing_run_is_reported_by_its_own_line_and_its_log(
    tmp_path: Path, code: int, kind: type[UserError], how: str
) -> None:
    log = tmp_path / "x.log"
    log.write_text("step 1\nmlm pretrain: out=x: disk full: free some space\nlast words of a library\n")
    process = subprocess.Popen([sys.executable, "-c", f"exit({code})"])
    process.wait()
    error = child_run.command_failure(process, "the straight run", log)
    assert type(error) is kind
    assert str(error).startswith(f"the straight run {how}: mlm pretrain: out=x: disk full: free some space")
    assert str(log) in str(error)
