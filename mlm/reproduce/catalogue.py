"""All experiments, in the order of `mlm reproduce`."""

from mlm.reproduce.experiment import Experiment

EXPERIMENTS: tuple[Experiment, ...] = ()
