"""YAML of a --config-dir sets values and calls nothing, whoever wrote it."""

import os
from pathlib import Path

import pytest

from mlm.cli import main
from tests.slow import slow_but, thinned

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
    "launcher of a group": "defaults: [override /hydra/launcher: theirs]",
}


def write_experiment(folder: Path, text: str) -> list[str]:
    """An experiment of somebody's, in whose text @ is a path that must not appear; the words to type."""
    path = folder / "theirs/experiment/theirs.yaml"
    path.parent.mkdir(parents=True)
    path.write_text(f"# @package _global_\n{text.replace('@', str(folder / 'marker'))}\n")
    return ["pretrain", "--config-dir", "theirs", "data=synthetic", "--check"]


@pytest.mark.parametrize(
    "chosen", slow_but({0}, [["experiment=theirs"], ["-m", "experiment=theirs,laptop", "seed=1,2"]])
)
@pytest.mark.parametrize("case", thinned(HOSTILE_YAML, 3))
def test_yaml_of_others_runs_nothing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    case: str,
    chosen: list[str],
) -> None:
    """An experiment that would have Hydra, logging or YAML call something."""
    monkeypatch.chdir(tmp_path)
    environment = dict(os.environ)
    assert main([*write_experiment(tmp_path, HOSTILE_YAML[case]), *chosen]) in (0, 2)
    assert "Traceback" not in capfd.readouterr().err
    assert os.listdir() == ["theirs"]
    assert dict(os.environ) == environment


def test_yaml_of_ones_own_may_set_values(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "model").mkdir()
    for size in (32, 64):  # a file that was rewritten is parsed again
        file = tmp_path / "model/my_model.yaml"
        file.write_text(f"hidden_size: {size}\nnum_heads: 2\nnum_layers: 1\n")
        assert main(["pretrain", "--config-dir", str(tmp_path), "--cfg", "job", "model=my_model"]) == 0
        assert f"hidden_size: {size}" in capfd.readouterr().out
