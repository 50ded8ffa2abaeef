"""`mlm convert`: around the circle of formats, bytes stay; what it writes, PyTorch and transformers read."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.serialization import safe_globals
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from mlm.checkpoint.commands import convert
from mlm.checkpoint.commands.config import ConvertConfig
from mlm.config.cli import main
from mlm.models.config import ModelConfig
from mlm.models.family import model_problem
from mlm.models.llama import megatron_moe
from mlm.models.llama.settings import LlamaSettings
from mlm.util.errors import UserError
from tests.checkpoint.commands.hf_berts import make_bert
from tests.checkpoint.commands.hf_models import edit_config, make_model
from tests.checkpoint.dcp.llamas import VOCAB, core_state, random_llama, torchtitan_state
from tests.finetune.chats import write_llama

QWEN: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 32,
}
TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))


def converted(source: Path, out: Path, to: str, **settings: Any) -> Path:
    config = ConvertConfig(source=str(source), out=str(out), to=to, **settings)  # type: ignore[arg-type]
    assert convert.preflight(config) == []
    convert.run(config)
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.fixture
def llama(tmp_path: Path) -> Path:
    random_llama().save_pretrained(tmp_path / "hf")
    return tmp_path / "hf"


def test_circle_of_formats_gives_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    torch_dist = converted(llama, tmp_path / "1", "torch_dist")
    native = converted(torch_dist, tmp_path / "2", "native", tp=2, pp=2)
    assert len(list(native.glob("checkpoints/step-00000000/*.safetensors"))) == 4
    titan = converted(native, tmp_path / "3", "torchtitan")
    ranks = converted(titan, tmp_path / "4", "torch", tp=2, pp=2)
    assert len(list(ranks.glob("release/mp_rank_*"))) == 4
    numbered = converted(ranks, tmp_path / "5", "megatron_dcp")
    back = weights(converted(numbered, tmp_path / "6", "hf"))
    first = weights(llama)
    assert back.keys() == first.keys()
    assert all(torch.equal(back[name].view(torch.uint8), first[name].view(torch.uint8)) for name in first)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "6")
    with torch.no_grad():
        assert torch.equal(model(TOKENS).logits, random_llama()(TOKENS).logits)


def load_dcp(folder: Path, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of these names and shapes, by PyTorch's loader."""
    found = {name: torch.full_like(value, 9.0) for name, value in state.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_torchtitan_names_are_read_by_pytorch_bit_equal(llama: Path, tmp_path: Path) -> None:
    wanted = torchtitan_state(random_llama())
    assert_equal(load_dcp(converted(llama, tmp_path / "dcp", "torchtitan"), wanted), wanted)


@pytest.mark.parametrize("to", ["torch_dist", "megatron_dcp"])
def test_megatron_names_are_read_by_pytorch_bit_equal(llama: Path, tmp_path: Path, to: str) -> None:
    folder = converted(llama, tmp_path / "dcp", to)
    wanted = core_state(random_llama(), stacked=to == "torch_dist")
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padding = torch.zeros(128 - VOCAB, wanted[name].shape[1])
        wanted[name] = torch.cat([wanted[name][:VOCAB], padding])
    found = load_dcp(folder / "release" if to == "torch_dist" else folder, wanted)
    assert_equal(found, wanted)


def test_checkpoint_of_torchtitan_takes_the_model_of_config(llama: Path, tmp_path: Path) -> None:
    dcp.save(torchtitan_state(random_llama()), checkpoint_id=tmp_path / "titan", no_dist=True)
    with pytest.raises(UserError, match="config=… of mlm convert"):
        convert.run(ConvertConfig(source=str(tmp_path / "titan"), out=str(tmp_path / "x"), to="hf"))
    back = converted(tmp_path / "titan", tmp_path / "back", "hf", config=str(llama))
    assert_equal(weights(back), weights(llama))


def test_newer_names_of_torchtitan_are_read(llama: Path, tmp_path: Path) -> None:
    state = {
        "lm_head.weight"
        if name == "output.weight"
        else re.sub(r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1.", name): value
        for name, value in torchtitan_state(random_llama()).items()
    }
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    back = converted(tmp_path / "titan", tmp_path / "back", "hf", config=str(llama))
    assert_equal(weights(back), weights(llama))


def test_config_of_fewer_layers_than_are_stored_is_rejected(llama: Path, tmp_path: Path) -> None:
    dcp.save(torchtitan_state(random_llama()), checkpoint_id=tmp_path / "titan", no_dist=True)
    edit_config(llama, num_hidden_layers=2)
    settings = {"out": str(tmp_path / "x"), "to": "hf", "config": str(llama)}
    with pytest.raises(UserError, match=r"layers\.2\.\S+ is \[.*none is needed"):
        convert.run(ConvertConfig(source=str(tmp_path / "titan"), **settings))  # type: ignore[arg-type]


def test_tied_qwen_around_torchtitan_gives_the_same_bytes(tmp_path: Path) -> None:
    config = Qwen3Config(**QWEN, intermediate_size=48, tie_word_embeddings=True)
    Qwen3ForCausalLM(config).save_pretrained(tmp_path / "hf")
    titan = converted(tmp_path / "hf", tmp_path / "1", "torchtitan")
    torch_dist = converted(titan, tmp_path / "2", "torch_dist")
    assert_equal(weights(converted(torch_dist, tmp_path / "3", "hf")), weights(tmp_path / "hf"))


def test_export_commands_write_a_run(llama: Path, tmp_path: Path) -> None:
    run = converted(llama, tmp_path / "run", "native", tp=2)
    assert main(["export", "megatron", str(run), f"out={tmp_path / 'm'}", "format=torch", "tp=2"]) == 0
    assert (tmp_path / "m/release/mp_rank_01/model_optim_rng.pt").is_file()
    assert main(["export", "dcp", str(run), f"out={tmp_path / 'd'}", "names=megatron"]) == 0
    assert (tmp_path / "d/.metadata").is_file()


def test_layout_of_a_format_without_one_is_rejected(
    llama: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(["convert", str(llama), str(tmp_path / "x"), "to=torch_dist", "tp=2"]) == 2
    assert "tp=2 pp=1: to=torch_dist has no layout" in capfd.readouterr().err


def test_interrupted_conversion_continues(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files that were whole are not written again; a damaged one is."""
    settings = {"max_file_gb": 1e-5}

    def stop(*_: Any) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(convert, "compare", stop)
        with pytest.raises(KeyboardInterrupt):
            converted(llama, tmp_path / "out", "torchtitan", **settings)
    left = sorted((tmp_path / ".out.partial" / "out").glob("*.distcp"))
    assert len(left) > 3
    times = {path.name: path.stat().st_mtime_ns for path in left}
    left[1].write_bytes(left[1].read_bytes()[:-1] + b"x")
    out = converted(llama, tmp_path / "out", "torchtitan", **settings)
    again = {path.name for path in out.glob("*.distcp") if path.stat().st_mtime_ns != times[path.name]}
    assert again == {left[1].name}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    wanted = torchtitan_state(random_llama())
    assert_equal(load_dcp(out, wanted), wanted)


def test_bfloat16_is_the_rounded_source(llama: Path, tmp_path: Path) -> None:
    back = weights(converted(llama, tmp_path / "back", "hf", dtype="bfloat16"))
    assert_equal(back, {name: value.bfloat16() for name, value in weights(llama).items()})


def test_difference_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that exchanges gates and inputs is seen, and nothing is published."""
    write = convert.write

    def spoil(config: Any, source: Any, folder: Path, *rest: Any) -> None:
        write(config, source, folder, *rest)
        file = next(folder.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(convert, "write", spoil)
    with pytest.raises(UserError, match="differs from"):
        converted(llama, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


def test_bert_around_megatron_gives_the_same_bytes(tmp_path: Path) -> None:
    make_bert(tmp_path / "hf", "megatron-bert", "ForPreTraining")
    ranks = converted(tmp_path / "hf", tmp_path / "1", "torch", tp=2, pp=2)
    torch_dist = converted(ranks, tmp_path / "2", "torch_dist")
    back = weights(converted(torch_dist, tmp_path / "3", "hf"))
    first = weights(tmp_path / "hf")
    assert_equal(back, {name: first[name] for name in back})


def test_gpt2_around_megatron_gives_the_same_bytes(tmp_path: Path) -> None:
    folder = tmp_path / "hf"
    make_model(folder)
    ranks = converted(folder, tmp_path / "1", "torch", tp=2)
    back = weights(converted(converted(ranks, tmp_path / "2", "torch_dist"), tmp_path / "3", "hf"))
    first = weights(folder)
    assert_equal(back, {name: first[name] for name in back})


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "mixtral", kind="Mixtral")


def test_experts_around_the_circle_give_the_same_bytes(mixtral: Path, tmp_path: Path) -> None:
    torch_dist = converted(mixtral, tmp_path / "1", "torch_dist")
    native = converted(torch_dist, tmp_path / "2", "native", tp=2, pp=2)
    ranks = converted(native, tmp_path / "3", "torch", tp=2, pp=2)
    numbered = converted(ranks, tmp_path / "4", "megatron_dcp")
    back, first = weights(converted(numbered, tmp_path / "5", "hf")), weights(mixtral)
    assert back.keys() == first.keys()
    assert_equal(back, first)


def test_a_run_keeps_its_chat_template(mixtral: Path, tmp_path: Path) -> None:
    back = converted(converted(mixtral, tmp_path / "run", "native"), tmp_path / "hf", "hf")
    theirs, ours = (AutoTokenizer.from_pretrained(folder).chat_template for folder in (mixtral, back))
    assert theirs
    assert theirs == ours


def test_qwen_with_experts_around_megatron_gives_the_same_bytes(tmp_path: Path) -> None:
    """Weights of a token's experts are not divided by their sum; norms of heads."""
    config = Qwen3MoeConfig(**QWEN, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16)
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "hf")
    ranks = converted(tmp_path / "hf", tmp_path / "1", "torch", tp=2)
    torch_dist = converted(ranks, tmp_path / "2", "torch_dist")
    back = converted(torch_dist, tmp_path / "3", "hf")
    assert_equal(weights(back), weights(tmp_path / "hf"))
    assert json.loads((back / "config.json").read_text())["norm_topk_prob"] is False


def test_experts_are_read_by_pytorch_as_megatron_core_stacks_them(mixtral: Path, tmp_path: Path) -> None:
    """[layer, expert, gate and input, H], each picked from the tensors of transformers."""
    state = weights(mixtral)

    def stacked(*names: str) -> torch.Tensor:
        block = "model.layers.{}.block_sparse_moe.experts.{}.{}.weight"
        each = [
            [torch.cat([state[block.format(n, e, name)] for name in names]) for e in range(4)]
            for n in range(2)
        ]
        return torch.stack([torch.stack(experts) for experts in each])

    router = [state[f"model.layers.{n}.block_sparse_moe.gate.weight"] for n in range(2)]
    norm = [state[f"model.layers.{n}.post_attention_layernorm.weight"] for n in range(2)]
    wanted = {
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": stacked("w1", "w3"),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": stacked("w2"),
        "decoder.layers.mlp.router.weight": torch.stack(router),
        "decoder.layers.pre_mlp_layernorm.weight": torch.stack(norm),
    }
    folder = converted(mixtral, tmp_path / "out", "torch_dist") / "release"
    assert_equal(load_dcp(folder, wanted), wanted)


def test_grouped_experts_are_read_as_those_one_after_the_other(mixtral: Path, tmp_path: Path) -> None:
    """Names of Transformer Engine's grouped products, linear_fc1.weight3, in the files of ranks."""
    ranks = converted(mixtral, tmp_path / "ranks", "torch")
    path = ranks / "release/mp_rank_00/model_optim_rng.pt"
    with safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    assert content["args"].num_experts == 4
    pattern = r"experts\.local_experts\.(\d+)\.(linear_fc.)\.weight"
    content["model"] = {re.sub(pattern, r"experts.\2.weight\1", k): v for k, v in content["model"].items()}
    assert any(name.endswith("linear_fc2.weight3") for name in content["model"])
    torch.save(content, path)
    assert_equal(weights(converted(ranks, tmp_path / "back", "hf")), weights(mixtral))


def options(**changes: Any) -> LlamaSettings:
    sizes = {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "ffn_hidden_size": 48}
    model = ModelConfig(kind="llama", activation="silu", options={"num_experts": 8, **changes}, **sizes)
    assert model_problem(model) is None
    return LlamaSettings.of(model)


SIGMOID = {"router_scores": "sigmoid", "router_bias": True, "router_scale": 2.5, "experts_per_token": 4}


@pytest.mark.parametrize(
    "changes",
    [
        {"router_normalise": False, "expert_ffn_size": 16},
        SIGMOID | {"router_groups": 4, "router_top_groups": 2, "shared_experts": 2},
        {"router_scores": "sigmoid", "router_normalise": False, "experts_per_token": 1},
    ],
)
def test_arguments_of_experts_are_read_as_they_were_written(changes: dict[str, Any]) -> None:
    settings = options(**changes)
    assert megatron_moe.problem(settings) is None
    read = megatron_moe.options_of(megatron_moe.write_args(settings))
    assert options(**{name: value for name, value in read.items() if name != "num_experts"}) == settings


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"dense_layers": 1}, "its dense_layers=1"),
        ({"router_bias": True}, "its router_bias"),
        (SIGMOID | {"router_normalise": False}, "its router_normalise=False"),
        (SIGMOID | {"router_groups": 4, "router_top_groups": 3}, "its router_top_groups=3"),
        ({"router_groups": 4}, "its router_groups=4"),
    ],
)
def test_experts_that_megatron_computes_otherwise_are_rejected(changes: dict[str, Any], problem: str) -> None:
    assert (megatron_moe.problem(options(**changes)) or "").startswith(problem)


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"moe_router_num_groups": 2, "moe_router_group_topk": 2}, "its router_groups=2"),
        ({"moe_shared_expert_intermediate_size": 50}, "moe_shared_expert_intermediate_size=50"),
        ({"num_experts": 10**9}, "args.num_experts is no whole number"),
        ({"moe_layer_freq": 2}, "args.moe_layer_freq=2"),
        ({"moe_expert_capacity_factor": 1.0}, "args.moe_expert_capacity_factor=1.0"),
        ({"expert_model_parallel_size": 2}, "save it again as torch_dist"),
    ],
)
def test_runs_whose_experts_are_others_are_rejected(
    mixtral: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    path = converted(mixtral, tmp_path / "ranks", "torch") / "release/mp_rank_00/model_optim_rng.pt"
    with safe_globals([argparse.Namespace]):
        content = torch.load(path, weights_only=True)
    vars(content["args"]).update(changes)
    torch.save(content, path)
    with pytest.raises(UserError, match=re.escape(problem)):
        convert.open_(ConvertConfig(source=str(tmp_path / "ranks"), out=str(tmp_path / "x"), to="native"))


def test_torchtitan_and_files_of_expert_ranks_are_rejected(mixtral: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="it has experts, which are converted to megatron and hf alone"):
        convert.run(ConvertConfig(source=str(mixtral), out=str(tmp_path / "x"), to="torchtitan"))
    ranks = converted(mixtral, tmp_path / "ranks", "torch") / "release"
    (ranks / "mp_rank_00").rename(ranks / "mp_rank_00_000_001")
    with pytest.raises(UserError, match="save it again as torch_dist"):
        convert.run(ConvertConfig(source=str(ranks), out=str(tmp_path / "x"), to="native"))
