"""`mlm convert`: around the circle of formats, bytes stay; what it writes, PyTorch and transformers read."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from mlm.cli.convert import run as convert
from mlm.convert import conversion
from mlm.convert.config import ConvertConfig
from mlm.util.errors import UserError
from tests.convert.dcp.llamas import (
    VOCAB,
    arguments,
    core_state,
    random_llama,
    torchtitan_state,
    write_torch_dist,
)
from tests.convert.hf_berts import make_bert
from tests.convert.hf_models import edit_config, make_model
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
    assert conversion.preflight(config) == []
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
    native = converted(torch_dist, tmp_path / "2", "native")
    titan = converted(native, tmp_path / "3", "torchtitan")
    back = weights(converted(titan, tmp_path / "4", "hf"))
    first = weights(llama)
    assert back.keys() == first.keys()
    assert all(torch.equal(back[name].view(torch.uint8), first[name].view(torch.uint8)) for name in first)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "4")
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


def test_megatron_names_are_read_by_pytorch_bit_equal(llama: Path, tmp_path: Path) -> None:
    folder = converted(llama, tmp_path / "dcp", "torch_dist")
    wanted = core_state(random_llama())
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padding = torch.zeros(128 - VOCAB, wanted[name].shape[1])
        wanted[name] = torch.cat([wanted[name][:VOCAB], padding])
    assert_equal(load_dcp(folder / "release", wanted), wanted)


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


def test_files_of_bounded_size_are_read_by_pytorch(llama: Path, tmp_path: Path) -> None:
    out = converted(llama, tmp_path / "out", "torchtitan", max_file_gb=1e-5)
    assert len(list(out.glob("*.distcp"))) > 3
    wanted = torchtitan_state(random_llama())
    assert_equal(load_dcp(out, wanted), wanted)


def test_interrupted_conversion_leaves_nothing(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(conversion, "compare", stop)
    with pytest.raises(KeyboardInterrupt):
        converted(llama, tmp_path / "out", "torchtitan")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


def test_bfloat16_is_the_rounded_source(llama: Path, tmp_path: Path) -> None:
    back = weights(converted(llama, tmp_path / "back", "hf", dtype="bfloat16"))
    assert_equal(back, {name: value.bfloat16() for name, value in weights(llama).items()})


@pytest.mark.parametrize(
    ("changed", "key"),
    [({"rms_norm_eps": 0.5}, "model.layer_norm_eps"), ({"rope_theta": 9.0}, "model.options.rope_theta")],
    ids=["a field", "an option"],
)
def test_a_setting_that_differs_is_found(
    changed: dict[str, float], key: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = conversion.write_target

    def spoil(config: Any, source: Any, folder: Path, *rest: Any) -> None:
        write(config, source, folder, *rest)
        edit_config(folder, **changed)

    monkeypatch.setattr(conversion, "write_target", spoil)
    with pytest.raises(UserError, match=f"{key} differs from"):
        converted(llama, tmp_path / "out", "hf")


def test_difference_is_found(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that exchanges gates and inputs is seen, and nothing is published."""
    write = conversion.write_target

    def spoil(config: Any, source: Any, folder: Path, *rest: Any) -> None:
        write(config, source, folder, *rest)
        file = next(folder.glob("*.safetensors"))
        content = bytearray(file.read_bytes())
        content[-9] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(conversion, "write_target", spoil)
    with pytest.raises(UserError, match="differs from"):
        converted(llama, tmp_path / "out", "hf")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["bert", "gpt2"])
def test_bert_and_gpt2_around_megatron_give_the_same_bytes(tmp_path: Path, kind: str) -> None:
    if kind == "bert":
        make_bert(tmp_path / "hf", "megatron-bert", "ForPreTraining")
    else:
        make_model(tmp_path / "hf")
    back = weights(converted(converted(tmp_path / "hf", tmp_path / "1", "torch_dist"), tmp_path / "2", "hf"))
    first = weights(tmp_path / "hf")
    assert_equal(back, {name: first[name] for name in back})


def test_a_classifier_does_not_go_to_megatron(tmp_path: Path) -> None:
    make_model(tmp_path / "hf", kind="GPT2ForSequenceClassification", num_labels=3)
    run = converted(tmp_path / "hf", tmp_path / "run", "native")
    config = ConvertConfig(source=str(run), out=str(tmp_path / "x"), to="torch_dist")
    assert conversion.preflight(config) == [
        "model.head=classification: Megatron has the heads of pretraining alone"
    ]


@pytest.fixture
def mixtral(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "mixtral", kind="Mixtral")


def test_a_run_keeps_its_chat_template(mixtral: Path, tmp_path: Path) -> None:
    back = converted(converted(mixtral, tmp_path / "run", "native"), tmp_path / "hf", "hf")
    theirs, ours = (AutoTokenizer.from_pretrained(folder).chat_template for folder in (mixtral, back))
    assert theirs
    assert theirs == ours


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("torch_dist", r"num_experts=4: .* mlm export hf"),
        ("torchtitan", "it has experts, which are converted to hf alone"),
    ],
)
def test_a_mixture_is_converted_to_hf_alone(mixtral: Path, tmp_path: Path, to: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        convert.run(ConvertConfig(source=str(mixtral), out=str(tmp_path / "out"), to=to))  # type: ignore[arg-type]


def test_a_mixture_of_megatron_comes_by_the_hugging_face_folder(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "theirs", core_state(random_llama()), arguments(num_experts=8))
    config = ConvertConfig(source=str(tmp_path / "theirs"), out=str(tmp_path / "x"))
    with pytest.raises(UserError, match="Megatron Bridge") as raised:
        conversion.open_for_conversion(config)
    assert "\n" not in str(raised.value)
