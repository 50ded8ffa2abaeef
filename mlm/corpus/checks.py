"""Checks of the settings of `mlm data build`."""

from mlm.corpus.config import DataBuildConfig
from mlm.data.corpus_files import SPLITS
from mlm.util.errors import Problem

MAX_BANDS = 1024  # a task and a column of keys each


def check_build(config: DataBuildConfig) -> list[Problem]:
    """Problems of `mlm data build` between its settings."""
    problems = []
    decontaminate, executor, rules = config.decontaminate, config.executor, config.filter
    if (bands := config.dedup.bands) > MAX_BANDS:
        problem = f"dedup.bands={bands} is above {MAX_BANDS}"
        problems.append(Problem(("dedup.bands",), problem, "lower it, and dedup.rows with it"))
    if decontaminate.min_ngram > decontaminate.ngram:
        problems.append(
            Problem(
                ("decontaminate.min_ngram", "decontaminate.ngram"),
                f"decontaminate.min_ngram={decontaminate.min_ngram} is above "
                f"decontaminate.ngram={decontaminate.ngram}",
                "lower it",
            )
        )
    if not decontaminate.parts or not set(decontaminate.parts) <= set(SPLITS):
        parts, fix = f"[{','.join(decontaminate.parts)}]", f"name some of {', '.join(SPLITS)}"
        problems.append(Problem.at("decontaminate.parts", parts, "must be parts of a corpus", fix))
    if executor.kind == "slurm" and not executor.partition:
        problem = "executor.kind=slurm needs a partition"
        problems.append(Problem(("executor.partition",), problem, "set executor.partition=NAME"))
    for low, high in (("min_words", "max_words"), ("min_mean_word_length", "max_mean_word_length")):
        least, most = getattr(rules, low), getattr(rules, high)
        if least is not None and most is not None and least > most:
            problem = f"filter.{low}={least} is above filter.{high}={most}: no document could pass"
            problems.append(Problem((f"filter.{low}", f"filter.{high}"), problem))
    return problems
