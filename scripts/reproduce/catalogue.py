"""All experiments, in the order in which they are listed."""

from reproduce import norm_order, pipelines, pretraining, recomputation, scaling, shakespeare

EXPERIMENTS = (
    scaling.EXPERIMENT,
    pretraining.EXPERIMENT,
    norm_order.EXPERIMENT,
    *pipelines.EXPERIMENTS,
    *recomputation.EXPERIMENTS,
    shakespeare.EXPERIMENT,
)
