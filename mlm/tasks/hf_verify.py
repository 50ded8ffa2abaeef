"""Whether a folder of `transformers` and a checkpoint of ours are one model: their logits, side by side."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.hf_folder import read_model
from mlm.config.errors import CheckFailedError, UserError
from mlm.config.model_schema import ModelConfig
from mlm.config.schema import ParallelConfig, PrecisionConfig
from mlm.data.sampler import Batch
from mlm.models.gpt2 import GPT2
from mlm.parallel.cross_entropy import full_logits
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.tasks.hf_source import EXTRA
from mlm.tasks.trained import load_trained

TOLERANCE = 1e-4
"""Of the largest logit: float32 sums of these lengths in two orders differ by a tenth of it at most."""
BATCH, LENGTH = 2, 64
SEED = 0


@dataclass(frozen=True)
class Agreement:
    """What was compared, and how near it was."""

    difference: float
    """Largest difference of two logits, in units of the largest logit."""
    tokens: int

    def __str__(self) -> str:
        found = f"largest difference {self.difference:.1e} of the largest logit"
        return f"logits agree with those of transformers: {found}, {self.tokens} random tokens"


NOT_COMPARED = "not verified: logits were not compared with those of transformers (verify=false)"


def extra_faults(verify: bool) -> list[str]:
    """What is missing to verify, for a preflight."""
    try:
        if verify:
            _transformers()
    except UserError as error:
        return [str(error)]
    return []


def compare_logits(folder: Path, run: Path) -> Agreement:
    """Load both models in float32, feed them the same tokens and compare. They are held one at a time.

    Args:
        folder: of `transformers`, read by its own code from safetensors alone.
        run: run or step-… directory of ours, read as training would.

    Raises CheckFailedError where they differ by more than TOLERANCE, or where `transformers` cannot load
    the folder; UserError when it is not installed.
    """
    ours, tokens = our_logits(run)
    reference = reference_logits(folder, tokens)
    if reference.shape != ours.shape:
        raise CheckFailedError(
            f"{folder}: transformers gives logits of {list(reference.shape)}, ours are {list(ours.shape)}: "
            f"not the same model. Nothing was written"
        )
    largest = float(reference.abs().max())
    difference = float((ours - reference).abs().max()) / largest if largest else float(ours.abs().max())
    if not difference <= TOLERANCE:  # a NaN too
        raise CheckFailedError(
            f"{folder}: logits differ from those of transformers by {difference:.1e} of the largest, "
            f"{TOLERANCE:.0e} is allowed: not the same model. Nothing was written; please report this"
        )
    return Agreement(difference, tokens.numel())


def random_tokens(model: ModelConfig) -> Tensor:
    """Token ids over the whole vocabulary, [BATCH, S] int64, the same at every call."""
    generator = torch.Generator().manual_seed(SEED)
    shape = (BATCH, min(model.max_positions, LENGTH))
    return torch.randint(model.vocab_size, shape, generator=generator)


@torch.no_grad()
def our_logits(run: Path, ctx: ParallelContext | None = None) -> tuple[Tensor, Tensor]:
    """Logits [B, S, V] of a checkpoint, on the last pipeline stage, and the tokens [B, S] they are of.

    Collective over all ranks of `ctx`; None for this process alone.
    """
    ctx = ctx or shape_context()
    layout = ParallelConfig(tp=ctx.tp.size, pp=ctx.pp.size)
    trained = load_trained(str(run), layout, PrecisionConfig(), ctx)
    tokens = random_tokens(trained.config.model)

    def forward(chunk: GPT2, batch: Batch, x: Tensor | None) -> Tensor:
        hidden = chunk.hidden_states(batch.tokens, None, x)  # [S, B, H]
        if not chunk.stage.is_last:
            return hidden
        rows = hidden.transpose(0, 1).flatten(0, 1)
        return full_logits(rows, chunk.token).view(*batch.tokens.shape, -1)

    results = [logits for _, logits in trained.model.evaluate([Batch(tokens, tokens, 0)], forward)]
    return (results[0] if results else torch.empty(0)), tokens


@torch.no_grad()
def reference_logits(folder: Path, tokens: Tensor) -> Tensor:
    """Logits [B, S, V] float32 of the folder, by `transformers`. Raises CheckFailedError, UserError."""
    transformers, architecture = _transformers(), read_model(folder).family.architecture
    with _quiet(transformers):
        try:
            model = getattr(transformers, architecture).from_pretrained(
                folder,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                attn_implementation="eager",
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckFailedError(
                f"{folder}: transformers {transformers.__version__} does not load it ({reason}). "
                f"Mend it, or set verify=false"
            ) from error
        logits: Tensor = model.eval()(tokens).logits
    del model
    gc.collect()
    return logits


def _transformers() -> Any:
    try:
        return import_module("transformers")  # optional, and slow to import
    except ImportError as error:
        raise UserError(
            f"verify=true: transformers cannot be imported ({error}): {EXTRA}, or set verify=false"
        ) from error


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Without its progress bars and notes on our terminal."""
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
