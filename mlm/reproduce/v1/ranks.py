"""Runs of several ranks: the throughput of each, and the share of its time that it waits for others."""

import os
import statistics
from collections.abc import Mapping, Sequence

from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.measured import of_rounds, spread
from mlm.reproduce.results import WARM_UP, Results


def cores(config: ReproduceConfig) -> int:
    """Return the cores that steps share."""
    return config.cores or len(os.sched_getaffinity(0))


def tflops(results: Results, experiment: str, contender: str) -> list[float]:
    """Return the model TFLOP/s of one rank in each round: the median of its steps."""

    def of_run(name: str) -> float:
        return statistics.median(map(float, results.run(name).column("step", "tflops")[WARM_UP:]))

    return of_rounds(results, experiment, contender, of_run)


def waiting(results: Results, experiment: str, contender: str) -> list[float]:
    """Return the share of time that ranks wait for each other in each round; 0 for one rank."""
    return of_rounds(results, experiment, contender, lambda name: waiting_share(results.run(name).ranks))


def waiting_share(records: Sequence[Mapping[str, object]]) -> float:
    """Return the waiting ranks' share of all ranks' seconds, in the records after the first."""
    waited = total = 0.0
    for record in list(records)[1:]:
        ranks = record.get("ranks")
        for times in ranks if isinstance(ranks, list) else []:
            seconds = {name: value for name, value in times.items() if isinstance(value, int | float)}
            waited += sum(value for name, value in seconds.items() if name.startswith("waiting"))
            total += sum(seconds.values())
    return waited / total if total else 0.0


def sent_megabytes(*, layers: int, hidden: int, rows: int, tp: int) -> float:
    """Return the megabytes that a rank sends for tensor parallelism in a step of one micro-batch, by formula.

    Two all-reduces forward and two backward of each layer, one of the token table's output and one of its
    input's gradient (arXiv:1909.08053, section 3), each of float32 [rows, hidden], in a ring.
    """
    return (4 * layers + 2) * 2 * (tp - 1) / tp * 4 * rows * hidden / 1e6


def percent_of(shares: Sequence[float]) -> str:
    """Return shares of 1 as `82.1 % (81.5 to 82.9)`; without a spread of a single one."""
    each = spread([100 * share for share in shares])
    between = f" ({each.least:.1f} to {each.largest:.1f})" if len(shares) > 1 else ""
    return f"{each.median:.1f} %{between}"
