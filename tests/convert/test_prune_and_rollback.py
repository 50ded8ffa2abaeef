"""`mlm ckpt prune` and `rollback`: what is deleted or set aside, what stays, and where a run continues."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native import pruning
from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, latest_checkpoint, latest_name, step_name
from mlm.util.lock import single_writer
from tests.checkpoint.native.helpers import save
from tests.checkpoints_on_disk import checkpoint, damage, mlm, shorten, tensors, training_state, write_run

Output = pytest.CaptureFixture[str]


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Checkpoints at steps 1 to 6."""
    return write_run(tmp_path / "run", steps=range(1, 7))


def steps(run: Path) -> list[int]:
    return sorted(int(path.name.removeprefix("step-")) for path in (run / CHECKPOINTS).glob("step-*"))


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


def test_folder_that_a_run_uses_is_left_alone(
    run: Path, capsys: Output, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlm.cli.ckpt.prune.single_writer", partial(single_writer, wait_s=0.0))
    with single_writer(run / CHECKPOINTS):
        assert mlm("ckpt", "prune", run) == 2
        assert mlm("ckpt", "prune", run, "--dry-run") == 0
    assert "in use by process" in capsys.readouterr().err
    assert steps(run) == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("given", "settings", "why"),
    [
        ("run/checkpoints/step-00000001", [], "is one checkpoint; set ckpt=… to its run directory"),
        (".", [], "holds no checkpoint"),
        ("run", ["keep_last=0"], "keep_last=0 must be greater than 0"),
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


def add(chain: Path, step: int, past: list[int], value: float = 1.0) -> None:
    """A checkpoint that descends from those of `past`; one of another value is another save."""
    lineage = {"ancestors": [[s, f"id{s}"] for s in past], "changes": []}
    state: dict[str, Any] = {**training_state(step), "lineage": lineage}
    save_id = f"id{step}" + "b" * (value != 1.0)
    save(chain / CHECKPOINTS, step, tensors(value), state=state, save_id=save_id, keep_last=99)


@pytest.fixture
def chain(tmp_path: Path) -> Path:
    """Checkpoints at steps 1 to 5, each a child of the one before."""
    for step in range(1, 6):
        add(tmp_path / "run", step, list(range(1, step)))
    return tmp_path / "run"


def names(chain: Path) -> list[str]:
    return sorted(path.name for path in (chain / CHECKPOINTS).glob("*step-*"))


def test_latest_moves_back_and_newer_ones_are_set_aside(chain: Path, capsys: Output) -> None:
    before = {path.name: path.stat().st_ino for path in (chain / CHECKPOINTS).glob("step-*")}
    assert mlm("ckpt", "rollback", chain, "step=3") == 0
    assert latest_checkpoint(chain / CHECKPOINTS) == checkpoint(chain, 3)
    assert names(chain) == [f"aside-{step_name(4)}", f"aside-{step_name(5)}", *map(step_name, (1, 2, 3))]
    assert (chain / CHECKPOINTS / f"aside-{step_name(5)}").stat().st_ino == before[step_name(5)]
    assert f"mlm ckpt rollback {chain} 5" in capsys.readouterr().out.replace("\n", " ")


@pytest.mark.parametrize("command", ["rollback", "verify"])
def test_advice_on_what_continues_is_a_command_that_is_taken(run: Path, capsys: Output, command: str) -> None:
    """A run by its folder, whatever named its checkpoints; weights alone are no run to resume."""
    (run / "config.yaml").touch()
    weights = {"model.w": tensors()["model.w"]}
    state = {**training_state(2), "weights_only": True}
    save(run / BEST / CHECKPOINTS, 2, weights, state=state)
    for given, advice in ((run / CHECKPOINTS, f"resume={run}"), (run / BEST, f"ckpt={run / BEST} ")):
        assert mlm("ckpt", command, given) == 0
        out = capsys.readouterr().out.replace("\n", " ")
        assert advice in f"{out} "
        assert ("resume=" in out) == (given.name != BEST)


def test_it_goes_forward_again_until_training_continues(chain: Path, capsys: Output) -> None:
    mlm("ckpt", "rollback", chain, "step=2")
    assert mlm("ckpt", "rollback", chain, "step=4") == 0
    assert names(chain) == [f"aside-{step_name(5)}", *map(step_name, (1, 2, 3, 4))]
    assert latest_name(chain / CHECKPOINTS) == step_name(4)
    mlm("ckpt", "rollback", chain, "step=2")
    add(chain, 3, [1, 2], value=2.0)  # training continues
    assert mlm("ckpt", "rollback", chain, "step=5") == 2
    assert "set step=… to one of 1, 2, 3" in capsys.readouterr().err
    assert names(chain) == [*(f"aside-{step_name(n)}" for n in (3, 4, 5)), *map(step_name, (1, 2, 3))]


def test_a_second_roll_back_keeps_what_the_first_set_aside(chain: Path) -> None:
    mlm("ckpt", "rollback", chain, "step=4")
    add(chain, 5, [1, 2, 3, 4], value=2.0)
    assert mlm("ckpt", "rollback", chain, "step=4") == 0
    assert names(chain)[:2] == [f"aside-{step_name(5)}", f"aside-{step_name(5)}-2"]


def test_the_newest_good_one_is_taken_without_a_step(chain: Path) -> None:
    shorten(checkpoint(chain, 5))
    add(chain, 4, [1, 2, 3], value=1e30)
    assert mlm("ckpt", "rollback", chain) == 0
    assert latest_name(chain / CHECKPOINTS) == step_name(3)


def test_a_latest_one_with_a_flipped_bit_gives_way_to_an_older_one(
    chain: Path, capsys: Output, caplog: pytest.LogCaptureFixture
) -> None:
    damage(checkpoint(chain, 5))
    assert mlm("ckpt", "rollback", chain, "step=5") == 1
    shard = checkpoint(chain, 5) / "rank-00000.safetensors"
    assert f"step=5: {shard}: damaged, digest" in capsys.readouterr().err
    assert latest_name(chain / CHECKPOINTS) == step_name(5)
    assert mlm("ckpt", "rollback", chain) == 0
    assert latest_name(chain / CHECKPOINTS) == step_name(4)
    assert f"{shard}: damaged" in caplog.text


def test_pruning_keeps_the_checkpoint_that_a_diverged_run_goes_back_to(chain: Path) -> None:
    record = {"kind": "diverged", "time": 0, "step": 12, "since": 5, "good": None}
    (chain / "metrics.jsonl").write_text(json.dumps(record) + "\n")
    assert mlm("ckpt", "prune", chain, "keep_last=1") == 0
    assert step_name(3) in names(chain)
    assert mlm("ckpt", "rollback", chain) == 0
    assert latest_name(chain / CHECKPOINTS) == step_name(3)


def test_a_step_that_is_not_there_is_a_line_with_those_that_are(chain: Path, capsys: Output) -> None:
    assert mlm("ckpt", "rollback", chain, "step=9") == 2
    assert capsys.readouterr().err.startswith(
        "mlm ckpt rollback: step=9: no checkpoint to move to; set step=… to one of 1, 2, 3, 4, 5"
    )
    assert mlm("ckpt", "rollback", checkpoint(chain, 3)) == 2
