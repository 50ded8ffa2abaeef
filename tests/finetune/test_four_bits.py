"""Adapters beside a base in 4 bits: `peft`'s on that base, two ranks, and what reads them."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig as TheirConfig
from peft import get_peft_model
from torch.nn.functional import cross_entropy

import mlm
from mlm.cli import main
from mlm.convert.huggingface.peft import stored_adapters
from mlm.convert.source import open_source
from mlm.convert.weights import fill_parameters
from mlm.finetune import training
from mlm.finetune.config import FinetuneConfig
from mlm.models.config import LoraConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.linear import linear
from mlm.parallel.mesh import Axis, ParallelContext, shape_context
from mlm.parallel.nf4 import NF4Weight
from mlm.parallel.sharding import parameter_shards
from mlm.training.pipelined import PipelinedModel
from mlm.util.errors import UserError
from tests.finetune.chats import chatting, write_chats, write_llama
from tests.finetune.runs import check_layout, losses, read
from tests.models.peft_adapters import to_ours

bitsandbytes = pytest.importorskip("bitsandbytes")
LORA = LoraConfig(rank=4, alpha=16.0, quantize="nf4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose rows, also those of two ranks, are whole blocks, and conversations."""
    folder = tmp_path_factory.mktemp("four-bits")
    llama = write_llama(folder / "llama", hidden_size=128, intermediate_size=256)
    # in bf16 they are rounded to 4 bits alike
    model = transformers.LlamaForCausalLM.from_pretrained(llama, dtype=torch.bfloat16)
    model.float().save_pretrained(llama)
    write_chats(folder / "chat")
    return folder


@pytest.fixture(scope="module")
def run(folder: Path) -> Path:
    training.run(adapting(folder), ParallelContext())
    return folder / "out"


def adapting(folder: Path, **changes: Any) -> FinetuneConfig:
    values = {"lora": LORA, "precision": PrecisionConfig(dtype="fp32")} | changes
    return replace(chatting(folder), **values)


def filled(dtype: str, folder: Path) -> PipelinedModel:
    source = open_source(str(folder / "llama"))
    ctx, precision = ParallelContext(), PrecisionConfig(dtype=dtype)
    model = PipelinedModel(source.model, ParallelConfig(), precision, ctx, LORA)
    shards = parameter_shards(model.chunks[0], Axis("tp"))
    fill_parameters([s for s in shards if not s.is_trained], source, ctx, initialize=False)
    return model


def adapted_by_peft(folder: Path, dtype: torch.dtype) -> tuple[Any, dict[str, Any]]:
    """Model of peft on the base in 4 bits, training, as the kernel of evaluation rounds; adapters by name."""
    settings = transformers.BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype
    )
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "llama", quantization_config=settings, dtype=dtype, device_map="cpu"
    )
    stored = stored_adapters(open_source(str(folder / "llama")).model, LORA)
    targets = [module for each in stored for module in each.modules]
    model = get_peft_model(base, TheirConfig(r=4, lora_alpha=16, target_modules=targets)).train()
    return model, {n.replace(".default", ""): p for n, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize("dtype, rtol", [("fp32", 2e-6), ("bf16", 4e-3)])
def test_losses_and_gradients_are_those_of_peft_on_a_base_in_4_bits(
    folder: Path, dtype: str, rtol: float
) -> None:
    """At each of 8 steps; in bf16 errors are near those of peft, whose adapters stay in float32."""
    torch.manual_seed(0)
    stored = stored_adapters(open_source(str(folder / "llama")).model, LORA)
    exact, values = adapted_by_peft(folder, torch.float32)
    half, half_values = adapted_by_peft(folder, torch.bfloat16)
    ours = filled(dtype, folder).chunks[0]
    parameters = dict(ours.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    for p in values.values():
        torch.nn.init.normal_(p, std=0.1)

    def as_ours(read: Any) -> dict[str, torch.Tensor]:
        return dict(pair for each in stored for pair in to_ours(each, read, parameters.__getitem__))

    optimizer = torch.optim.AdamW(values.values(), lr=1e-3)
    errors, their_errors = [], []
    for batch in torch.randint(340, (8, 2, 9)):
        with torch.no_grad():
            for name, value in as_ours(values.__getitem__).items():
                trained[name].copy_(value)
            for name, value in values.items():
                half_values[name].copy_(value)
        for model in (exact, half, ours):
            model.zero_grad()
        loss = ours(batch[:, :-1], batch[:, 1:])
        loss.backward()
        for model in (half, exact):
            logits = model(batch[:, :-1]).logits.float().transpose(1, 2)
            their_loss = cross_entropy(logits, batch[:, 1:])
            their_loss.backward()
        torch.testing.assert_close(loss.float(), their_loss, rtol=rtol, atol=0)
        their_grads = as_ours(lambda name: half_values[name].grad)
        for name, grad in as_ours(lambda name: values[name].grad).items():
            errors.append(float((trained[name].grad - grad).norm() / grad.norm()))
            their_errors.append(float((their_grads[name] - grad).norm() / grad.norm()))
        optimizer.step()
    if dtype == "bf16":
        assert sum(errors) < 1.5 * sum(their_errors)
        assert max(errors) < 2 * max(their_errors)
    else:
        assert max(errors) < 10 * rtol


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_product_and_gradient_are_those_of_bitsandbytes(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain, x, dy = torch.randn(96, 128), torch.randn(3, 5, 128), torch.randn(3, 5, 96)
    options: dict[str, Any] = {"quant_type": "nf4", "compress_statistics": False}
    layer = bitsandbytes.nn.Linear4bit(128, 96, bias=False, compute_dtype=dtype, **options)
    layer.weight = bitsandbytes.nn.Params4bit(plain.to(dtype), requires_grad=False, **options)
    weight = NF4Weight.empty(96, 128, dtype)
    weight.quantize(plain)
    sides = []
    for product in (layer.to("cpu").train(), lambda x: linear(x, weight)):
        leaf = x.to(dtype).requires_grad_()
        y = product(leaf)
        y.backward(dy.to(dtype))
        sides.append((y.detach(), leaf.grad))
    for theirs, ours in zip(*sides, strict=True):
        torch.testing.assert_close(ours, theirs)
        assert ours.dtype == dtype


def test_weights_take_four_and_a_half_bits(folder: Path) -> None:
    model = filled("bf16", folder)
    held = [p for p in model.chunks[0].parameters() if isinstance(p, NF4Weight)]
    count = sum(p.numel() for p in held)
    layer = 128 * 128 * 2 + 2 * 64 * 128 + 3 * 128 * 256
    assert count == 2 * layer
    assert sum(p.packed.numel() + 4 * p.scales.numel() for p in held) * 8 == 4.5 * count


def test_run_is_evaluated_on_the_base_that_it_was_trained_on(run: Path, folder: Path, tmp_path: Path) -> None:
    """In one process and exported, merged: scores of the run, which those on the plain base are not."""
    loss = read(run / "result.json")["scores"]["validation"]["loss"]
    words = [f"data={folder / 'chat'}", "dist.device=cpu", f"out={tmp_path / 'a.json'}"]
    assert main(["eval", "chat", f"ckpt={run}", *words]) == 0
    assert read(tmp_path / "a.json")["results"][0]["metrics"]["loss"] == pytest.approx(loss, rel=1e-5)
    mlm.export_hf(run, tmp_path / "merged", merge=True)  # compares logits with transformers
    tokens = [[3, 1, 4, 1, 5, 9, 2, 6]]
    merged = torch.as_tensor(mlm.load(tmp_path / "merged", device="cpu").logits(tokens))
    torch.testing.assert_close(merged, torch.as_tensor(mlm.load(run, device="cpu").logits(tokens)))
    assert losses(run)[-1] < losses(run)[0]


def test_two_tensor_parallel_ranks_train_the_same(run: Path, folder: Path, tmp_path: Path) -> None:
    config = adapting(folder, parallel=ParallelConfig(tp=2), out=str(tmp_path / "out"))
    config = replace(config, precision=PrecisionConfig(dtype="fp64"))
    one = replace(config, parallel=ParallelConfig(), out=str(tmp_path / "one"))
    training.run(one, ParallelContext())
    check_layout(config, tmp_path / "one")


def test_what_4_bits_do_not_go_with_is_one_line(
    folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    fixed = [
        f"data={folder / 'chat'}",
        f"ckpt={folder / 'llama'}",
        "dist.device=cpu",
        f"out={tmp_path / 'x'}",
    ]
    for word, problem in (
        ("zero=2", "lora.quantize=nf4 does not go with zero=2; use lora.quantize=none or zero=0"),
        ("lora.rank=0", "lora.quantize=nf4: has no effect with lora.rank=0"),
    ):
        assert main(["finetune", "chat", *fixed, "lora.rank=4", "lora.quantize=nf4", word]) == 2
        err = capfd.readouterr().err
        assert problem in err
        assert "Traceback" not in err
    model, split = open_source(str(folder / "llama")).model, ParallelConfig(tp=4)
    with pytest.raises(
        UserError, match="rows of 32 elements, and blocks are of 64: use a smaller tp, or lora"
    ):
        PipelinedModel(model, split, PrecisionConfig(dtype="fp32"), shape_context(0, tp=4), LORA)
