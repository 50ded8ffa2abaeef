"""Steps of the check, the most valuable first."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """One step: a function that runs in a process of its own."""

    name: str
    title: str
    run: str
    """module:function, called with a Case (gpu/child.py)."""
    limit_s: float
    """The process and its children are killed after that."""
    likely_s: float
    """Usual duration on a large GPU: with less time left the step is not begun."""


STEPS = (
    Step("facts", "Device and matrix products", "gpu.facts:run", 90, 15),
    Step("graphs", "GPT-2 124M by each form of CUDA graphs, and nanoGPT", "gpu.speed:run_graphs", 180, 75),
    Step("agree", "One training step against the CPU's float64", "gpu.agree:run", 180, 45),
    Step("commands", "Parity, resuming, saving, and torchrun", "gpu.commands:run_one_rank", 180, 60),
    Step("layouts", "Two ranks on one device over gloo", "gpu.commands:run_two_ranks", 180, 55),
    Step("nccl", "Collectives and FSDP2 on one rank", "gpu.nccl:run", 90, 15),
    Step("waits", "Places where a step waits for the device", "gpu.waits:run", 90, 20),
    Step(
        "stacks",
        "Training speed as shipped: small, 8B-like, mixtures, 8 bits",
        "gpu.speed:run_stacks",
        420,
        240,
    ),
    Step("peers", "The same models by transformers, and torchao", "gpu.speed:run_peers", 420, 150),
    Step("speed-1.2b", "Training speed of GPT-2 1.2B", "gpu.speed:run_1_2b", 150, 60),
    Step(
        "switches",
        "The 1.2B step with each gain on or off, and in 8 bits",
        "gpu.speed:run_switches",
        300,
        140,
    ),
    Step("speed-124m", "Training speed of GPT-2 124M", "gpu.speed:run_124m", 90, 35),
    Step("speed-2.5b", "Training speed of GPT-2 2.5B", "gpu.speed:run_2_5b", 120, 45),
    Step("speed-355m", "Training speed of GPT-2 355M", "gpu.speed:run_355m", 90, 35),
    Step("speed-774m", "Training speed of GPT-2 774M", "gpu.speed:run_774m", 90, 40),
)
