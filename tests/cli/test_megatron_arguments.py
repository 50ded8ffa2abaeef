"""Whole command lines of Megatron-LM as settings: scripts, published models, every flag of its parser."""

import shlex
from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.entry import main
from mlm.cli.megatron_arguments import Translation, flags_of, translate, translate_words
from mlm.cli.megatron_script import command_in
from mlm.config.suggest import megatron_flags
from mlm.models.config import ModelConfig
from mlm.util.errors import UserError

SCRIPT = r"""#!/bin/bash
# Trains on two nodes; pretrain_gpt.py --bf16 in a comment is no command.
CHECKPOINTS=${1:-"runs/llama"}   # a default
TP=2
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32
    --group-query-attention --num-query-groups 8 --rotary-base 500000
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --seq-length 8192 --max-position-embeddings 8192
    --attention-dropout 0.0 --hidden-dropout 0.0 --init-method-std 0.0134
)
DTYPE=()
if [ -z "$FP8" ]; then DTYPE+=("--bf16"); fi
TRAIN="--micro-batch-size 1 --global-batch-size 128 --train-samples 1280000 --lr-warmup-samples 128000"
if [ ! -f "pretrain_gpt.py" ]; then echo "pretrain_gpt.py is missing"; exit 1; fi
torchrun --nnodes 2 pretrain_gpt.py ${MODEL_ARGS[@]} "${DTYPE[@]}" $TRAIN \
    --tensor-model-parallel-size ${TP} --sequence-parallel --use-distributed-optimizer \
    --pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 8 \
    --lr 3e-4 --min-lr=3e-5 --lr-decay-style cosine --adam-beta2 0.95 --clip-grad 1.0 \
    --data-path 0.3 data/wiki 0.7 data/web --split 99,1,0 --tokenizer-model $TOKENIZER \
    --save "$CHECKPOINTS" --load "$CHECKPOINTS" --overlap-grad-reduce --apply-layernorm-1p 2>&1 | tee log
"""
SETTINGS = {
    "model": "llama",
    "model.num_layers": "32",
    "model.hidden_size": "4096",
    "model.ffn_hidden_size": "14336",
    "model.num_heads": "32",
    "model.options.num_kv_heads": "8",
    "model.options.rope_theta": "500000",
    "model.max_positions": "8192",
    "model.attention_dropout": "0.0",
    "model.hidden_dropout": "0.0",
    "model.init_std": "0.0134",
    "model.layer_norm_eps": "1e-5",
    "data.seq_length": "8192",
    "data.blend": "[0.3 data/wiki,0.7 data/web]",
    "train.micro_batch_size": "1",
    "train.global_batch_size": "128",
    "train.steps": "10000",
    "train.validate_every": "1000",
    "train.validate_batches": "100",
    "schedule.warmup_steps": "1000",
    "schedule.decay": "cosine",
    "schedule.min_lr": "3e-5",
    "optimizer.lr": "3e-4",
    "optimizer.betas": "[0.9,0.95]",
    "optimizer.weight_decay": "0.01",
    "optimizer.clip_grad_norm": "1.0",
    "precision": "bf16",
    "tp": "2",
    "pp": "2",
    "vp": "2",
    "zero": "2",
    "sequence_parallel": "true",
    "seed": "1234",
    "out": "runs/llama",
}
UNTIED = (
    "--attention-dropout 0 --hidden-dropout 0 --swiglu --position-embedding-type rope "
    "--normalization RMSNorm --untie-embeddings-and-output-weights --disable-bias-linear "
)
MODELS = {
    "mixtral_8x7b": UNTIED
    + "--num-layers 32 --hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 "
    "--group-query-attention --num-query-groups 8 --rotary-base 1000000 --max-position-embeddings 32768 "
    "--num-experts 8 --moe-router-topk 2 --moe-router-load-balancing-type none --vocab-size 32000",
    "deepseek_v3": UNTIED
    + "--num-layers 61 --hidden-size 7168 --ffn-hidden-size 18432 --num-attention-heads 128 "
    "--multi-latent-attention --q-lora-rank 1536 --kv-lora-rank 512 --qk-head-dim 128 --v-head-dim 128 "
    "--qk-pos-emb-head-dim 64 --qk-layernorm --norm-epsilon 1e-6 --max-position-embeddings 163840 "
    "--num-experts 256 --moe-layer-freq ([0]*3+[1]*58) --moe-ffn-hidden-size 2048 --moe-router-topk 8 "
    "--moe-shared-expert-intermediate-size 2048 --moe-router-score-function sigmoid "
    "--moe-router-topk-scaling-factor 2.5 --moe-router-num-groups 8 --moe-router-group-topk 4 "
    "--moe-router-enable-expert-bias --vocab-size 129280",
}
ELSEWHERE = {"rope_scaling", "rope_factor", "rope_original_positions", "rope_mscale", "rope_attention_factor"}
"""Options that other flags decide; balance=bias has a router_bias."""


def of(line: str) -> Translation:
    return translate(flags_of(shlex.split(line)))


def test_script_is_translated_whole(tmp_path: Path) -> None:
    """Arrays, strings of flags, defaults of variables and redirections; comments are no command."""
    path = tmp_path / "train.sh"
    path.write_text(SCRIPT)
    found = translate_words([str(path)])
    assert found.settings == SETTINGS
    assert list(found.automatic) == ["--use-mcore-models", "--overlap-grad-reduce"]
    assert list(found.not_offered) == ["--apply-layernorm-1p"]
    assert list(found.by_hand) == ["--split 99,1,0", "--tokenizer-model $TOKENIZER"]
    assert not found.unknown


def test_translation_is_a_command_that_passes_its_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.sh").write_text(SCRIPT)
    assert main(["pretrain", "--from-megatron", str(tmp_path / "train.sh")]) == 0
    command, *comments = capsys.readouterr().out.replace("\\\n", "").splitlines()
    assert all(line.startswith("# ") for line in comments)
    words = [word for word in shlex.split(command)[1:] if not word.startswith(("data.blend", "out="))]
    assert main([*words, "data=synthetic", f"out={tmp_path / 'run'}", "--check", "16"]) == 0
    assert "tp=2 × pp=2" in capsys.readouterr().out


@pytest.mark.parametrize("preset", MODELS)
def test_flags_of_a_published_model_are_its_preset(preset: str) -> None:
    """The presets are compared with config.json and the papers' parameter counts elsewhere."""
    settings = [
        f"{key}={value}" for key, value in of(MODELS[preset]).settings.items() if key.startswith("model")
    ]
    found: ModelConfig = load_config("pretrain", [*settings, "data=synthetic"]).model
    expected: ModelConfig = load_config("pretrain", [f"model={preset}", "data=synthetic"]).model
    options = {
        key: value for key, value in expected.options.items() if key not in {*ELSEWHERE, "router_bias"}
    }
    assert {key: found.options[key] for key in options} == options
    for name in ("num_layers", "hidden_size", "ffn_size", "num_heads", "vocab_size", "max_positions", "norm"):
        assert getattr(found, name) == getattr(expected, name), name


def test_every_flag_of_the_parser_has_an_answer() -> None:
    unknown = [name for name in megatron_flags() if translate({name: ["1"]}).unknown]
    assert len(megatron_flags()) > 850
    assert unknown == []
    assert list(of("--no-such-flag 3").unknown) == ["--no-such-flag 3"]


@pytest.mark.parametrize(
    "line, settings",
    [
        ("--lr 1e-4", {"schedule.decay": "linear", "schedule.min_lr": "0.0", "schedule.warmup_steps": "0"}),
        (
            "--lr-decay-style WSD --lr-wsd-decay-iters 9",
            {"schedule.decay": "constant", "schedule.cooldown": "9"},
        ),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads", {"zero": "2"}),
        ("--bf16 --fp8-format hybrid", {"precision": "fp8"}),
        (
            "--optimizer muon --muon-momentum 0.9",
            {"optimizer.kind": "muon", "optimizer.muon.momentum": "0.9", "optimizer.muon.nesterov": "false"},
        ),
        ("--train-data-path a --valid-data-path b", {"data.path": "a", "data.validation": "b"}),
        ("--rampup-batch-size 16 16 1000", {"train.ramp_batch": "[16,16,1000]"}),
    ],
)
def test_flags_decide_settings_together_and_by_their_defaults(
    line: str, settings: dict[str, str | None]
) -> None:
    found = of(line).settings
    assert {key: found.get(key) for key in settings} == settings


@pytest.mark.parametrize(
    "script, flags",
    [
        ("pretrain_gpt.py --lr 1 --seed 2\necho --lr 5\nset +x", {"lr": ["1"], "seed": ["2"]}),
        (
            "pretrain_gpt.py --lr $((A*(B+2))) --seed $(cat 'x y') --tp 4",
            {"lr": ["$((A*(B+2)))"], "tp": ["4"]},
        ),
        ("A=(--lr 1 \\\n# --lr 2 \\\n--seed 5)\npretrain_gpt.py ${A[*]}", {"lr": ["1"], "seed": ["5"]}),
        ("X=\npretrain_gpt.py --lr 1 $X --seed=7 ${Y} --bf16 z", {"lr": ["1"], "seed": ["7"], "bf16": []}),
        ("sbatch <<EOF\npretrain_gpt.py --lr 1\nEOF\nsbatch job.sh", {"lr": ["1"]}),
        ("L=${A:-${B:-10}}\npretrain_gpt.py --lr $L --save 'a b'", {"lr": ["10"], "save": ["a b"]}),
        (
            'O="--lr 1 \\\n--seed 2"\nCMD="torchrun pretrain_gpt.py $O"\n$CMD\r\n',
            {"lr": ["1"], "seed": ["2"]},
        ),
        ('M="it\'s fine"\necho $M "it\'s here"\npretrain_gpt.py --lr 1', {"lr": ["1"]}),
        ("A=${PWD}/a\npretrain_gpt.py --save $A --load $HOME/b", {"save": ["./a"], "load": ["~/b"]}),
    ],
)
def test_words_of_a_command_are_those_that_a_shell_would_pass(
    script: str, flags: dict[str, list[str]]
) -> None:
    found = flags_of(command_in(script))
    assert {name: found.get(name) for name in flags} == flags
    assert found.keys() - flags.keys() <= {"seed"}


@pytest.mark.parametrize(
    "line, not_offered",
    [
        ("--position-embedding-type rope --normalization RMSNorm --swiglu", "a Llama has no biases"),
        ("--position-embedding-type rope --disable-bias-linear --swiglu", "a Llama has RMSNorm"),
        ("--lr-decay-style WSD --lr-wsd-decay-style cosine", "schedule.cooldown_shape is linear or 1-sqrt"),
    ],
)
def test_part_that_is_not_offered_is_named(line: str, not_offered: str) -> None:
    assert not_offered in of(line).not_offered.values()


@pytest.mark.parametrize(
    "line",
    [
        "--train-samples 1e6 --global-batch-size 0",
        "--num-experts $E --moe-aux-loss-coeff $C --position-embedding-type rope",
        "--hidden-size $H --position-embedding-type rope --swiglu",
        "--distributed-timeout-minutes x",
    ],
)
def test_value_that_is_no_number_is_left_to_the_user(line: str) -> None:
    assert of(line).by_hand


def test_flags_of_a_condition_are_named(tmp_path: Path) -> None:
    """All branches count, as a condition is not judged: --fp8-format hybrid replaces --bf16."""
    (tmp_path / "run.sh").write_text(
        'A=(--bf16)\nif [[ "$T" == "fp8" ]]; then\n  A+=(\n    "--fp8-format hybrid"\n    --seed=3\n  )\nfi\n'
        "pretrain_gpt.py ${A[@]} --lr 1\n"
    )
    lines = translate_words([str(tmp_path / "run.sh")]).lines()
    assert "# in a condition of the script, and taken: --fp8-format --seed" in lines
    assert not any("in a condition" in line for line in translate_words(["--lr", "1"]).lines())


def test_nothing_in_a_script_is_run(tmp_path: Path) -> None:
    touched = tmp_path / "touched"
    words = command_in(f"X=$(touch {touched})\npretrain_gpt.py --lr `touch {touched}` --save $X --seed 1")
    assert not touched.exists()
    assert flags_of(words)["seed"] == ["1"]


@pytest.mark.parametrize(
    "words, problem",
    [
        (["/nowhere/x.sh"], "--from-megatron /nowhere/x.sh: No such file or directory"),
        (["/dev/zero"], "/dev/zero: not a regular file"),
        ([], "--from-megatron: no flags"),
        (["unended.sh"], "line 1 of the script has a quote without an end"),
    ],
)
def test_mistake_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], problem: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("unended.sh").write_text("pretrain_gpt.py --lr 'x")
    with pytest.raises(UserError, match=problem):
        translate_words(words)
