"""`mlm convert`: around the circle of formats, bytes stay; what it writes, PyTorch and transformers read."""

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from mlm.cli.convert import run as convert
from mlm.convert import conversion
from mlm.convert.config import ConvertConfig
from mlm.util.errors import UserError
from tests.checkpoints_on_disk import flip
from tests.convert.dcp.llamas import (
    VOCAB,
    core_state,
    random_llama,
    torchtitan_state,
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
    found = {name: torch.full_like(value, 9.0) for name, value in state.items()}
    dcp.load(found, checkpoint_id=folder, no_dist=True)
    return found


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


def test_megatron_names_are_read_by_pytorch_bit_equal(llama: Path, tmp_path: Path) -> None:
    folder = converted(llama, tmp_path / "dcp", "torch_dist")
    wanted = core_state(random_llama())
    for name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        padding = torch.zeros(128 - VOCAB, wanted[name].shape[1])
        wanted[name] = torch.cat([wanted[name][:VOCAB], padding])
    assert_equal(load_dcp(folder / "release", wanted), wanted)


NEWER = ((r"\.attention\.(w[qkv])\.", r".attention.qkv_linear.\1."), ("^output", "lm_head"))
"""Names of torchtitan in 2026."""


@pytest.mark.parametrize("renamed", [(), NEWER], ids=["0.2", "2026"])
def test_checkpoint_of_torchtitan_takes_the_model_of_config(
    llama: Path, tmp_path: Path, renamed: tuple[tuple[str, str], ...]
) -> None:
    state = torchtitan_state(random_llama())
    for pattern, new in renamed:
        state = {re.sub(pattern, new, name): value for name, value in state.items()}
    dcp.save(state, checkpoint_id=tmp_path / "titan", no_dist=True)
    with pytest.raises(UserError, match="config=… of mlm convert"):
        convert.run(ConvertConfig(source=str(tmp_path / "titan"), out=str(tmp_path / "x"), to="hf"))
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


def test_declared_token_ids_survive_without_a_tokenizer(llama: Path, tmp_path: Path) -> None:
    edit_config(llama, bos_token_id=3, eos_token_id=[5, 7], pad_token_id=9)
    folder = llama
    for to in ("torch_dist", "torchtitan", "native", "hf"):
        folder = converted(folder, tmp_path / f"to-{to}", to)
    config = AutoConfig.from_pretrained(folder)
    assert (config.bos_token_id, config.eos_token_id, config.pad_token_id) == (3, [5, 7], 9)


KILLED = """
import os, signal, sys
from mlm.cli.entry import main
from mlm.convert.locations import ForeignTensor

compute, calls = ForeignTensor.compute, []

def counted(*args, **kwargs):
    calls.append(args)
    if len(calls) == 14:
        os.kill(os.getpid(), signal.SIGKILL)
    return compute(*args, **kwargs)

ForeignTensor.compute = counted
main(sys.argv[1:])
"""


def test_killed_conversion_continues_to_the_same_bytes(llama: Path, tmp_path: Path) -> None:
    """Complete files are not written again."""
    undisturbed, out = converted(llama, tmp_path / "undisturbed", "hf", max_file_gb=1e-5), tmp_path / "out"
    command = [sys.executable, "-c", KILLED, "convert", str(llama), str(out), "max_file_gb=1e-5", "to=hf"]
    assert subprocess.run(command, capture_output=True).returncode == -signal.SIGKILL
    partial = tmp_path / ".out.partial"
    complete = json.loads((partial / "journal.json").read_bytes())["files"]
    times = {name: (partial / "out" / name).stat().st_mtime_ns for name in complete}
    assert 3 < len(complete) < len(list(undisturbed.glob("*[0-9].*")))
    converted(llama, out, "hf", max_file_gb=1e-5)
    assert {name: (out / name).stat().st_mtime_ns for name in complete} == times
    assert contents(out) == contents(undisturbed)
    assert not partial.exists()


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def interrupted(llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Files of a conversion to torchtitan that Ctrl-C stopped before it was compared."""
    with monkeypatch.context() as patch:
        patch.setattr(conversion, "compare", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            converted(llama, tmp_path / "out", "torchtitan", max_file_gb=1e-5)
    return sorted((tmp_path / ".out.partial" / "out").glob("*.distcp"))


def test_damaged_file_of_an_interrupted_conversion_is_written_again(
    interrupted: list[Path], llama: Path, tmp_path: Path
) -> None:
    """So is one that is gone; what no conversion wrote is not published."""
    times = {path.name: path.stat().st_mtime_ns for path in interrupted}
    interrupted[1].write_bytes(interrupted[1].read_bytes()[:-1] + b"x")
    interrupted[2].unlink()
    interrupted[3].with_name(".config.json.123.partial").touch()
    interrupted[3].with_name("__0_99.distcp").symlink_to("/etc/hostname")
    out = converted(llama, tmp_path / "out", "torchtitan", max_file_gb=1e-5)
    again = {path.name for path in out.glob("*.distcp") if path.stat().st_mtime_ns != times[path.name]}
    assert again == {path.name for path in interrupted[1:3]}
    undisturbed = converted(llama, tmp_path / "undisturbed", "torchtitan", max_file_gb=1e-5)
    assert contents(out) == contents(undisturbed)


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "journal": lambda content: content[:-1],
    "journal beyond its bound": lambda content: content + b" " * (1 << 26),
}


@pytest.mark.parametrize("change", ["target", "source", *DAMAGES])
def test_changed_conversion_starts_over(
    interrupted: list[Path], llama: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, change: str
) -> None:
    settings: dict[str, Any] = {"max_file_gb": 2e-5 if change == "target" else 1e-5}
    if change == "source":
        random_llama(seed=1).save_pretrained(llama)
    if change in DAMAGES:
        journal = tmp_path / ".out.partial/journal.json"
        journal.write_bytes(DAMAGES[change](journal.read_bytes()))
    out = converted(llama, tmp_path / "out", "torchtitan", **settings)
    said = {
        "target": "max_file_gb changed since",
        "source": "source changed since",
        **dict.fromkeys(DAMAGES, "journal.json changed"),
    }
    assert [said[change] in record.message for record in caplog.records] == [True]
    assert contents(out) == contents(converted(llama, tmp_path / "2", "torchtitan", **settings))


def test_bfloat16_is_the_rounded_source(llama: Path, tmp_path: Path) -> None:
    back = weights(converted(llama, tmp_path / "back", "hf", dtype="bfloat16"))
    assert_equal(back, {name: value.bfloat16() for name, value in weights(llama).items()})


SPOILT: dict[str, tuple[Callable[[Path], None], str]] = {
    "a field": (lambda folder: edit_config(folder, rms_norm_eps=0.5), "model.layer_norm_eps"),
    "a weight": (lambda folder: flip(next(folder.glob("*.safetensors")), -9), r"\S+\.weight"),
}


@pytest.mark.parametrize("case", SPOILT)
def test_difference_is_found_and_leaves_nothing(
    case: str, llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, (spoil, named) = conversion.write_target, SPOILT[case]

    def write_spoilt(config: Any, source: Any, folder: Path, *rest: Any) -> None:
        write(config, source, folder, *rest)
        spoil(folder)

    monkeypatch.setattr(conversion, "write_target", write_spoilt)
    with pytest.raises(UserError, match=f"{named} differs from"):
        converted(llama, tmp_path / "out", "hf")
    assert [path.name for path in tmp_path.iterdir()] == ["hf"]


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


@pytest.mark.parametrize(
    ("to", "message"),
    [
        ("torch_dist", r"num_experts=4: .* mlm export hf"),
        ("torchtitan", "it has experts, which are converted to hf alone"),
    ],
)
def test_a_mixture_is_converted_to_hf_alone(tmp_path: Path, to: str, message: str) -> None:
    mixtral = write_llama(tmp_path / "mixtral", kind="Mixtral")
    with pytest.raises(UserError, match=message):
        convert.run(ConvertConfig(source=str(mixtral), out=str(tmp_path / "out"), to=to))  # type: ignore[arg-type]
