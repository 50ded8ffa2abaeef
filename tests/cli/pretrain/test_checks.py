"""Cross-checks: each problem names key, value, remedy and the nearest valid setting."""

from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm.cli.compose.composition import compose_values, load_config
from mlm.cli.pretrain.run import epochs_warning
from mlm.config.build import build
from mlm.data.blend import BlendedDataset
from mlm.runs.checks import check_pretrain
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import corpora, corpus_folders, validation_prefixes
from mlm.util.errors import ConfigError
from tests.slow import thinned

SOUND = ["model=gpt2_tiny", "data=synthetic"]
GROUPED = [
    *("model=llama_tiny", "model.num_heads=12", "model.hidden_size=96", "model.ffn_hidden_size=192"),
    "model.options.num_kv_heads=3",
]


SHORT = [
    *("exact=4", "model=moe_tiny", "model.ffn_hidden_size=256", "data.seq_length=16"),
    "train.micro_batch_size=1",
]
"""Eight tokens of each of two parts, with four scores of experts: whole vectors."""


STACK = "cuda_graphs=stack compile=true model.attention_dropout=0"


def problems_of(
    *overrides: str, world_size: int | None = None, local_devices: int | None = None
) -> list[str]:
    config = load_config("pretrain", [*SOUND, *overrides])
    return check_pretrain(config, world_size=world_size, local_devices=local_devices)


@pytest.mark.parametrize(
    "words",
    [
        [],
        ["cp=2", "data.reset_positions=true", "data.eod_id=3"],
        ["cp=2", "model=llama_tiny"],
        ["cp=8", "model=llama_tiny"],  # splits no heads
        [*GROUPED, "tp=6"],  # heads of keys and values are replicated
        SHORT,
        ["cuda_graphs=true", "compile=true", "recompute=selective"],
        ["fuse_accumulation=true", "compile=true"],
        STACK.split(),
        ["recompute=budget", "compile=true", "tp=2", "dp=2", "zero=2", "sequence_parallel=true"],
    ],
    ids=" ".join,
)
def test_sound_config_has_no_problem(words: list[str]) -> None:
    assert problems_of(*words) == []


@pytest.mark.parametrize(
    "overrides, problem",
    thinned(
        [
            (
                ["model.num_heads=7"],
                "model.num_heads=7 does not divide model.hidden_size=64; "
                "use model.num_heads=4 or model.num_heads=8",
            ),
            (["tp=3"], "tp=3 does not divide model.num_heads=4; use tp=2 or tp=4 (its divisors: 1, 2, 4)"),
            (
                ["data.seq_length=512"],
                "data.seq_length=512 is more than model.max_positions=128; "
                "use data.seq_length=128, or model.max_positions=512",
            ),
            (
                ["schedule.warmup_steps=3000", "train.steps=100"],
                "schedule.warmup_steps=3000 must be below train.steps=100, where the decay ends; "
                "use schedule.warmup_steps=99 or fewer",
            ),
            (
                ["model=llama_tiny", "model.options.rope_scaling=ntk"],
                "model.options.rope_scaling=ntk is not supported; "
                "use default, linear, dynamic, llama3, yarn or longrope",
            ),
            (
                [*GROUPED, "tp=2"],
                "of tp=2 and model.options.num_kv_heads=3 neither divides the other; use tp=1 or tp=3",
            ),
            (
                ["ckpt=no/where"],
                "ckpt=no/where: no such folder; give a run folder (runs/…) or one of its checkpoints "
                "(…/step-00001000)",
            ),
        ],
        2,
    ),
)
def test_problem_names_value_and_remedy(overrides: list[str], problem: str) -> None:
    assert problems_of(*overrides) == [problem]


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        ("dist.backend=nccl", "dist.backend=nccl runs on GPUs, and this run is on CPU"),
        ("cp=2 data.reset_attention=true data.eod_id=3", "cp=2: data.reset_attention=true keeps documents"),
        ("model.head=classification model.num_labels=2", "model.head=classification is for finetuning"),
        ("schedule.min_lr=0.1", "schedule.min_lr=0.1 is more than optimizer.lr=0.00015"),
        ("precision=fp16 precision.initial_loss_scale=0.5", "precision.min_loss_scale=1 is more than"),
        ("tp=4 model.ffn_hidden_size=10", "tp=4 does not divide model.ffn_hidden_size=10"),
    ],
)
def test_problem_of_a_rule_begins_with_its_setting(words: str, problem: str) -> None:
    (found,) = problems_of(*words.split())
    assert found.startswith(problem)


def problem_of_files(*overrides: str) -> str:
    config = load_config("pretrain", ["model=gpt2_tiny", *overrides])
    (problem,) = check_pretrain(config, world_size=None, local_devices=None)
    return problem


def test_missing_data_names_the_command_that_writes_it_and_an_absent_tokenizer_its_file(
    tmp_path: Path,
) -> None:
    assert problem_of_files().startswith(
        "data.path is not set: give a corpus folder, write one with `mlm data build`"
    )
    touch(tmp_path / "train.bin", tmp_path / "train.idx")
    problem = problem_of_files(f"data.path={tmp_path}", "data.tokenizer=t.json")
    assert problem == "data.tokenizer=t.json: no such file; correct the path, or data.tokenizer=null"


def test_data_path_may_be_the_prefix_of_a_pair(tmp_path: Path) -> None:
    """It is then the training part, with no validation part beside it."""
    touch(tmp_path / "wiki_text_document.bin", tmp_path / "wiki_text_document.idx")
    prefix = tmp_path / "wiki_text_document"
    config = load_config("pretrain", ["model=gpt2_tiny", f"data.path={prefix}"])
    assert check_pretrain(config, world_size=None, local_devices=None) == []
    assert (corpora(config.data)[0].train, validation_prefixes(config.data)) == (prefix, {})
    assert corpus_folders(config.data) == [tmp_path]
    problem = problem_of_files(f"data.path={prefix}.bin")
    assert problem.endswith(f"use data.path={prefix}")


def test_blend_as_in_megatron_is_answered_with_ours() -> None:
    values = compose_values("pretrain", ["model=gpt2_tiny", "data.blend=[0.3,a,0.7,b]"])
    with pytest.raises(ConfigError) as caught:
        build(PretrainConfig, values, partial(check_pretrain, world_size=None, local_devices=None))
    (problem,) = caught.value.problems
    assert problem.fix == "weight and corpus are one entry: 'data.blend=[0.3 wiki,0.7 web]'"


def touch(*files: Path) -> None:
    for file in files:
        file.touch()


@pytest.mark.parametrize(
    "overrides, problem",
    [
        (["attention=flash"], "attention=flash needs half precision, not precision.dtype=fp32"),
        (
            ["attention=flash", "precision=bf16", "data.reset_attention=true", "model.attention_dropout=0.1"],
            "attention=flash has no dropout (model.attention_dropout=0.1) for sequences of several lengths, "
            "which data.reset_attention=true makes; use attention=auto or model.attention_dropout=0",
        ),
        (
            ["attention=flash", "precision=bf16", "data.reset_attention=true", "model=llama_tiny"],
            "attention=flash takes no mask, which data.reset_attention=true needs in a model.kind=llama; "
            "use attention=auto",
        ),
    ],
    ids=str,
)
def test_attention_that_no_kernel_computes_is_a_mistake(overrides: list[str], problem: str) -> None:
    assert any(problem in found for found in map(str, problems_of(*overrides)))


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            ["exact=8"],
            "exact=8 does not go with model.hidden_size=64; use a multiple of 128 for it, or exact=0",
        ),
        (
            ["exact=4", "cp=2", "data.seq_length=128"],
            "exact=4 does not go with cp=2; use 1 (or a multiple of 256 for data.seq_length) for it, "
            "or exact=0",
        ),
        (
            ["exact=4", "cp=2", "model=moe_tiny"],
            "exact=4 does not go with ep=1; use a multiple of 2 for it, or exact=0",
        ),
        (
            [*SHORT, "model.options.z_loss=0.1"],
            "exact=4 does not go with train.micro_batch_size=1; use a larger power of two for it, or exact=0",
        ),
    ],
)
def test_exact_names_sizes_that_its_parts_do_not_divide(settings: list[str], problem: str) -> None:
    assert problem in map(str, problems_of(*settings))


@pytest.mark.parametrize(
    "words, other, fix",
    thinned(
        [
            ("cuda_graphs=true", "compile=false", "cuda_graphs=false or compile=true"),
            ("cuda_graphs=true", "tp=2", "cuda_graphs=false or tp=1"),
            (STACK, "model.attention_dropout=0.1", "cuda_graphs=false or model.attention_dropout=0"),
            (STACK, "precision.dtype=fp8", "cuda_graphs=false or precision.dtype=bf16"),
            (STACK, "data.reset_attention=true", "cuda_graphs=false or data.reset_attention=false"),
            ("fuse_accumulation=true", "zero=2", "fuse_accumulation=false or zero=0"),
            ("exact=4", "lora.dora=true", "exact=0 or lora.dora=false"),
            ("exact=4", "train.ramp_batch=[8,8,100]", "exact=0 or train.ramp_batch=null"),
            ("recompute=budget", "compile=false", "recompute=full or compile=true"),
            ("recompute=budget compile=true", "cp=2", "recompute=full or cp=1"),
        ],
        2,
    ),
)
def test_switch_names_the_setting_that_it_does_not_go_with(words: str, other: str, fix: str) -> None:
    problem = f"{words.split()[0]} does not go with {other}; use {fix}"
    assert problem in map(str, problems_of(*words.split(), other))


@pytest.mark.parametrize("words", ["recompute=budget compile=true", "cuda_graphs=true"])
def test_switch_of_the_compiler_takes_no_mixture(words: str) -> None:
    (problem,) = problems_of(*words.split(), "model=moe_tiny")
    assert "does not go with model.options.num_experts=" in problem
    assert problem.endswith("or model.options.num_experts=0")


@pytest.mark.parametrize(("epochs", "fix"), [([20.0], None), ([126.0], "15"), ([1.0, 40.0], "50")])
def test_a_run_that_learns_its_corpus_by_heart_is_warned(epochs: list[float], fix: str | None) -> None:
    parts = [SimpleNamespace(epochs=number) for number in epochs]
    samples = parts[0] if len(parts) == 1 else BlendedDataset(parts, epochs, num_samples=1)  # type: ignore
    warning = epochs_warning(samples, 500)  # type: ignore[arg-type]
    assert (warning is None) == (fix is None)
    assert f"about train.steps={fix} " in (warning or "about train.steps=None ")
