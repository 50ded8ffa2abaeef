"""Frozen weights in 4 bits: NormalFloat of arXiv:2305.14314, section 3, by bitsandbytes.

An element is one of 16 values, times a float32 scale that 64 consecutive elements of a row share: 4.5 bits.
Products dequantize the weight to the dtype of their input, forward and backward.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from mlm.util.errors import UserError
from mlm.util.extras import load_extra

BLOCK = 64
_form: ContextVar[str] = ContextVar("form of linear weights", default="none")


class NF4Weight(torch.Tensor):
    """A frozen weight [O, I], uint8 to PyTorch; `to` a float dtype dequantizes it.

    Attributes:
        packed: [O I / 2] uint8, two elements each.
        scales: [O I / 64] float32.
        plain_dtype: dtype of the weight before quantization.
    """

    packed: Tensor
    scales: Tensor
    plain_dtype: torch.dtype

    @staticmethod
    def __new__(
        cls, packed: Tensor, scales: Tensor, shape: torch.Size, plain_dtype: torch.dtype
    ) -> "NF4Weight":
        weight: NF4Weight = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=torch.uint8, device=packed.device, storage_size=0
        )
        weight.packed, weight.scales, weight.plain_dtype = packed, scales, plain_dtype
        return weight

    @classmethod
    def empty(cls, rows: int, columns: int, dtype: torch.dtype) -> "NF4Weight":
        """Allocate a weight on the default device. Raises UserError if blocks do not divide the columns."""
        if columns % BLOCK:
            problem = f"a rank's weights have rows of {columns} elements, and blocks are of {BLOCK}"
            raise UserError(f"lora.quantize=nf4: {problem}: use a smaller tp, or lora.quantize=none")
        packed = torch.empty(rows * columns // 2, dtype=torch.uint8)
        scales = torch.zeros(rows * columns // BLOCK, dtype=torch.float32)
        return cls(packed, scales, torch.Size((rows, columns)), dtype)

    @property
    def element_bytes(self) -> float:
        return 0.5 + 4 / BLOCK

    def quantize(self, weight: Tensor) -> None:
        plain = weight.detach().to(self.packed.device, _kernel_dtype(self.plain_dtype)).contiguous()
        packed, state = _library().quantize_4bit(plain, quant_type="nf4", blocksize=BLOCK)
        self.packed.copy_(packed.flatten())
        self.scales.copy_(state.absmax)

    def to_plain(self, dtype: torch.dtype) -> Tensor:
        if self.packed.is_meta:
            return torch.empty(self.shape, dtype=dtype, device="meta")
        state = _library().QuantState(
            absmax=self.scales,
            shape=self.shape,
            dtype=_kernel_dtype(dtype),
            blocksize=BLOCK,
            quant_type="nf4",
            code=_code(self.device),
        )
        value: Tensor = _library().dequantize_4bit(self.packed[:, None], state)
        return value.to(dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        weight = args[0]
        if func is torch.ops.aten.detach.default:
            return cls(weight.packed, weight.scales, weight.shape, weight.plain_dtype)
        if func is torch.ops.aten._to_copy.default and (dtype := (kwargs or {}).get("dtype")) is not None:
            return weight.to_plain(dtype)
        if func is torch.ops.aten.zero_.default:
            weight.scales.zero_()
            return weight
        raise TypeError(f"{func}: of a weight in 4 bits; compute it by to(dtype)")


def storage_tensors(weight: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors that store a parameter: itself, or packed elements and scales."""
    return (weight.packed, weight.scales) if isinstance(weight, NF4Weight) else (weight,)


def round_to_nf4(weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Quantize a plain weight of `dtype` to 4 bits and dequantize it."""
    rows, columns = weight.shape
    with weight.device:
        in_four_bits = NF4Weight.empty(rows, columns, dtype)
    in_four_bits.quantize(weight)
    return in_four_bits.to_plain(weight.dtype)


@contextmanager
def weight_format(form: str) -> Iterator[None]:
    """In the block, create the weights of linear layers in `form`: frozen nf4, or plain for none."""
    token = _form.set(form)
    try:
        yield
    finally:
        _form.reset(token)


def linear_weight(rows: int, columns: int) -> nn.Parameter:
    """Return an uninitialised weight [rows, columns]."""
    if _form.get() == "nf4":
        return nn.Parameter(NF4Weight.empty(rows, columns, torch.get_default_dtype()), requires_grad=False)
    return nn.Parameter(torch.empty(rows, columns))


def _kernel_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype == torch.float64 else dtype


@cache
def _library() -> Any:
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # silences warnings on optional kernels
    return load_extra("bitsandbytes.functional", "lora.quantize=nf4", "nf4")


@cache
def _code(device: torch.device) -> Tensor:
    code: Tensor = _library().get_4bit_type("nf4", device=device)
    return code
