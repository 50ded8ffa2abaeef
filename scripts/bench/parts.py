"""Parts of a contender's CPU step: products, attention, vocabulary loss, norms and so on, by torch.profiler.

Each part is the least of several steps, so that a busy machine lengthens it less.
"""

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile

from bench.contenders import Trainee

STEPS = 5
ANCESTORS = {
    "_LinearCrossEntropy": "vocabulary loss",
    "log_softmax": "vocabulary loss",
    "nll_loss": "vocabulary loss",
    "cross_entropy": "vocabulary loss",
    "Optimizer.": "optimizer",
    "scaled_dot_product": "attention",
    "linear_pointwise": "products",
    "aten::addmm": "products",
    "aten::mm": "products",
    "SwiGLU": "gates",
    "silu": "gates",
    "_Turn": "rotary",
    "RMSNorm": "norms",
    "gelu": "GELU",
    "tanh": "GELU",
    "aten::pow": "GELU",
    "layer_norm": "layer norm",
    "aten::embedding": "embedding",
    "aten::index_select": "embedding",
    "linalg_vector_norm": "gradient norm",
    "_foreach": "gradient norm",
}
"""Part of whatever runs inside an operator whose name holds these words."""


def measure_parts(trainee: Trainee, steps: int = STEPS) -> dict[str, float]:
    """Seconds of each part of a step, after a warm-up; "Python" lies outside operators, "step" is all."""
    least: dict[str, float] = {}
    for index in range(steps):
        for part, seconds in profiled(lambda index=index: trainee.step(index)).items():  # type: ignore[misc]
            least[part] = min(seconds, least.get(part, seconds))
    return least


def profiled(run: Callable[[], None]) -> dict[str, float]:
    """Seconds of each part of one run."""
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        begin = time.perf_counter()
        run()
        total = time.perf_counter() - begin
    parts: dict[str, float] = defaultdict(float)
    for event in profiler.events():
        if (part := part_of(event)) is not None:
            parts[part] += event.self_cpu_time_total / 1e6
    parts["Python"] = total - sum(parts.values())
    return {**parts, "step": total}


def part_of(event: Any) -> str | None:
    """The part an event's own time belongs to; None if it is Python's or the engine's."""
    inside, name = event, ""
    while inside is not None:
        name = inside.name
        for words, part in ANCESTORS.items():
            if words in name:
                return part
        inside = inside.cpu_parent
    return "elementwise, copies" if event.name.startswith("aten::") else None
