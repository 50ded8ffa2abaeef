"""Forecast that `mlm pretrain` prints before it builds the model.

A small run on CPUs gets a bound of its memory. Other forecasts count a run's layers, which imports the plan
and a compiler: two seconds of CPU time.
"""

import logging

from mlm.launch.devices import device_kind
from mlm.models.shape import architecture_of, count_parameters
from mlm.plan.hardware import CPU_RESERVED_GIB, GIB, gib, read_calibration
from mlm.runs.config import PretrainConfig
from mlm.util.system import host_memory

log = logging.getLogger(__name__)


def forecast_lines(config: PretrainConfig, ranks: int) -> list[str]:
    """Return the lines to print; empty if the forecast fails, which must not stop a run."""
    try:
        if bound := small_run_bound(config, ranks):
            return [f"needs {gib(bound)} at most; this host has {gib(host_memory())}"]
        from mlm.plan import run_forecast

        return run_forecast.summary(run_forecast.forecast(config, ranks))
    except Exception as error:
        log.debug("no forecast: %r", error)
        return []


def small_run_bound(config: PretrainConfig, ranks: int) -> float:
    """Return a generous bound of the bytes of all ranks of a small run on CPUs; 0.0 for other runs.

    A calibrated machine has no small runs: its forecast has times too, which need the counts.
    """
    model, train, seq = config.model, config.train, config.data.seq_length
    if device_kind(config.dist) != "cpu" or read_calibration() is not None:
        return 0.0
    parts = architecture_of(model)
    channels = model.hidden_size * (1 + parts.experts_per_token) + max(model.ffn_size, parts.active_size)
    state = 36.0 * count_parameters(model)  # weights, gradients, moments, copies, buckets, temporaries
    samples_per_replica = train.global_batch_size * config.parallel.replica // ranks
    samples = train.micro_batch_size if config.parallel.pp == 1 else samples_per_replica  # in flight at most
    layer = 100.0 * seq * channels + 16.0 * model.num_heads * seq**2  # of a sample
    bound = ranks * (CPU_RESERVED_GIB * GIB + state + samples * (model.num_layers + 1) * layer)
    return bound if bound < host_memory() / 4 else 0.0
