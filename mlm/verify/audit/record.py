"""The subject of an audit, which users describe, and the record of one rank's run of it.

Recorded: outputs of every module, parameters, the gradients of both, the gradient norm and the loss.
"""

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from fnmatch import fnmatch
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mlm.util.errors import UserError
from mlm.util.files import digest_bytes
from mlm.verify.audit.formats import COLLECTIVES, EPS, FORMATS, Formats

AXES = ("pp", "dp", "cp", "tp")
"""Axes of the mesh that a build function receives, outermost first; unused ones have size 1."""
WRAPPERS = re.compile(r"(^|(?<=\.))(module|_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)(\.|$)")
"""Name parts added by DDP, `torch.compile`, FSDP and activation checkpointing."""
KINDS = {
    "initial": "initial weight",
    "output": "output",
    "scalar": "scalar output",
    "loss": "loss",
    "backward": "gradient of the output",
    "gradient": "reduced gradient",
    "norm": "gradient norm",
    "clipped": "clipped gradient",
    "weight": "updated weight",
}
"""Types of recorded tensors in the order of computation, and their names."""
MODULE_KINDS = ("input", "output", "scalar", "backward")
"""Types of tensors of modules. Inputs only match calls; their item is 1 if they require gradients."""
SQUARE = "square"
"""Type of the sum of squares of a rank's local part of a reduced gradient."""
ADDEND = "addend"
"""Type of a parameter's gradient in one backward pass, before accumulation and reduction."""
SCALAR_GRADIENT = "reached"
"""Type of a scalar output's gradient, recorded if the loss depends on it."""
DROPOUT = F.dropout


@dataclass(frozen=True)
class Split:
    """A dimension that is split over an axis of the mesh, in the order of its ranks."""

    dim: int
    axis: str = "tp"
    blocks: int = 1
    """Parts of the dimension that are split each: 3 where a rank holds slices of q, k and v in turn."""
    is_zigzag: bool = False
    """True if each rank holds two pieces, as far from either end: of sequences split over cp."""
    groups: int = 0
    """Parts, where these are fewer than ranks: `Replicated` says so."""
    is_sum: bool = False
    """True if these hold addends of their part, as gradients of such heads are."""


@dataclass(frozen=True)
class Replicated(Split):
    """A split into `groups` parts, each on as many ranks in a row: key and value heads, fewer than ranks."""

    dim: int = 0


@dataclass(kw_only=True)
class AuditSubject:
    """One rank's part of a training step; at a mesh of size 1 it is the reference.

    The audit runs `step`, or `module(batch)`, `loss` and backward; then `reduce`, `clip` and
    `optimizer.step()`, each where it is given.
    """

    module: nn.Module
    """This rank's module, wrapped as it trains; of several pipeline stages an `nn.ModuleList`."""
    batch: Any = None
    """This rank's samples: a tensor, a tuple of positional or a mapping of keyword arguments."""
    loss: Callable[[Any], Tensor] | None = None
    """Loss of the module's output; None where that is the loss itself."""
    step: Callable[[], Tensor | None] | None = None
    """Forward and backward; returns the loss, or None on ranks that have none. It may step `optimizer`."""
    reduce: Callable[[], object] | None = None
    """Reduction of gradients after backward, where no wrapper does it."""
    clip: Callable[[], Tensor | float] | None = None
    """Clips gradients; returns their norm."""
    optimizer: Optimizer | None = None
    placements: Mapping[str, Split | None] = field(default_factory=dict)
    """Splits of parameters by pattern ("*.qkv.weight"), None for copies. Megatron's attributes say it
    themselves, and of others the shapes do, where they are split over tp in one block or in groups."""
    names: Callable[[str], str] = str
    """Name on one process of a module or parameter, from its name on this rank: for pipeline stages."""


class Key(NamedTuple):
    """Name of a recorded tensor."""

    step: int
    kind: str
    """One of KINDS, or "input"."""
    name: str
    call: int = 0
    """Number of the module's call in this micro-batch, and of the tensor in its output."""
    item: int = 0
    micro: int = 0
    """Number of the micro-batch in this step: of the call of the outermost module."""

    @property
    def words(self) -> str:
        """`the output of 2.norm in step 1`."""
        of = "" if self.name in KINDS else f" of {self.name or 'the whole module'}"
        return f"the {KINDS.get(self.kind, self.kind)}{of} in step {self.step + 1}"


class Cause(NamedTuple):
    """Cause of a difference: a short name, evidence and advice, and a place if not that of the difference."""

    name: str
    reason: str
    place: str = ""


@dataclass
class Record:
    """Tensors that one rank computed, in the order of computation."""

    tensors: dict[Key, Tensor] = field(default_factory=dict)
    splits: dict[str, tuple[Split, ...] | None] = field(default_factory=dict)
    """By parameter; None if only shapes can tell."""
    offsets: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By parameter whose region is known: where this rank's part begins in the full tensor."""
    precision: str = "fp64"
    """Narrowest format that an operation returned."""
    formats: dict[str, str] = field(default_factory=dict)
    """Formats other than float64, by module, phase or parameter."""
    reductions: dict[str, str] = field(default_factory=dict)
    """Formats of collective sums in 16 bits, by place."""
    masks: list[tuple[str, str, str]] = field(default_factory=list)
    """(module, digest of the input, digest of the mask) of each dropout."""
    causes: list[Cause] = field(default_factory=list)
    """Causes found in operations of a step."""
    tries_at_limit: int | None = None
    """Hypotheses tried before the time limit ended the search for a cause; None if it did not."""

    def to_bytes(self) -> bytes:
        """Encode without pickle, since the subject is untrusted."""
        facts = asdict(replace(self, tensors={})) | {"tensors": list(self.tensors)}
        numbers = self.tensors.values()  # NumPy has no narrow formats but float16; a wider one is exact
        exact = [x.float() if x.is_floating_point() and x.itemsize < 4 else x for x in numbers]
        arrays = {str(number): x.detach().numpy() for number, x in enumerate(exact)}
        np.savez(file := BytesIO(), allow_pickle=False, facts=np.array(json.dumps(facts)), **arrays)
        return file.getvalue()

    @classmethod
    def of_bytes(cls, content: bytes) -> "Record":
        with np.load(BytesIO(content), allow_pickle=False) as arrays:
            facts = json.loads(str(arrays["facts"]))
            keys = enumerate(facts.pop("tensors"))
            tensors = {Key(*key): torch.from_numpy(arrays[str(number)]) for number, key in keys}
        splits = {name: s and tuple(Split(**split) for split in s) for name, s in facts.pop("splits").items()}
        offsets = {name: tuple(offset) for name, offset in facts.pop("offsets").items()}
        causes = [Cause(*cause) for cause in facts.pop("causes")]
        return cls(tensors, splits, offsets, causes=causes, **facts)


class Recorder(TorchDispatchMode):
    """Runs a subject and records it; as a dispatch mode it sees each operation and reports collectives."""

    def __init__(self, subject: AuditSubject, report: Callable[[str], None], seed: int = 0) -> None:
        super().__init__()
        self.subject, self.report, self.phase = subject, report, ""
        self.record, self.step, self.formats = Record(), 0, Formats(seed)
        self.updates: dict[tuple[int, str], Tensor] = {}
        """Full gradients by step and name, which replace the subject's after these are recorded."""
        self.calls: Counter[tuple[str, int | str]] = Counter()
        """Counts in this step: calls of modules by micro-batch, of outermost modules (-1), and addends."""
        self.micro = 0
        self.run_operation: Callable[[Any, Any, Any], Any] | None = None
        """Replaces the default dispatch, which observes formats."""
        self.module_stack: list[str] = []
        """Modules in their forward pass, innermost last."""
        self.parameters: dict[str, nn.Parameter] = {}
        for name, parameter in subject.module.named_parameters():
            self.parameters.setdefault(self.reference_name(name), parameter)
        for name, parameter in self.parameters.items():
            if parameter.requires_grad and not isinstance(parameter, DTensor):
                parameter.register_hook(partial(self._on_addend, name))
        self.record.splits = {name: self._declared_splits(name, p) for name, p in self.parameters.items()}
        modules = {self.reference_name(name): module for name, module in subject.module.named_modules()}
        for name, module in modules.items():  # a wrapped module replaces its wrapper of equal name
            if isinstance(module, nn.Identity):  # placeholder of modules on other pipeline stages
                continue
            module.register_forward_pre_hook(partial(self._enter_module, name), with_kwargs=True)
            module.register_forward_hook(partial(self._leave_module, name), always_call=True)
        if subject.optimizer is not None:
            subject.optimizer.register_step_pre_hook(lambda *_: self._record_gradients())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # decomposes into operations on local tensors
            return NotImplemented
        if func.namespace in COLLECTIVES:
            suffix = f" of {self.module_stack[-1]}" if self.module_stack else ""
            self.report(f"{func._opname.strip('_')}{suffix}")
        if self.run_operation is not None:
            return self.run_operation(func, args, kwargs or {})
        result = func(*args, **kwargs or {})
        place = self.module_stack[-1] if self.module_stack else self.phase
        self.formats.observe(func, args, result, place, is_update=self.phase == "update")
        return result

    def run(self, steps: int, *, has_dropout: bool) -> Record:
        """Run steps with dropout off, then one forward and backward with it that records its masks."""
        self._record_parameters("initial")
        batch = [leaf for leaf in tree_leaves(self.subject.batch) if isinstance(leaf, Tensor)]
        digests = list(map(digest, batch))
        for self.step in range(steps):
            self.run_step()
            if digests != list(map(digest, batch)):
                raise UserError("the subject changes its batch in place", fix="let it work on a clone of it")
        if has_dropout:
            with self._dropout_patched_by(self._record_mask):
                self.step = -1
                self._compute()
        return self.record

    def load(self, weights: Mapping[str, Tensor]) -> None:
        """Load full weights of one process."""
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                local_part(parameter).copy_(weights[name])

    def run_step(self, *, has_update: bool = True) -> None:
        self.calls.clear()
        with self._dropout_patched_by(lambda x, *_, **__: x):
            loss = self._compute()
        if loss is not None:
            self._record("loss", "loss", loss)
        subject = self.subject
        if has_update and not self._has_gradients():
            self._begin_phase("reduction")
            with self:
                if subject.reduce is not None:
                    subject.reduce()
                self._record_gradients()
                if subject.clip is not None:
                    self._begin_phase("clipping")
                    self._record("norm", "norm", subject.clip())
                    for name, grad in self._gradients():  # Adam would hide a wrong scale
                        self._record("clipped", name, full_tensor(grad))
                if subject.optimizer is not None:
                    self._begin_phase("update")
                    subject.optimizer.step()
        if has_update:
            self._record_parameters("weight")
        subject.module.zero_grad()
        formats = {name: FORMATS[p.dtype] for name, p in self.parameters.items() if p.dtype in FORMATS}
        narrow = {name: fmt for name, fmt in formats.items() if fmt != "fp64"} | self.formats.narrowest
        self.record.formats, self.record.reductions = narrow, self.formats.reductions
        self.record.precision = max((*narrow.values(), "fp64"), key=list(EPS).index)

    def _begin_phase(self, phase: str) -> None:
        self.phase = phase
        self.report(phase)

    def _compute(self) -> Tensor | None:
        """Run forward and backward; return the loss."""
        subject = self.subject
        with self:
            if subject.step is not None:
                self._begin_phase("step")
                return subject.step()
            self._begin_phase("forward")
            batch = subject.batch
            if isinstance(batch, Mapping):
                output = subject.module(**batch)
            else:
                output = subject.module(*(batch if isinstance(batch, tuple) else (batch,)))
            self._begin_phase("loss")
            loss: Tensor = output if subject.loss is None else subject.loss(output)
            self._begin_phase("backward")
            loss.backward()
        return loss

    def _enter_module(self, name: str, _module: object, *inputs: object) -> None:
        if self._is_recorded and not self.module_stack:
            self.micro, self.calls[name, -1] = self.calls[name, -1], self.calls[name, -1] + 1
        self.module_stack.append(name or "the whole module")
        self.report(f"forward of {self.module_stack[-1]}")
        batch = [leaf for leaf in leaves_of(inputs) if isinstance(leaf, Tensor) and leaf.ndim]
        if self._is_recorded and batch:
            call = self.calls[name, self.micro]
            self._record("input", name, batch[0], call, int(batch[0].requires_grad))

    def _leave_module(self, name: str, _module: object, _args: object, output: Any) -> None:
        self.module_stack.pop()
        if not self._is_recorded:
            return
        call = self.calls[name, self.micro]
        self.calls[name, self.micro] += 1
        counts = {"scalar": 0, "output": 0}
        for leaf in leaves_of(output):
            is_tensor = isinstance(leaf, Tensor) and leaf.is_floating_point()
            # a leaf is a parameter that the module returns, as Megatron's layers return biases
            if type(leaf) is float or (is_tensor and not (leaf.is_leaf and leaf.requires_grad)):
                kind = "output" if is_tensor and leaf.ndim else "scalar"
                key = self._record(kind, name, leaf, call, counts[kind])
                counts[kind] += 1
                if is_tensor and leaf.requires_grad:
                    gradient_kind = "backward" if leaf.ndim else SCALAR_GRADIENT
                    leaf.register_hook(partial(self._store_copy, key._replace(kind=gradient_kind)))

    @property
    def _is_recorded(self) -> bool:
        """False in recomputation, and in the step of dropout masks."""
        return self.step >= 0 and torch._C._current_graph_task_id() == -1

    def _on_addend(self, name: str, grad: Tensor) -> None:
        if self.step >= 0:
            self._record(ADDEND, name, grad, self.calls[name, ADDEND])
            self.calls[name, ADDEND] += 1

    def _record(self, kind: str, name: str, tensor: Tensor | float, call: int = 0, item: int = 0) -> Key:
        key = Key(self.step, kind, name, call, item, self.micro if kind in MODULE_KINDS else 0)
        self._store_copy(key, tensor)
        return key

    def _store_copy(self, key: Key, tensor: Tensor | float) -> None:
        """Record a copy, without tracing its operations."""
        run_operation = self.run_operation
        self.run_operation = lambda func, args, kwargs: func(*args, **kwargs)
        self.record.tensors[key] = local_copy(torch.as_tensor(tensor))
        self.run_operation = run_operation

    def _record_parameters(self, kind: str) -> None:
        for name, parameter in self.parameters.items():
            self._record(kind, name, full_tensor(parameter))

    def _record_gradients(self) -> None:
        if self.step < 0 or self._has_gradients():  # the optimizer's hook runs after clipping
            return
        for name, grad in self._gradients():
            self._record("gradient", name, full_tensor(grad))
            self._record(SQUARE, name, local_copy(grad).double().square().sum())
            if (update := self.updates.get((self.step, name))) is not None:
                local_part(grad).copy_(update)

    def _gradients(self) -> Iterator[tuple[str, Tensor]]:
        for name, parameter in self.parameters.items():
            grad = parameter.grad if parameter.grad is not None else getattr(parameter, "main_grad", None)
            if grad is not None:
                yield name, grad

    def reference_name(self, name: str) -> str:
        return self.subject.names(WRAPPERS.sub("", name).rstrip("."))

    def _has_gradients(self) -> bool:
        return any(key.step == self.step and key.kind == "gradient" for key in self.record.tensors)

    def _declared_splits(self, name: str, parameter: nn.Parameter) -> tuple[Split, ...] | None:
        for pattern, split in self.subject.placements.items():
            if fnmatch(name, pattern):
                return () if split is None else (split,)
        if getattr(parameter, "tensor_model_parallel", False):
            return (Split(parameter.partition_dim, "tp", getattr(parameter, "partition_stride", 1)),)  # type: ignore[attr-defined]
        return None

    @contextmanager
    def _dropout_patched_by(self, function: Callable[..., Tensor]) -> Iterator[None]:
        F.dropout = function
        try:
            yield
        finally:
            F.dropout = DROPOUT

    def _record_mask(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        mask = DROPOUT(torch.ones_like(x), p, training)
        differs_by_sample = bool((x != x.flatten()[:1]).any())  # stochastic depth passes ones
        if training and 0 < p < 1 and differs_by_sample:
            name = self.module_stack[-1] if self.module_stack else ""
            self.record.masks.append((name, digest(x), digest(mask)))
        return x * mask


def leaves_of(tree: Any) -> Iterator[Any]:
    """Leaves of a pytree, including fields of dataclasses."""
    for leaf in tree_leaves(tree):
        is_object = is_dataclass(leaf) and not isinstance(leaf, type)
        yield from leaves_of([getattr(leaf, f.name) for f in fields(leaf)]) if is_object else (leaf,)


def local_part(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def local_copy(tensor: Tensor) -> Tensor:
    return local_part(tensor.detach()).clone().cpu()


def full_tensor(tensor: Tensor) -> Tensor:
    """The full tensor of a DTensor (collective), and any other tensor itself."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def digest(tensor: Tensor) -> str:
    return digest_bytes(local_copy(tensor).reshape(-1).view(torch.uint8).numpy().tobytes())
