"""The model of a run that begins with the weights of a checkpoint and chooses none itself."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from mlm.checkpoint.native.save_load import read_manifest, resolve
from mlm.errors import UserError
from mlm.inference.trained import trained_config


def model_of_ckpt(ckpt: Any) -> dict[str, Any] | None:
    """Return the settings `model.*` of what `ckpt` names; None where they cannot be read.

    The reason is left to the checks of the run, which read the checkpoint too.
    """
    if not isinstance(ckpt, str) or not Path(ckpt).expanduser().is_dir():
        return None
    try:
        path = resolve(str(Path(ckpt).expanduser()))
        return asdict(trained_config(read_manifest(path), path).model)
    except (UserError, OSError):
        return None
