"""Every shipped YAML composes, passes the checks, and has its paper's shape."""

import re
from functools import cache

import pytest

from mlm.cli.commands import SPECS
from mlm.cli.compose.composition import compose_values, load_config
from mlm.cli.data import check_build
from mlm.cli.finetune import check_finetune
from mlm.cli.plan import check_plan_layouts
from mlm.config.paths import CONFIG_DIR, groups
from mlm.config.tree import flatten, leaves
from mlm.models.config import ModelConfig
from mlm.plan.hardware import preset
from mlm.runs.checks import check_pretrain
from mlm.runs.config import PretrainConfig
from mlm.util.errors import Absent
from tests.slow import thinned

SHIPPED = groups(CONFIG_DIR)
GROUPS_OF_OTHERS = ("recipe", "executor", "task", "hardware")  # of commands other than `pretrain`
CHOICES = [f"{group}={name}" for group in SHIPPED.keys() - {*GROUPS_OF_OTHERS} for name in SHIPPED[group]]
SC21 = {  # GPUs, arXiv:2104.04473, table 1
    **{"1_7b": 32, "3_6b": 64, "7_5b": 128, "18b": 256, "39b": 512, "76b": 1024, "145b": 1536},
    **{"310b": 1920, "530b": 2520, "1t": 3072},
}
LLAMA3 = [  # GPUs, tokens a step
    ("llama3_405b", 16_384, 1 << 24),
    ("llama3_405b_128k", 16_384, 1 << 24),
    ("llama3_70b", 64, 1 << 20),
    ("llama3_70b_zero3", 256, 1 << 22),
]


@cache
def pretrain(*overrides: str) -> PretrainConfig:
    """The run spec of these overrides; composing takes a tenth of a second."""
    return load_config("pretrain", overrides)


def model(name: str) -> ModelConfig:
    return pretrain(f"model={name}").model


@pytest.mark.parametrize("choice", thinned(sorted(CHOICES), 3))
def test_shipped_choice_composes_into_a_run_spec_without_problem(choice: str) -> None:
    config = pretrain(choice, *model_of_layout(choice))
    layout = config.parallel
    world_size = layout.replica * (layout.dp or 1)
    problems = check_pretrain(config, world_size=world_size, local_devices=8)
    assert [p for p in problems if not p.startswith("data.path")] == []  # the user has the corpus


@pytest.mark.parametrize(("group", "name"), [(g, n) for g in ("recipe", "executor") for n in SHIPPED[g]])
def test_shipped_choice_composes_into_a_build_without_problem(group: str, name: str) -> None:
    config = load_config("data_build", ["input=i", "tokenizer=t", "out=o", f"{group}={name}"])
    assert check_build(config) == []
    if group == "recipe":
        assert config.dedup.enabled == (name != "plain")
    else:
        assert config.executor.kind == name


@pytest.mark.parametrize("name", thinned(SHIPPED["hardware"], 3))
def test_shipped_hardware_composes_into_a_plan_without_problem(name: str) -> None:
    config = load_config("plan_layouts", [f"hardware={name}", "precision=fp16"])
    assert check_plan_layouts(config) == []
    assert config.hardware == preset(name)


@pytest.mark.parametrize("name", thinned(SHIPPED["task"], 3))
def test_shipped_task_composes_into_a_finetuning_run_without_problem(name: str) -> None:
    config = load_config("finetune", ["ckpt=c", f"task={name}"])
    problems = check_finetune(config, world_size=None, local_devices=None)
    assert [problem for problem in problems if not isinstance(problem, Absent)] == []  # no model is named
    assert config.out == f"runs/{name}"
    task = config.task
    assert (config.optimizer.lr, config.schedule.warmup) == (task.lr, task.warmup)


@pytest.mark.parametrize(
    "words, lr", [([], 2e-5), (["lora.rank=8"], 2e-4), (["lora.rank=8", "optimizer.lr=3e-5"], 3e-5)]
)
def test_adapters_take_ten_times_the_learning_rate_of_a_task(words: list[str], lr: float) -> None:
    assert load_config("finetune", ["ckpt=c", "task=chat", *words]).optimizer.lr == lr


def model_of_layout(choice: str) -> list[str]:
    """The model that a layout's first lines say it is for."""
    group, _, name = choice.partition("=")
    text = (CONFIG_DIR / group / f"{name}.yaml").read_text()
    return re.findall(r"for (model=\w+):", text) if group == "parallel" else []


@pytest.mark.parametrize("name", thinned(SPECS, 5))
def test_primary_config_holds_exactly_the_keys_of_its_dataclass(name: str) -> None:
    assert flatten(compose_values(name)).keys() == leaves(SPECS[name]).keys()


def test_sc21_vocabulary_pads_to_the_papers() -> None:
    assert model("gpt2_sc21_1t").padded_vocab_size(tp=8) == 51_200


@pytest.mark.parametrize("name", thinned(SC21, 3))
def test_sc21_layout_fills_its_gpus_and_fits_its_model(name: str) -> None:
    config = load_config("pretrain", [f"model=gpt2_sc21_{name}", f"parallel=sc21_{name}", "data=synthetic"])
    gpus = SC21[name]
    layout = config.parallel
    assert layout.tp * layout.pp * layout.dp == gpus
    problems = check_pretrain(config, world_size=gpus, local_devices=8)
    assert problems == []


@pytest.mark.parametrize(
    "name, vp", [("39b", 1), ("76b", 3), ("145b", 2), ("310b", 2), ("530b", 3), ("1t", 1)]
)
def test_sc21_layout_interleaves_where_the_authors_script_does(name: str, vp: int) -> None:
    """--num-layers-per-virtual-pipeline-stage of examples/sc21/run_table_1.sh in NVIDIA/Megatron-LM."""
    assert pretrain(f"parallel=sc21_{name}").parallel.vp == vp


@pytest.mark.parametrize(("name", "gpus", "tokens"), LLAMA3)
def test_llama3_layout_fills_its_gpus_and_fits_its_model(name: str, gpus: int, tokens: int) -> None:
    """At the length of sequence that its source has, which gives the source's tokens a step."""
    seq_length = 131_072 if name.endswith("128k") else 8192
    words = [*model_of_layout(f"parallel={name}"), f"parallel={name}", "data=synthetic"]
    config = load_config("pretrain", [*words, f"data.seq_length={seq_length}"])
    assert config.parallel.dp is not None
    assert config.parallel.replica * config.parallel.dp == gpus
    assert config.train.global_batch_size * seq_length == tokens
    assert check_pretrain(config, world_size=gpus, local_devices=8) == []


def test_v1_experiment_has_the_papers_training_settings() -> None:
    config = pretrain("experiment=v1_8_3b")
    assert config.parallel.tp * (config.parallel.dp or 1) == 512  # GPUs, figure 5
    assert config.train.global_batch_size == 512
    given, schedule = config.optimizer, config.schedule
    assert (given.lr, given.weight_decay, given.clip_grad_norm) == (1.5e-4, 0.01, 1.0)
    assert (schedule.warmup_steps, schedule.decay_steps, schedule.min_lr) == (3000, 300_000, 1e-5)
    assert (config.precision.dtype, config.model.hidden_dropout, config.model.init_std) == ("fp16", 0.1, 0.02)


def test_typed_value_wins_over_every_group() -> None:
    config = load_config(
        "pretrain", ["tp=4", "parallel=v1_8_3b", "experiment=v1_8_3b", "train.micro_batch_size=2"]
    )
    assert (config.parallel.tp, config.parallel.dp, config.train.micro_batch_size) == (4, 64, 2)
