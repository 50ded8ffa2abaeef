"""picotron's tensor parallelism from a checkout: a Llama whose matrix products are those of our GPT-2.

picotron has no GPT-2. Its Llama of the same layers, width, heads and vocabulary, with an MLP of 8/3 H (three
products in place of GPT-2's two of 4 H), needs the same matrix-product FLOPs per token when 8 H divides by 3;
both numbers are reported and speeds compared in model FLOP/s. Its output layer is not tied, so its optimizer
has V * H more parameters. Nothing of it is edited; `flash_attn`, which it imports and does not use here, is
an empty module while it does.
"""

import os
import sys
from importlib import import_module
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.contenders import Trainee, adamw
from bench.equality import Agreement, Reference, agreement
from bench.shapes import Shape, make_batches
from bench.spec import Spec
from mlm.util.errors import UserError

ROPE_BASE, NORM_EPS = 10000.0, 1e-5
SPLIT_BY_ROW = ("out_proj.weight", "down_proj.weight")
THEIRS_TO_LLAMA = {
    "embedding.": "model.embed_tokens.",
    "decoder_layers.": "model.layers.",
    "attention.out_proj": "self_attn.o_proj",
    ".attention.": ".self_attn.",
    "final_norm.": "model.norm.",
    "final_proj.": "lm_head.",
}


def ffn_size(shape: Shape, tp: int) -> int:
    """Width of the gated MLP nearest to 8/3 H that tp divides."""
    return max(1, round(8 * shape.hidden_size / 3 / tp)) * tp


class PicotronTrainee(Trainee):
    """Its Llama under apply_tensor_parallel, stepped as its train.py does (no clipping there)."""

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        super().__init__(name, spec, device)
        shape, tp = spec.shape, dist.get_world_size()
        self.config = SimpleNamespace(
            num_hidden_layers=shape.num_layers,
            hidden_size=shape.hidden_size,
            num_attention_heads=shape.num_heads,
            num_key_value_heads=shape.num_heads,
            intermediate_size=ffn_size(shape, tp),
            max_position_embeddings=shape.seq_length,
            vocab_size=shape.vocab_size,
            rms_norm_eps=NORM_EPS,
            rope_theta=ROPE_BASE,
        )
        self.notes = (
            f"Llama, MLP 3 × {self.config.intermediate_size}, untied output: "
            f"{self.flops_per_token() / 1e6:.1f} MFLOP/token, GPT-2 {shape.flops_per_token() / 1e6:.1f}",
            "fused AdamW as all have it (its own is never fused); no clipping, as in its train.py",
            "flash_attn stubbed; DTYPE set, without which its rotary tables are bfloat16",
        )
        picotron_model, tensor_parallel = import_picotron(spec)
        model = tensor_parallel.apply_tensor_parallel(picotron_model.Llama(self.config))
        self.whole = llama_state(model, self.config, spec.seed)
        for key, parameter in model.named_parameters():
            parameter.data.copy_(self._local(key, self.whole[key]))
        self.model = model.to(device=device, dtype=DTYPES[spec.dtype]).train()
        self.optimizer = adamw(list(self.model.parameters()))
        self.batches = [(t.to(device), y.to(device)) for t, y in make_batches(shape, spec.seed)]

    def _local(self, key: str, whole: Tensor) -> Tensor:
        """This rank's part of a whole parameter."""
        if "norm" in key:
            return whole
        return whole.chunk(dist.get_world_size(), 1 if key.endswith(SPLIT_BY_ROW) else 0)[dist.get_rank()]

    def _loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        logits = self.model(input_ids=tokens)
        return F.cross_entropy(logits.view(tokens.numel(), -1), labels.reshape(-1), reduction="mean")

    def step(self, index: int) -> None:
        self.clear()
        loss = self._loss(*self.batches[index % len(self.batches)])
        loss.backward()
        loss.item()  # it logs every step
        self.optimizer.step()

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        """On the first sample alone, in its own names: this rank's parts."""
        self.clear()
        tokens, labels = self.batches[0]
        loss = self._loss(tokens[:1], labels[:1])
        loss.backward()
        gradients = {}
        for key, parameter in self.model.named_parameters():
            assert parameter.grad is not None, key
            gradients[key] = parameter.grad.float().cpu()
        self.clear()
        return loss.item(), gradients

    def check(self, reference: Reference) -> Agreement:
        """Against `transformers`' LlamaForCausalLM with the same weights: GPT-2's reference says nothing."""
        loss, gradients = self.loss_and_gradients()
        whole = llama_reference(self.config, self.whole, *(x[:1].cpu() for x in self.batches[0]))
        self.whole = {}
        local = {key: self._local(key, g) for key, g in whole.gradients.items()}
        return agreement(self.name, self.spec.dtype, loss, gradients, Reference(whole.loss, local))

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)

    def flops_per_token(self) -> float:
        """As for GPT-2: 6 per weight of a matrix product, and attention."""
        c = self.config
        layer = 4 * c.hidden_size**2 + 3 * c.hidden_size * c.intermediate_size
        attention = 12 * c.num_hidden_layers * c.hidden_size * c.max_position_embeddings
        return float(6 * (c.num_hidden_layers * layer + c.hidden_size * c.vocab_size) + attention)


DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""picotron trains with parameters of the compute dtype."""


def import_picotron(spec: Spec) -> tuple[Any, Any]:
    """Its `model` and `tensor_parallel` modules, set up for these ranks. It reads the environment."""
    path = spec.peers["picotron"]
    if not os.path.isfile(os.path.join(path, "picotron", "model.py")):
        raise UserError(f"--peers: {path} holds no picotron/model.py: give the path of a checkout")
    os.environ |= {
        "FLASH_ATTEN": "0",
        "CONTEXT_PARALLEL": "0",
        "DEVICE": spec.device,
        "DTYPE": "float32" if spec.dtype == "fp32" else "bfloat16",
        "LOCAL_RANK": str(dist.get_rank()),
    }
    stubs: dict[str, ModuleType] = {}
    for name, function in (
        ("flash_attn.flash_attn_interface", "flash_attn_func"),
        ("flash_attn.layers.rotary", "apply_rotary_emb"),
        ("flash_attn.ops.triton.layer_norm", "layer_norm_fn"),
    ):
        parts = name.split(".")
        for end in range(1, len(parts) + 1):
            stubs.setdefault(".".join(parts[:end]), ModuleType(".".join(parts[:end])))
        setattr(stubs[name], function, _unused)
    sys.path.insert(0, path)
    with mock.patch.dict(sys.modules):  # transformers must not take the stubs for the real thing
        sys.modules |= stubs
        model = import_module("picotron.model")
        manager = import_module("picotron.process_group_manager")
        tensor_parallel = import_module("picotron.tensor_parallel.tensor_parallel")
    manager.setup_process_group_manager(dist.get_world_size(), 1, 1, 1)
    return model, tensor_parallel


def _unused(*_: object, **__: object) -> None:
    raise AssertionError("flash_attn is not installed: FLASH_ATTEN=0 must keep this from being called")


def llama_state(model: nn.Module, config: Any, seed: int) -> dict[str, Tensor]:
    """Random whole weights in picotron's names, the same on every rank."""
    tp, generator, state = dist.get_world_size(), torch.Generator().manual_seed(seed), {}
    for key, parameter in model.named_parameters():
        size = list(parameter.shape)
        if "norm" not in key:
            size[1 if key.endswith(SPLIT_BY_ROW) else 0] *= tp
        state[key] = torch.empty(size).normal_(float("norm" in key), 0.02, generator=generator)
    return state


def llama_reference(config: Any, whole: dict[str, Tensor], tokens: Tensor, labels: Tensor) -> Reference:
    """Loss and gradients of `transformers`' Llama with these weights, in float32 and picotron's names."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise UserError(
            "--peers picotron is checked against `transformers`: pip install 'mlm[dev]'"
        ) from None
    sizes = {k: v for k, v in vars(config).items() if k != "rope_theta"}
    rope = {"rope_type": "default", "rope_theta": config.rope_theta}
    llama_config = LlamaConfig(**sizes, rope_parameters=rope, tie_word_embeddings=False, use_cache=False)
    model = LlamaForCausalLM(llama_config)
    model.load_state_dict({to_llama(key): value for key, value in whole.items()})
    loss = model(input_ids=tokens, labels=labels, shift_labels=labels).loss
    loss.backward()
    named = dict(model.named_parameters())
    gradients = {}
    for key in whole:
        grad = named[to_llama(key)].grad
        assert grad is not None, key
        gradients[key] = grad
    return Reference(loss.item(), gradients)


def to_llama(key: str) -> str:
    """LlamaForCausalLM's name of a picotron parameter."""
    for theirs, llama in THEIRS_TO_LLAMA.items():
        key = key.replace(theirs, llama)
    return key
