"""The settings saved in a checkpoint, and whether its tensors are their model's."""

from math import prod
from pathlib import Path

from mlm.checkpoint.native.format import Manifest
from mlm.config.build import from_dict
from mlm.config.imports import OwnCodeError, is_path
from mlm.models.config import KINDS, ModelConfig
from mlm.models.documents import Boundaries
from mlm.models.family import family_of
from mlm.models.shape import architecture_of, count_parameters
from mlm.runs.checks import saved_problems
from mlm.runs.config import PretrainConfig
from mlm.util.errors import CorruptFileError

LISTED = 3  # problems of a saved configuration that a message lists


def trained_config(manifest: Manifest, path: Path) -> PretrainConfig:
    """The run spec saved in a checkpoint. Raises CorruptFileError if this version cannot read it."""
    try:
        config = from_dict(PretrainConfig, dict(manifest.state["config"]))
        if is_path(config.model.kind):
            family_of(config.model.kind)
        if problems := saved_problems(config):
            raise ValueError("; ".join(problems[:LISTED]))
        Boundaries.of(config.data)  # raises ValueError for invalid document boundaries
        return config
    except OwnCodeError:
        raise  # the file is intact
    except (KeyError, TypeError, ValueError) as error:
        reason = "; ".join(str(error).split("\n")[:LISTED])
        problem = f"holds no configuration this version can read ({reason})"
        raise CorruptFileError(f"{path}: {problem}; use the version of mlm that saved it") from error


def check_stored_parameters(manifest: Manifest, model: ModelConfig, path: Path) -> None:
    """Raise CorruptFileError unless number and sizes of stored tensors match the model.

    Call it before building the model: a file cannot claim more memory than its tensors have.
    """
    stored = [entry for name, entry in manifest.tensors.items() if name.startswith("model.")]
    num_stored, last = sum(prod(entry.shape) for entry in stored), f"model.layers.{model.num_layers - 1}."
    is_deep = len(stored) >= model.num_layers and any(name.startswith(last) for name in manifest.tensors)
    # Counting builds all layers that differ, so bound their number first.
    is_short = is_deep or (model.kind in KINDS and architecture_of(model).dense_layers < len(stored))
    num_made = count_parameters(model, with_state=True) if is_short else 0
    if not is_deep or num_stored != num_made:
        parameters = f"{num_made:,} parameters in " if is_short else ""
        raise CorruptFileError(
            f"{path}: its configuration makes {parameters}{model.num_layers:,} layers, "
            f"other than the {num_stored:,} stored: restore it from a copy, or load another"
        )
