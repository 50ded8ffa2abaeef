"""The contenders: `mlm`, `transformers` and nanoGPT, from the same weights and tokens.

Every step is zero_grad, forward, backward, clip, optimizer step. Master weights are float32; with bf16 `mlm`
casts in its layers and the others run under torch.autocast. The optimizer is the same fused AdamW but for
`stock` contenders, which have their own.
"""

import contextlib
import importlib
import importlib.util
import io
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from bench.equality import Agreement, Reference, agreement
from bench.shapes import OPTIMIZER, TRANSPOSED, Shape, make_batches
from bench.spec import Spec
from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.mapping import TokenIds
from mlm.data.config import DataConfig
from mlm.data.sampler import Batch
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig, ScheduleConfig
from mlm.parallel import matmul
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import load_full
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError

TIED = frozenset({"lm_head.weight"})
"""Parameters that the state of a GPT-2 lacks."""


class Trainee(ABC):
    """A model with its optimizer in this process. `notes` says what a reader must know of it."""

    notes: Sequence[str] = ()

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        self.name, self.spec, self.device = name, spec, device

    @abstractmethod
    def step(self, index: int) -> None:
        """One optimizer step on prepared batch number `index` (they are read in turn)."""

    @abstractmethod
    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        """Mean loss and gradients on the first batch, in mlm's names, on the CPU; clears them."""

    @abstractmethod
    def clear(self) -> None:
        """Drop the gradients."""

    def reference(self) -> Reference:
        return Reference(*self.loss_and_gradients(), self.spec.dtype)

    def check(self, reference: Reference) -> Agreement:
        """Compare with the reference. Raises UserError if it differs."""
        return agreement(self.name, self.reference(), reference)

    def flops_per_token(self) -> float:
        return self.spec.shape.flops_per_token()


def run_config(spec: Spec, micro_batch_size: int, parallel: ParallelConfig | None = None) -> PretrainConfig:
    return PretrainConfig(
        name="bench",
        out="",
        model=spec.shape.model(),
        data=DataConfig(kind="synthetic", seq_length=spec.shape.seq_length),
        parallel=parallel or ParallelConfig(),
        optimizer=OPTIMIZER,
        schedule=ScheduleConfig(decay="constant", warmup_steps=0),
        precision=PrecisionConfig(dtype=spec.dtype),
        train=TrainConfig(global_batch_size=spec.shape.batch_size, micro_batch_size=micro_batch_size),
    )


class MlmTrainee(Trainee):
    """`mlm` by its own Trainer: what `mlm pretrain` runs."""

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        super().__init__(name, spec, device)
        self.by_mkl = "mkl" in name
        if self.by_mkl:
            self.notes = ("float32 products by torch.mm's library (MKL on x86), not oneDNN",)
        config, replays = run_config(spec, spec.shape.batch_size), "graphs" in name
        config = replace(config, compile=replays or "compiled" in name)
        config = replace(config, cuda_graphs=True) if replays else config
        ctx = ParallelContext(device=device)
        self.trainer = Trainer(config, ctx)
        whole = in_our_names(spec.shape.state(spec.seed), spec.shape)
        load_full(self.trainer.model.chunks[0], whole, ctx.tp)
        self.batches = [  # on the host: moving them is part of the Trainer's step
            Batch(tokens.pin_memory(), labels.pin_memory(), 0)
            if device.type == "cuda"
            else Batch(tokens, labels, 0)
            for tokens, labels in make_batches(spec.shape, spec.seed)
        ]

    def step(self, index: int) -> None:
        with self._library():
            self.trainer.train_step([self.batches[index % len(self.batches)]])

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        with self._library():
            parts = self.trainer.compute_gradients(self.batches[:1])
        gradients = {}
        for shard in self.trainer.shards:
            assert shard.parameter.grad is not None
            gradients[shard.name] = shard.without_padding(shard.parameter.grad).float().cpu()
        self.clear()
        return float(parts[: self.trainer.objective.num_losses].sum()), gradients

    def clear(self) -> None:
        for reducer in self.trainer.reducers:
            reducer.start_step()

    @contextlib.contextmanager
    def _library(self) -> Iterator[None]:
        """torch.mm's library in place of oneDNN, for this contender alone."""
        if not self.by_mkl:
            yield
            return
        saved = matmul.onednn_is_faster
        matmul.onednn_is_faster = lambda: False
        try:
            yield
        finally:
            matmul.onednn_is_faster = saved


class TorchTrainee(Trainee):
    """A plain module in a plain PyTorch loop: what `transformers` and nanoGPT are."""

    def __init__(self, name: str, spec: Spec, device: torch.device, model: Any) -> None:
        super().__init__(name, spec, device)
        self.model = model.to(device).train()
        if "compiled" in name:  # as a whole, as their own scripts do
            self.model.compile()
        self.parameters: list[nn.Parameter] = list(model.parameters())
        self.optimizer = self.stock_optimizer() if spec.stock else adamw(self.parameters)
        batches = make_batches(spec.shape, spec.seed)
        self.batches = [(tokens.to(device), labels.to(device)) for tokens, labels in batches]

    def stock_optimizer(self) -> torch.optim.Optimizer:
        """The program's own optimizer; transformers.Trainer's is the benchmark's."""
        return adamw(self.parameters)

    @abstractmethod
    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """Mean loss of a batch."""

    def forward(self, index: int) -> Tensor:
        """Mean loss of a prepared batch, under autocast for bf16."""
        batch = self.batches[index % len(self.batches)]
        half = self.spec.dtype == "bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if half else contextlib.nullcontext():
            return self.loss(*batch)

    def step(self, index: int) -> None:
        self.clear()
        self.forward(index).backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, OPTIMIZER.clip_grad_norm)
        self.optimizer.step()

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        self.clear()
        loss = self.forward(0)
        loss.backward()
        gradients = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = parameter.grad.float().cpu()
        self.clear()
        return loss.item(), in_our_names(self.as_huggingface(gradients), self.spec.shape)

    def as_huggingface(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        return gradients

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


class TransformersTrainee(TorchTrainee):
    """The same model by `transformers`: GPT2LMHeadModel, LlamaForCausalLM."""

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        self.name, self.spec = name, spec
        if spec.shape.model().kind == "gpt2":
            self.notes = ("gelu_new as GPT-2's configuration has it: many elementwise passes",)
        model = transformers_model(spec.shape.model())
        model.loss_type = "ForCausalLM"  # its default; unset, it warns
        load_exactly(model, self.state())
        super().__init__(name, spec, device, model)

    def state(self) -> dict[str, Tensor]:
        return self.spec.shape.state(self.spec.seed)

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        # labels already stand under their inputs: shift_labels says so, and all S positions are scored
        loss: Tensor = self.model(input_ids=tokens, labels=labels, shift_labels=labels).loss
        return loss


def transformers_model(model: ModelConfig) -> Any:
    """The model by `transformers`, with sdpa attention. Raises UserError without the package."""
    transformers, mapping = imported("transformers"), mapping_of(model)
    assert mapping is not None
    known = mapping.write(model, TokenIds(eod=0, bos=0))
    settings = {key: value for key, value in known.items() if key not in ("architectures", "dtype")}
    config = transformers.AutoConfig.for_model(**settings, use_cache=False)
    return transformers.AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")


def in_our_names(state: dict[str, Tensor], shape: Shape) -> dict[str, Tensor]:
    """Weights or gradients of `transformers` by mlm's names, in its layout."""
    model = shape.model()
    mapping = mapping_of(model)
    assert mapping is not None
    return mapping.to_parameters(state, model)


def imported(package: str) -> Any:
    """A package that one contender needs. Raises UserError where it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise UserError(f"--contenders {package} needs `{package}`: pip install 'mlm[dev]'") from None


class NanoGptTrainee(TorchTrainee):
    """nanoGPT's GPT from a checkout."""

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        self.is_exact = "erf" in name.split("-")
        timed = "with its exact GELU" if self.is_exact else "with it"
        self.notes = (f"compared with GPT-2's tanh GELU for its own, so that losses agree; timed {timed}",)
        source = load_source(Path(spec.peers["nanogpt"]) / "model.py", "nanogpt_model")
        shape = spec.shape
        config = source.GPTConfig(
            block_size=shape.seq_length,
            vocab_size=shape.vocab_size,
            n_layer=shape.num_layers,
            n_head=shape.num_heads,
            n_embd=shape.hidden_size,
            dropout=0.0,
            bias=True,
        )
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its size
            model = source.GPT(config)
        self.mlps = [block.mlp for block in model.transformer.h]
        for mlp in self.mlps:
            mlp.gelu = nn.GELU(approximate="tanh")
        state = shape.state(spec.seed)
        load_exactly(model, {k: v.t() if k.endswith(TRANSPOSED) else v for k, v in state.items()})
        super().__init__(name, spec, device, model)

    def check(self, reference: Reference) -> Agreement:
        agreement = super().check(reference)
        if self.is_exact:
            for mlp in self.mlps:
                mlp.gelu = nn.GELU()
        return agreement

    def stock_optimizer(self) -> torch.optim.Optimizer:
        """Its AdamW: on a CPU not fused, a parameter at a time."""
        o = OPTIMIZER
        with contextlib.redirect_stdout(io.StringIO()):  # it prints its groups
            made = self.model.configure_optimizers(o.weight_decay, o.lr, o.betas, self.device.type)
        assert isinstance(made, torch.optim.Optimizer)
        return made

    def loss(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens, labels)[1]
        return loss

    def as_huggingface(self, gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {k.replace("lm_head.weight", "transformer.wte.weight"): g for k, g in gradients.items()}
        return {k: g.t() if k.endswith(TRANSPOSED) else g for k, g in named.items()}


def adamw(parameters: Sequence[nn.Parameter]) -> torch.optim.AdamW:
    """The optimizer of every contender: fused, no decay on biases and norms."""
    groups: list[dict[str, Any]] = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": OPTIMIZER.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=OPTIMIZER.lr, betas=OPTIMIZER.betas, eps=OPTIMIZER.eps, fused=True)


def load_exactly(model: nn.Module, state: dict[str, Tensor]) -> None:
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= TIED, missing


def load_source(path: Path, name: str) -> ModuleType:
    """Import one file of a checkout under a name of our own. Raises UserError if it is not there."""
    if name in sys.modules:
        return sys.modules[name]
    if not path.is_file():
        raise UserError(f"--peers: {path} does not exist: give the path of a checkout")
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up there
    found.loader.exec_module(module)
    return module
