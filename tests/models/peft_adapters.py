"""Tensors of `peft` as those of our adapters."""

from collections.abc import Callable, Iterator

from torch import Tensor

from mlm.convert.huggingface.peft import PREFIX, StoredAdapter

Read = Callable[[str], Tensor]


def to_ours(stored: StoredAdapter, read: Read, base: Read) -> Iterator[tuple[str, Tensor]]:
    """Yield our (name, tensor); `read` returns tensors by their names, `base` by ours."""
    for part, (end, location) in stored.forms.items():
        value = location.to_ours([read(f"{PREFIX}{module}{end}") for module in stored.modules])
        yield f"{stored.name}.lora.{part}", value - stored.norms(base) if part == "magnitude" else value
