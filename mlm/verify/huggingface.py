"""Comparison of a checkpoint with a folder of `transformers`: outputs on the same random tokens."""

import gc
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.convert.huggingface.families import mapping_of
from mlm.convert.huggingface.folder import EXTRA, HFModel, read_model
from mlm.convert.huggingface.mapping import Outputs, ProbeSamples
from mlm.convert.source import open_source
from mlm.inference.trained import load_trained
from mlm.models.backbone import Inputs, Transformer
from mlm.models.documents import padding_spans
from mlm.models.family import family_of
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.util.errors import CheckFailedError, UserError, attempt

TOLERANCE = 1e-4
"""Fraction of the largest number; float32 sums in two orders differ by at most a tenth of it."""


@dataclass(frozen=True)
class Agreement:
    names: tuple[str, ...]
    difference: float
    """In units of the largest number of an output."""
    tokens: int

    def __str__(self) -> str:
        largest = self.names[0].removesuffix("s") if len(self.names) == 1 else "of each"
        agreement = f"largest difference {self.difference:.1e} of the largest {largest}"
        names = " and ".join(self.names)
        return f"{names} agree with those of transformers: {agreement}, {self.tokens} random tokens"


def extra_problems(verify: bool) -> list[str]:
    """Problems of the environment, for a preflight."""
    problems: list[str] = []
    if verify:
        attempt(problems, _transformers)
    return problems


def compare_logits(folder: Path, run: Path) -> Agreement:
    """Run both models, one after the other, in float32 on the same probe, and compare their outputs.

    Parameters that the folder lacks are not compared.

    Args:
        folder: A folder of `transformers`, read by its own code from safetensors alone.
        run: A run or step-… directory, read as training would.

    Raises:
        CheckFailedError: They differ by more than TOLERANCE, or `transformers` cannot load the folder.
        UserError: `transformers` is not installed.
    """
    outputs = our_outputs(run)
    model = read_model(folder)
    reference = reference_outputs(model)
    largest = 0.0
    for name, expected in reference.items():
        actual = outputs.get(name)
        difference = math.inf
        if actual is not None and actual.shape == expected.shape and bool(expected.isfinite().all()):
            difference = relative_difference(actual, expected)
        if not difference <= TOLERANCE:  # a NaN too
            raise CheckFailedError(
                f"{folder}: {name} differ from those of transformers by {difference:.1e} of the largest, "
                f"{TOLERANCE:.0e} is allowed: not the same model. Nothing was written; please report this"
            )
        largest = max(largest, difference)
    return Agreement(tuple(reference), largest, int(ProbeSamples.of(model.config).lengths.sum()))


def relative_difference(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, in units of the largest number of `expected`."""
    largest = float(expected.abs().max())
    return float((actual - expected).abs().max()) / largest if largest else float(actual.abs().max())


@torch.no_grad()
def our_outputs(run: Path, ctx: ParallelContext | None = None) -> Outputs:
    """Outputs of a checkpoint on its probe; empty except on the last pipeline stage.

    Collective over all ranks of `ctx`; None for this process alone.
    """
    ctx = ctx or shape_context()
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(open_source(str(run)), layout, PrecisionConfig(), ctx)
    model = trained.config.model
    mapping, is_causal = mapping_of(model), family_of(model.kind).causal
    assert mapping is not None, "read from a folder, or about to be exported"
    outputs: Outputs = {}

    def forward(chunk: Transformer, probe: ProbeSamples, x: Tensor | None) -> Tensor:
        inputs = inputs_of(probe, ctx.device, reads_both_ways=not is_causal)
        head = chunk.config.head
        is_finetuned = head in ("classification", "span")
        y = (chunk.outputs if is_finetuned else chunk.encode)(inputs, None, x)
        if chunk.stage.is_last:
            mask = probe.mask.to(ctx.device)
            logits = {"logits": y[mask] if head == "span" else y}
            outputs.update(logits if is_finetuned else mapping.native_outputs(chunk, y, mask))
        return y

    for _ in trained.model.evaluate([ProbeSamples.of(model)], forward):
        pass
    return {name: value.cpu() for name, value in outputs.items()}


def inputs_of(probe: ProbeSamples, device: torch.device, *, reads_both_ways: bool) -> Inputs:
    width = probe.tokens.shape[1]
    spans = padding_spans(probe.lengths, width, torch.float32, device) if reads_both_ways else None
    types = None if probe.token_types is None else probe.token_types.to(device)
    return Inputs(probe.tokens.to(device), probe.lengths.to(device), types, spans)


@torch.no_grad()
def reference_outputs(model: HFModel) -> Outputs:
    """Outputs of `transformers` on the probe of a folder's model. Raises CheckFailedError, UserError."""
    hf_model = _load(model)
    with _blames_folder(model, "run"):
        outputs = model.mapping.hf_outputs(hf_model, ProbeSamples.of(model.config), model.content)
    del hf_model
    gc.collect()
    return outputs


def _load(model: HFModel) -> Any:
    transformers = _transformers()
    labels = {"num_labels": model.config.num_labels} if model.config.head == "classification" else {}
    quantised = model.raw.get("quantization_config")
    if isinstance(quantised, dict) and quantised.get("quant_method") == "mxfp4":
        labels["quantization_config"] = transformers.Mxfp4Config(dequantize=True)
    options = {"dtype": torch.float32, "use_safetensors": True, "local_files_only": True} | labels
    options |= {"attn_implementation": "eager", "key_mapping": dict(model.renamings)}
    with _quiet(transformers), _blames_folder(model, "load"):
        return getattr(transformers, model.architecture).from_pretrained(model.folder, **options).eval()


@contextmanager
def _blames_folder(model: HFModel, action: str) -> Iterator[None]:
    """Convert an error of `transformers` into a CheckFailedError of one line."""
    try:
        yield
    except Exception as error:  # StrictDataclassError has no narrower base
        reason, version = " ".join(str(error).split()), _transformers().__version__
        raise CheckFailedError(
            f"{model.folder}: transformers {version} does not {action} it ({reason}). Fix it, or set "
            "verify=false"
        ) from error


def _transformers() -> Any:
    try:
        return import_module("transformers")  # optional, and slow to import
    except ImportError as error:
        raise UserError(
            f"verify=true: transformers cannot be imported ({error}): {EXTRA}, or set verify=false"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence progress bars and notes of `transformers`."""
    log = transformers.utils.logging
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
