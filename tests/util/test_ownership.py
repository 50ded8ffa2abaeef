"""mlm/util/ownership.py: which folders are claimed, and what is deleted in them."""

import os
from pathlib import Path

import pytest

from mlm.util.errors import UserError
from mlm.util.ownership import (
    MARKER,
    claim_folder,
    claim_problems,
    delete_owned,
    read_marker,
    rejected_place,
)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path


@pytest.mark.parametrize("name", ["config.yaml", "checkpoints/a"])
def test_claim_rejects_a_folder_whose_files_it_would_replace(elsewhere: Path, name: str) -> None:
    file, top = elsewhere / "proj" / name, name.split("/")[0]
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(UserError) as raised:
        claim_folder(elsewhere / "proj", "run")
    problem = f"out={elsewhere / 'proj'}: holds {top}, which mlm did not write; name a new folder"
    assert str(raised.value) == problem
    assert os.listdir(elsewhere / "proj") == [top]


def test_a_mounted_volume_is_claimed_and_never_deleted(elsewhere: Path) -> None:
    volume = Path("/dev/shm")
    assert rejected_place("out=/dev/shm", volume, []) == []
    (problem,) = rejected_place("out=/dev/shm", volume, [], deletes=True)
    assert "is the root of a file system" in problem


@pytest.mark.parametrize("content", ["", "{", "[]", '{"kind": "corpus-work"}', '{"format": "mlm-folder-1"}'])
def test_folder_with_a_broken_marker_is_neither_claimed_nor_deleted(elsewhere: Path, content: str) -> None:
    folder = elsewhere / "work"
    folder.mkdir()
    (folder / MARKER).write_text(content)
    (folder / "evaluation.jsonl").write_text("{}")
    assert claim_problems(folder, "corpus-work") != []
    assert delete_owned(folder, "corpus-work") == f"{folder}: not deleted, as mlm did not make it"
    assert (folder / "evaluation.jsonl").exists()


def test_marker_that_is_a_fifo_or_link_does_not_hang_or_count(elsewhere: Path) -> None:
    folder = elsewhere / "s"
    folder.mkdir()
    os.mkfifo(folder / MARKER)
    assert read_marker(folder) is None
    assert claim_problems(folder, "run") == [
        f"out={folder}: holds {MARKER}, which mlm did not write; name a new folder"
    ]


def test_delete_removes_a_folder_that_we_made_and_keeps_one_that_we_adopted(elsewhere: Path) -> None:
    made = claim_folder(elsewhere / "made", "corpus-work")
    (elsewhere / "adopted").mkdir()
    adopted = claim_folder(elsewhere / "adopted", "corpus-work")
    for folder in (made, adopted):
        (folder / "evaluation.jsonl").write_text("{}")
        assert delete_owned(folder, "corpus-work") is None
    assert not made.exists()
    assert os.listdir(adopted) == []


def test_delete_rejects_inputs_the_working_directory_and_what_has_no_marker(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = claim_folder(elsewhere / "work", "corpus-work")
    (folder / "evaluation.jsonl").write_text("{}")
    text = folder / "text.jsonl"
    text.write_text("{}")
    assert "holds the input" in str(delete_owned(folder, "corpus-work", inputs=[text]))
    assert "not deleted" in str(delete_owned(folder, "run"))
    monkeypatch.chdir(folder)
    assert "is the working directory" in str(delete_owned(folder, "corpus-work"))
    (elsewhere / "s").mkdir()
    (elsewhere / "s" / "evaluation.jsonl").write_text("{}")
    assert "mlm did not make it" in str(delete_owned(elsewhere / "s", "corpus-work"))
    assert (elsewhere / "s" / "evaluation.jsonl").exists()
    assert (folder / "evaluation.jsonl").exists()


def test_claim_and_deletion_of_a_link_leave_the_link(elsewhere: Path) -> None:
    (elsewhere / "scratch").mkdir()
    link = elsewhere / "work"
    link.symlink_to(elsewhere / "scratch")
    claim_folder(link, "corpus-work")
    (link / "evaluation.jsonl").write_text("{}")
    assert delete_owned(link, "corpus-work") is None
    assert link.is_symlink()
    assert os.listdir(elsewhere / "scratch") == []
