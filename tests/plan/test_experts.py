"""Plans of mixtures of experts against what the dry run counts: operations and bytes of tokens."""

from dataclasses import replace
from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.plan import check_plan_layouts
from mlm.models.shape import count_parameters
from mlm.plan import cost
from mlm.plan.candidates import layouts, query_of
from mlm.plan.config import PlanDryRunConfig
from mlm.plan.cost import CostModel, Software
from mlm.plan.dry_run import flops_of
from mlm.plan.dry_run_rank import DryRun, dry_run
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import PlannedLayout, model_flops
from mlm.plan.layouts import run
from mlm.plan.memory import MemoryModel

MICRO, BATCH = 2, 16


def dry(words: str) -> tuple[PlanDryRunConfig, PlannedLayout, DryRun]:
    typed = ["model=moe_tiny", "model.vocab_multiple=16", "precision=bf16", *words.split()]
    config = load_config(
        "plan_dry_run", [*typed, f"train.micro_batch_size={MICRO}", f"train.global_batch_size={BATCH}"]
    )
    dp = config.parallel.dp or 1
    layout = PlannedLayout.of(config, dp)
    return config, layout, dry_run(config, 0, in_full=True)


def test_exchanged_bytes_are_those_that_the_dry_run_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time of a link of 1 GB/s without latency, nothing hidden."""
    monkeypatch.setattr(cost, "RING_HOP_S", 0.0)
    config, layout, found = dry("tp=2 dp=4 ep=4")
    sent = sum(m.ring_bytes * n for m, n in found.counts.messages.items() if m.axis == "ep")
    plan = load_config("plan_memory", ["model=moe_tiny", "hardware=dgx_a100_80g"])
    one = replace(plan.hardware.efficiency, network=1.0)
    hardware = replace(plan.hardware, node_gbps=1.0, node_latency_us=0.0, efficiency=one)
    step = CostModel(counts_of(config, "gpu"), hardware, layout.gpus, Software(overlaps=False)).step(layout)
    assert step.parts["ep"] == pytest.approx(sent / 1e9, rel=1e-9)
    assert sum(step.parts.values()) == pytest.approx(step.total)


def test_values_narrower_than_queries_and_router_state_are_no_work_or_weights_of_the_model() -> None:
    """DeepSeek's kind: heads of 24 with values of 16 that kernels pad; biases of routers are state."""
    options = "kv_lora_rank=16 q_lora_rank=0 rope_head_dim=8 head_dim=24 v_head_dim=16 router_bias=true"
    words = " ".join(f"model.options.{option}" for option in options.split())
    config, layout, found = dry(f"{words} model.options.balance=bias")
    flops = flops_of(found)
    assert flops["model"] == model_flops(config.model, config.data.seq_length, BATCH)
    assert flops["hardware"] > flops["model"]
    assert found.parameters == count_parameters(config.model)
    memory = MemoryModel(counts_of(config, "gpu"))
    assert memory.peak(layout).parameters == found.parameters


@pytest.mark.slow
def test_layouts_are_searched_over_ep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["model=mixtral_8x7b", "hardware=dgx_h100", "gpus=64", "zero=2", "pipeline=1f1b", "show=3"]
    words += ["tp=4", "sequence_parallel=true", "train.micro_batch_size=1"]
    config = load_config("plan_layouts", [*words, "data.seq_length=4096", "train.global_batch_size=256"])
    assert check_plan_layouts(config) == []
    query = query_of(config)
    assert {layout.ep for layout in layouts(query) if layout.dp == 16} == {1, 2, 4, 8}
    best, printed = run(config).best[0].layout, capsys.readouterr().out
    assert "46.7B parameters, 12.9B of a token" in printed
    assert f"ep={best.ep}" in printed
