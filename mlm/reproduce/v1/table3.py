"""Table 3 of arXiv:1909.08053: WikiText103 and LAMBADA without training on them, by model size."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import ALL_CORES, Experiment, Step
from mlm.reproduce.measured import Spread, spread
from mlm.reproduce.results import Results
from mlm.reproduce.v1 import trained_models
from mlm.reproduce.v1.sizes import CORPUS, TRAININGS, Size, folder, order, run_name, training_steps

ARTICLES = 20
"""Articles of WikiText that are scored at a laptop's scale."""
SETTINGS: dict[Scale, tuple[str, ...]] = {
    "laptop": ("dist.device=cpu", "dist.threads_per_rank=1", "batch_size=32"),
    "node": ("dp=8",),
}
WIKITEXT: dict[Scale, tuple[str, ...]] = {"laptop": ("overlapping_eval=64", f"limit={ARTICLES}"), "node": ()}


@dataclass(frozen=True)
class Score:
    """A number that an evaluation gives."""

    evaluation: str
    """Of its step: test, wikitext103 or lambada."""
    name: str
    """In tables."""
    task: str
    """Protocol's name in the result; empty for `mlm eval loss`, whose result holds the number itself."""
    metric: str
    is_better_low: bool = True
    is_claimed: bool = False
    """True if the paper's table has it."""

    def read(self, found: dict[str, Any]) -> float:
        """Return the number from the JSON of an evaluation."""
        if not self.task:
            return float(found[self.metric])
        protocol = next(each for each in found["results"] if each["task"] == self.task)
        return float(protocol["metrics"][self.metric]["value"])


SCORES = (
    Score("test", "held-out documents, perplexity per token", "", "perplexity"),
    Score("test", "held-out documents, bits per byte", "", "bits_per_byte"),
    Score(
        "wikitext103", "WikiText, adjusted perplexity", "wikitext103", "adjusted perplexity", is_claimed=True
    ),
    Score("wikitext103", "WikiText, bits per byte (lm-eval)", "wikitext", "bits_per_byte"),
    Score("lambada", "LAMBADA, accuracy", "lambada", "accuracy", is_better_low=False, is_claimed=True),
    Score("lambada", "LAMBADA, perplexity (lm-eval)", "lambada_openai", "perplexity"),
)


def evaluations(config: ReproduceConfig) -> dict[str, tuple[str, ...]]:
    """Return the evaluations' command lines without checkpoint and result, by name."""
    own = SETTINGS[config.scale]
    found: dict[str, tuple[str, ...]] = {"test": ("mlm", "eval", "loss", f"path={CORPUS}/test", *own)}
    if config.wikitext is not None:
        data = f"data.path={seen_from_steps(config, config.wikitext)}"
        found["wikitext103"] = ("mlm", "eval", "wikitext103", data, *WIKITEXT[config.scale], *own)
    if config.lambada is not None:
        data = f"data.path={seen_from_steps(config, config.lambada)}"
        found["lambada"] = ("mlm", "eval", "lambada", data, *own)
    return found


def seen_from_steps(config: ReproduceConfig, file: str) -> Path:
    """Return the path of a user's file for steps, which run in `out`: relative to that if it lies there."""
    path, folder = Path(file).absolute(), Path(config.out).absolute()
    return path.relative_to(folder) if path.is_relative_to(folder) else path


def step_name(size: Size, seed: int, evaluation: str) -> str:
    """Return the name of an evaluation's step."""
    return f"table3-{size.name}-seed{seed}-{evaluation}"


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the runs of figure 6 and their evaluations; at scale=paper the plans of the paper's models."""
    training = TRAININGS.get(config.scale)
    if training is None:
        return trained_models.plan_steps()
    found = list(training_steps(config))
    for seed in range(1, config.seeds + 1):
        for size in training.sizes:
            for evaluation, words in evaluations(config).items():
                name = step_name(size, seed, evaluation)
                result = f"results/{name}.json"
                found.append(
                    Step(
                        name=name,
                        words=(*words, f"ckpt={folder(size, seed)}", f"out={result}"),
                        result=result,
                        minutes=size.minutes / 6,
                        cores=1 if config.scale == "laptop" else ALL_CORES,
                        needs=(run_name(size, seed),),
                    )
                )
    return found


def conclude(results: Results) -> Conclusion:
    """Compare the sizes' scores."""
    training = TRAININGS.get(results.config.scale)
    if training is None:
        lines = ("mlm eval wikitext103 ckpt={ckpt}", "mlm eval lambada ckpt={ckpt}")
        return trained_models.conclusion(results, lines)
    given = evaluations(results.config)
    scores = [score for score in SCORES if score.evaluation in given]
    found = {score: [of_size(results, score, size) for size in training.sizes] for score in scores}
    seeds = len(results.seeds)
    orders = {score: orders_of(seeds, score, spreads) for score, spreads in found.items()}
    return Conclusion(
        verdict=verdict(orders),
        seen=seen(training.sizes, found),
        limits=limits(results.config),
        tables=(ours(training.sizes, found), published()),
        charts=(chart(training.sizes, scores[0], found[scores[0]]),),
    )


def of_size(results: Results, score: Score, size: Size) -> Spread:
    """Return a score of a size over the seeds."""
    names = [step_name(size, seed, score.evaluation) for seed in results.seeds]
    return spread([score.read(results.json(name)) for name in names])


def orders_of(seeds: int, score: Score, spreads: Sequence[Spread]) -> list[int]:
    """Return for each neighbouring pair -1 if the larger model is better in all seeds, 1 if worse, else 0."""
    pairs = [order(seeds, larger, smaller) for smaller, larger in pairwise(spreads)]
    return pairs if score.is_better_low else [-each for each in pairs]


def verdict(orders: dict[Score, list[int]]) -> Verdict:
    """Return the verdict: agreement needs both of the paper's scores, better with each step in size."""
    claimed = [each for score, pairs in orders.items() if score.is_claimed for each in pairs]
    both = {score.evaluation for score in orders if score.is_claimed} == {"wikitext103", "lambada"}
    if both and all(each == -1 for each in claimed):
        return Verdict.AGREES
    decided = claimed or [each for pairs in orders.values() for each in pairs]
    if any(each == -1 for each in decided):
        return Verdict.PARTLY
    return Verdict.CONTRADICTS if any(each == 1 for each in decided) else Verdict.OPEN


def seen(sizes: Sequence[Size], found: dict[Score, list[Spread]]) -> str:
    """Return what was measured, in a sentence."""
    labels = ", ".join(size.label for size in sizes)
    chosen = [score for score in found if score.is_claimed] or list(found)[:1]
    each = "; ".join(f"{score.name}: {', '.join(map(str, found[score]))}" for score in chosen)
    return f"scores of the models of {labels} parameters, median (least to largest seed): {each}."


def ours(sizes: Sequence[Size], found: dict[Score, list[Spread]]) -> Table:
    """Return the scores measured here."""
    rows: list[Sequence[Cell]] = [[score.name, *map(str, spreads)] for score, spreads in found.items()]
    return Table(
        title="Scores of figure 6's models, trained on equal tokens",
        headings=["score", *(size.label for size in sizes)],
        rows=rows,
        note="Columns by parameters without embeddings. Median of the seeds, least to largest.",
    )


def published() -> Table:
    """Return the paper's table."""
    rows: list[Sequence[Cell]] = [
        [each.name, each.wikitext103, each.lambada] for each in trained_models.MODELS
    ]
    return Table(
        title="Published",
        headings=["model", "WikiText103 perplexity", "LAMBADA accuracy, %"],
        rows=rows,
        note="arXiv:1909.08053, table 3, from memory. Its models are trained on 174 GB of text.",
    )


def chart(sizes: Sequence[Size], score: Score, spreads: Sequence[Spread]) -> Chart:
    """Return a score over the parameters."""
    series = Series(
        name="here",
        x=[float(size.parameters) for size in sizes],
        y=[each.median for each in spreads],
        low=[each.least for each in spreads],
        high=[each.largest for each in spreads],
    )
    return Chart(
        name="held-out",
        title="Perplexity of held-out documents by size",
        x_label="parameters without embeddings",
        y_label=score.name,
        series=[series],
        log_x=True,
        log_y=True,
    )


def limits(config: ReproduceConfig) -> list[str]:
    """Return what cannot be concluded."""
    missing = [key for key in ("wikitext", "lambada") if getattr(config, key) is None]
    found = ["Models of this size and corpus say nothing about the paper's scores themselves."]
    if missing:
        found.append(
            f"Without {' and '.join(f'{key}=FILE' for key in missing)} the models are not scored on the "
            "paper's data sets, only on held-out documents of their own corpus."
        )
    if config.wikitext is not None and config.scale == "laptop":
        found.append(
            f"WikiText: the first {ARTICLES} articles of the file, in windows of 128 tokens that overlap by "
            "half; the paper scores the whole test split in windows of 1,024, each 32 tokens on. The "
            "corpus's tokenizer splits such words into many tokens, which makes the perplexity per word high."
        )
    if config.lambada is not None and config.scale == "laptop":
        found.append(
            "LAMBADA asks for a word that needs a paragraph's context; a context of 128 tokens truncates "
            "some passages, and models of this size read too little text to find it often."
        )
    return found


EXPERIMENT = Experiment(
    name="v1-table3",
    title="WikiText103 and LAMBADA without training on them, by model size",
    source="Megatron-LM, arXiv:1909.08053, table 3",
    claim="Larger models have a lower perplexity on WikiText103 (19.31, 12.76, 10.81 for 355M, 2.5B, 8.3B) "
    "and a higher accuracy on LAMBADA (45.18 %, 61.73 %, 66.51 %).",
    minutes=95,
    steps=steps,
    conclude=conclude,
)
