"""The rehearsal's own parts: what it holds, compares and records. The cluster itself needs root and SLURM."""

import importlib.util
import json
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import rehearse
from rehearsal.cluster import Failed
from rehearsal.record import Row, table, write
from rehearsal.training import compare

HOLD = Path(rehearse.__file__).parent / "rehearsal/hold/sitecustomize.py"
ALONE = {1: 4.0, 2: 3.0, 3: 2.0}


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> ModuleType:
    """The module that Python would import at the start of a rank."""
    spec = importlib.util.spec_from_file_location("hold", HOLD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.delenv("REHEARSAL_FOLDER", raising=False)
    spec.loader.exec_module(module)
    module.FOLDER = str(tmp_path)
    return module


def test_every_phase_is_a_function_that_is_there(hold: ModuleType) -> None:
    for name, path in hold.PLACES.values():
        place = import_module(name)
        for part in path.split("."):
            place = getattr(place, part)
        assert callable(place)


def test_a_function_of_a_module_is_changed_when_it_is_imported(
    hold: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "held_module.py").write_text("class Work:\n    def do(self): return 5\n")
    monkeypatch.syspath_prepend(tmp_path)
    calls: list[int] = []
    monkeypatch.setattr(
        sys, "meta_path", [hold.Finder({"held_module": [("Work.do", calls.append)]}), *sys.meta_path]
    )
    work = import_module("held_module").Work()
    assert (work.do(), work.do(), calls) == (5, 5, [1, 2])
    del sys.modules["held_module"]


def test_a_rank_is_held_until_it_is_released(hold: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "released").touch()
    hold.hold()
    assert (tmp_path / "held-0").exists()


def history(folder: Path, losses: list[tuple[int, float]]) -> Path:
    """A run with these steps."""
    lines = [{"kind": "run", "start_step": 0, "layout": {"dp": 1}}]
    lines += [{"kind": "step", "step": step, "loss": loss} for step, loss in losses]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder


def test_a_history_like_the_undisturbed_one_passes(tmp_path: Path) -> None:
    found = compare(history(tmp_path, [(1, 4.0 + 1e-12), (2, 3.0)]), ALONE, steps=2)
    assert (found.starts, found.sizes, found.last) == ([0], [1], 2)


@pytest.mark.parametrize(
    "losses, said",
    [
        ([(1, 4.0), (3, 2.0)], "the history holds the steps"),
        ([(1, 4.0), (2, 3.0), (2, 3.0), (3, 2.0)], "the history holds the steps"),
        ([(1, 4.0), (2, 3.001), (3, 2.0)], "step 2 has the loss 3.001, undisturbed 3.0"),
    ],
)
def test_skipped_repeated_and_other_samples_fail(
    tmp_path: Path, losses: list[tuple[int, float]], said: str
) -> None:
    with pytest.raises(Failed, match=said):
        compare(history(tmp_path, losses), ALONE, steps=3)


def row(case: str, passed: bool = True) -> Row:
    return Row(case, "a | b", 1.25, "said", "nothing", 3.0, passed)


def test_a_record_keeps_the_rows_of_cases_that_were_not_repeated(tmp_path: Path) -> None:
    write(tmp_path, {"date": "a"}, [row("one"), row("two")])
    write(tmp_path, {"date": "b"}, [row("two", passed=False)])
    cases = json.loads((tmp_path / "rehearsal.json").read_text())["cases"]
    assert [(case["case"], case["passed"]) for case in cases] == [("one", True), ("two", False)]
    assert (tmp_path / "rehearsal.md").read_text() == table(
        {"date": "b"}, [row("one"), row("two", passed=False)]
    )


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(rehearse.os, "geteuid", lambda: 1000)
    assert rehearse.main([]) == 2
    assert "need root" in capsys.readouterr().err


@pytest.mark.parametrize("ends, code", [(Failed("no daemon"), 2), (KeyboardInterrupt(), 130)])
def test_no_lock_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ends: BaseException, code: int
) -> None:
    """Held while it runs, so that a second one is refused; gone at its end."""
    seen = []

    class Network:
        def __init__(self, folder: Path) -> None: ...

        def up(self) -> None:
            seen.append(rehearse.main([]))
            raise ends

        def down(self) -> None: ...

    monkeypatch.setattr(rehearse, "LOCK", tmp_path / "rehearsal.lock")
    monkeypatch.setattr(rehearse, "Network", Network)
    monkeypatch.setattr(rehearse.os, "geteuid", lambda: 0)
    assert rehearse.main([]) == code
    assert (seen, list(tmp_path.iterdir())) == ([2], [])
