"""`mlm report` on a command line, and while runs go on."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from mlm.cli import main
from mlm.cli.commands import COMMANDS
from mlm.cli.compose.arguments import parse
from mlm.tracking.config import ReportConfig
from mlm.tracking.page import report
from mlm.tracking.page.report import run
from mlm.tracking.runs import RunRecords, read_run
from tests.slow import thinned
from tests.tracking.page.made import some_run, stepped, write_run

FIX = "name a run folder (out=… of mlm pretrain or mlm finetune)"
REPORT = next(command for command in COMMANDS if command.words == ("report",))


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    some_run(tmp_path / "runs" / "a")
    some_run(tmp_path / "runs" / "b")
    return tmp_path


@pytest.mark.parametrize(
    ("words", "listed"),
    [
        (["runs/a"], "['runs/a']"),
        (["it's, [odd]"], r"['it\'s, [odd]']"),
        (["runs=runs/a", "runs/b"], "['runs/a','runs/b']"),
        (["runs=[runs/a,runs/b]"], "[runs/a,runs/b]"),
    ],
)
def test_words_are_a_list_of_runs(words: list[str], listed: str) -> None:
    assert parse(REPORT, [*words, "watch=true"]).overrides == [f"runs={listed}", "watch=true"]


def test_a_page_is_written_and_replaced(desk: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert main(["report", "runs/a", "runs/b"]) == 0
    assert "written to report.html (" in capsys.readouterr().out
    assert (desk / "report.html").read_bytes().count(b"<figure>") == 0  # the script draws
    assert sorted(path.name for path in (desk / "runs/a").iterdir()) == ["config.yaml", "metrics.jsonl"]


@pytest.mark.parametrize(
    ("words", "line"),
    thinned(
        [
            (["runs=[]"], "runs=[]: no run; name a run folder: mlm report runs/shakespeare"),
            (["."], f"runs=.: holds no run; {FIX}"),
            (
                [f"many/{number}" for number in range(21)],
                "runs: 21 runs; 20 is the limit; choose some, or write several pages",
            ),
            (
                ["runs/a", "out=mine.html"],
                "out=mine.html: exists and was not written by mlm; name another file, or delete it",
            ),
            (
                ["runs/a", "watch=true", "out=-"],
                "out=-: watch=true writes the page again; name a file, such as out=report.html",
            ),
        ],
        2,
    ),
)
def test_mistakes_are_one_line(
    desk: Path, capsys: pytest.CaptureFixture[str], words: list[str], line: str
) -> None:
    (desk / "mine.html").write_text("<!doctype html><title>mine</title>")
    for number in range(21):
        write_run(desk / "many" / str(number))
    assert main(["report", *words]) == 2
    assert capsys.readouterr().err == f"mlm report: {line}\n"
    assert (desk / "mine.html").read_text() == "<!doctype html><title>mine</title>"
    assert not (desk / "report.html").exists()


def test_what_a_pattern_of_the_shell_names_beside_runs_is_skipped(
    desk: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As `mlm report runs/*` does."""
    (desk / "runs/notes.yaml").write_text("a: 1")
    (desk / "runs/empty").mkdir()
    assert main(["report", *sorted(str(path) for path in (desk / "runs").iterdir())]) == 0
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(";")[0] for line in said] == [
        f"mlm report: skipped: runs={desk}/runs/empty: holds no run",
        f"mlm report: skipped: runs={desk}/runs/notes.yaml: is not a folder",
    ]
    assert '"name":"a"' in (desk / "report.html").read_text().replace(" ", "")


def test_it_imports_no_torch_and_no_scipy(desk: Path) -> None:
    code = (
        "import sys, mlm.cli; code = mlm.cli.main(['report', 'runs/a']); "
        "sys.exit(code or ','.join({'torch', 'scipy'} & sys.modules.keys()) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def config(desk: Path, **changed: object) -> ReportConfig:
    return ReportConfig(**{"runs": ("runs/a",), "out": str(desk / "page.html"), "watch": True, **changed})  # type: ignore[arg-type]


def reload_of(page: Path) -> object:
    text = page.read_text().partition('id="data">')[2].partition("</script>")[0]
    return json.loads(text)["reload"]


def test_watching_writes_again_until_the_run_is_finished(desk: Path) -> None:
    pages, console = [], Console(record=True, width=200)

    def sleep(seconds: float) -> None:
        assert seconds == 5.0
        pages.append(reload_of(desk / "page.html"))
        step = (30, 100)[len(pages) - 1]
        with open(desk / "runs/a/metrics.jsonl", "a") as f:
            f.write(json.dumps(stepped(step)) + "\n")

    run(config(desk), console, sleep)
    assert pages == [5.0, 5.0]
    assert reload_of(desk / "page.html") is None
    assert console.export_text().startswith("written to ")


def test_ctrl_c_before_all_runs_are_read_keeps_the_earlier_page(
    desk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(folder: Path, name: str) -> RunRecords:
        if name == "b":
            raise KeyboardInterrupt
        return read_run(folder, name)

    run(config(desk, runs=("runs/a", "runs/b"), watch=False))
    earlier = (desk / "page.html").read_bytes()
    monkeypatch.setattr(report, "read_run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        run(config(desk, runs=("runs/a", "runs/b")), Console(record=True))
    assert (desk / "page.html").read_bytes() == earlier


def test_ctrl_c_leaves_a_whole_page_that_does_not_reload_even_of_a_run_that_vanished(desk: Path) -> None:
    turns, console = iter([lambda: shutil.rmtree(desk / "runs/a")]), Console(record=True, width=200)

    def sleep(seconds: float) -> None:
        turn = next(turns, None)
        if turn is None:
            raise KeyboardInterrupt
        turn()

    with pytest.raises(KeyboardInterrupt):
        run(config(desk), console, sleep)
    assert console.export_text().startswith("written to ")
    assert reload_of(desk / "page.html") is None
    assert "no step is logged yet" in (desk / "page.html").read_text()
