"""All experiments, in the order of `mlm reproduce`."""

from mlm.reproduce.experiment import Experiment
from mlm.reproduce.nanogpt import shakespeare
from mlm.reproduce.ptdp import (
    bubble,
    interleaving,
    micro_batch,
    recomputation,
    scatter_gather,
    schedules,
    table1,
    tp_pp,
)
from mlm.reproduce.sp import memory
from mlm.reproduce.sp import recomputation as sp_recomputation
from mlm.reproduce.v1 import figure6, figure7, heads, scaling, strong_scaling, table3, table5

V1: tuple[Experiment, ...] = (
    scaling.EXPERIMENT,
    heads.EXPERIMENT,
    strong_scaling.EXPERIMENT,
    figure6.EXPERIMENT,
    table3.EXPERIMENT,
    table5.EXPERIMENT,
    figure7.EXPERIMENT,
)
PTDP: tuple[Experiment, ...] = (
    schedules.EXPERIMENT,
    bubble.EXPERIMENT,
    interleaving.EXPERIMENT,
    tp_pp.EXPERIMENT,
    micro_batch.EXPERIMENT,
    recomputation.EXPERIMENT,
    table1.EXPERIMENT,
    scatter_gather.EXPERIMENT,
)
SP: tuple[Experiment, ...] = (memory.EXPERIMENT, sp_recomputation.EXPERIMENT)

EXPERIMENTS: tuple[Experiment, ...] = (*V1, *PTDP, *SP, shakespeare.EXPERIMENT)
