"""mlm/runs/journal.py: the complete files by which an interrupted command continues."""

from pathlib import Path
from unittest.mock import Mock

import pytest

from mlm.runs import journal
from mlm.runs.folder import new_folder
from mlm.util.errors import UserError


def write(out: Path, *, then: BaseException | None = None) -> None:
    record = journal.Journal({"source": "a"})
    with new_folder(out, 10, "exported-model", record) as folder:
        path = folder / "weights.bin"
        record.write_file(path, lambda: path.write_bytes(b"complete"))
        if then is not None:
            raise then


def test_a_complete_file_survives_an_interruption_while_it_is_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file may be all there is: it takes minutes to read, and hours to write again."""
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", then=KeyboardInterrupt())
    with monkeypatch.context() as patch:
        patch.setattr(journal, "digest_file", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            write(tmp_path / "out")
    assert (tmp_path / ".out.partial/out/weights.bin").read_bytes() == b"complete"
    write(tmp_path / "out")
    assert (tmp_path / "out/weights.bin").read_bytes() == b"complete"


def test_complete_files_survive_a_folder_that_takes_their_place(tmp_path: Path) -> None:
    """`out` was free when the command began."""
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", then=KeyboardInterrupt())
    (tmp_path / "out/other").mkdir(parents=True)
    with pytest.raises(UserError, match="is there already"):
        write(tmp_path / "out")
    with pytest.raises(UserError, match="is there already"), new_folder(tmp_path / "out", 10):
        pass
    assert (tmp_path / ".out.partial/out/weights.bin").read_bytes() == b"complete"


def test_complete_files_survive_an_interruption_while_they_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out", then=KeyboardInterrupt())
    monkeypatch.setattr(journal, "parse_json", Mock(side_effect=[{}, KeyboardInterrupt]))
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "out")
    assert (tmp_path / ".out.partial/out/weights.bin").read_bytes() == b"complete"
