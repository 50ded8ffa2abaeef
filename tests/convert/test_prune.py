"""`mlm ckpt prune`: what goes, what stays, and that nothing whole is lost by mistake."""

from pathlib import Path

import pytest

from mlm.checkpoint.native import pruning
from mlm.checkpoint.native.folders import CHECKPOINTS, LATEST
from mlm.util.lock import single_writer
from tests.checkpoints_on_disk import checkpoint, damage, mlm, shorten, write_run

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints at steps 1 to 6."""
    return write_run(tmp_path / "run", steps=range(1, 7))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / CHECKPOINTS).glob("step-*"))


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        ([], [5, 6]),
        (["keep_last=1", "keep_every=2"], [2, 4, 6]),
    ],
)
def test_newest_and_multiples_are_kept(run: Path, settings: list[str], kept: list[int]) -> None:
    assert mlm("ckpt", "prune", run, *settings) == 0
    assert steps(run) == kept


def test_dry_run_deletes_nothing_and_says_how_much_it_would(run: Path, capsys: Output) -> None:
    (run / CHECKPOINTS / ".saving-step-00000009-a").mkdir()
    before = sorted(run.rglob("*"))
    assert mlm("ckpt", "prune", run, "keep_last=1", "--dry-run") == 0
    assert sorted(run.rglob("*")) == before
    freed = sum(file.stat().st_size for step in range(1, 6) for file in checkpoint(run, step).iterdir())
    out = capsys.readouterr().out
    assert f"{freed / 1000:.1f} kB would be freed" in out
    assert out.count("would be deleted") == 6


def test_damaged_one_is_not_counted_and_stays_while_it_is_newer(run: Path, capsys: Output) -> None:
    shorten(checkpoint(run, 6))
    assert mlm("ckpt", "prune", run, "keep_last=2") == 0
    assert steps(run) == [4, 5, 6]
    assert "damaged, kept and not counted: 1" in capsys.readouterr().out


def test_a_flipped_bit_is_found_in_those_that_count_and_no_other_is_read(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, problem_of = list[Path](), pruning.content_problem
    monkeypatch.setattr(pruning, "content_problem", lambda path: (read.append(path), problem_of(path))[1])
    for step in (2, 4, 6):
        damage(checkpoint(run, step))
    assert mlm("ckpt", "prune", run, "keep_last=2") == 0
    assert steps(run) == [3, 4, 5, 6]
    assert read == [checkpoint(run, step) for step in (6, 5, 4, 3)]
    out = capsys.readouterr().out
    assert out.count("damaged: rank-00000.safetensors: damaged, digest") == 2
    assert "damaged, kept and not counted: 2" in out


def test_damaged_one_goes_when_enough_whole_ones_are_newer(run: Path, capsys: Output) -> None:
    shorten(checkpoint(run, 2))
    assert mlm("ckpt", "prune", run, "keep_last=2") == 0
    assert steps(run) == [5, 6]
    assert "damaged: rank-00000.safetensors" in capsys.readouterr().out


def test_where_none_is_whole_nothing_goes(run: Path) -> None:
    for step in range(1, 7):
        (checkpoint(run, step) / "manifest.json").unlink()
    assert mlm("ckpt", "prune", run, "keep_last=1") == 0
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_leftovers_of_killed_saves_are_cleared_up(run: Path) -> None:
    folder = run / CHECKPOINTS
    for name in (".saving-step-00000007-a", ".trash-step-00000001", ".replaced-step-00000006"):
        (folder / name).mkdir()
        (folder / name / "rank-00000.safetensors").touch()
    mlm("ckpt", "prune", run)
    assert sorted(path.name for path in folder.iterdir()) == [
        *(".lock", LATEST, "step-00000005", "step-00000006")
    ]


def test_folder_that_a_run_uses_is_left_alone(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:

    def at_once(folder: Path, **options: str) -> object:
        return single_writer(folder, wait_s=0.0, **options)

    monkeypatch.setattr("mlm.cli.ckpt.prune.single_writer", at_once)
    with single_writer(run / CHECKPOINTS):
        assert mlm("ckpt", "prune", run) == 2
        assert mlm("ckpt", "prune", run, "--dry-run") == 0
    assert "in use by process" in capsys.readouterr().err
    assert steps(run) == [1, 2, 3, 4, 5, 6]


def test_what_could_not_be_deleted_is_an_error(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pruning, "discard", lambda path: False)
    assert mlm("ckpt", "prune", run, "keep_last=5") == 2
    captured = capsys.readouterr()
    assert f"{checkpoint(run, 1)}: could not be deleted" in captured.err
    assert "0 B freed" in captured.out


@pytest.mark.parametrize(
    ("given", "settings", "why"),
    [
        ("run/checkpoints/step-00000001", [], "is one checkpoint; set ckpt=… to its run directory"),
        (".", [], "holds no checkpoint"),
        ("absent", [], "no such directory"),
        ("run", ["keep_last=0"], "keep_last=0 must be greater than 0"),
        ("run", ["keep_every=-1"], "keep_every=-1 must be 0 or more"),
    ],
)
def test_mistake_is_one_line_and_deletes_nothing(
    run: Path, capsys: Output, given: str, settings: list[str], why: str
) -> None:
    assert mlm("ckpt", "prune", run.parent / given, *settings) == 2
    err = capsys.readouterr().err
    assert why in err
    assert err.count("\n") == 1
    assert steps(run) == [1, 2, 3, 4, 5, 6]
