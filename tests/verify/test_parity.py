"""`mlm parity` as a command: its settings, its limits, its exit codes."""

import errno
import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.cli.compose.composition import load_config
from mlm.cli.verify import check_parity
from mlm.models.shape import count_parameters
from mlm.parallel.mesh import shape_context
from mlm.util.errors import UserError
from mlm.verify import parity as module
from mlm.verify.config import FIRST_LOSS_SCALE, ParityConfig, comparable
from mlm.verify.parity import preflight, run
from tests.cli.doubles import Cli, make_cli
from tests.verify.parity_layouts import LAYOUTS

cli = pytest.fixture(make_cli)
KINDS = {"loss": 1, "norm": 1, "gradient": 28, "weight": 28}
"""Rows of parity.json for each step of the small model."""


def parity(*overrides: str) -> ParityConfig:
    config = load_config("parity", overrides)
    assert isinstance(config, ParityConfig)
    return config


def compare(folder: Path, *words: str) -> int:
    """Exit code of `mlm parity` of the smallest run, on ranks of its own."""
    small = ["model.hidden_size=16", "model.vocab_size=61", "data.seq_length=16", "train.global_batch_size=4"]
    return main(["parity", *small, "steps=2", f"out={folder / 'out'}", *words])


@pytest.mark.slow
def test_an_equal_layout_ends_with_0_and_leaves_its_numbers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert compare(tmp_path, "tp=2", "sequence_parallel=true") == 0
    told = capfd.readouterr()
    assert told.err == ""
    assert "parity of tp=2 pp=1 dp=1 sequence_parallel=true with one process" in told.out
    assert "EQUAL: losses to" in told.out
    result = json.loads((tmp_path / "out/parity.json").read_text())
    assert result["equal"] is True
    rows = Counter((row["step"], row["kind"]) for row in result["differences"])
    assert rows == {(n, kind): k for n in (1, 2) for kind, k in KINDS.items()}


@pytest.mark.slow
def test_a_layout_with_exact_sums_is_equal_bit_for_bit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("exact=4", "model.hidden_size=64", "precision=bf16", "tp=2", "dp=2")
    assert compare(tmp_path, *words) == 0
    assert "EQUAL bit for bit: 116 tensors of 2 steps, sha256:" in capfd.readouterr().out


def test_a_comparison_that_decides_nothing_ends_with_1_and_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A loss scale that float16 overflows at: the way out of every verdict but EQUAL."""
    assert compare(tmp_path, "recompute=full", "precision=fp16", "precision.min_loss_scale=4e9") == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert (
        "UNDECIDED: the reduced gradient of token.weight in step 1 is not finite on one process either"
        in line
    )
    assert json.loads((tmp_path / "out/parity.json").read_text())["equal"] is False


def test_a_wrong_key_ends_with_2(cli: Cli) -> None:
    assert cli("parity tp=2 step=3") == 2
    assert cli.err == "mlm parity: unknown key 'step'; did you mean 'steps'?\n"


@pytest.mark.parametrize("problem", ["tp=3", "steps=0", "train.global_batch_size=3", "vp=2"])
def test_a_layout_that_cannot_train_is_rejected_as_by_pretrain(cli: Cli, problem: str) -> None:
    assert cli(f"parity {problem}") == 2
    assert cli.err.startswith(f"mlm parity: {problem}")


def test_a_large_run_is_compared_small_and_exactly(cli: Cli) -> None:
    """The experiment's layout and schedule; float64 and this host unless they are typed."""
    assert cli("parity experiment=v1_8_3b model=gpt2_tiny tp=2 dp=2") == 0
    config = cli.launched.config
    assert (config.parallel.tp, config.parallel.recompute, config.schedule.decay) == (2, "full", "cosine")
    assert (config.precision.dtype, config.dist.device) == ("fp64", "auto")


def test_float16_begins_below_its_overflow() -> None:
    assert comparable(parity("precision=fp16")).precision.initial_loss_scale == FIRST_LOSS_SCALE


def test_one_process_differs_in_its_layout_alone() -> None:
    config = parity("tp=2", "recompute=full", "zero=2", "dp=2")
    alone = config.on_one_process()
    assert alone.parallel.recompute == "none"
    assert replace(alone, parallel=config.parallel, compile=None) == config


def test_layouts_that_are_proven_equal_can_be_typed() -> None:
    for layout in LAYOUTS:
        assert check_parity(layout.config(), world_size=None, local_devices=None) == [], str(layout)


def test_a_model_beyond_the_memory_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    config = parity("model=gpt2_8b", "tp=2", "pp=2")
    # weights, gradients, two moments and a record in float64: whole, and again in the parts of four ranks
    needed = 2 * 5 * 8 * count_parameters(config.model)
    monkeypatch.setattr(module, "available_memory", lambda: needed - 1)
    (problem,) = preflight(config)
    assert problem.startswith("model.num_layers=72: the whole model and its layout take more than 66")
    monkeypatch.setattr(module, "available_memory", lambda: needed)
    assert not preflight(config)


def test_a_disk_that_fills_while_comparing_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder could be written to at the start; the numbers cannot at the end."""

    def full(path: Path, _: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr("mlm.verify.verdict.write_result", full)
    small = ("steps=1", "model.hidden_size=16", "data.seq_length=16", "train.global_batch_size=2")
    with pytest.raises(UserError, match=r"out=.*No space left on device"):
        run(parity(f"out={tmp_path}", *small), shape_context())
