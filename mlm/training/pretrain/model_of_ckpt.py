"""The model of a run that begins with the weights of a checkpoint and chooses none itself."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlm.config.fields import expand_home
from mlm.inference.trained import named_checkpoint
from mlm.util.errors import UserError


def model_of_ckpt(ckpt: Any) -> dict[str, Any] | None:
    """Return the settings `model.*` of what `ckpt` names; None where they cannot be read.

    The reason is left to the checks of the run, which read the checkpoint too.
    """
    if not isinstance(ckpt, str) or not Path(expand_home(ckpt)).is_dir():
        return None
    try:
        return asdict(named_checkpoint(expand_home(ckpt)).config.model)
    except (UserError, OSError):
        return None
