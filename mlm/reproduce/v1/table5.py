"""Table 5 of arXiv:1909.08053: BERTs of three sizes, pretrained on one corpus and finetuned on SST-2."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from mlm.reproduce.conclusion import Cell, Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig, Scale
from mlm.reproduce.experiment import ALL_CORES, Experiment, Step
from mlm.reproduce.measured import LEAST_ROUNDS, line, spread
from mlm.reproduce.planned import layout_step, planned
from mlm.reproduce.results import Results
from mlm.reproduce.v1.sizes import millions, parameters_of

CORPUS = "corpus-bert"
TASK = "sst2"
"""The task of GLUE on which a small model shows something within minutes; its folder in `glue`."""


@dataclass(frozen=True)
class Size:
    """A model of the comparison."""

    name: str
    layers: int
    hidden: int
    heads: int
    lr: float
    """Peak learning rate of pretraining."""
    finetune_lr: float
    minutes: float
    """Of pretraining."""
    finetune_minutes: float
    """Of all seeds."""

    @property
    def label(self) -> str:
        """Parameters of its layers, embeddings left out: `3.1M`."""
        return millions(parameters_of(self.layers, self.hidden))

    @property
    def pretraining(self) -> str:
        """Name of the step that pretrains it."""
        return f"table5-{self.name}"

    @property
    def finetuning(self) -> str:
        """Name of the step that finetunes it, with all seeds."""
        return f"table5-{self.name}-{TASK}"


@dataclass(frozen=True, kw_only=True)
class Training:
    """Settings that all sizes share."""

    sizes: tuple[Size, ...]
    """Ascending."""
    pretraining: tuple[str, ...]
    finetuning: tuple[str, ...]
    cores: int


ROWS = 4000
"""Rows to finetune on at a laptop's scale."""
TRAININGS: dict[Scale, Training] = {
    "laptop": Training(
        sizes=(
            Size("small", 2, 64, 4, 3e-3, 1e-3, 1, 1),
            Size("medium", 4, 128, 4, 2e-3, 1e-3, 3, 3),
            Size("large", 4, 256, 8, 1e-3, 5e-4, 9, 7),
        ),
        pretraining=(
            *("model.max_positions=64", "data.seq_length=64", "data.short_seq_prob=0", "train.steps=1200"),
            *("train.global_batch_size=16", "train.micro_batch_size=16", "train.validate_every=300"),
            *("train.validate_batches=100", "schedule.warmup_steps=120", "schedule.decay_steps=1200"),
            *("checkpoint.save_every=400", "dist.device=cpu", "dist.threads_per_rank=1"),
        ),
        finetuning=(
            *(f"data.train_rows={ROWS}", "task.max_length=64", "train.epochs=3", "dropout=0.1"),
            *("train.micro_batch_size=32", "dist.device=cpu", "dist.threads_per_rank=1"),
        ),
        cores=1,
    ),
    "node": Training(
        sizes=(
            Size("small", 6, 384, 6, 1e-3, 1e-4, 5, 5),
            Size("medium", 12, 768, 12, 5e-4, 5e-5, 15, 10),
            Size("large", 24, 1024, 16, 2e-4, 3e-5, 40, 20),
        ),
        pretraining=(
            *("model.max_positions=128", "data.seq_length=128", "data.short_seq_prob=0", "train.steps=10000"),
            *("train.global_batch_size=256", "train.micro_batch_size=32", "train.validate_every=1000"),
            *("train.validate_batches=20", "schedule.warmup_steps=500", "schedule.decay_steps=10000"),
            *("checkpoint.save_every=2000", "precision=bf16", "dp=8"),
        ),
        finetuning=("task.max_length=128", "train.micro_batch_size=4", "precision=bf16", "dp=8"),
        cores=ALL_CORES,
    ),
}
"""By scale; at scale=paper nothing is trained. Those of a node have not been run."""


@dataclass(frozen=True)
class Paper:
    """A row of the paper's table."""

    name: str
    model: str
    gpus: int
    scores: tuple[float, ...]
    """In the order of TASKS."""


TASKS = ("MNLI m", "MNLI mm", "QQP", "SQuAD 1.1 F1", "SQuAD 2.0 F1", "RACE")
PUBLISHED = (
    Paper("336M", "bert_336m", 128, (89.7, 90.0, 92.3, 94.2, 88.1, 83.0)),
    Paper("1.3B", "bert_1_3b", 256, (90.9, 91.0, 92.6, 94.9, 90.2, 87.3)),
    Paper("3.9B", "bert_3_9b", 512, (91.4, 91.4, 92.7, 95.5, 91.2, 89.5)),
)
"""From memory: development sets, medians of 5 seeds; RACE its test set."""


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return pretraining of each size and, with `glue`, finetuning; at scale=paper plans of its models."""
    training = TRAININGS.get(config.scale)
    if training is None:
        tokens = f"tokens={2_000_000 * 1024 * 512}"
        return [
            layout_step(plan_name(each), *plan_words(each), "hardware=dgx2h_v100_32g", tokens, "show=1")
            for each in PUBLISHED
        ]
    found = [pretraining(training, size) for size in reversed(training.sizes)]
    if config.glue is not None:
        found += [finetuning(training, size, config) for size in reversed(training.sizes)]
    return found


def pretraining(training: Training, size: Size) -> Step:
    """Return the step that pretrains a size."""
    result = f"runs/{size.pretraining}"
    return Step(
        name=size.pretraining,
        words=(
            *("mlm", "pretrain", "model=bert_tiny", f"model.num_layers={size.layers}"),
            *(f"model.hidden_size={size.hidden}", f"model.num_heads={size.heads}", "model.vocab_size=8192"),
            *(f"data.path={CORPUS}", "optimizer=adamw_bert", f"optimizer.lr={size.lr:g}"),
            *("schedule=linear_bert", *training.pretraining, "checkpoint.keep_last=1", "log.live=off"),
            f"out={result}",
        ),
        result=result,
        minutes=size.minutes,
        cores=training.cores,
    )


def finetuning(training: Training, size: Size, config: ReproduceConfig) -> Step:
    """Return the step that finetunes a size with all seeds."""
    folder = f"runs/{size.finetuning}"
    return Step(
        name=size.finetuning,
        words=(
            *("mlm", "finetune", TASK, f"ckpt=runs/{size.pretraining}", f"data.path={task_folder(config)}"),
            *(f"optimizer.lr={size.finetune_lr:g}", "seed=1", f"seeds={config.seeds}", *training.finetuning),
            *("log.live=off", f"out={folder}"),
        ),
        result=f"{folder}/result.json",
        minutes=size.finetune_minutes,
        cores=training.cores,
        needs=(size.pretraining,),
    )


def task_folder(config: ReproduceConfig) -> Path:
    """Return the task's folder in that of GLUE."""
    return Path(str(config.glue)).absolute() / TASK


def plan_name(model: Paper) -> str:
    """Return the name of the step that plans a model of the paper."""
    return f"v1-table5-{model.name.lower()}"


def plan_words(model: Paper) -> tuple[str, ...]:
    """Return the settings of a model of the paper."""
    return (
        *(f"model={model.model}", f"gpus={model.gpus}", "train.global_batch_size=1024", "precision=fp16"),
    )


def conclude(results: Results) -> Conclusion:
    """Compare the sizes' losses and scores."""
    training = TRAININGS.get(results.config.scale)
    if training is None:
        return planned_models(results)
    scores = [accuracies(results, size) for size in training.sizes] if results.config.glue else []
    losses = [masked_loss(results, size) for size in training.sizes]
    return Conclusion(
        verdict=verdict(losses, scores),
        seen=seen(training, losses, scores),
        limits=limits(losses, scores),
        tables=(compared(training, losses, scores), published()),
        charts=charts(training, scores),
        curves=[size.pretraining for size in training.sizes],
    )


def accuracies(results: Results, size: Size) -> list[float]:
    """Return the accuracy of each seed, percent."""
    found = results.json(size.finetuning)
    runs = found.get("results", [found])  # one seed has no list
    return [100 * float(run["scores"]["validation"]["accuracy"]) for run in runs]


def masked_loss(results: Results, size: Size) -> float:
    """Return the last validation loss of masked tokens in pretraining."""
    found = results.run(size.pretraining).column("validation", "validation/mlm_loss")
    return float(found[-1]) if len(found) else math.nan


def verdict(losses: Sequence[float], scores: Sequence[Sequence[float]]) -> Verdict:
    """Return the verdict on `a larger model scores better`: a difference counts if all seeds show it.

    The claim is of models that learned more the larger they are: it is open if pretraining did not end so.
    """
    if not scores or len(scores[0]) < LEAST_ROUNDS or not learned_more(losses):
        return Verdict.OPEN
    better = [min(larger) > max(smaller) for smaller, larger in pairwise(scores)]
    worse = [max(larger) < min(smaller) for smaller, larger in pairwise(scores)]
    if all(better):
        return Verdict.AGREES
    if any(better) or min(scores[-1]) > max(scores[0]):
        return Verdict.PARTLY
    return Verdict.CONTRADICTS if any(worse) else Verdict.OPEN


def learned_more(losses: Sequence[float]) -> bool:
    """True if the largest model ended pretraining with a lower loss than the smallest."""
    return losses[-1] < losses[0]


def seen(training: Training, losses: Sequence[float], scores: Sequence[Sequence[float]]) -> str:
    """Return what was measured, in a sentence."""
    labels = [size.label for size in training.sizes]
    pairs = zip(labels, losses, strict=True)
    found = f"loss of masked tokens by parameters: {', '.join(f'{n}: {loss:.3f}' for n, loss in pairs)}"
    if not scores:
        return f"{found}; nothing was finetuned, as glue=FOLDER was not given"
    each = ", ".join(f"{label}: {spread(score)}" for label, score in zip(labels, scores, strict=True))
    return f"accuracy on SST-2, percent, median (least to largest of {len(scores[0])} seeds): {each}; {found}"


def limits(losses: Sequence[float], scores: Sequence[Sequence[float]]) -> list[str]:
    """Return what these runs cannot say."""
    found = []
    if not learned_more(losses):
        found.append(
            "The largest model ended pretraining no better than the smallest: a lead in finetuning is one of "
            "learning the task, and says nothing about what a larger model carries over."
        )
    if not scores:
        found.append(f"Give glue=FOLDER with {TASK}/train.jsonl and {TASK}/validation.jsonl to finetune.")
    return [
        *found,
        "Pretraining has one seed per size; seeds are of finetuning, as in the paper.",
        "The corpus is documentation or plays, the task film reviews, in a few million tokens: what carries "
        "over is little, and a larger model may only fit the task's own rows better.",
        "SST-2's validation split has 872 rows: an accuracy has a standard error of 1.4 percent points. The "
        "paper's tasks are larger.",
    ]


def compared(training: Training, losses: Sequence[float], scores: Sequence[Sequence[float]]) -> Table:
    """Return losses and accuracies by size."""
    rows: list[list[Cell]] = []
    for number, size in enumerate(training.sizes):
        accuracy = str(spread(scores[number])) if scores else "–"
        rows.append([f"{size.label} ({size.layers} x {size.hidden})", f"{losses[number]:.3f}", accuracy])
    return Table(
        title="BERTs by size",
        headings=("parameters", "loss of masked tokens, nats", "SST-2 accuracy, percent"),
        rows=rows,
        note="Parameters without embeddings (layers x hidden size). Median of the seeds, least to largest.",
    )


def published() -> Table:
    """Return the paper's table."""
    return Table(
        title="arXiv:1909.08053, table 5, percent",
        headings=("model", *TASKS),
        rows=[[each.name, *each.scores] for each in PUBLISHED],
        note="From memory. Medians of five seeds; development sets, and RACE's test set.",
    )


def charts(training: Training, scores: Sequence[Sequence[float]]) -> list[Chart]:
    """Return accuracies over parameters, if there are any, and the paper's errors beside them."""
    if not scores:
        return []
    x = [12.0 * size.layers * size.hidden**2 for size in training.sizes]
    paper = [336e6, 1.3e9, 3.9e9]
    return [
        Chart(
            name="accuracy",
            title="Finetuned accuracy by size",
            x_label="parameters",
            y_label="percent",
            series=[
                line("SST-2, here", x, scores),
                *(
                    Series(
                        name=f"{TASKS[i]}, paper", x=paper, y=[e.scores[i] for e in PUBLISHED], published=True
                    )
                    for i in (0, len(TASKS) - 1)
                ),
            ],
            log_x=True,
        )
    ]


def planned_models(results: Results) -> Conclusion:
    """Return the paper's models as commands for a cluster."""
    rows: list[list[Cell]] = []
    commands = []
    for each in PUBLISHED:
        plan = planned(results, plan_name(each))
        rows.append([each.name, each.gpus, "does not fit" if plan is None else plan["days"]])
        if plan is not None:
            layout = f"tp={plan['tp']} pp={plan['pp']} dp={plan['dp']} zero={plan['zero']}"
            words = f"recompute={plan['recompute']} train.micro_batch_size={plan['micro_batch_size']}"
            line = (
                f"mlm pretrain model={each.model} precision=fp16 {layout} {words} data.path=corpora/web-bert"
            )
            commands.append((f"Pretrain BERT {each.name} on {each.gpus} GPUs", line))
        for task in ("mnli", "qqp", "squad", "squad_v2", "race"):
            line = f"mlm finetune {task} ckpt=runs/{each.model} seeds=5"
            commands.append((f"Finetune BERT {each.name} on {task}", line))
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen="nothing is trained at this scale; the plan's days stand for 2M steps of 1,024 × 512 tokens",
        limits=("Learning rate, batch and epochs of each task are in configs/task.",),
        tables=(
            Table(
                title="Pretraining on V100 of DGX-2H", headings=("model", "GPUs", "days, planned"), rows=rows
            ),
            published(),
        ),
        commands=commands,
    )


EXPERIMENT = Experiment(
    name="v1-table5",
    title="Finetuned accuracy of BERT by size",
    source="Megatron-LM, arXiv:1909.08053, table 5",
    claim="BERTs of 336M, 1.3B and 3.9B parameters score better the larger they are on MNLI (89.7, 90.9, "
    "91.4), QQP, SQuAD and RACE (83.0, 87.3, 89.5).",
    minutes=15,
    steps=steps,
    conclude=conclude,
)
