"""Megatron-LM of 2019 on a DGX-2H as the time model predicts it, and this toolkit there."""

from mlm.plan.cost import CostModel
from mlm.plan.hardware import preset
from mlm.plan.shape import Layout, Shape
from mlm.plan.software import MEGATRON_2019
from mlm.reproduce.experiment import Step
from mlm.reproduce.planned import layout, layout_step

HARDWARE = "dgx2h_v100_32g"
BATCH = 8
"""Samples of a micro-batch, as in all runs of the paper's scaling study."""
FITTED = (
    "The plan's constants are fitted on this very table of the paper: that it comes close to these rows is "
    "no evidence."
)
NOT_FITTED = "The plan's constants are fitted on table 1 and figure 5 of the paper, not on these numbers."


def shape(*, layers: int, hidden: int, heads: int) -> Shape:
    """Return the shape of a GPT-2 of the scaling study."""
    return Shape(layers=layers, hidden=hidden, heads=heads, ffn=4 * hidden, seq=1024, vocab=51200)


def seconds(its: Shape, *, tp: int, dp: int = 1) -> float:
    """Return the seconds of a step by the program of 2019."""
    return CostModel(its, preset(HARDWARE), "fp16", MEGATRON_2019).step(of(tp, dp)).total


def tflops(its: Shape, *, tp: int, dp: int = 1) -> float:
    """Return its TFLOP/s per GPU, recomputed operations counted as in the paper."""
    its_layout = of(tp, dp)
    flops = its.hardware_flops("full", its_layout.global_batch)
    return flops / (its_layout.gpus * seconds(its, tp=tp, dp=dp) * 1e12)


def of(tp: int, dp: int) -> Layout:
    """Return a layout of the scaling study: layers recomputed, a micro-batch for each replica."""
    return Layout(tp=tp, dp=dp, recompute="full", micro_batch=BATCH, global_batch=BATCH * dp)


def own_step(name: str, *words: str, tp: int, dp: int = 1) -> Step:
    """Return a step that plans the same layout for this toolkit."""
    fixed = layout(tp=tp, dp=dp, recompute="full", micro_batch=BATCH, global_batch=BATCH * dp)
    return layout_step(name, *words, *fixed, f"hardware={HARDWARE}", "precision=fp16")


def gpus(number: int) -> str:
    """Return a number of GPUs in words."""
    return "1 GPU" if number == 1 else f"{number} GPUs"
