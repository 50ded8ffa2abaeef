"""All experiments, in the order in which they are listed."""

from reproduce import clusters, norm_order, pipelines, pretraining, recomputation, scaling, shakespeare

EXPERIMENTS = (
    scaling.EXPERIMENT,
    *pretraining.EXPERIMENTS,
    norm_order.EXPERIMENT,
    *pipelines.EXPERIMENTS,
    *recomputation.EXPERIMENTS,
    *clusters.EXPERIMENTS,
    shakespeare.EXPERIMENT,
)
