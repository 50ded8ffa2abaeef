"""Tensors of `peft` as those of our adapters."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft import LoraConfig as PeftConfig
from peft import get_peft_model
from torch import Tensor, nn

from mlm.convert.huggingface.families import layer_names
from mlm.convert.huggingface.peft import PREFIX, StoredAdapter, stored_adapters
from mlm.models.config import LoraConfig, ModelConfig
from mlm.models.lora import add_adapters, freeze_base

Read = Callable[[str], Tensor]


def to_ours(stored: StoredAdapter, read: Read, base: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield our (name, tensor); `read` returns tensors by their names, `base` by ours."""
    for part, (end, location) in stored.forms.items():
        value = location.from_stored([read(f"{PREFIX}{module}{end}") for module in stored.modules])
        yield f"{stored.name}.lora.{part}", value - stored.norms(base) if part == "magnitude" else value


def adapt(
    ours: nn.Module, theirs: Any, model: ModelConfig, lora: LoraConfig
) -> tuple[Any, list[StoredAdapter], dict[str, Tensor], dict[str, Tensor]]:
    """Add the same random adapters to both; return peft's model, what is stored, what of each is trained."""
    add_adapters(ours, lora, layer_names(model))
    ours.double()
    freeze_base(ours, torch.float64)
    stored = stored_adapters(model, lora)
    config = PeftConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]
        target_modules=sorted({module for each in stored for module in each.modules}),
        use_rslora=lora.rslora,
        use_dora=lora.dora,
    )
    adapted = get_peft_model(theirs, config).double()
    values = {
        name.replace(".default", "").replace("_vector.weight", "_vector"): p
        for name, p in adapted.named_parameters()
        if p.requires_grad
    }
    mine = {name: p for name, p in ours.named_parameters() if p.requires_grad}
    with torch.no_grad():
        for p in values.values():
            p.normal_(0, 0.1)
        for each in stored:
            for name, value in to_ours(each, values.__getitem__, dict(ours.named_parameters()).__getitem__):
                mine[name].copy_(value)
    return adapted, list(stored), mine, values
