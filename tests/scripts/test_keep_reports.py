"""scripts/keep_reports.py: what it copies of a report, and what it leaves out."""

import json
from pathlib import Path

import keep_reports
import pytest

WORDS = ["mlm", "data.path=/home/me/glue/sst2", "/home/me/nanoGPT", "out=runs/a", "a / b", "tokens/s"]


def test_a_report_is_kept_without_the_users_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_reports, "KEPT", tmp_path / "kept")
    made = tmp_path / "v1-made"
    made.mkdir()
    (made / "report.md").write_text("![Values](values.png)")
    (made / "values.png").write_bytes(b"picture")
    (made / "report.html").write_text("page")
    (made / "result.json").write_text(json.dumps({"words": WORDS}))
    (tmp_path / "kept/v1-made").mkdir(parents=True)
    (tmp_path / "kept/v1-made/earlier.png").touch()
    keep_reports.keep(made)
    kept = tmp_path / "kept/v1-made"
    assert {path.name for path in kept.iterdir()} == {"report.md", "values.png", "result.json"}
    assert json.loads((kept / "result.json").read_text())["words"] == [
        *("mlm", "data.path=sst2", "nanoGPT", "out=runs/a", "a / b", "tokens/s")
    ]
