"""Lines that `mlm pretrain` prints before it takes memory."""

import time
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.models.family import family_of
from mlm.models.shape import count_parameters
from mlm.parallel.mesh import ParallelContext
from mlm.plan import forecast as module
from mlm.plan import run_forecast
from mlm.plan.forecast import forecast_lines, small_run_bound
from mlm.plan.hardware import GIB, preset
from mlm.plan.report import COMPARED, UNCOMPARED, format_range, format_seconds, time_range
from mlm.plan.run_forecast import Forecast, forecast, summary
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError
from tests.cli.test_presets import load_config
from tests.slow import slow

A100 = preset("dgx_a100_80g")
TINY = ["model=gpt2_tiny", "data=synthetic", "train.global_batch_size=8", "train.micro_batch_size=4"]


def config_of(*words: str) -> PretrainConfig:
    config = load_config("pretrain", [*words, "data=synthetic", "precision=bf16"])
    return config


def of_8b(ranks: int, *words: str, gibs: float = 79.15) -> Forecast:
    return forecast(config_of("model=gpt2_8b", *words), ranks, replace(A100, memory_gib=gibs))


def test_the_line_names_memory_and_mfu_of_the_layout() -> None:
    found = of_8b(512, "tp=8", "dp=64")
    (line,) = summary(found)
    low, high = COMPARED
    took = format_range(low * found.row["step_s"], high * found.row["step_s"], format_seconds)
    mfu = format_range(found.row["mfu"] / high, found.row["mfu"] / low, "{:.0%}".format)
    assert line == (
        f"needs {found.memory / GIB:.1f} GiB of 79.2 GiB per GPU; {took} a step "
        f"and {mfu} MFU expected (DGX A100 80GB, 512 ranks; "
        "constants of other programs (`mlm plan calibrate` measures this one's))"
    )


def test_times_are_ranges_that_are_wider_where_nothing_was_compared() -> None:
    """By the quantiles of published runs; nothing was compared of links and loads of experts."""
    dense, experts = (config_of(f"model={name}").model for name in ("gpt2_8b", "mixtral_8x7b"))
    measured = replace(A100, is_calibrated=True)
    usual = (COMPARED, ["this machine's rate at usual sizes"])
    assert time_range(A100, dense, 8)[0] == COMPARED
    assert time_range(measured, dense, 512) == usual
    one_node = replace(measured, network_is_assumed=True)
    assert time_range(one_node, dense, 8) == usual
    assert time_range(one_node, dense, 16)[0] == UNCOMPARED
    assert time_range(measured, experts, 8) == (UNCOMPARED, [*usual[1], "even loads of experts"])
    assert format_range(1.6, 3.08, format_seconds) == "1.6-3.08 s"
    assert format_range(0.72, 1.12, format_seconds) == "720 ms-1.12 s"
    assert format_range(0.32, 0.5, "{:.0%}".format) == "32%-50%"


def test_a_layout_that_does_not_fit_names_the_command_that_finds_others() -> None:
    found = of_8b(8, "tp=2", "dp=4")
    assert found.memory > found.query.memory_bytes
    _, warning = summary(found)
    assert warning.endswith("may be lacking; `mlm plan layouts gpus=8` finds layouts that fit")


def test_a_forecast_of_a_trillion_parameters_takes_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words = ["model=gpt2_sc21_1t", "parallel=sc21_1t", "train.global_batch_size=3072", "train.steps=9"]
    config = config_of(*words, "train.micro_batch_size=1")
    hardware = replace(A100, memory_gib=40)  # too little: layouts are searched
    monkeypatch.setattr(run_forecast, "hardware_here", lambda *_: hardware)
    assert family_of(config.model.kind).causal  # the run imports its family anyway
    begin = time.process_time()
    found = forecast_lines(config, 3072)
    assert time.process_time() - begin < 10
    assert len(found) == 2


def test_failures_are_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config("pretrain", TINY)
    assert len(forecast_lines(config, 1)) == 1
    own = replace(config, model=replace(config.model, kind="my_package.my_family:FAMILY"))
    assert forecast_lines(own, 1) == []
    monkeypatch.setattr(run_forecast, "forecast", lambda *_, **__: 1 / 0)
    monkeypatch.setattr(module, "small_run_bound", lambda *_: 0.0)
    assert forecast_lines(config, 1) == []


@pytest.mark.parametrize(
    ("words", "ranks"),
    [
        ("model=bert_tiny model.vocab_size=4096 pp=2 pipeline=gpipe train.micro_batch_size=1", 2),
        slow(("model=moe_demo train.micro_batch_size=1 tp=2 sequence_parallel=true", 4)),
    ],
)
def test_small_runs_on_cpus_need_less_than_their_bound(
    words: str, ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = load_config("pretrain", [*TINY, *words.split()])
    monkeypatch.setattr(module, "host_memory", lambda: 64 * GIB)
    assert ranks * forecast(config, ranks).memory < small_run_bound(config, ranks) < 16 * GIB
    monkeypatch.setattr(module, "host_memory", lambda: 1 * GIB)
    assert small_run_bound(config, ranks) == 0.0


@pytest.mark.slow
def test_adapters_and_split_sequences_have_a_forecast() -> None:
    """Of a trained weight 18 bytes are held, with gradient, moments and copy; of a frozen one 2."""
    whole, adapted = of_8b(8, "tp=8"), of_8b(8, "tp=8", "lora.rank=8")
    share = count_parameters(whole.query.run.model) / 8
    assert whole.memory - adapted.memory == pytest.approx(16 * share, rel=0.02)
    split = of_8b(16, "tp=8", "cp=2", "model.attention_dropout=0")
    assert split.layout.cp == 2
    assert split.row is not None


def test_pretrain_says_what_it_needs_before_it_takes_memory(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def fail(config: PretrainConfig, ctx: ParallelContext) -> None:
        raise UserError("the model is built")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr("mlm.cli.pretrain.run.Trainer", fail)
    assert main(["pretrain", *TINY, f"out={tmp_path / 'run'}"]) == 2
    needs, built = capsys.readouterr().err.splitlines()
    assert needs.startswith("mlm pretrain: needs 0.")
    assert built == "mlm pretrain: the model is built"
