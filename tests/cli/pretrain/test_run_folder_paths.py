"""A run folder in which something of the user's stands: one line, nothing replaced, no hang."""

from pathlib import Path

import pytest

from mlm.cli import main
from mlm.tracking.history import FILE_NAME, MetricsFile
from mlm.util.errors import UserError
from mlm.util.lock import LOCK, single_builder, single_writer
from mlm.util.ownership import claim_folder
from tests.util.special_files import put

TINY = (
    *("pretrain", "data=synthetic", "dist.device=cpu", "model=gpt2_tiny", "model.num_layers=1"),
    *("train.steps=1", "train.global_batch_size=1", "train.micro_batch_size=1"),
)


@pytest.mark.parametrize("name", ["checkpoints/latest", "config.yaml"])
def test_a_folder_in_place_of_a_file_of_a_run_is_rejected_before_it_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a save replaces last would lose it."""
    out = claim_folder(tmp_path / "run", "run")
    (out / name).mkdir(parents=True)
    assert main([*TINY, f"out={out}"]) == 2
    expected = f"mlm pretrain: out={out}: {out / name} is a folder; delete or rename it\n"
    assert capsys.readouterr().err == expected


@pytest.mark.parametrize("kind", ["FIFO", "folder", "socket", "device"])
def test_metrics_and_a_lock_that_are_no_file_are_an_error(kind: str, tmp_path: Path) -> None:
    out = claim_folder(tmp_path / "run", "run")
    (out / "checkpoints").mkdir()
    files = (out / FILE_NAME, out / "checkpoints" / LOCK)
    for file in files:
        put(kind, file)
    before = [file.lstat().st_mode for file in files]
    with pytest.raises(UserError, match=r"metrics\.jsonl: "):
        MetricsFile(out / FILE_NAME, 1, print).start({})
    with pytest.raises(UserError, match=r"\.lock: .*: make it writable"), single_writer(out / "checkpoints"):
        pass
    assert [file.lstat().st_mode for file in files] == before


def test_a_lock_follows_no_link(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / LOCK).symlink_to(tmp_path / "mine")
    with pytest.raises(UserError), single_writer(tmp_path / "checkpoints"):
        pass
    (tmp_path / ".index.npy.lock").symlink_to(tmp_path / "mine")
    with single_builder(tmp_path / "index.npy"):
        pass  # done without
    assert (tmp_path / "mine").read_text() == "mine"
    assert (tmp_path / ".index.npy.lock").is_symlink()
