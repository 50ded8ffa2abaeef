"""Whether a folder of `transformers` and a checkpoint of ours are one model: what they say, side by side."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mlm.checkpoint.huggingface.folder import HFModel, read_model
from mlm.convert.hf_probe import Outputs, Probe, our_outputs
from mlm.errors import CheckFailedError, UserError
from mlm.inference.hf_source import EXTRA

TOLERANCE = 1e-4
"""Of the largest number compared: float32 sums of these lengths in two orders differ by a tenth of it at
most."""


@dataclass(frozen=True)
class Agreement:
    """What was compared, and how near it was."""

    names: tuple[str, ...]
    difference: float
    """Largest difference of two numbers, in units of the largest of their kind."""
    tokens: int

    def __str__(self) -> str:
        largest = self.names[0].removesuffix("s") if len(self.names) == 1 else "of each"
        found = f"largest difference {self.difference:.1e} of the largest {largest}"
        names = " and ".join(self.names)
        return f"{names} agree with those of transformers: {found}, {self.tokens} random tokens"


NOT_COMPARED = "not verified: logits were not compared with those of transformers (verify=false)"


def extra_problems(verify: bool) -> list[str]:
    """What is missing to verify, for a preflight."""
    try:
        if verify:
            _transformers()
    except UserError as error:
        return [str(error)]
    return []


def compare_logits(folder: Path, run: Path) -> Agreement:
    """Load both models in float32, feed them the same texts, padded and of two segments where the model
    knows such, and compare what they say. They are held one at a time.

    What the folder does not hold is not compared.

    Args:
        folder: of `transformers`, read by its own code from safetensors alone.
        run: run or step-… directory of ours, read as training would.

    Raises CheckFailedError where they differ by more than TOLERANCE, or where `transformers` cannot load
    the folder; UserError when it is not installed.
    """
    ours = our_outputs(run)
    model = read_model(folder)
    reference = reference_outputs(model)
    worst = 0.0
    for name, want in reference.items():
        found = ours.get(name)
        if found is None or found.shape != want.shape:
            said = "none" if found is None else str(list(found.shape))
            raise CheckFailedError(
                f"{folder}: transformers gives {name} of {list(want.shape)}, ours are {said}: not the same "
                f"model. Nothing was written"
            )
        difference = relative_difference(found, want)
        if not difference <= TOLERANCE:  # a NaN too
            raise CheckFailedError(
                f"{folder}: {name} differ from those of transformers by {difference:.1e} of the largest, "
                f"{TOLERANCE:.0e} is allowed: not the same model. Nothing was written; please report this"
            )
        worst = max(worst, difference)
    return Agreement(tuple(reference), worst, int(Probe.of(model.config).lengths.sum()))


def relative_difference(found: Tensor, want: Tensor) -> float:
    """Largest difference in units of the largest number of `want`."""
    largest = float(want.abs().max())
    return float((found - want).abs().max()) / largest if largest else float(found.abs().max())


@torch.no_grad()
def reference_outputs(model: HFModel) -> Outputs:
    """What `transformers` makes of the probe of a folder's model, but for what the folder does not hold.

    Raises CheckFailedError, UserError.
    """
    theirs, probe, head = _load(model), Probe.of(model.config), model.config.head
    if model.config.kind == "gpt2" and head == "classification":
        theirs.config.pad_token_id = None  # it would take a random token for padding: text by text, without
        texts = zip(probe.tokens, probe.lengths.tolist(), strict=True)
        found = {"logits": torch.cat([theirs(row[None, :length]).logits for row, length in texts])}
    else:
        types = {} if probe.token_types is None else {"token_type_ids": probe.token_types}
        said = theirs(probe.tokens, attention_mask=probe.mask.long(), **types)
        found = _by_name(said, model, probe.mask)
    del theirs
    gc.collect()
    return found


def _by_name(said: Any, model: HFModel, mask: Tensor) -> Outputs:
    """What their class gives, as `hf_probe.said` calls it."""
    is_bert = model.config.kind == "bert"
    match model.config.head:
        case "classification":
            return {"logits": said.logits}
        case "span":
            return {"logits": torch.stack([said.start_logits, said.end_logits], -1)[mask]}
        case "none":
            found = {"hidden states": said.last_hidden_state[mask]}
            parts = {"pooled states": ("pooler", said.pooler_output)} if is_bert else {}
        case _ if is_bert:
            found = {"token logits": said.prediction_logits[mask]}
            parts = {"order logits": ("sop_head", said.seq_relationship_logits)}
        case _:
            return {"logits": said.logits[mask]}
    filled = {name.partition(".")[0] for name in model.content.filled}
    if "pooler" in filled:
        return found
    return found | {name: value for name, (part, value) in parts.items() if part not in filled}


def _load(model: HFModel) -> Any:
    """The folder's model, by `transformers`."""
    transformers = _transformers()
    labels = {"num_labels": model.config.num_labels} if model.config.head == "classification" else {}
    with _quiet(transformers):
        try:
            return (
                getattr(transformers, model.family.architectures[model.config.head])
                .from_pretrained(
                    model.folder,
                    dtype=torch.float32,
                    use_safetensors=True,
                    local_files_only=True,
                    attn_implementation="eager",
                    **labels,
                )
                .eval()
            )
        except (OSError, ValueError, RuntimeError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).strip().partition("\n")[0]
            raise CheckFailedError(
                f"{model.folder}: transformers {transformers.__version__} does not load it ({reason}). "
                f"Mend it, or set verify=false"
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
