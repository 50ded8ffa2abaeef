"""Every row of the table against `transformers` from the same weights, and at every layout."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file
from torch import Tensor

from mlm.convert.huggingface.llama import MAPPING
from mlm.convert.huggingface.llama_variants import VARIANTS
from mlm.convert.huggingface.peft import stored_tensors
from mlm.models.cache import DecodePass, KeyValueCache, PrefillPass
from mlm.models.config import LoraConfig
from mlm.models.llama.model import Llama
from mlm.models.llama.settings import LlamaSettings
from mlm.models.shape import architecture_of, count_parameters
from mlm.optim.matrices import matrices_of
from mlm.parallel.expert.router import routers
from mlm.parallel.mesh import Axis, shape_context
from mlm.parallel.sharding import load_full, parameter_shards
from mlm.util.errors import UserError
from tests.convert.hf_models import export_model, import_model
from tests.models.llama.on_ranks import check_layout
from tests.models.llama.table import (
    BATCH,
    ROWS,
    SHAPES,
    choices,
    on_disk,
    our_config,
    samples,
    their_gradients,
    their_model,
)
from tests.models.peft_adapters import adapt, to_ours
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.verify.parity_layouts import Layout

SHAPED = [pytest.param(n, marks=[pytest.mark.slow] if n else []) for n in range(len(SHAPES))]


def our_model(theirs: Any, dtype: torch.dtype = torch.float64) -> Llama:
    """Ours with the weights of theirs, which are kept in float64, or in float32 for a narrower `dtype`."""
    config = our_config(theirs)
    model = Llama(config, dtype=dtype)
    if dtype == torch.float64:
        model.double()
    load_full(model, MAPPING.to_parameters(on_disk(theirs, theirs.state_dict()), config), Axis("tp"))
    return model


def exact_model(name: str, shape: int = 0) -> Any:
    """Theirs in float64, also where its code computes in float32: norms, softmaxes, angles, routers."""
    single = their_model(name, shape)
    settings = {"dtype": torch.float64, "attn_implementation": "eager"}
    with exactly():  # frequencies and factors of embeddings are computed here, and not stored
        model = transformers.AutoModelForCausalLM.from_config(copy.deepcopy(single.config), **settings)
    model.double().load_state_dict(single.state_dict())
    forward = model.eval().forward

    def exact(*args: Any, **kwargs: Any) -> Any:
        with exactly():
            return forward(*args, **kwargs)

    model.forward = exact
    return model


@contextmanager
def exactly() -> Iterator[None]:
    """Compute in float64 what code asks for in float32."""

    def widened(value: Any) -> Any:
        return torch.float64 if value is torch.float32 else value

    def wide(function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return function(*map(widened, args), **{key: widened(value) for key, value in kwargs.items()})

        return call

    softmax = F.softmax
    with (
        patch.object(Tensor, "float", Tensor.double),
        patch.object(Tensor, "to", wide(Tensor.to)),
        patch.object(Tensor, "type", wide(Tensor.type)),
        patch.object(Tensor, "softmax", wide(Tensor.softmax)),
        patch.object(torch, "arange", wide(torch.arange)),
        patch.object(torch, "tensor", wide(torch.tensor)),
        patch.object(F, "softmax", lambda x, dim, dtype=None: softmax(x, dim)),
    ):
        yield


def their_loss(model: Any, tokens: Tensor) -> Tensor:
    logits = model(tokens[:, :-1]).logits
    return F.cross_entropy(logits.flatten(0, 1).to(torch.float64), tokens[:, 1:].flatten())


@pytest.mark.parametrize("shape", SHAPED)
@pytest.mark.parametrize("name", ROWS)
def test_logits_and_gradients_are_those_of_transformers(name: str, shape: int) -> None:
    """Within 1e-9 of the largest; and as many parameters, and the logits of a cached continuation."""
    theirs = exact_model(name, shape)
    ours, (tokens,) = our_model(theirs), samples(name, shape)
    assert count_parameters(ours.config) == sum(p.numel() for p in theirs.parameters() if p.requires_grad)
    check_cached(ours.eval(), tokens)
    ours.train()
    chosen: list[Tensor] = []
    hooks = [r.register_forward_hook(lambda _, __, y: chosen.append(y.experts)) for r in routers(ours)]
    want = theirs(tokens).logits.detach()
    assert (ours.logits(tokens) - want).abs().max() <= 1e-9 * want.abs().max()
    for experts, others in zip(chosen, choices(theirs, tokens), strict=True):  # [S, B, k] and [B S, k]
        assert torch.equal(experts.transpose(0, 1).flatten(0, 1).sort(-1).values, others)
    for hook in hooks:
        hook.remove()

    loss, other = ours(tokens[:, :-1], tokens[:, 1:]), their_loss(theirs, tokens)
    loss.backward()
    other.backward()
    torch.testing.assert_close(loss.detach(), other.detach(), rtol=1e-9, atol=0)
    grads = MAPPING.to_parameters(on_disk(theirs, their_gradients(theirs)), our_config(theirs))
    for shard in parameter_shards(ours, Axis("tp")):
        if shard.is_trained:
            grad, expected = shard.without_padding(shard.parameter.grad), grads[shard.name]
            assert (grad - expected).norm() <= 1e-9 * expected.norm(), shard.name


def check_cached(model: Llama, tokens: Tensor) -> None:
    """Token by token after a third of the sample; heads of keys and values are held once."""
    want, first = model.logits(tokens), tokens.shape[1] // 3
    cache = KeyValueCache(BATCH, model.config.max_positions)
    model.read(tokens[:, :first], PrefillPass(cache, range(BATCH)))
    for column in range(first, tokens.shape[1]):
        step = DecodePass(cache, [column] * BATCH, dtype=torch.float64, device=torch.device("cpu"))
        y = model.read(tokens[:, column : column + 1], step)
        assert (y - want[:, column]).abs().max() <= 1e-10 * want.abs().max(), f"token {column}"
    for keys, values in cache._layers.values():
        if rank := model.config.options.get("kv_lora_rank"):  # one head for all: latents and turned keys
            assert keys is values
            assert keys.shape[1::2] == (1, int(rank) + int(model.config.options["rope_head_dim"]))
        else:
            assert keys.shape[1] == architecture_of(model.config).kv_heads


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return {k: v for path in sorted(folder.glob("*.safetensors")) for k, v in load_file(path).items()}


@pytest.mark.parametrize("name", thinned(ROWS, 7))
def test_an_export_after_an_import_has_the_same_bits_and_settings(tmp_path: Path, name: str) -> None:
    """Tensors come in several files; logits of what is written are those of what was read."""
    source, theirs = tmp_path / "model", their_model(name)
    theirs.save_pretrained(source, max_shard_size=20_000)
    assert len(list(source.glob("*.safetensors"))) > 1
    run = import_model(source, tmp_path / "run", verify=False)
    out = export_model(run, tmp_path / "out", verify=False)
    before, after = tensors_of(source), tensors_of(out)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[key], after[key]) for key in before)
    loaded = transformers.AutoConfig.from_pretrained(out)
    assert type(loaded) is type(theirs.config)
    keys = loaded.to_dict().keys() & theirs.config.to_dict().keys()
    differing = {key for key in keys if getattr(loaded, key) != getattr(theirs.config, key)}
    assert differing <= SAVED_OTHERWISE, differing
    for key, value in theirs.config.rope_parameters.items():  # of all layers, or of a type of them
        written = loaded.rope_parameters[key]
        assert written.items() >= value.items() if isinstance(value, dict) else written == value
    (tokens,) = samples(name, 0)
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    again = transformers.AutoModelForCausalLM.from_pretrained(out, **eager)
    torch.testing.assert_close(again(tokens).logits, theirs(tokens).logits, rtol=0, atol=1e-6)


SAVED_OTHERWISE = {
    *("_name_or_path", "architectures", "dtype", "transformers_version", "use_cache"),
    *("output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers"),
    *("rope_parameters", "hidden_act", "max_window_layers"),
    *("n_group", "topk_group", "num_experts_per_tok", "first_k_dense_replace", "routed_scaling_factor"),
}
"""Settings with other names of a value, or that mean nothing in some model; logits tell where one does."""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama3", "gemma2", "qwen2", "cohere2", "mixtral", "deepseek_v3"])
def test_ten_steps_of_training_are_those_of_transformers(name: str) -> None:
    theirs = exact_model(name)
    ours = our_model(theirs)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    for tokens in samples(name, 0, count=10):
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss, other = ours(tokens[:, :-1], tokens[:, 1:]), their_loss(theirs, tokens)
        torch.testing.assert_close(loss.detach(), other.detach(), rtol=1e-6, atol=0)
        loss.backward()
        other.backward()
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_a_layout_equals_one_process(name: str) -> None:
    """Settings that the models of tests/verify/parity_layouts.py do not combine; the layouts are there."""
    config = our_config(their_model(name))
    has_experts = LlamaSettings.of(config).num_experts > 0
    layout = Layout(ep=2, dp=2, pp=2) if has_experts else Layout(tp=2, sequence_parallel=True, cp=2)
    sizes = {"tp": layout.tp, "pp": layout.pp, "dp": layout.dp, "cp": layout.cp, "ep": layout.ep}
    run_on_ranks(check_layout, config, layout, **sizes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_bfloat16_rounds_no_more_than_in_transformers(name: str) -> None:
    """Errors of logits and gradients against float64, from weights of that precision; the median over tokens
    for logits, as rounding moves a token to another expert now and then."""
    dtype = torch.bfloat16
    theirs = copy.deepcopy(their_model(name)).to(dtype)
    exact, ours, (tokens,) = copy.deepcopy(theirs).double(), our_model(theirs, dtype), samples(name, 0)
    want = exact(tokens).logits
    error, usual = ((y - want).norm(dim=-1).median() for y in (ours.logits(tokens), theirs(tokens).logits))
    assert error <= 1.5 * usual
    for loss in (ours(tokens[:, :-1], tokens[:, 1:]), their_loss(theirs, tokens), their_loss(exact, tokens)):
        loss.backward()
    config = our_config(theirs)
    found, wanted = (MAPPING.to_parameters(on_disk(m, their_gradients(m)), config) for m in (theirs, exact))
    errors = []
    for shard in parameter_shards(ours, Axis("tp")):
        if shard.is_trained and (grad := shard.parameter.grad) is not None:
            mine = (shard.without_padding(grad) - wanted[shard.name]).norm()
            errors.append((mine, (found[shard.name] - wanted[shard.name]).norm()))
    mine, usual = (torch.stack(each).norm() for each in zip(*errors, strict=True))
    assert mine <= 1.5 * usual


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_adapters_are_those_of_peft(name: str) -> None:
    """Logits and gradients, and both ways through peft's tensors.

    On every linear layer; of families with experts on attention's, as peft takes gate_proj for all experts.
    """
    theirs = exact_model(name)
    ours, config = our_model(theirs), our_config(theirs)
    has_experts = VARIANTS[theirs.config.model_type].has_experts
    targets = ("query", "kv", "out") if has_experts else ("all-linear",)
    lora = LoraConfig(rank=3, alpha=5.0, targets=targets)
    adapted, stored, mine, values = adapt(ours, theirs, config, lora)
    base = dict(ours.named_parameters()).__getitem__
    with torch.no_grad():
        if any(each.rows.section is not None for each in stored):
            with pytest.raises(UserError, match="peft adapts no part; use mlm export hf merge=true"):
                stored_tensors(config, lora, mine.__getitem__, base)
        else:
            written = stored_tensors(config, lora, mine.__getitem__, base)
            assert written.keys() == values.keys()
            assert all(torch.equal(value, values[name]) for name, value in written.items())
    (tokens,) = samples(name, 0)
    loss, other = ours(tokens[:, :-1], tokens[:, 1:]), their_loss(adapted, tokens)
    torch.testing.assert_close(loss.detach(), other.detach(), rtol=1e-9, atol=0)
    loss.backward()
    other.backward()
    grads = {name: p.grad for name, p in mine.items()}
    for each in stored:
        if each.rows.section is not None:  # their A is read by two of ours
            neighbours = (other.name for other in stored if other.modules == each.modules)
            grads[f"{each.name}.lora.a"] = sum(mine[f"{name}.lora.a"].grad for name in neighbours)  # type: ignore[misc, assignment]
        for ours_name, grad in to_ours(each, lambda n: values[n].grad, base):  # type: ignore[arg-type, return-value]
            assert (grads[ours_name] - grad).abs().max() <= 1e-9 * grad.abs().max(), ours_name  # type: ignore[operator]


def their_matrices(name: str) -> Iterator[Tensor]:
    """Matrices of the layers, as theirs has them before it fuses any."""
    theirs = their_model(name)
    config = theirs.config
    for stored, value in on_disk(theirs, theirs.state_dict()).items():
        if ".layers." not in stored or value.dim() < 2 or stored.endswith("bias"):
            continue
        if stored.endswith("qkv_proj.weight"):
            width = architecture_of(our_config(theirs)).head_dim
            heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
            yield from value.split([n * width for n in (heads, kv_heads, kv_heads)])
        elif stored.endswith("gate_up_proj.weight"):
            yield from value.chunk(2)
        elif stored.endswith("experts.gate_up_proj"):  # [E, H, 2F], columns in pairs
            yield from (part for one in value.mT for part in (one[::2], one[1::2]))
        elif stored.endswith("experts.down_proj"):
            yield from value.mT
        elif stored.endswith("input_linear.weight"):  # [E, 2F, H]
            yield from (part for one in value for part in one.chunk(2))
        elif stored.endswith("output_linear.weight"):
            yield from value
        else:
            yield value


@pytest.mark.slow
@pytest.mark.parametrize("name", ROWS)
def test_muon_knows_the_matrices_in_each_weight(name: str) -> None:
    """Whole ones of `transformers`, up to the order of their rows."""

    def rows(matrix: Tensor) -> tuple[bytes, ...]:
        return tuple(sorted(row.numpy().tobytes() for row in matrix.detach()))

    model, found = our_model(their_model(name), torch.float32), []
    for shard in parameter_shards(model, shape_context().tp):
        weight = shard.parameter
        if not shard.name.startswith("layers.") or weight.dim() < 2 or shard.name.endswith("bias"):
            continue
        for matrix in matrices_of(shard, per_head=False):
            part = weight[matrix.index] if matrix.index else weight
            numbers = matrix.rows_in(((0, 0), tuple(part.shape)), part.device)
            found.append(rows(part if numbers is None else part[numbers]))
    assert sorted(found) == sorted(map(rows, their_matrices(name)))
