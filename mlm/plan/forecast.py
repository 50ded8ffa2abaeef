"""Forecast that `mlm pretrain` prints before it builds the model.

A small run on CPUs has a bound of its memory. The forecast of any other counts what its layers do, which
loads the plan and a compiler: two seconds of processor time, so that it is imported only then.
"""

import logging

from mlm.launch.devices import device_kind
from mlm.models.shape import architecture_of, count_parameters
from mlm.plan.hardware import CPU_RESERVED_GIB, GIB, calibrated, gib
from mlm.runs.config import PretrainConfig
from mlm.util.system import host_memory

log = logging.getLogger(__name__)


def of_run(config: PretrainConfig, ranks: int) -> list[str]:
    """Lines to print; none where nothing can be said.

    Never raises: a forecast must not be in the way.
    """
    try:
        if most := most_of_small(config, ranks):
            return [f"needs {gib(most)} at most; this host has {gib(host_memory())}"]
        from mlm.plan import run_forecast

        return run_forecast.summary(run_forecast.forecast(config, ranks))
    except Exception as error:
        log.debug("no forecast: %r", error)
        return []


def most_of_small(config: PretrainConfig, ranks: int) -> float:
    """Generous bound of the bytes that all ranks of a small run on CPUs take; 0.0 for other runs.

    Whoever calibrated this machine wants times too, which need the counts.
    """
    model, train, seq = config.model, config.train, config.data.seq_length
    if device_kind(config.dist) != "cpu" or calibrated() is not None:
        return 0.0
    parts = architecture_of(model)
    channels = model.hidden_size * (1 + parts.experts_per_token) + max(model.ffn_size, parts.active_size)
    state = 36.0 * count_parameters(model)  # weights, gradients, moments, copies, buckets, temporaries
    of_rank = train.global_batch_size * config.parallel.replica // ranks
    samples = train.micro_batch_size if config.parallel.pp == 1 else of_rank  # in flight at most
    layer = 100.0 * seq * channels + 16.0 * model.num_heads * seq**2  # of a sample
    most = ranks * (CPU_RESERVED_GIB * GIB + state + samples * (model.num_layers + 1) * layer)
    return most if most < host_memory() / 4 else 0.0
