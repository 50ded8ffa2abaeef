"""Attributes of PyTorch replaced during a dry run on the meta device, for which PyTorch has no argument.

Nothing else in mlm replaces an attribute of PyTorch.

- FSDP2 asks `torch.meta` for streams and events, as of each device, and there is none. PyTorch registers a
  device's module for good; this one is for a dry run alone.
- FSDP2 rejects parameters on the meta device, as of a model whose weights were forgotten. No option lets it.
- It frees and takes memory of gathered weights by `UntypedStorage.resize_`, which is no operator: no dispatch
  mode or hook sees it.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class _NoStreams:
    """A device's module whose streams and events are itself, and do nothing."""

    def current_device(self) -> int:
        """Return the only one."""
        return 0

    def __getattr__(self, name: str) -> Any:
        return lambda *_, **__: self

    def __enter__(self) -> "_NoStreams":
        return self

    def __exit__(self, *_: object) -> None:
        pass


@contextmanager
def sharding_on_meta() -> Iterator[None]:
    """Let FSDP2 run on the meta device."""
    from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

    validate = FSDPParamGroup._validate_no_meta_params
    torch.meta = _NoStreams()  # type: ignore[attr-defined]
    FSDPParamGroup._validate_no_meta_params = lambda group: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        FSDPParamGroup._validate_no_meta_params = validate  # type: ignore[method-assign]
        del torch.meta  # type: ignore[attr-defined]


@contextmanager
def watching_resizes(resized: Callable[[torch.UntypedStorage], None]) -> Iterator[None]:
    """Call `resized` with each storage that was given another size in place."""
    resize = torch.UntypedStorage.resize_

    def resize_and_tell(storage: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        result = resize(storage, size)
        resized(storage)
        return result

    torch.UntypedStorage.resize_ = resize_and_tell  # type: ignore[assignment, method-assign]
    try:
        yield
    finally:
        torch.UntypedStorage.resize_ = resize  # type: ignore[method-assign]
