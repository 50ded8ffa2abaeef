"""Update rule, learning-rate factor and weight decay of each parameter."""

import math
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from typing import NamedTuple

from mlm.config.imports import OwnCodeError
from mlm.optim.config import OptimizerConfig

EMBEDDINGS = ("token.*", "position.*", "token_type.*")
SETTINGS: dict[str, Callable[[float], bool]] = {
    "lr": lambda x: x > 0,
    "lr_scale": lambda x: x >= 0,
    "weight_decay": lambda x: x >= 0,
}
"""Settings in an entry of optimizer.groups, and their bounds."""


class GroupRates(NamedTuple):
    is_matrix: bool
    """True if Muon updates it."""
    lr_scale: float
    """Factor of the schedule's learning rate."""
    weight_decay: float


def parse_groups(entries: Iterable[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Yield pattern and settings of each entry of optimizer.groups. Raises OwnCodeError (a UserError)."""
    for entry in entries:
        pattern, *words = entry.split() or [""]
        settings = dict[str, float]()
        for word in words:
            key, _, value = word.partition("=")
            try:
                settings[key] = float(value)
            except ValueError:
                settings[key] = math.nan  # within no bounds
        allowed = [key for key, value in settings.items() if key in SETTINGS and SETTINGS[key](value)]
        if not settings or len(allowed) < len(settings):
            raise OwnCodeError(
                f"optimizer.groups: {entry!r} is not a pattern with settings; write "
                "'layers.*.bias lr=1e-3 weight_decay=0', of lr, lr_scale and weight_decay"
            )
        yield pattern, settings


def group_rates(
    name: str, dims: int, config: OptimizerConfig, width: float = 1.0, side: str | None = None
) -> GroupRates:
    """Return the settings of a parameter. Raises OwnCodeError as parse_groups.

    Weight decay is for matrices: biases and norm parameters have none (arXiv:1909.08053, section 4.2).
    `width` W is the model's width over its base's in muP, 1 without it. Adam moves an element of a layer's
    matrix by the learning rate whatever the gradient, and an output sums over W times as many elements, so
    its rate falls as 1 / W (arXiv:2203.03466, table 8), unless the inputs are the constant `side`, as in
    LoRA's B (arXiv:2402.12354). The spectral norm of Muon's update is its scale, which should follow
    sqrt(outputs / inputs) (arXiv:2310.17813): scale=original does except for constant outputs,
    match_rms_adamw grows as sqrt(W). The product of rate and weight_decay does not change.
    """
    dims = 1 if name.endswith("bias") else dims  # biases of experts are stacked
    by_muon = config.kind == "muon" and dims > 1 and fnmatchcase(name, config.muon.matrices)
    lr, decay = config.lr, config.weight_decay if dims > 1 else 0.0
    if config.kind == "muon" and not by_muon:
        lr = config.muon.adamw_lr or lr
    if config.embedding_lr and any(fnmatchcase(name, pattern) for pattern in EMBEDDINGS):
        lr = config.embedding_lr
    scale = lr / config.lr
    for pattern, settings in parse_groups(config.groups):
        if fnmatchcase(name, pattern):
            scale = settings["lr"] / config.lr if "lr" in settings else scale
            scale *= settings.get("lr_scale", 1.0)
            decay = settings.get("weight_decay", decay)
            break
    if dims > 1 and name.startswith("layers."):
        if not by_muon:
            power = 0.0 if side == "in" else 1.0
        elif config.muon.scale == "match_rms_adamw":
            power = {"in": 0.0, "out": 1.0}.get(side or "", 0.5)
        else:
            power = 0.5 if side == "out" else 0.0
        factor = width**-power
        return GroupRates(by_muon, scale * factor, decay / factor)
    return GroupRates(by_muon, scale, decay)
