"""Rules of layouts: each problem names key, value and the nearest layout that works, which leaves fewer."""

import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mlm.cli.compose.composition import load_config
from mlm.launch.rules import layout as layout_checks
from mlm.launch.rules.layout import RANK_RULES, SPLIT_RULES, TRAIN_RULES, Launch
from mlm.launch.rules.nearest import layout_problems
from mlm.runs.checks import check_pretrain
from mlm.util.errors import Problem
from tests.slow import thinned


def problems_of(
    *overrides: str, world_size: int | None = None, local_devices: int | None = None
) -> list[str]:
    sound = ["model=gpt2_tiny", "model.num_layers=12", "data=synthetic"]  # 4 heads, 128 positions
    config = load_config("pretrain", [*sound, *overrides])
    return check_pretrain(config, world_size=world_size, local_devices=local_devices)


@pytest.mark.parametrize(
    "overrides",
    thinned(
        [
            "pp=5",  # stages need not be equal
            "pp=2 vp=6",
            "pp=2 vp=2 pipeline=gpipe",
            "cp=64",
            "tp=4 sequence_parallel=true tp_overlap=32",
            "cp=2 tp=4 pp=2 dp=1 zero=2 sequence_parallel=true",
            "tp=2 pp=3 vp=2 dp=2 zero=2 sequence_parallel=true train.global_batch_size=48",
        ],
        4,
    ),
)
def test_layout_that_runs_has_no_problem(overrides: str) -> None:
    assert problems_of(*overrides.split()) == []


@pytest.mark.parametrize(
    "overrides, problem",
    thinned(
        [
            (
                "cp=3",
                "cp=3 splits sequences into 6 pieces, but 6 does not divide data.seq_length=128; use "
                "data.seq_length=126 or cp=1",
            ),
            ("vp=2", "vp=2 interleaves the stages of a pipeline, but pp=1 makes none; use vp=1 or pp=2"),
            (
                "pp=4 vp=2",
                "pp=4 * vp=2 = 8 stages do not divide model.num_layers=12, as vp > 1 needs; use vp=1 or vp=3",
            ),
            (
                "pp=2 vp=2 pipeline=zb_h1",
                "pipeline=zb_h1 has one stage per rank, but vp=2; use pipeline=1f1b or vp=1",
            ),
            (
                "pp=2 zero=3",
                "zero=3 would gather the weights again for each micro-batch of a pipeline (pp=2); use zero=2",
            ),
            (
                "tp=4 sequence_parallel=true data.seq_length=3",
                "sequence_parallel=true splits sequences, but tp=4 does not divide data.seq_length=3; "
                "use data.seq_length=4 or sequence_parallel=false",
            ),
            (
                "tp=2 tp_overlap=3",
                "tp_overlap=3 does not divide a rank's 128 tokens of a sequence; "
                "use tp_overlap=2 or tp_overlap=4",
            ),
            (
                "pp=3 vp=2 dp=2 train.global_batch_size=64",
                "train.global_batch_size=64 is not a multiple of dp=2 * train.micro_batch_size=8 * pp=3 = "
                "48; use train.global_batch_size=48 or train.global_batch_size=96",
            ),
        ],
        2,
    ),
)
def test_problem_names_value_and_remedy(overrides: str, problem: str) -> None:
    assert problems_of(*overrides.split()) == [problem]


@pytest.mark.parametrize(
    "overrides, world_size, problem",
    [
        (
            "tp=2 pp=3",
            8,
            "tp=2 * pp=3 = 6 does not divide the 8 ranks started; "
            "use pp=2 or pp=4, or start a multiple of 6 ranks",
        ),
        (
            "cp=2 dp=2",
            8,
            "tp=1 * cp=2 * pp=1 * dp=2 = 4 ranks, not the 8 ranks started; use dp=4 or dp=null, or start "
            "4 ranks",
        ),
    ],
)
def test_world_of_a_launcher_must_be_filled(overrides: str, world_size: int, problem: str) -> None:
    assert problems_of(*overrides.split(), world_size=world_size) == [problem]


def test_alternatives_of_one_problem_break_no_other_rule() -> None:
    heads = ["model.num_heads=24", "model.hidden_size=48", "tp=5"]
    batches = ["train.micro_batch_size=1", "train.global_batch_size=40"]
    (problem,) = problems_of(*heads, *batches, world_size=40)
    assert "; use tp=4 or tp=8 (" in problem  # tp=6 divides the heads, but not the ranks


@pytest.mark.parametrize(
    "local_devices, remedy",
    [
        (8, "this host has 8 GPUs; {}, or here use dp=4"),
        (None, "a CPU host runs at most 64; {}, or here use dp=32 or tp=1"),
    ],
)
def test_first_remedy_of_too_many_ranks_is_to_launch_them(local_devices: int | None, remedy: str) -> None:
    batch = ["train.global_batch_size=768", "train.micro_batch_size=1"]
    remedy = remedy.format("start 128 ranks with torchrun or SLURM (scripts/slurm/pretrain.sbatch)")
    assert problems_of("tp=2", "dp=64", *batch, local_devices=local_devices) == [
        f"tp=2 * pp=1 * dp=64 = 128 ranks, but {remedy}"
    ]


def test_too_few_ranks_here_do_not_shrink_the_other_remedies() -> None:
    problems = problems_of("tp=4", "pp=12", "zero=3", "dp=8", local_devices=8)
    assert [problem.split("; ")[1].split(", or here ")[-1] for problem in problems] == [
        "change dp, cp, tp, pp",
        "use zero=2",
    ]


def test_a_host_without_the_memory_for_the_weights_is_no_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout_checks, "host_memory", lambda: 24 << 30)
    large = ["model.num_layers=72", "model.hidden_size=3072", "model.num_heads=24", "tp=8", "dp=64"]
    batch = ["train.global_batch_size=512", "train.micro_batch_size=1"]
    (problem,) = problems_of(*large, *batch)
    assert problem.endswith("(scripts/slurm/pretrain.sbatch)")
    (problem,) = problems_of(*large, "model.num_layers=2", *batch)
    assert problem.endswith(", or here use dp=8 or tp=1")


SIZE = st.integers(1, 12)
LAYOUTS = st.fixed_dictionaries(
    {
        "tp": SIZE,
        "cp": st.sampled_from([1, 1, 2, 3, 4]),
        "pp": SIZE,
        "vp": st.integers(1, 4),
        "dp": st.none() | SIZE,
        "sequence_parallel": st.booleans(),
        "tp_overlap": st.sampled_from([1, 1, 2, 3]),
        "pipeline": st.sampled_from(["1f1b", "gpipe", "zb_h1"]),
        "zero": st.sampled_from([0, 2, 3]),
        "model.num_layers": st.integers(1, 24),
        "model.num_heads": SIZE,
        "model.hidden_size": st.sampled_from([24, 32, 60]),
        "model.ffn_hidden_size": st.none() | st.sampled_from([30, 96]),
        "model.max_positions": st.integers(1, 40),
        "data.seq_length": st.integers(1, 48),
        "train.global_batch_size": st.integers(1, 100),
        "train.micro_batch_size": st.integers(1, 4),
    }
)
LAUNCHES = st.builds(Launch, st.none() | st.integers(1, 48), st.none() | st.integers(1, 16))


def fixes(problem: Problem) -> list[dict[str, Any]]:
    """The alternatives that a problem offers here, as changes; none if it names keys alone."""
    if "change " in problem.fix:
        return []
    offered = re.split(r" \(|, or ", re.split("^use |, or here use ", problem.fix)[1])[0]
    typed = [[word.split("=") for word in words.split()] for words in offered.split(" or ")]
    return [
        {key: value if key == "pipeline" else json.loads(value) for key, value in pairs} for pairs in typed
    ]


@pytest.mark.parametrize("rules", [TRAIN_RULES, RANK_RULES, SPLIT_RULES])
@settings(max_examples=20, deadline=None)
@given(layout=LAYOUTS, launch=LAUNCHES, data=st.data())
def test_a_fix_solves_its_problem_and_makes_no_other(
    rules: Any, layout: dict[str, Any], launch: Launch, data: st.DataObject
) -> None:
    problems = layout_problems(layout, launch, rules)
    offered = [(n, change) for n, problem in enumerate(problems) for change in fixes(problem)]
    assume(offered)
    number, change = data.draw(st.sampled_from(offered))
    left = layout_problems({**layout, **change}, launch, rules)
    assert len(left) < len(problems)
    inputs = [problem.keys for problem in left]
    assert all(inputs.count(keys) <= [p.keys for p in problems].count(keys) for keys in inputs)
    assert inputs.count(problems[number].keys) < [p.keys for p in problems].count(problems[number].keys)


@settings(max_examples=60, deadline=None)
@given(layout=LAYOUTS, launch=LAUNCHES)
def test_model_is_not_changed_to_suit_its_layout(layout: dict[str, Any], launch: Launch) -> None:
    assume(layout["model.hidden_size"] % layout["model.num_heads"] == 0)
    found = layout_problems(layout, launch, TRAIN_RULES)
    changed = [change for problem in found for change in fixes(problem)]
    assert not any(key.startswith("model.") for change in changed for key in change)
