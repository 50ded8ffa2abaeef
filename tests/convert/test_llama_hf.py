"""Llama, Mistral and Qwen folders of `transformers`, both ways; what ours does not compute is rejected."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import mlm
from mlm.cli.convert.run import preflight_import_hf
from mlm.cli.convert.settings import ImportHFConfig
from mlm.convert.huggingface.folder import read_model
from mlm.convert.huggingface.llama import MAPPING
from mlm.convert.huggingface.llama_variants import VARIANTS, model_type
from mlm.util.errors import UserError
from tests.convert.hf_models import edit_config, edit_tensors, import_model, make_model
from tests.models.llama.on_ranks import greedy
from tests.models.llama.table import YARN, our_config, their_model
from tests.ranks import run_on_ranks
from tests.slow import slow_but


def folder_of(name: str, folder: Path) -> Any:
    model = their_model(name)
    model.save_pretrained(folder, max_shard_size=20_000)
    return model


def test_yarn_of_latent_attention_with_two_weights_means_what_it_means_to_transformers(
    tmp_path: Path,
) -> None:
    """Loaded as it is, and imported, which compares logits itself.

    Frequencies of all other spellings: tests/models/llama/test_rope_settings.py.
    """
    folder_of("deepseek_v3", tmp_path / "model")
    edit_config(tmp_path / "model", rope_parameters={**YARN, "mscale": 0.7, "mscale_all_dim": 2})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    tokens = torch.arange(30)[None]
    want = theirs(tokens).logits
    run = import_model(tmp_path / "model", tmp_path / "run")
    for folder in (tmp_path / "model", run):
        assert (mlm.load(folder, device="cpu").logits(tokens) - want).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("name", "tp", "pp"),
    slow_but({0, 2}, [("deepseek_v3", 2, 2), ("mixtral", 4, 1), ("qwen3 with a window", 2, 2)]),
)
def test_a_folder_is_read_and_continued_at_any_layout(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    """Greedy texts of prompts of several lengths, equal to transformers' token by token.

    At tp=4 each of two heads of keys and values is on two ranks.
    """
    model = folder_of(name, tmp_path)
    prompts = [[3, 14, 15, 92, 65, 35, 89, 79], [32], [38, 46, 26]]
    want = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        mask = torch.ones_like(tokens)
        text = model.generate(tokens, attention_mask=mask, max_new_tokens=9, do_sample=False, pad_token_id=0)
        want.append(text[0, len(prompt) :].tolist())
    assert run_on_ranks(greedy, tmp_path, prompts, 9, tp=tp, pp=pp) == [want] * 4


def test_texts_change_their_positions_where_those_of_transformers_do(tmp_path: Path) -> None:
    """Of longrope, beyond the original context: prompts before, at and after it, read side by side."""
    folder_of("phi3 with longrope", tmp_path)
    edit_config(tmp_path, original_max_position_embeddings=10)
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    prompts = [[3, 14, 15, 92, 65, 35, 89], [32, 38, 46, 26, 4, 33, 83, 27, 95, 2], [*range(13)], [9]]
    want = []
    for prompt in prompts:
        tokens = torch.tensor([prompt])
        for _ in range(14):  # without its cache
            tokens = torch.cat([tokens, model(tokens, use_cache=False).logits[:, -1:].argmax(-1)], 1)
        want.append(tokens[0, len(prompt) :].tolist())
    assert run_on_ranks(greedy, tmp_path, prompts, 14) == [want]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("qwen2", "Set tie_word_embeddings=false to keep lm_head.weight, or remove that tensor"),
        ("gpt2", "an untied output layer of gpt2 is not supported. Remove lm_head.weight if wte.weight is"),
    ],
)
def test_another_output_layer_than_a_tied_one_is_rejected_with_the_ways_out(
    tmp_path: Path, name: str, said: str
) -> None:
    """transformers 5 computes with what is stored, which our GPT-2 lacks; with either fix it is imported."""
    source = tmp_path / "model"
    model = make_model(source) if name == "gpt2" else their_model(name)
    state = {**model.state_dict(), "lm_head.weight": 2 * model.get_input_embeddings().weight}
    model.save_pretrained(source, state_dict=state)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert torch.equal(theirs.lm_head.weight, 2 * theirs.get_input_embeddings().weight)
    with pytest.raises(UserError, match=re.escape(said)):
        mlm.load(source, device="cpu")
    if name == "qwen2":
        edit_config(source, tie_word_embeddings=False)
        import_model(source, tmp_path / "untied")
        edit_config(source, tie_word_embeddings=True)
    edit_tensors(source, lambda tensors: tensors.pop("lm_head.weight"))
    import_model(source, tmp_path / "tied")


def test_names_in_a_wrapper_are_read_without(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the logits of the language model alone; transformers compares them too."""
    model = their_model("llama3")
    model.save_pretrained(tmp_path / "model")

    def rename(tensors: dict[str, Tensor]) -> None:
        renamed = {
            re.sub("^model", "model.language_model", name): tensors.pop(name) for name in list(tensors)
        }
        tensors.update(renamed, **{"model.vision_tower.patches.weight": torch.ones(2)})

    edit_tensors(tmp_path / "model", rename)
    run = import_model(tmp_path / "model", tmp_path / "run")
    out = " ".join(capsys.readouterr().out.split())
    assert "note: names begin with model.language_model.: read without" in out
    assert "left out, outside the language model: " in out
    tokens = torch.arange(30)[None]
    assert (mlm.load(run, device="cpu").logits(tokens) - model(tokens).logits).abs().max() <= 1e-5


FULL, SLIDING = ["full_attention"] * 2, ["sliding_attention"] * 2
CHUNKED = {"use_sliding_window": True, "layer_types": ["full_attention", "chunked_attention"]}
REJECTED: dict[str, tuple[str, dict[str, Any], str]] = {
    "dynamic": ("yarn", {"rope_parameters": None, "rope_scaling": {"type": "dynamic"}}, "factor is missing"),
    "unknown yarn key": ("yarn", {"rope_parameters": {**YARN, "finetuned": True}}, "finetuned=true"),
    "experts of a dense type": ("mistral", {"num_local_experts": 8}, "num_local_experts=8"),
    "every other layer with experts": ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2"),
    "a dense layer between": ("qwen3_moe", {"mlp_only_layers": [1]}, "mlp_only_layers=[1]: supported: the"),
    "another choice of experts": ("deepseek_v3", {"topk_method": "greedy"}, "topk_method=greedy"),
    "groups that do not divide": ("deepseek_v3", {"n_group": 3}, "router_groups=3 does not divide"),
    "weights in 8 bits": ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}, "fp8 with block"),
    "partial rotary": ("llama", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "another type of attention": ("qwen3", CHUNKED, "layer_types=["),
    "a type for too few layers": ("qwen3", {"layer_types": ["full_attention"]}, "layer_types=["),
    "full with a window": (
        "mistral",
        {"layer_types": FULL},
        "alike, by sliding_window=5; remove layer_types",
    ),
    "rotary positions in some layers": ("smollm3", {"no_rope_layers": [1]}, "no_rope_layers=[1] must be"),
    "scaled windows": (
        "gemma3",
        {"rope_parameters": {"sliding_attention": {"rope_type": "linear", "factor": 2.0}}},
        "rope_parameters.sliding_attention.rope_type=linear",
    ),
    "a softcap that its class lacks": (
        "gemma3",
        {"attn_logit_softcapping": 50.0},
        "attn_logit_softcapping=50",
    ),
    "both ways": ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=true"),
    "another family": ("llama", {"model_type": "phimoe"}, "phimoe is not supported; the reference"),
    "one adapter's factors": (
        "phi3 with longrope",
        {"rope_parameters": {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [2.0] * 3}},
        "rope_short_factors=1.0 must be 4 numbers above 0",
    ),
    "no factor of logits": ("granite", {"logits_scaling": 0}, "logits_scaling=0 must be"),
}
"""Model, changes of its config.json, what the error names."""


@pytest.mark.parametrize("case", REJECTED)
def test_what_is_not_computed_is_rejected_by_name(tmp_path: Path, case: str) -> None:
    name, changed, named = REJECTED[case]
    folder_of(name, tmp_path)
    edit_config(tmp_path, **changed)
    config = ImportHFConfig(source=str(tmp_path), out=str(tmp_path / "run"))
    (problem,) = preflight_import_hf(config)
    assert named in str(problem)
    assert "\n" not in str(problem)
    with pytest.raises(UserError) as caught:
        mlm.load(tmp_path, device="cpu")
    assert caught.value.problems == (problem,)


def test_an_untied_model_without_its_output_layer_is_rejected(tmp_path: Path) -> None:
    """`transformers` would draw one; a folder of the layers alone has none, and a note says so."""
    model = folder_of("llama", tmp_path / "model")
    model.save_pretrained(tmp_path / "model", max_shard_size="1GB")
    edit_tensors(tmp_path / "model", lambda tensors: tensors.pop("lm_head.weight"))
    (tmp_path / "model" / "model.safetensors.index.json").unlink(missing_ok=True)
    said = "holds no lm_head.weight, which LlamaForCausalLM has"
    with pytest.raises(UserError, match=said):
        mlm.load(tmp_path / "model", device="cpu")
    config = ImportHFConfig(source=str(tmp_path / "model"), out=str(tmp_path / "run"))
    (problem,) = preflight_import_hf(config)
    assert said in str(problem)
    model.model.save_pretrained(tmp_path / "layers")
    (note,) = read_model(tmp_path / "layers").notes
    assert "without output" in note


@pytest.mark.parametrize("kind", VARIANTS)
def test_a_row_of_the_table_is_found_by_its_marks(kind: str) -> None:
    """From the defaults of its config.json, which are those of transformers; and it has all they describe."""
    given: dict[str, Any] = {
        "seed_oss": {"hidden_size": 5120},
        "deepseek_v2": {"num_experts_per_tok": 6},
        "glm4_moe": {"head_dim": 128},
        "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 16},  # else it is a mistral
    }.get(kind, {})
    model, _ = MAPPING.read({"model_type": kind, **given}, "config.json")
    config = transformers.CONFIG_MAPPING[kind](**given)
    assert MAPPING.read(config.to_dict(), "config.json")[0] == model
    assert model_type(model) == kind
    named = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3", "olmo2", "gemma2"}
    assert kind not in named or "model_type" not in model.options
    assert MAPPING.problem(model) is None


def test_the_guide_shows_a_row_as_it_is() -> None:
    guide = Path("scripts/docs/pages/guides/models.md").read_text()
    (shown,) = re.findall(r"```python\n(    .granite.*?)```", guide, re.DOTALL)
    assert shown in Path("mlm/convert/huggingface/llama_variants.py").read_text()


NOT_EXPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "llama": ({"rotary_fraction": 0.4}, "rotary_fraction=0.4 is not what llama of transformers computes"),
    "mixtral": ({"router_normalise": False}, "router_normalise=false is not what mixtral of transformers"),
    "olmoe": ({"dense_layers": 1}, "dense_layers=1"),
    "deepseek_v3": ({"router_group_best": 1}, "router_group_best=1 is not what deepseek_v3"),
}
"""Model -> options that its type does not have, and how the first is named."""


@pytest.mark.parametrize("case", NOT_EXPORTED)
def test_a_model_that_no_class_computes_is_not_exported(case: str) -> None:
    options, named = NOT_EXPORTED[case]
    config = our_config(their_model(case.partition(" ")[0]))
    assert MAPPING.problem(config) is None
    problem = MAPPING.problem(replace(config, options=config.options | options))
    assert named in problem


def test_settings_of_training_alone_do_not_keep_a_model_from_export() -> None:
    config = our_config(their_model("deepseek_v3"))
    balanced = replace(config, options=config.options | {"balance": "bias", "z_loss": 0.1})
    assert MAPPING.problem(balanced) is None
    problem = MAPPING.problem(replace(config, head="classification", num_labels=2))
    assert "its head=classification has a bias, which theirs lack" in problem


def test_multi_token_prediction_is_left_out_with_a_note(tmp_path: Path) -> None:
    """The model's logits are those without it."""
    model = folder_of("deepseek_v3", tmp_path)
    model.save_pretrained(tmp_path, max_shard_size="1GB")
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    more = {
        "model.layers.2.eh_proj.weight": torch.ones(36, 72),
        "model.layers.2.enorm.weight": torch.ones(36),
    }
    edit_tensors(tmp_path, lambda tensors: tensors.update(more))
    assert read_model(tmp_path).notes == ("multi-token prediction is left out: 2 tensors",)
    tokens = torch.arange(30)[None]
    assert (mlm.load(tmp_path, device="cpu").logits(tokens) - model(tokens).logits).abs().max() <= 1e-5
    edit_tensors(tmp_path, lambda tensors: tensors.pop("model.layers.2.eh_proj.weight"))
    with pytest.raises(UserError, match=r"layers.2.enorm.weight is not a parameter of DeepseekV3ForCausalLM"):
        mlm.load(tmp_path, device="cpu")
