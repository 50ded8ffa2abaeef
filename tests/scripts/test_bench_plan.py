"""The benchmark of plans: its cases are layouts that train here, its targets are counted as stated."""

import pytest
from bench.contenders import run_config
from bench.layouts import parse_layout
from bench.spec import Spec
from bench_plan import CASES, RANKS, predicted_memory, predicted_time, verdicts

from mlm.config.tree import values_of
from mlm.launch.rules.layout import TRAIN_RULES, Launch
from mlm.launch.rules.nearest import layout_problems
from mlm.plan.hardware import preset


def test_every_case_is_a_valid_layout_of_few_ranks() -> None:
    assert len({case.name for case in CASES}) == len(CASES)
    for case in CASES:
        launch, parallel = Launch(case.layout.gpus, None), parse_layout(case.words).parallel
        assert parallel.tp * parallel.pp * (parallel.dp or 1) == case.layout.gpus
        config = run_config(Spec(case.sizes, "cpu", "fp32", 1), case.layout.micro_batch, parallel)
        assert not layout_problems(values_of(config), launch, TRAIN_RULES), case.name
        assert case.layout.gpus * case.threads <= RANKS


@pytest.mark.slow
def test_targets_are_met_by_the_prediction_itself_and_missed_by_others() -> None:
    hardware = preset("rtx_4090")
    found = {
        case.name: {"wall_s": predicted_time(case, hardware)}
        if case.kind == "time"
        else {"bytes": predicted_memory(case)}
        for case in CASES
    }
    assert all(met for _, met in verdicts(found, hardware))
    for case in CASES:
        if case.kind == "time":
            found[case.name]["wall_s"] *= 1.3
        else:
            found[case.name]["bytes"] = [1.3 * size for size in predicted_memory(case)]
    missed = [words for words, met in verdicts(found, hardware) if not met]
    assert len(missed) == 1 + sum(case.kind == "memory" for case in CASES)
