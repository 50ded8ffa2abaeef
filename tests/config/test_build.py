"""Composed values to dataclasses and back."""

import json
from typing import Any

import pytest

from mlm.cli.commands import SPECS
from mlm.cli.compose.composition import load_config
from mlm.cli.generate.settings import GenerateConfig
from mlm.config.build import build, config_digest, from_dict, to_dict
from mlm.config.tree import defaults, out_of_range
from mlm.runs.config import PretrainConfig
from mlm.util.errors import ConfigError, Problem


def composed(**changes: Any) -> dict[str, Any]:
    values = defaults(PretrainConfig)
    values["model"] |= {"num_layers": 2, "hidden_size": 8, "num_heads": 2}
    values |= {"name": "n", "out": "o"}
    for key, value in changes.items():
        place = values
        *path, name = key.split("__")
        for part in path:
            place = place.setdefault(part, {})
        place[name] = value
    return values


def problems_of(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as error:
        build(PretrainConfig, composed(**changes))
    return list(error.value.problems)


def test_top_level_degrees_become_the_parallel_section() -> None:
    config = build(PretrainConfig, composed(tp=4, dp=2, recompute="full"))
    assert (config.parallel.tp, config.parallel.dp, config.parallel.recompute) == (4, 2, "full")


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"tp": "two"}, "tp=two must be a whole number"),
        ({"dp": 1.5}, "dp=1.5 must be a whole number or null"),
        ({"optimizer__lr": float("nan")}, "optimizer.lr=NaN must be finite"),
        ({"optimizer__betas": [0.9]}, "optimizer.betas=[0.9] must be a list of 2 numbers"),
        ({"compile": "maybe"}, "compile=maybe must be true, false or null"),
        (
            {"cuda_graphs": "stak"},
            "cuda_graphs=stak must be true, false, stack or null; did you mean cuda_graphs=stack?",
        ),
        ({"zero": 1}, "zero=1 must be 0, 2 or 3"),
        (
            {"model__num_layers": "???"},
            "model.num_layers is required: add model.num_layers=… (Transformer layers, L)",
        ),
    ],
)
def test_value_of_the_wrong_kind_is_a_problem(change: dict[str, Any], problem: str) -> None:
    assert problems_of(**change) == [problem]


def test_whole_float_is_a_whole_number() -> None:
    assert build(PretrainConfig, composed(train__steps=1e3)).train.steps == 1000


def test_all_problems_come_together_with_those_of_the_check() -> None:
    low = Problem(("seed",), "seed=0 is low")
    with pytest.raises(ConfigError) as error:
        build(PretrainConfig, composed(tp="x", seeds=1), lambda _: [low, "a line of no key"])
    assert [p.keys for p in error.value.problems] == [("seeds",), ("tp",), ("seed",), ()]


def test_problem_that_follows_from_an_unusable_value_is_left_out() -> None:
    with pytest.raises(ConfigError) as error:
        build(PretrainConfig, composed(tp="x"), lambda _: [Problem(("tp",), "tp=1 does not fit")])
    assert error.value.problems == ("tp=x must be a whole number",)


def test_number_out_of_range_is_reported_once_and_hides_what_follows_from_it() -> None:
    """The check sees the number itself, and may find it again."""
    seen = []

    def check(config: PretrainConfig) -> list[Problem]:
        seen.append(config.parallel.tp)
        return [*out_of_range(config).values(), Problem(("tp", "pp"), "tp=0 * pp=1 make no ranks")]

    with pytest.raises(ConfigError) as error:
        build(PretrainConfig, composed(tp=0), check)
    assert (seen, error.value.problems) == ([0], ("tp=0 must be greater than 0",))


@pytest.mark.parametrize("name", ["pretrain", "generate", "data_build", "plan_schedule"])
def test_run_spec_survives_json(name: str) -> None:
    given = {"generate": "ckpt=c prompt=p", "pretrain": "optimizer.lr=0.1"}
    given |= {"data_build": "input=i out=o tokenizer=t"}
    config = load_config(name, given.get(name, "").split())
    assert from_dict(SPECS[name], json.loads(json.dumps(to_dict(config)))) == config


def test_saved_spec_of_another_kind_is_rejected() -> None:
    with pytest.raises(ConfigError, match="saved GenerateConfig"):
        from_dict(GenerateConfig, to_dict(build(PretrainConfig, composed())))


def test_digest_depends_on_values_alone() -> None:
    config, same = build(PretrainConfig, composed()), build(PretrainConfig, composed())
    assert config_digest(config) == config_digest(same)
    assert config_digest(config) != config_digest(build(PretrainConfig, composed(seed=1)))
