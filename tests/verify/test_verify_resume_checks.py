"""Settings that `mlm verify-resume` rejects before it starts, and those compared bit for bit."""

import pytest

from mlm.config.cli.compose import load_config
from mlm.verify.config import VerifyResumeConfig, check_halves, check_verify_resume, is_same_layout


def verify_resume(*overrides: str) -> VerifyResumeConfig:
    config = load_config("verify_resume", overrides)
    assert isinstance(config, VerifyResumeConfig)
    return config


def problems(*overrides: str) -> list[str]:
    return check_verify_resume(verify_resume(*overrides))


@pytest.mark.parametrize(
    "words,begins",
    [
        (["tp=3"], "tp=3 does not divide model.num_heads=4; use tp=2"),
        (["resumed.tp=3"], "resumed.tp=3 does not divide model.num_heads=4; use resumed.tp=2"),
        (["resumed.tp=0"], "resumed.tp=0 must be"),
        (["dp=2", "resumed.dp=3"], "train.global_batch_size=16 is not a multiple of resumed.dp=3 *"),
        (["pp=2", "resumed.zero=3"], "resumed.zero=3 would gather the weights again"),
        (["resumed.pp=2", "resumed.vp=2"], "resumed.pp=2 * resumed.vp=2 = 4 stages are more than"),
        (["steps=0"], "steps=0 must be"),
    ],
    ids=str,
)
def test_a_problem_names_the_half_it_is_in(words: list[str], begins: str) -> None:
    (problem,) = problems(*words)
    assert problem.startswith(begins)


def test_masks_of_fused_attention_on_a_gpu_depend_on_tp() -> None:
    """No other mask depends on the layout."""
    config = verify_resume("model.attention_dropout=0.1", "model.hidden_dropout=0.1", "resumed.tp=2")
    (problem,) = check_halves(config, local_devices=2)
    assert str(problem).startswith("model.attention_dropout=0.1 on a GPU draws other masks at resumed.tp=2")
    assert check_halves(config, local_devices=None) == []


@pytest.mark.parametrize(
    "words,same",
    [([], True), (["resumed.dp=1"], True), (["dp=2", "resumed.dp=1"], False), (["resumed.tp=2"], False)],
)
def test_bits_are_asked_for_where_nothing_of_the_layout_changes(words: list[str], same: bool) -> None:
    """dp=null is one replica on a CPU."""
    assert is_same_layout(verify_resume(*words), local_devices=None) is same


def test_other_hosts_are_no_remedy() -> None:
    """The ranks of a run that is killed are all on this one."""
    (problem,) = problems("dp=128", "train.global_batch_size=256")
    assert problem.startswith("tp=1 * pp=1 * dp=128 = 128 ranks, but a CPU host runs at most 64; use dp=")
    assert "torchrun" not in problem
