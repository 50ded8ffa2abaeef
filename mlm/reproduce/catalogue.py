"""All experiments, in the order of `mlm reproduce`."""

from mlm.reproduce.experiment import Experiment
from mlm.reproduce.v1 import figure6, table3

EXPERIMENTS: tuple[Experiment, ...] = (figure6.EXPERIMENT, table3.EXPERIMENT)
