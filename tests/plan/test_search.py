"""The search: exhaustive over valid layouts, and its best that of trying everything."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig
from mlm.plan.candidates import Query, layouts
from mlm.plan.hardware import preset
from mlm.plan.layout import PlannedLayout
from mlm.plan.search import Forecaster, search
from mlm.runs.checks import check_pretrain
from mlm.runs.config import TrainConfig
from tests.plan.planned import planned_run

SMALL = ModelConfig(num_layers=12, hidden_size=768, num_heads=12, attention_dropout=0.0)
LARGE = ModelConfig(num_layers=72, hidden_size=3072, num_heads=32)


def query(model: ModelConfig = SMALL, gpus: int = 8, batch: int = 32, seq: int = 1024, **more: Any) -> Query:
    values = {"hardware": preset("dgx_a100_80g"), **more}
    return Query(run=planned_run(model, seq, batch=batch), gpus=gpus, **values)


@pytest.mark.parametrize(
    ("model", "gpus", "batch", "fixed"),
    [
        (SMALL, 1, 16, {}),
        pytest.param(SMALL, 12, 24, {"pp": 3, "cp": 1}, marks=pytest.mark.slow),
        pytest.param(LARGE, 16, 16, {"zero": 0}, marks=pytest.mark.slow),
    ],
)
def test_best_layouts_equal_those_of_brute_force(
    model: ModelConfig, gpus: int, batch: int, fixed: dict[str, object]
) -> None:
    asked = query(model, gpus, batch, fixed=fixed)
    models = Forecaster(asked)
    tried = [models.forecast(layout) for layout in layouts(asked)]
    fitting = sorted(p.step.total for p in tried if p.memory.total <= asked.memory_bytes)
    assert all(models.cost.bound(p.layout) <= p.step.total * (1 + 1e-9) for p in tried)
    assert all(models.memory.bound(p.layout) <= p.memory.total * (1 + 1e-9) for p in tried)
    found = search(asked, most=10)
    assert found.candidates == len(tried)
    assert [p.step.total for p in found.best] == pytest.approx(fitting[:10], rel=1e-12)
    lacking = [p for p in tried if p.memory.total > asked.memory_bytes]
    as_fast = [p.memory.total for p in lacking if len(fitting) < 10 or p.step.total < fitting[9]]
    if as_fast:
        assert found.nearest[1] <= min(as_fast) - asked.memory_bytes


SEARCHED = (
    *("tp", "pp", "vp", "dp", "cp", "sequence_parallel", "pipeline", "zero", "zero_reduce", "recompute"),
)


@given(
    layers=st.integers(1, 12),
    heads=st.sampled_from([1, 2, 3, 4, 6]),
    ffn=st.sampled_from([None, 96, 100]),
    gpus=st.sampled_from([1, 2, 3, 4, 6, 8, 12]),
    batch=st.sampled_from([1, 2, 6, 8, 12]),
    seq=st.sampled_from([16, 18, 31]),
)
@settings(max_examples=25, deadline=None)
def test_no_layout_is_proposed_that_pretraining_rejects(
    layers: int, heads: int, ffn: int | None, gpus: int, batch: int, seq: int
) -> None:
    model = ModelConfig(
        num_layers=layers,
        hidden_size=48,
        num_heads=heads,
        ffn_hidden_size=ffn,
        max_positions=32,
        vocab_size=300,
    )
    for layout in layouts(query(model, gpus, batch, seq=seq)):
        parallel = ParallelConfig(**{key: getattr(layout, key) for key in SEARCHED})
        train = TrainConfig(global_batch_size=batch, micro_batch_size=layout.micro_batch)
        run = planned_run(model, seq, dtype="fp32", parallel=parallel)
        config = replace(run, out="runs/planned", train=train)
        assert check_pretrain(config, world_size=gpus, local_devices=gpus) == [], layout


def test_search_is_exhaustive_over_what_changes_a_step() -> None:
    """Against loops over every value of every setting, those without effect at their defaults."""
    asked = query(SMALL, 4, 8)
    found = list(layouts(asked))
    assert len(set(found)) == len(found)
    sizes = [(tp, cp, pp) for tp in (1, 2, 4) for cp in (1, 2, 4) for pp in (1, 2, 4) if tp * cp * pp <= 4]
    assert {(x.tp, x.cp, x.pp, x.dp) for x in found} == {(t, c, p, 4 // (t * c * p)) for t, c, p in sizes}
    deep = [x for x in found if (x.tp, x.cp, x.pp, x.micro_batch, x.zero) == (1, 1, 2, 2, 0)]
    deep = [x for x in deep if x.recompute == "none"]
    assert sorted((x.pipeline, x.vp) for x in deep) == sorted(
        [("zb_h1", 1), *((name, vp) for name in ("1f1b", "gpipe") for vp in (1, 2, 3, 6))]
    )
    assert {x.zero for x in found if x.dp * x.cp == 1} == {0}
    assert {x.sequence_parallel for x in found if x.tp == 1} == {False}


def test_fixed_settings_are_kept() -> None:
    found = search(query(LARGE, 16, 64, fixed={"tp": 4, "recompute": "full"}))
    assert {(p.layout.tp, p.layout.recompute) for p in found.best} == {(4, "full")}


def test_a_layout_is_read_from_its_name() -> None:
    asked = query(SMALL, 4, 8)
    for layout in layouts(asked):
        assert PlannedLayout.named(layout.label, asked.run) == layout
    split = {"tp": 2, "dp": 4, "cp": 2, "ep": 4, "expert_tp": 1, "sequence_parallel": True}
    experts = PlannedLayout(**split, tp_overlap=4, global_batch=8)
    assert PlannedLayout.named(experts.label, asked.run) == experts
    parallel, train = ParallelConfig(tp=2, zero=3, dp=4), TrainConfig(global_batch_size=8, micro_batch_size=2)
    typed = replace(asked.run, parallel=parallel, train=train)  # what a name leaves open is as typed
    expected = PlannedLayout(zero=3, dp=4, micro_batch=2, global_batch=8)
    assert PlannedLayout.named("tp1", typed) == expected
    assert PlannedLayout.named("tp1 dp1", typed) == PlannedLayout(micro_batch=2, global_batch=8)  # no zero
    for word in ("tp", "tp0", "12", "zero1", "TP2", "tp=2"):
        with pytest.raises(ValueError, match=f"{word} is not a word"):
            PlannedLayout.named(f"tp2 {word}", asked.run)
