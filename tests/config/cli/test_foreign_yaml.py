"""YAML that comes with somebody's folder sets values and calls nothing."""

from itertools import pairwise
from pathlib import Path

import pytest

from mlm.config.cli import main

HOSTILE_YAML = {
    "object tag": "name: !!python/object/apply:os.mkdir [@]",
    "name tag": "name: !!python/name:os.system ''",
    "callback": "hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir, "
    "self: {_target_: pathlib.Path, _args_: ['@']}}}}",
    "callback by arguments": "hydra: {callbacks: {x: {_target_: os.mkdir, path: '@'}}}",
    "launcher": "hydra: {launcher: {_target_: os.mkdir, path: '@'}, mode: MULTIRUN}",
    "sweeper": "hydra: {sweeper: {_target_: os.mkdir, path: '@'}, mode: MULTIRUN}",
    "logging handler": "hydra: {job_logging: {root: {handlers: [x]}, "
    "handlers: {x: {(): os.mkdir, path: '@'}}}}",
    "logging of Hydra": "hydra: {hydra_logging: {root: {handlers: [x]}, "
    "handlers: {x: {(): os.mkdir, path: '@'}}}}",
    "environment": "hydra: {job: {env_set: {LD_PRELOAD: '@'}}}",
    "aliases": "a: &a [1, 1, 1, 1]\n"
    + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 8)}]\n" for a, b in pairwise("abcdefghijk")),
    "endless alias": "a: &a [*a]",
    "brackets": "a: " + "[" * 100_000,
    "size": "#" * (1 << 19),
}


@pytest.mark.parametrize("case", HOSTILE_YAML)
@pytest.mark.parametrize("file", ["config.yaml", "experiment/theirs.yaml"])
def test_yaml_of_others_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], file: str, case: str
) -> None:
    """A run directory's config.yaml, and an experiment, that would have Hydra or YAML call something."""
    monkeypatch.chdir(tmp_path)
    marker, path = tmp_path / "marker", tmp_path / "theirs" / file
    path.parent.mkdir(parents=True)
    head = "# @package _global_\n" if "/" in file else "defaults: [hydra_quiet, pretrain_defaults, _self_]\n"
    path.write_text(head + HOSTILE_YAML[case].replace("@", str(marker)) + "\n")
    chosen = ["experiment=theirs", "data=synthetic"] if "/" in file else ["--config-name", "config"]
    code = main(["pretrain", "--config-dir", str(tmp_path / "theirs"), *chosen, f"out={tmp_path / 'out'}"])
    err = capfd.readouterr().err
    assert code == 2, err
    assert "Traceback" not in err
    assert not marker.exists()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["theirs"]


@pytest.mark.parametrize("chosen", ["gpt2_tiny,theirs", "glob(t*)"])
def test_every_choice_of_a_sweep_is_checked(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], chosen: str
) -> None:
    """Hydra composes each job again, and makes its logging handlers."""
    (tmp_path / "model").mkdir()
    hostile = HOSTILE_YAML["logging handler"].replace("@", str(tmp_path / "marker"))
    (tmp_path / "model/theirs.yaml").write_text(f"# @package _global_\n{hostile}\n")
    words = ["--config-dir", str(tmp_path), "-m", f"model={chosen}", "optimizer.lr=1e-4,1e-3"]
    assert main(["pretrain", "data=synthetic", f"out={tmp_path / 'out'}", *words]) == 2
    assert "hydra.job_logging is set by the YAML" in capfd.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_yaml_of_ones_own_may_set_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "my_model.yaml").write_text("hidden_size: 32\nnum_heads: 2\nnum_layers: 1\n")
    words = ["--config-dir", str(tmp_path), "--cfg", "job", "model=my_model", "hydra.sweep.dir=here"]
    assert main(["pretrain", *words]) == 0
    assert "hidden_size: 32" in capfd.readouterr().out
