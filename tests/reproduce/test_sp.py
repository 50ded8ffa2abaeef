"""What the experiments of arXiv:2205.05198 conclude from results with a known answer."""

import pytest

from mlm.reproduce.conclusion import Verdict
from mlm.reproduce.counted import Case, kept_per_layer, sent
from mlm.reproduce.sp import memory, recomputation
from tests.reproduce.timed import Timed

SEQ, HIDDEN = 16, 32
TINY = {"num_layers": 4, "hidden_size": HIDDEN, "num_heads": 4, "vocab_size": 64, "vocab_multiple": 16}


def by_formula(**changes: float) -> dict[str, float]:
    """Counts that are the formulas'."""
    model = memory.MODELS[0]
    return {each.name: each.formula(memory.TP, model.scores) for each in memory.TECHNIQUES} | changes


@pytest.mark.parametrize(
    "counted,verdict",
    [
        (by_formula(), Verdict.AGREES),
        (by_formula(full=3.0), Verdict.PARTLY),
        ({name: 2 * size for name, size in by_formula().items()}, Verdict.CONTRADICTS),
    ],
)
def test_counts_agree_with_table_2(counted: dict[str, float], verdict: Verdict) -> None:
    found = memory.conclude_from(counted)
    assert found.verdict is verdict
    assert [row[2] for row in found.tables[0].rows] == pytest.approx(list(by_formula().values()))


def test_the_model_that_keeps_scores_has_the_same_share_of_them() -> None:
    small = memory.SMALL
    assert small["num_heads"] * memory.SMALL_SEQ / small["hidden_size"] == memory.MODELS[0].scores


@pytest.mark.parametrize(
    "parallel,bytes_per_element",
    [({"tp": 2}, 10 + 24 / 2), ({"tp": 2, "sequence_parallel": True}, 34 / 2)],
)
def test_a_layer_is_counted_as_table_2_has_it(parallel: dict[str, object], bytes_per_element: float) -> None:
    kept = kept_per_layer(Case(model=TINY, seq=SEQ, parallel=parallel))
    norms_and_softmax = 16 * SEQ // (2 if "sequence_parallel" in parallel else 1) + 2 * 4 * SEQ + 24
    assert kept == bytes_per_element * SEQ * HIDDEN + norms_and_softmax


def test_a_rank_is_counted_to_send_1_of_t_between_stages() -> None:
    sizes = [
        sent(
            Case(
                model=TINY,
                seq=SEQ,
                parallel={"tp": 2, "pp": 2, "sequence_parallel": split},
                global_batch=3,
            ),
            rank=0,
        )["pp", "send"]
        for split in (False, True)
    ]
    assert sizes == [3 * 2 * SEQ * HIDDEN, 3 * 2 * SEQ * HIDDEN // 2]


@pytest.mark.parametrize(
    "full,selective,verdict",
    [
        (1.39, 1.07, Verdict.AGREES),
        (1.39, 1.3, Verdict.PARTLY),
        (1.1, 1.3, Verdict.CONTRADICTS),
        (1.0, 1.0, Verdict.OPEN),
    ],
)
def test_selective_recomputation_costs_less_than_half_of_full(
    full: float, selective: float, verdict: Verdict
) -> None:
    times = {"full": full, "selective": selective, "selective-sp": selective}
    results = Timed(recomputation.EXPERIMENT, lambda name: times.get(name, 1.0))
    found = recomputation.conclude(results)
    assert found.verdict is verdict
    assert len(found.tables[0].rows) == 5


def test_nothing_is_concluded_of_runs_that_failed() -> None:
    results = Timed(recomputation.EXPERIMENT, failed=("full",))
    assert recomputation.conclude(results).verdict is Verdict.OPEN


def test_the_papers_scale_says_what_does_not_fit() -> None:
    plan = {"layouts": [{"step_s": 2.0, "memory_bytes": 2.0**35}]}
    results = Timed(recomputation.EXPERIMENT, scale="paper", found=plan, failed=("plan-none",))
    found = recomputation.conclude(results)
    assert found.verdict is Verdict.PLANNED
    assert found.tables[0].rows[0][1] == "does not fit"
