"""A run's config.yaml and YAML of a --config-dir are data: they set values; nothing in them is called."""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from mlm.cli import main
from mlm.cli.compose.composition import load_config
from mlm.cli.compose.saved import read_values
from mlm.config.build import build
from mlm.config.tree import flatten
from mlm.runs.config import PretrainConfig
from mlm.training.loop import composed_yaml
from tests.slow import slow_but, thinned
from tests.util.special_files import put

HEAD = "command: pretrain\n"
BOMB = "".join(
    f"{b}: ${{{a}}}${{{a}}}${{{a}}}${{{a}}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)
HOSTILE = {
    "searchpath": "hydra: {searchpath: ['pkg://theirs.run.evil']}\n",
    "group of Hydra": "defaults: [pretrain, {override hydra/launcher: theirs}]\n",
    "another command": "command: finetune\n",
    "environment": "name: ${oc.env:MLM_SECRET}\n",
    "decoded": "name: ${oc.decode:'[1]'}\n",
    "interpolation bomb": f"a: xxxxxxxx\n{BOMB}name: ${{i}}\n",
    "interpolation of a missing value": "name: ???\n",
    "alias bomb": "name: &a [x, x]\nout: &b [*a, *a]\n",
    "anchor alone": "name: &a run\n",
    "python tag": "name: !!python/name:os.system ''\n",
    "standard tag": "name: !!binary aGk=\n",
    "key twice": "name: a\nname: b\n",
    "key that is a list": "? [a]\n: 1\n",
    "two documents": "name: a\n---\nname: b\n",
    "unknown key": "nme: run\n",
    "section that is a number": "model: 3\n",
    "value that is a section": "name: {a: 1}\n",
    "list of lists of interpolations": "data: {blend: [[['${x}']]]}\n",
    "infinite": "optimizer: {lr: .inf}\n",
    "number of many digits": f"seed: {'9' * 5000}\n",
    "number in base 60": f"seed: {':'.join(['59'] * 60)}\n",
    "out of range": "name: a\nmodel: {num_layers: 1, hidden_size: 8, num_heads: 0}\n",
    "out of range in a list": "name: a\nmodel: {num_layers: 1, hidden_size: 8, num_heads: 2}\n"
    "optimizer: {betas: [2.0, 0.9]}\n",
    "wrong type": "tp: two\n",
    "brackets": f"name: {'[' * 100_000}\n",
    "size": "#" * (1 << 19),
    "many values": f"data: {{blend: [{'1,' * 30_000}]}}\n",
    "long value": f"name: {'x' * 20_000}\n",
    "no mapping": "- a\n",
    "empty": "",
    "no YAML": "a: b: c: [\n",
    "control characters": "name: \x1b[2J\n",
    "escape in a name": 'name: "\\e[2J"\n',
    "escaped control characters": 'tp: "\\e[2J"\n',
    "no UTF-8": b"name: \xff\n",
}
"""Hostile content of a config.yaml; @ is a folder that must not appear."""


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder of others, in a package whose import leaves a mark, seen from its parent."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("MLM_SECRET", "hunter2")
    run = tmp_path / "theirs/run"
    (run / "evil").mkdir(parents=True)
    for folder in (run.parent, run, run / "evil"):
        (folder / "__init__.py").write_text("")
    (run / "evil/__init__.py").write_text(f"open({str(tmp_path / 'marker')!r}, 'w').close()\n")
    yield run
    for name in [name for name in sys.modules if name.split(".")[0] == "theirs"]:
        del sys.modules[name]


def write(run: Path, text: str | bytes) -> None:
    content = text if isinstance(text, bytes) else text.replace("@", str(run.parents[1] / "marker")).encode()
    (run / "config.yaml").write_bytes(content)


WHOLE = (
    *("group of Hydra", "another command", "two documents", "size", "no mapping", "empty", "no YAML"),
    "no UTF-8",
)
"""Cases that are a file as they stand; the others stand behind what a run writes first."""
BUILT = {
    "infinite": "optimizer.lr=Infinity",
    "out of range": "model.num_heads=0",
    "out of range in a list": "optimizer.betas=[2.0,0.9]",
    "wrong type": "tp=two",
}
"""Cases that are data, found where all values are checked, and what is said of them."""


@pytest.mark.parametrize("case", thinned(HOSTILE, 2))
def test_a_saved_config_that_is_not_data_is_an_error(
    theirs: Path, capfd: pytest.CaptureFixture[str], case: str
) -> None:
    """One line for each problem, exit code 2; nothing is imported, read from the environment or written."""
    write(theirs, HOSTILE[case] if case in WHOLE else HEAD + HOSTILE[case])
    shown = [] if case in BUILT else ["--cfg", "job", "--resolve"]
    code = main(["pretrain", "resume=theirs/run", "out=o", *shown])
    told = capfd.readouterr()
    assert code == 2, told.err
    assert all(line.startswith("mlm pretrain: ") for line in told.err.splitlines())
    assert BUILT.get(case, "theirs/run/config.yaml") in told.err
    assert "hunter2" not in told.err + told.out
    assert "\x1b" not in told.err + told.out
    assert not [name for name in sys.modules if name.startswith("theirs")], "a module was imported"
    assert os.listdir() == ["theirs"], "something was written"


@pytest.mark.parametrize("kind", ["FIFO", "folder", "device", "link"])
def test_only_a_plain_file_is_read(theirs: Path, capfd: pytest.CaptureFixture[str], kind: str) -> None:
    if kind == "link":
        (theirs / "other.yaml").write_text("name: a\n")
        (theirs / "config.yaml").symlink_to(theirs / "other.yaml")
    else:
        put(kind, theirs / "config.yaml")
    assert main(["pretrain", "resume=theirs/run", "--cfg", "job"]) == 2
    assert "theirs/run/config.yaml" in capfd.readouterr().err


def composed(capfd: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    """Return the run spec that a command line gives."""
    capfd.readouterr()
    code = main(["pretrain", *words, "--cfg", "job"])
    told = capfd.readouterr()
    assert code == 0, told.err
    found: dict[str, Any] = yaml.safe_load(told.out)
    return found


SAVED = (
    HEAD
    + """name: mine
out: elsewhere
tp: 2
model: {num_layers: 3, hidden_size: 64, num_heads: 4, max_positions: 32}
optimizer: {lr: 1e-3, betas: [0.8, 0.9], eps: 1.0e-06}
data: {kind: indexed, path: corpus, seq_length: 16}
precision: {dtype: bf16, min_loss_scale: 2.0}
"""
)


def test_nothing_typed_leaves_the_saved_values(theirs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(theirs, SAVED)
    found = composed(capfd, "resume=theirs/run")
    saved = yaml.safe_load(SAVED.replace("1e-3", "1.0e-3").removeprefix(HEAD)) | {"out": "theirs/run"}
    assert (
        flatten(found).items() >= {k: v for k, v in flatten(saved).items() if k != "optimizer.betas"}.items()
    )
    assert found["optimizer"]["betas"] == [0.8, 0.9]


def test_a_typed_key_replaces_the_saved_one(theirs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    write(theirs, SAVED)
    found = composed(capfd, "resume=theirs/run", "optimizer.lr=5e-4", "tp=1", "--train.steps", "9", "out=o")
    assert [found["optimizer"][key] for key in ("lr", "betas", "eps")] == [5e-4, [0.8, 0.9], 1e-6]
    assert (found["tp"], found["train"]["steps"], found["out"], found["name"]) == (1, 9, "o", "mine")


def test_a_typed_group_replaces_the_saved_keys_that_it_sets(
    theirs: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The choice that is the default of a new run too, which composing alone would not show."""
    write(theirs, SAVED)
    found = composed(capfd, "resume=theirs/run", "precision=fp32")
    assert (found["precision"]["dtype"], found["precision"]["min_loss_scale"]) == ("fp32", 2.0)
    assert found["data"]["seq_length"] == 16


def test_groups_of_ones_own_join_saved_values(theirs: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """They are typed, so Hydra composes them; their interpolations see the saved values."""
    write(theirs, SAVED)
    Path("mine/optimizer").mkdir(parents=True)
    Path("mine/optimizer/slow.yaml").write_text("lr: 1e-9\nweight_decay: ${model.num_layers}\n")
    found = composed(
        capfd,
        "resume=theirs/run",
        "--config-dir",
        "mine",
        "optimizer=slow",
        "schedule.min_lr=0",
        "--resolve",
    )
    assert (found["optimizer"]["lr"], found["optimizer"]["weight_decay"]) == (1e-9, 3)


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (f"resume={'x' * 300}", "too long for a file system"),
        ("resume=", "empty"),
        ("resume=theirs", "holds no config.yaml"),
        ("resume=theirs/run optimzer.lr=1", "did you mean 'optimizer.lr'?"),
    ],
)
def test_a_mistake_beside_a_saved_run_is_one_line(
    theirs: Path, capfd: pytest.CaptureFixture[str], words: str, problem: str
) -> None:
    write(theirs, SAVED)
    assert main(["pretrain", *words.split(), "data=synthetic"]) == 2
    err = capfd.readouterr().err
    assert problem in err
    assert len(err.splitlines()) == 1


def test_what_a_run_writes_is_read_back(tmp_path: Path) -> None:
    words = ["model=gpt2_tiny", "data.blend=['0.3 a','0.7 b']", "name='2024-01-01'", "optimizer.lr=1e-5"]
    config = load_config("pretrain", [*words, "experiment=v1_8_3b", "out='yes'"])
    (tmp_path / "config.yaml").write_text(composed_yaml(config, "pretrain"))
    assert build(PretrainConfig, read_values(tmp_path / "config.yaml", "pretrain")) == config


HOSTILE_YAML = {
    "object tag": "name: !!python/object/apply:os.mkdir [@]",
    "name tag": "name: !!python/name:os.system ''",
    "callback": "hydra: {callbacks: {x: {_target_: pathlib.Path.mkdir, "
    "self: {_target_: pathlib.Path, _args_: ['@']}}}}",
    "launcher": "hydra: {launcher: {_target_: os.mkdir, path: '@'}, mode: MULTIRUN}",
    "logging handler": "hydra: {job_logging: {root: {handlers: [x]}, "
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
