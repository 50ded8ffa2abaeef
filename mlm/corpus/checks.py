"""What must hold of the settings of the commands that make corpora."""

from typing import Any

from mlm.config.build import to_dict
from mlm.config.ranges import out_of_range
from mlm.config.tree import flatten
from mlm.corpus.config import DataBuildConfig

MAX_BANDS = 1024  # a task and a column of keys each


def check_numbers(config: Any) -> list[str]:
    """Numbers out of their bounds."""
    return list(out_of_range(flatten(to_dict(config))).values())


def check_build(config: DataBuildConfig) -> list[str]:
    """Faults of `mlm data build`."""
    faults = check_numbers(config)
    decontaminate, executor, rules = config.decontaminate, config.executor, config.filter
    if config.dedup.bands > MAX_BANDS:
        faults.append(
            f"dedup.bands={config.dedup.bands} is above {MAX_BANDS}: lower it, and dedup.rows with it"
        )
    if decontaminate.min_ngram > decontaminate.ngram:
        faults.append(
            f"decontaminate.min_ngram={decontaminate.min_ngram} is above decontaminate.ngram="
            f"{decontaminate.ngram}: lower it"
        )
    if executor.kind == "slurm" and not executor.partition:
        faults.append("executor.kind=slurm needs a partition: set executor.partition=NAME")
    for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
        least, most = getattr(rules, low), getattr(rules, high)
        if least is not None and most is not None and least > most:
            faults.append(f"filter.{low}={least} is above filter.{high}={most}: no document could pass")
    return faults
