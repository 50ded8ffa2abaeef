"""Figure 7 of arXiv:1909.08053: BERTs of several depths with layer norm in its first and in its new place.

Two orders, norm=post (after the residual sums) and norm=pre (before attention and MLP), start from the same
weights of a seed and see the same samples. They are compared at one learning rate, as in the paper, and each
at the best of the rates that it was tried at. Weights start with the paper's standard deviation, 0.02 at a
width of 1024, times sqrt(1024 / width): sublayers then weigh as much beside the residual stream as there.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from itertools import product

from mlm.data.config import DataConfig
from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import LEAST_ROUNDS, line, spread
from mlm.reproduce.planned import layout_step, planned
from mlm.reproduce.results import Results
from mlm.reproduce.v1.masked_tokens import entropy
from mlm.reproduce.v1.norm_orders import (
    ORDERS,
    PAPER_DEPTH,
    PAPER_WIDTH,
    TRAININGS,
    Training,
    Trial,
    data_of,
    rates_of,
    text_steps,
    training_step,
    trials,
)

CONTEXT = 0.05
"""Nats that a model must come below the entropy of single tokens to have learned from context."""
ROSE = 0.3
"""Nats that a last validation loss may lie above an earlier one; more is divergence."""
PLANS = {"v1-bert-336m": ("model=bert_336m", 24), "v1-bert-752m": ("model=bert_336m", 48)}
"""The paper's two models: name of their plan, settings, and layers."""


def plan_words(model: str, layers: int) -> tuple[str, ...]:
    """Return the settings of a model of the paper on 128 of its GPUs; it names no number of them."""
    return (model, f"model.num_layers={layers}", "train.global_batch_size=1024", "precision=fp16")


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return all runs; at scale=paper the plans of the paper's models."""
    training = TRAININGS.get(config.scale)
    if training is None:
        gpus = ("gpus=128", "hardware=dgx2h_v100_32g", f"tokens={2_000_000 * 1024 * 512}", "show=1")
        return [layout_step(name, *plan_words(*model), *gpus) for name, model in PLANS.items()]
    return [
        *text_steps(config),
        *(training_step(training, trial, config) for trial in trials(training, config.seeds)),
    ]


class Trained:
    """One run in numbers.

    Attributes:
        losses    validation loss of masked tokens, in order
        loss      the last; infinite for a run that failed or diverged
        highest   gradient norm before clipping, the largest that was logged
        outcome   learns, single tokens (their frequencies, nothing of the context), or diverged
    """

    def __init__(self, results: Results, trial: Trial, single: float) -> None:
        run = results.run(trial.name)
        self.steps = [int(step) for step in run.column("validation", "step")]
        self.losses = [float(loss) for loss in run.column("validation", "validation/mlm_loss")]
        norms = run.column("step", "grad_norm")
        self.highest = float(norms.max()) if len(norms) else math.nan
        least, last = min(self.losses, default=math.inf), self.losses[-1] if self.losses else math.inf
        if results.failed(trial.name) or last > least + ROSE or not math.isfinite(last):
            self.outcome, self.loss = "diverged", math.inf
        else:
            self.outcome, self.loss = "learns" if last < single - CONTEXT else "single tokens", last


class Measured:
    """All runs of a scale."""

    def __init__(self, results: Results, training: Training) -> None:
        self.training, self.seeds = training, results.seeds
        data = DataConfig(seq_length=training.seq, max_ngram=1, short_seq_prob=0.0)
        self.single = entropy(results.folder / data_of(results.config)[0], data)
        self.runs = {
            trial: Trained(results, trial, self.single) for trial in trials(training, len(results.seeds))
        }

    def shared(self, layers: int, order: str) -> list[Trained]:
        """Return the runs of all seeds at the learning rate of both orders."""
        return self.at(layers, order, self.training.shared)

    def best(self, layers: int, order: str) -> list[Trained]:
        """Return the runs of all seeds at the order's own learning rate."""
        return self.at(layers, order, self.training.best[order][layers])

    def at(self, layers: int, order: str, rate: float) -> list[Trained]:
        """Return the runs of all seeds at a learning rate; of the first alone where the others have none."""
        every = (Trial(layers, order, rate, seed) for seed in self.seeds)
        return [self.runs[trial] for trial in every if trial in self.runs]

    def rates(self, layers: int, order: str) -> list[float]:
        """Return the learning rates of an order and depth, ascending."""
        return rates_of(self.training, layers, order, seed=1)

    @cached_property
    def untuned(self) -> list[str]:
        """Orders and depths for which the first seed did better at another learning rate than their own."""
        found = []
        for layers, order in product(self.training.depths, ORDERS):
            losses = {rate: self.at(layers, order, rate)[0].loss for rate in self.rates(layers, order)}
            best = min(losses, key=lambda rate: losses[rate])
            if losses[best] < losses[self.training.best[order][layers]]:
                found.append(f"{layers} layers {order} at {best:g}")
        return found

    def leads(self, layers: int) -> str | None:
        """Return the order whose losses at its own rate are all below the other's.

        None if they overlap, or if not all its runs have learned from context.
        """
        if len(self.seeds) < LEAST_ROUNDS:
            return None
        post, pre = (losses_of(self.best(layers, order)) for order in ORDERS)
        lower = "pre" if max(pre) < min(post) else "post" if max(post) < min(pre) else None
        return lower if lower and all(run.outcome == "learns" for run in self.best(layers, lower)) else None

    @property
    def deep(self) -> list[int]:
        """Depths of the paper's models, and deeper ones."""
        return [layers for layers in self.training.depths if layers >= PAPER_DEPTH]

    def is_unstable_after(self, layers: int) -> bool:
        """True if at one learning rate no seed learns with norm=post, and each does with norm=pre."""
        post, pre = ([run.outcome for run in self.shared(layers, order)] for order in ORDERS)
        return len(post) >= LEAST_ROUNDS and "learns" not in post and set(pre) == {"learns"}


def losses_of(runs: Sequence[Trained]) -> list[float]:
    """Return their last losses."""
    return [run.loss for run in runs]


def outcomes_of(runs: Sequence[Trained]) -> str:
    """Return `2 learn, 1 diverged`."""
    found = [run.outcome for run in runs]
    words = {"learns": "learn", "single tokens": "stay at token frequencies", "diverged": "diverge"}
    return ", ".join(f"{found.count(each)} {words[each]}" for each in words if each in found)


def conclude(results: Results) -> Conclusion:
    """Compare the orders at each depth."""
    training = TRAININGS.get(results.config.scale)
    if training is None:
        return planned_models(results)
    found = Measured(results, training)
    return Conclusion(
        verdict=verdict(found),
        seen=seen(found),
        limits=limits(found),
        tables=(compared(found),),
        charts=(by_depth(found), *(over_steps(found, layers) for layers in training.depths)),
        curves=[
            Trial(layers, order, training.best[order][layers], 1).name
            for layers, order in product(training.depths, ORDERS)
        ],
    )


def verdict(found: Measured) -> Verdict:
    """Return the verdict on `norm=pre is stable where norm=post is not, and better`, at the paper's depths.

    It agrees if both hold at the deepest model: the first at one learning rate, the second at each order's
    own. It agrees in part if one of them holds at any of the depths, and contradicts if none does and
    norm=post is better at one.
    """
    deepest, leads = found.deep[-1], [found.leads(layers) for layers in found.deep]
    unstable = [found.is_unstable_after(layers) for layers in found.deep]
    if found.is_unstable_after(deepest) and found.leads(deepest) == "pre":
        return Verdict.AGREES
    if any(unstable) or "pre" in leads:
        return Verdict.PARTLY
    return Verdict.CONTRADICTS if "post" in leads else Verdict.OPEN


def seen(found: Measured) -> str:
    """Return outcomes and losses by depth, in a sentence."""
    shared, own = [], []
    for layers in found.training.depths:
        runs = {order: found.shared(layers, order) for order in ORDERS}
        shared.append(
            f"{layers} layers: {outcomes_of(runs['post'])} with post, {outcomes_of(runs['pre'])} with pre"
        )
        best = {order: spread(losses_of(found.best(layers, order))) for order in ORDERS}
        own.append(f"{layers} layers {best['post']} with post, {best['pre']} with pre")
    return (
        f"norm=post and pre, {len(found.seeds)} seeds at learning rate {found.training.shared:g}: "
        f"{'; '.join(shared)}. Loss of masked tokens, each at the best of its rates, median "
        f"(least to largest seed): {'; '.join(own)}; "
        f"token frequencies alone give {found.single:.3f}"
    )


def limits(found: Measured) -> list[str]:
    """Return what these runs cannot say."""
    training = found.training
    tokens = training.steps * training.batch * training.seq / 1e6
    lines = [
        f"Models are {training.width} wide and see {tokens:.2g}M tokens, the paper's are {PAPER_WIDTH} wide "
        "and see a million times as many: this is the beginning of training, and says nothing about its end.",
        f"Learning rates were swept at {training.depths[-1]} layers, with one seed, in factors of three.",
        "Sentence order is learned beside masked tokens, as in the paper; masked tokens alone are compared.",
    ]
    for layers in found.training.depths:
        if not any(run.outcome == "learns" for order in ORDERS for run in found.best(layers, order)):
            lines.append(
                f"At {layers} layers no run learned from context in {training.steps} steps: which would "
                "do so is not decided."
            )
    if found.untuned:
        lines.append(f"Another learning rate was better with the first seed for: {', '.join(found.untuned)}.")
    return lines


def compared(found: Measured) -> Table:
    """Return losses, outcomes and gradient norms by depth, order and learning rate."""
    rows: list[list[Cell]] = []
    for layers, order in product(found.training.depths, ORDERS):
        rates = found.rates(layers, order)
        for rate in rates:
            runs = found.at(layers, order, rate)
            mark = " (best)" if len(rates) > 1 and rate == found.training.best[order][layers] else ""
            norms = str(spread([run.highest for run in runs]))
            row = [
                f"{layers}, {order}",
                f"{rate:g}{mark}",
                str(spread(losses_of(runs))),
                outcomes_of(runs),
                norms,
            ]
            rows.append([*row])
    return Table(
        title="Validation loss of masked tokens after all steps",
        headings=("layers, norm", "learning rate", "loss, nats", "seeds", "largest gradient norm"),
        rows=rows,
        note=f"Median, least to largest seed. Token frequencies alone give {found.single:.3f}; a run learns "
        f"if it comes {CONTEXT} below. A run that diverged has an infinite loss.",
    )


def by_depth(found: Measured) -> Chart:
    """Return the last loss over depth: each order at the shared rate, and at its own."""
    depths, rate = found.training.depths, found.training.shared
    series = [finite_line(f"{order}, {rate:g}", depths, found.shared, order) for order in ORDERS]
    for order in ORDERS:
        if set(found.training.best[order].values()) != {rate}:
            series.append(finite_line(f"{order}, its best", depths, found.best, order))
    series.append(Series(name="token frequencies", x=[depths[0], depths[-1]], y=[found.single, found.single]))
    return Chart(
        name="depth",
        title="Loss of masked tokens by depth",
        x_label="layers",
        y_label="validation loss, nats",
        series=series,
    )


def finite_line(
    name: str, depths: Sequence[int], runs: Callable[[int, str], Sequence[Trained]], order: str
) -> Series:
    """Return a line of losses over depth, without depths at which a run diverged."""
    pairs = [(layers, losses_of(runs(layers, order))) for layers in depths]
    finite = [(layers, losses) for layers, losses in pairs if all(map(math.isfinite, losses))]
    return line(name, [layers for layers, _ in finite], [losses for _, losses in finite])


def over_steps(found: Measured, layers: int) -> Chart:
    """Return the first seed's validation losses over steps, a line for each order and learning rate."""
    series = []
    for order in ORDERS:
        for rate in found.rates(layers, order):
            run = found.at(layers, order, rate)[0]
            series.append(Series(name=f"{order}, {rate:g}", x=run.steps, y=run.losses))
    return Chart(
        name=f"steps-{layers}",
        title=f"{layers} layers: loss of masked tokens, first seed",
        x_label="step",
        y_label="validation loss, nats",
        series=series,
    )


def planned_models(results: Results) -> Conclusion:
    """Return the paper's two models in both orders, as commands for a cluster."""
    rows: list[list[Cell]] = []
    commands = []
    for name, model in PLANS.items():
        plan = planned(results, name)
        size = name.removeprefix("v1-bert-").upper()
        rows.append([size, "does not fit" if plan is None else plan["days"]])
        if plan is None:
            continue
        layout = f"tp={plan['tp']} pp={plan['pp']} dp={plan['dp']} zero={plan['zero']}"
        words = " ".join(plan_words(*model))
        for order in ORDERS:
            commands.append(
                (
                    f"BERT {size}, layer norm {'after the sums' if order == 'post' else 'before sublayers'}",
                    f"mlm pretrain {words} model.norm={order} {layout} recompute={plan['recompute']} "
                    f"train.micro_batch_size={plan['micro_batch_size']} data.path=corpora/web-bert",
                )
            )
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen="nothing is trained at this scale; the plan's days stand for 2M steps of 1,024 × 512 tokens",
        limits=("The plan says nothing about which order trains.",),
        tables=(Table(title="BERT on 128 V100", headings=("parameters", "days, planned"), rows=rows),),
        commands=commands,
    )


EXPERIMENT = Experiment(
    name="v1-figure7",
    title="Position of layer norm in deep BERTs: training loss by depth",
    source="Megatron-LM, arXiv:1909.08053, figure 7 and section 5.3",
    claim="With layer norm after the residual sums, as in the first BERT, a model of 336M parameters "
    "(24 layers) trains and one of 752M (48 layers) is unstable; with layer norm before attention and MLP "
    "both train, and to a lower loss.",
    minutes=110,
    steps=steps,
    conclude=conclude,
)
