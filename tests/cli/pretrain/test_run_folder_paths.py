"""A run folder in which something of the user's stands: one line, nothing replaced, no hang."""

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.tracking.history import FILE_NAME, MetricsFile
from mlm.util.errors import UserError
from mlm.util.lock import LOCK, single_builder, single_writer
from mlm.util.ownership import claim_folder

TINY = (
    *("pretrain", "data=synthetic", "dist.device=cpu", "model=gpt2_tiny", "model.num_layers=1"),
    *("train.steps=1", "train.global_batch_size=1", "train.micro_batch_size=1"),
)


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")


def make_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        os.chdir(path.parent)  # a socket's path is at most 107 bytes long
        server.bind(path.name)


STANDS: dict[str, Callable[[Path], object]] = {
    "fifo": os.mkfifo,
    "folder": Path.mkdir,
    "socket": make_socket,
    "link to a fifo": lambda p: (os.mkfifo(p.with_name("elsewhere")), p.symlink_to("elsewhere")),
}


@pytest.mark.parametrize("name", ["config.yaml", FILE_NAME])
def test_pretrain_rejects_a_project_before_it_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "proj"
    out.mkdir()
    (out / name).write_text("mine")
    assert main([*TINY, f"out={out}"]) == 2
    expected = f"mlm pretrain: out={out}: holds {name}, which mlm did not write; name a new folder\n"
    assert capsys.readouterr().err == expected
    assert {path.name: path.read_text() for path in out.iterdir()} == {name: "mine"}


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


@pytest.mark.parametrize("stand", STANDS)
def test_metrics_that_are_no_file_are_an_error(stand: str, tmp_path: Path) -> None:
    out = claim_folder(tmp_path / "run", "run")
    STANDS[stand](out / FILE_NAME)
    before = (out / FILE_NAME).lstat().st_mode
    with pytest.raises(UserError, match=r"metrics\.jsonl: "):
        MetricsFile(out / FILE_NAME, 1, print).start({})
    assert (out / FILE_NAME).lstat().st_mode == before


@pytest.mark.parametrize("stand", STANDS)
def test_a_lock_that_is_no_file_is_an_error(stand: str, tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    STANDS[stand](folder / LOCK)
    before = (folder / LOCK).lstat().st_mode
    with pytest.raises(UserError, match=r"\.lock: .*: make it writable"), single_writer(folder):
        pass
    assert (folder / LOCK).lstat().st_mode == before


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
