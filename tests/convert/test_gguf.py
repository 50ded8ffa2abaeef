"""GGUF files: read back by the package `gguf`; in llama.cpp, logits and tokens are those of transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import Regex, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from mlm.api import import_hf
from mlm.cli.convert.run import preflight_export_gguf, run_export_gguf
from mlm.cli.convert.settings import ExportGGUFConfig
from mlm.convert.gguf import export as gguf_export
from mlm.convert.gguf.export import LlamaCpp
from mlm.convert.gguf.vocabulary import GPT2, PATTERNS, PROBE, vocabulary
from mlm.convert.huggingface import llama
from mlm.convert.source import open_checkpoint
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import UserError
from tests.convert.hf_models import edit_config
from tests.data.chats import TEXT, write_tokenizer
from tests.finetune.chats import write_llama
from tests.slow import thinned

SHAPE = {
    "vocab_size": 340,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
}
LLAMA3 = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    **{"original_max_position_embeddings": 16, "rope_theta": 1e4},
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "rope_theta": 1e4}
MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8}
GRANITE = {
    **{"embedding_multiplier": 12.0, "attention_multiplier": 0.0625},
    **{"residual_multiplier": 0.22, "logits_scaling": 6.0},
}
GLM = {"head_dim": 8, "pad_token_id": None}
SMOLLM3 = {"pad_token_id": None}
QWEN2_MOE = {
    **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"shared_expert_intermediate_size": 48, "norm_topk_prob": False},
}
GEMMA = {"head_dim": 16, "query_pre_attn_scalar": 16, "sliding_window": 11}
LINEAR = {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6}
LOCAL = {"rope_type": "default", "rope_theta": 1e4}
GEMMA3 = GEMMA | {"num_hidden_layers": 7}
CONFIGS = {"Gemma3": "Gemma3Text"}
RIGHT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "tied": ("Llama", {"tie_word_embeddings": True}),
    "heads of another width": ("Llama", {"head_dim": 16}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3}),
    "linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}),
    "yarn": ("Llama", {"rope_parameters": YARN}),
    "yarn of qwen": ("Qwen2", {"rope_parameters": YARN | {"attention_factor": 1.3}}),
    "mistral": ("Mistral", {"sliding_window": None, "head_dim": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 16}),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "qwen3_moe": ("Qwen3Moe", MOE | {"norm_topk_prob": True}),
    "internlm3": ("Llama as internlm3", {"head_dim": 8}),
    "granite": ("Granite", GRANITE),
    "starcoder2": ("Starcoder2", {"sliding_window": None}),
    "stablelm": ("StableLm", {"partial_rotary_factor": 0.5}),
    "stablelm, parallel, biases": ("StableLm", {"use_parallel_residual": True, "use_qkv_bias": True}),
    "nemotron": ("Nemotron", {"head_dim": 8}),
    "cohere": ("Cohere", {"logit_scale": 0.25, "pad_token_id": None}),
    "cohere2": (
        "Cohere2",
        {"logit_scale": 0.25, "pad_token_id": None, "num_hidden_layers": 5, "sliding_window": 11},
    ),
    "glm4": ("Glm4", GLM | {"head_dim": 16}),
    "olmo3": ("Olmo3", {"num_hidden_layers": 5, "sliding_window": 11}),
    "arcee": ("Arcee", {"head_dim": 8}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 16}),
    "glm": ("Glm", GLM),
    "glm without biases": ("Glm", GLM | {"attention_bias": False}),
    "phi3": ("Phi3", {"pad_token_id": None, "partial_rotary_factor": 0.5}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "olmo2": ("Olmo2", {}),
    "smollm3": ("SmolLM3", SMOLLM3 | {"num_hidden_layers": 5}),
    "qwen2_moe": ("Qwen2Moe", QWEN2_MOE),
    "gemma": ("Gemma", {"head_dim": 16}),
    "gemma2": ("Gemma2", GEMMA | {"attn_logit_softcapping": 3.0, "final_logit_softcapping": 2.0}),
    "gemma3": ("Gemma3", GEMMA3),
    "gemma3 with a scaled context": (
        "Gemma3",
        GEMMA3 | {"rope_parameters": {"full_attention": LINEAR, "sliding_attention": LOCAL}},
    ),
    "olmoe": ("Olmoe", {"num_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 4}),
}
REJECTED: dict[str, tuple[str, dict[str, Any]]] = {
    "rope_scaling=llama3": ("Qwen3", {"rope_parameters": LLAMA3, "head_dim": 8}),
    "rope_beta_fast=16": ("Llama", {"rope_parameters": YARN | {"beta_fast": 16.0}}),
    "rotary_layers=rn": ("SmolLM3", SMOLLM3 | {"no_rope_layer_interval": 2}),
    "attention_multiplier=": ("Gemma2", GEMMA | {"query_pre_attn_scalar": 9}),
    "window_layers=s+f": ("Gemma3", GEMMA | {"layer_types": ["sliding_attention", "full_attention"]}),
    "attention_softcap=0": ("Gemma2", GEMMA | {"attn_logit_softcapping": None}),
    "heads of other widths": ("Glm", GLM | {"head_dim": 16}),
    "dense_layers=1": ("Qwen2Moe", QWEN2_MOE | {"mlp_only_layers": [0]}),
    "router_normalise=true": ("Qwen2Moe", QWEN2_MOE | {"norm_topk_prob": True}),
    "router_normalise=false": ("Qwen3Moe", MOE | {"norm_topk_prob": False}),
}


def write_model(folder: Path, kind: str, changes: dict[str, Any]) -> Any:
    """A model of random weights in folder/theirs and folder/run, with a tokenizer."""
    torch.manual_seed(1)
    kind, _, model_type = kind.partition(" as ")
    settings = getattr(transformers, f"{CONFIGS.get(kind, kind)}Config")(**SHAPE | changes)
    model = getattr(transformers, f"{kind}ForCausalLM")(settings).eval()
    for name, value in model.named_parameters():
        if "norm" in name or name.endswith("bias"):  # ones and zeros would hide a swap
            torch.nn.init.normal_(value, 1.0, 0.2)
    model.save_pretrained(folder / "theirs")
    if model_type:  # a model of remote code, which is a Llama
        edit_config(folder / "theirs", model_type=model_type)
    write_tokenizer(folder / "theirs", "qwen2", None)
    import_hf(folder / "theirs", folder / "run", verify=False)
    return model


def export(folder: Path, kind: str = "f32", out: Path | None = None) -> Path:
    """Write folder/model.gguf, or `out`, tried in llama.cpp by the command."""
    out = out or folder / "model.gguf"
    config = ExportGGUFConfig(ckpt=str(folder / "run"), out=str(out), type=kind)  # type: ignore[arg-type]
    if problems := preflight_export_gguf(config):
        raise UserError(problems[0])
    run_export_gguf(config)
    return out


@pytest.mark.parametrize("name", thinned(RIGHT, 7))
def test_logits_in_llama_cpp_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    model = write_model(tmp_path, *RIGHT[name])
    ids = torch.randint(SHAPE["vocab_size"], (40,), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        want = model(ids[None]).logits[0]
    found = LlamaCpp(export(tmp_path)).logits(ids.tolist())
    if name.startswith(("gemma", "starcoder2")):  # a GELU is a table of half precision there
        assert (found - want).square().mean().sqrt() < 2e-3 * want.std()
    else:
        assert (found - want).abs().max() < 1e-4 * want.std()


def test_a_window_bounds_the_context(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_model(tmp_path, "Mistral", {"sliding_window": 24, "head_dim": 8})
    export(tmp_path)
    assert "context of 24 tokens" in capsys.readouterr().out


@pytest.mark.parametrize("name", REJECTED)
def test_a_model_that_llama_cpp_computes_otherwise_is_rejected(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, *REJECTED[name])
    with pytest.raises(UserError, match=name):
        export(tmp_path)


def test_a_file_that_llama_cpp_reads_otherwise_is_not_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_model(tmp_path, "Llama", {})
    monkeypatch.setattr(gguf_export, "locations", lambda model, row: llama.locations(model))
    with pytest.raises(UserError, match="other logits than mlm"):
        export(tmp_path)
    assert not (tmp_path / "model.gguf").exists()


def byte_level(patterns: tuple[str, ...], normalizer: Any = None, **bpe: Any) -> Backend:
    backend = Backend(models.BPE(**bpe))
    if normalizer is not None:
        backend.normalizer = normalizer
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in patterns]
    last = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*splits, last])
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator([*TEXT, *PROBE], trainer)
    backend.add_special_tokens(["<|endoftext|>"])
    return backend


def tokenizer(backend: Backend) -> Tokenizer:
    return Tokenizer(str(backend.to_str()))


@pytest.mark.parametrize("patterns", [*PATTERNS, None], ids=[*PATTERNS.values(), "sentencepiece"])
def test_tokens_in_llama_cpp_are_those_of_the_tokenizer(
    tmp_path: Path, patterns: tuple[str, ...] | None
) -> None:
    write_model(tmp_path, "Llama", {"vocab_size": 420})
    if patterns is None:
        write_tokenizer(tmp_path / "theirs", "llama2", None)
        import_again(tmp_path, (tmp_path / "theirs" / "tokenizer.json").read_text())
    else:
        whole_words = {"ignore_merges": True} if PATTERNS[patterns] == "llama-bpe" else {}
        import_again(tmp_path, byte_level(patterns, **whole_words).to_str())
    theirs, llama = Tokenizer.load(tmp_path / "theirs"), LlamaCpp(export(tmp_path))
    assert [llama.tokens(text) for text in PROBE] == [theirs.encode(text) for text in PROBE]


def import_again(folder: Path, content: str | None) -> None:
    """Import folder/theirs with another tokenizer, None for none."""
    (folder / "theirs" / "tokenizer.json").unlink()
    if content is not None:
        (folder / "theirs" / "tokenizer.json").write_text(content)
    import_hf(folder / "theirs", folder / "again", verify=False)
    (folder / "run").rename(folder / "before")
    (folder / "again").rename(folder / "run")


@pytest.mark.parametrize("adds", [True, False])
def test_llama_cpp_adds_the_beginning_of_a_text_where_the_tokenizer_does(tmp_path: Path, adds: bool) -> None:
    write_model(tmp_path, "Llama", {})
    write_tokenizer(tmp_path / "theirs", "llama2", None)
    backend = Backend.from_file(str(tmp_path / "theirs" / "tokenizer.json"))
    if adds:
        backend.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    import_again(tmp_path, backend.to_str())
    found = LlamaCpp(export(tmp_path)).tokens("the cat", add_special=True)
    assert found == backend.encode("the cat").ids


LOWER = {"Lowercase": normalizers.Lowercase(), "Replace": normalizers.Replace("a", "b")}


@pytest.mark.parametrize("name", LOWER)
def test_a_tokenizer_that_changes_text_first_is_rejected(name: str) -> None:
    with pytest.raises(UserError, match="otherwise than this tokenizer"):
        vocabulary(tokenizer(byte_level((GPT2,), LOWER[name])), 420)


@pytest.mark.parametrize("change", ["prefix space", "end of word", "removed", "unigram"])
def test_a_tokenizer_that_llama_cpp_has_not_is_rejected(change: str) -> None:
    content = json.loads(byte_level((GPT2,)).to_str())
    if change == "prefix space":
        content["pre_tokenizer"] = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True}
        content["pre_tokenizer"]["use_regex"] = True
    elif change == "end of word":
        content["model"]["end_of_word_suffix"] = "b"
    elif change == "removed":
        content["pre_tokenizer"]["pretokenizers"][0]["behavior"] = "Removed"
    else:
        content["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["<|endoftext|>", 0.0], ["a", -1.0]]}
        content["added_tokens"] = []
    with pytest.raises(UserError, match=r"tokenizer: .*llama\.cpp"):
        vocabulary(Tokenizer(json.dumps(content)), 420)


ERRORS = {"f32": 0.0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 1 / 127}
"""Rounding, of the largest number of a row."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("gguf")
    write_llama(made / "llama")
    import_hf(made / "llama", made / "run", verify=False)
    return made


@pytest.mark.parametrize("kind", ERRORS)
def test_tensors_are_those_of_the_model(folder: Path, tmp_path: Path, kind: str) -> None:
    reader = GGUFReader(export(folder, kind, tmp_path / "model.gguf"))
    stored = {t.name: torch.from_numpy(dequantize(t.data, t.tensor_type).copy()) for t in reader.tensors}
    shapes = {t.name: tuple(int(n) for n in t.shape[::-1]) for t in reader.tensors}
    full = open_checkpoint(str(folder / "run")).read_full
    up = full("layers.1.mlp.up.weight").unflatten(0, (-1, 2, 12))
    want = {
        "token_embd.weight": full("token.weight"),
        "output.weight": full("output.weight"),
        "blk.1.ffn_gate.weight": up[:, 0].flatten(0, 1),
        "blk.1.ffn_down.weight": full("layers.1.mlp.down.weight"),
        "blk.0.attn_norm.weight": full("layers.0.attention_norm.weight"),
        # llama.cpp's converter: halves of a head become neighbours
        "blk.0.attn_q.weight": full("layers.0.attention.query.weight")
        .view(4, 2, 4, 32)
        .transpose(1, 2)
        .reshape(32, 32),
    }
    for name, value in want.items():
        assert shapes[name] == tuple(value.shape)
        limit = ERRORS[kind] * value.abs().max().item()
        torch.testing.assert_close(stored[name].view_as(value), value, rtol=0, atol=limit + 1e-9)
    assert len(stored) == 3 + 2 * 9


def test_settings_and_tokenizer_are_in_it(folder: Path, tmp_path: Path) -> None:
    reader = GGUFReader(export(folder, "f16", tmp_path / "model.gguf"))
    fields = {name: field.contents() for name, field in reader.fields.items()}
    assert fields["general.architecture"] == "llama"
    theirs = AutoTokenizer.from_pretrained(folder / "llama")
    tokens = fields["tokenizer.ggml.tokens"]
    types = np.array(fields["tokenizer.ggml.token_type"])
    assert (types[theirs.all_special_ids] == 3).all()
    assert tokens[fields["tokenizer.ggml.eos_token_id"]] == theirs.eos_token
    assert fields["tokenizer.ggml.pre"] == "qwen2"
    assert fields["tokenizer.chat_template"] == theirs.chat_template
