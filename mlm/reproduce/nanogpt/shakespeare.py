"""nanoGPT's Shakespeare character run, beside nanoGPT itself where `peer` names a checkout of it."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.measured import LEAST_ROUNDS, above, line, ratios, spread
from mlm.reproduce.nanogpt.characters import CHARACTERS
from mlm.reproduce.planned import layout_step, planned
from mlm.reproduce.results import WARM_UP, Results

INPUT = "data/shakespeare_char/input.txt"
"""tiny-shakespeare in a checkout of nanoGPT whose prepare.py has downloaded it."""
PLAYS = "text/plays"
CHECKOUT = ("train.py", "model.py", "configurator.py", "config/train_shakespeare_char.py")
"""Files of nanoGPT that its run reads."""
EVERY = 250
"""Steps between validations of both."""
NOISE = 0.02
"""Nats by which a loss that nanoGPT estimates from 20 random batches may be off."""
PLAN = "nanogpt-plan"
PLAN_WORDS = (
    *("model=gpt2_124m", "gpus=8", "hardware=dgx_a100_40g", "precision=bf16"),
    *("train.global_batch_size=480", f"tokens={600_000 * 480 * 1024}", "show=1"),
)
"""nanoGPT's reproduction of GPT-2: 600,000 steps of 0.5M tokens."""


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Shape and training of a run that nanoGPT's README gives."""

    layers: int
    heads: int
    width: int
    block: int
    batch: int
    steps: int
    dropout: float
    published: float
    """Validation loss of nanoGPT's README."""
    minutes: float
    """Of a run here, about."""
    ours: tuple[str, ...]
    theirs: tuple[str, ...]
    """Words for one device, beyond the shape."""


CPU = Setting(
    layers=4,
    heads=4,
    width=128,
    block=64,
    batch=12,
    steps=2000,
    dropout=0.0,
    published=1.88,
    minutes=2,
    ours=("dist.device=cpu",),
    theirs=("--device=cpu", "--compile=False", "--eval_iters=20", "--always_save_checkpoint=True"),
)
GPU = Setting(
    layers=6,
    heads=6,
    width=384,
    block=256,
    batch=64,
    steps=5000,
    dropout=0.2,
    published=1.4697,
    minutes=4,
    ours=("precision=bf16", "dp=1"),
    theirs=("--device=cuda",),
)


def setting_of(config: ReproduceConfig) -> Setting:
    """Return the run of a scale: that for a CPU, or that for a GPU."""
    return CPU if config.scale == "laptop" else GPU


def source_of(config: ReproduceConfig) -> Path | None:
    """Return tiny-shakespeare of nanoGPT's checkout, if it is there."""
    found = None if config.peer is None else Path(config.peer).resolve() / INPUT
    return found if found is not None and found.is_file() else None


def prefix(config: ReproduceConfig) -> str:
    """Return the beginning of the steps' names: runs on one text are no runs on the other."""
    return "nanogpt-tiny" if source_of(config) else "nanogpt-plays"


def ours(config: ReproduceConfig, seed: int) -> str:
    """Return the name of a run of mlm."""
    return f"{prefix(config)}-mlm-round{seed}"


def theirs(config: ReproduceConfig, seed: int) -> str:
    """Return the name of a run of nanoGPT."""
    return f"{prefix(config)}-peer-round{seed}"


def threads(config: ReproduceConfig) -> int:
    """Return the threads of a run: all cores, as PyTorch takes them."""
    return config.cores or len(os.sched_getaffinity(0))


def our_words(config: ReproduceConfig, seed: int) -> tuple[str, ...]:
    """Return nanoGPT's run as a command of mlm."""
    run = setting_of(config)
    return (
        *("mlm", "pretrain", "model=gpt2_tiny", f"model.num_layers={run.layers}"),
        *(
            f"model.num_heads={run.heads}",
            f"model.hidden_size={run.width}",
            f"model.max_positions={run.block}",
        ),
        *(f"model.vocab_size={len(CHARACTERS) + 1}", "model.activation=gelu"),
        *(f"model.hidden_dropout={run.dropout:g}", f"model.attention_dropout={run.dropout:g}"),
        *(f"data.path=corpora/{prefix(config)}", f"train.steps={run.steps}"),
        *(f"train.global_batch_size={run.batch}", f"train.micro_batch_size={run.batch}"),
        *(f"train.validate_every={EVERY}", "train.validate_batches=10000"),  # the whole part
        *("optimizer=adamw_v1", "optimizer.lr=0.001", "optimizer.betas=[0.9,0.99]"),
        *("optimizer.weight_decay=0.1", "schedule=cosine", "schedule.warmup_steps=100"),
        *("schedule.min_lr=0.0001", "checkpoint.save_every=0", "log.every=1", "log.live=off"),
        *(f"dist.threads_per_rank={threads(config)}", *run.ours, f"seed={seed}"),
        f"out=runs/{ours(config, seed)}",
    )


def their_words(config: ReproduceConfig, seed: int) -> tuple[str, ...]:
    """Return the command that runs nanoGPT's train.py; what is not named is as in its config file."""
    run = setting_of(config)
    return (
        *("python", "-m", "mlm.reproduce.nanogpt.peer", str(Path(str(config.peer)).resolve())),
        *(f"corpora/{prefix(config)}", f"runs/{theirs(config, seed)}"),
        *(f"--seed={seed}", f"--threads={threads(config)}"),
        *(f"--n_layer={run.layers}", f"--n_head={run.heads}", f"--n_embd={run.width}"),
        *(f"--block_size={run.block}", f"--batch_size={run.batch}", f"--dropout={run.dropout}"),
        *(f"--max_iters={run.steps}", f"--lr_decay_iters={run.steps}"),
        *(f"--eval_interval={EVERY}", "--log_interval=1", *run.theirs),
    )


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the text, the corpus, and rounds in which mlm and nanoGPT train one after the other."""
    if config.scale == "paper":
        return [layout_step(PLAN, *PLAN_WORDS)]
    run, found = setting_of(config), [*text_steps(config)]
    for seed in range(1, config.seeds + 1):
        pair = [(ours(config, seed), our_words(config, seed), "")]
        if config.peer is not None:
            pair.append((theirs(config, seed), their_words(config, seed), "/result.json"))
        for each, words, file in pair:
            result = f"runs/{each}{file}"
            needs = (found[-1].name,)  # in turns
            found.append(Step(name=each, words=words, result=result, minutes=run.minutes, needs=needs))
    return found


def text_steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return the steps that make the corpus of characters, of the plays without tiny-shakespeare."""
    name, given = prefix(config), source_of(config)
    plays = Step(
        name=PLAYS.replace("/", "-"),
        words=(
            *("python", "-m", "mlm.reproduce.text", "--corpus", "plays", "--debs", "text/debs"),
            *("--out", PLAYS),
        ),
        result=PLAYS,
        minutes=0.1,
        cores=1,
    )
    text = Step(
        name=f"{name}-text",
        words=("python", "-m", "mlm.reproduce.nanogpt.characters", str(given or PLAYS), f"text/{name}"),
        result=f"text/{name}/tokenizer.json",
        minutes=0.1,
        cores=1,
        needs=() if given else (plays.name,),
    )
    corpus = Step(
        name=f"{name}-corpus",
        words=(
            *("mlm", "data", "build", f"input=text/{name}/text", f"tokenizer=text/{name}/tokenizer.json"),
            *(f"out=corpora/{name}", "recipe=plain", "append_eod=false"),
        ),
        result=f"corpora/{name}",
        minutes=0.1,
        cores=1,
        needs=(text.name,),
    )
    return [text, corpus] if given else [plays, text, corpus]


class Rounds:
    """Losses and times of all rounds.

    Attributes:
        loss      loss of the whole validation part after the last step (on a GPU: the best), ours
        minutes   of all steps without validations, from the median step: ours
        loss_peer, minutes_peer   the same of nanoGPT; empty without `peer`
    """

    def __init__(self, results: Results) -> None:
        config, self.results = results.config, results
        self.setting = setting_of(config)
        self.names = [ours(config, seed) for seed in results.seeds]
        self.told = [] if config.peer is None else [results.json(theirs(config, n)) for n in results.seeds]

    @cached_property
    def loss(self) -> list[float]:
        """Of ours, in each round."""
        curves = [[loss for _, loss in self.results.validation(name)] for name in self.names]
        return [min(curve) if self.setting is GPU else curve[-1] for curve in curves]

    @cached_property
    def minutes(self) -> list[float]:
        """Of ours."""
        return [self.setting.steps * self.results.step_times(name).median / 60 for name in self.names]

    @cached_property
    def loss_peer(self) -> list[float]:
        """Of nanoGPT."""
        return [float(each["validation_loss"]) for each in self.told]

    @cached_property
    def minutes_peer(self) -> list[float]:
        """Of nanoGPT."""
        times = [[*map(float, each["seconds"])][WARM_UP:] for each in self.told]
        return [self.setting.steps * statistics.median(every) / 60 for every in times]


def conclude(results: Results) -> Conclusion:
    """Compare losses and times with nanoGPT's, and with those of its README."""
    if results.config.scale == "paper":
        return planned_gpt2(results)
    rounds = Rounds(results)
    is_tiny = source_of(results.config) is not None
    return Conclusion(
        verdict=verdict(rounds, is_tiny=is_tiny),
        seen=seen(rounds),
        limits=limits(rounds, is_tiny=is_tiny),
        tables=[contenders(rounds)],
        charts=[curves(rounds)],
        curves=rounds.names,
    )


def verdict(rounds: Rounds, *, is_tiny: bool) -> Verdict:
    """Return what the losses, and the times beside nanoGPT's, say."""
    loss = spread(rounds.loss)
    if len(rounds.loss) < LEAST_ROUNDS or not (rounds.told or is_tiny):
        return Verdict.OPEN
    if not rounds.told:
        good = loss.median <= rounds.setting.published + NOISE
        return Verdict.AGREES if good else Verdict.CONTRADICTS
    if loss.median > spread(rounds.loss_peer).largest:
        return Verdict.CONTRADICTS
    faster = above(ratios(rounds.minutes_peer, rounds.minutes), 1.0)
    return Verdict.AGREES if faster else Verdict.PARTLY


def seen(rounds: Rounds) -> str:
    """Return the losses and times with their spread."""
    ours = f"mlm: validation loss {spread(rounds.loss)}, {spread(rounds.minutes)} minutes of training"
    if not rounds.told:
        return f"{ours}; {len(rounds.loss)} seeds; nanoGPT's README says {rounds.setting.published}"
    ratio = spread(ratios(rounds.minutes_peer, rounds.minutes))
    return (
        f"{ours}; nanoGPT beside it: {spread(rounds.loss_peer)}, {spread(rounds.minutes_peer)} minutes, "
        f"{ratio} times ours; medians of {len(rounds.loss)} rounds, least and largest; its README says "
        f"{rounds.setting.published}"
    )


def limits(rounds: Rounds, *, is_tiny: bool) -> list[str]:
    """Return what these runs cannot say."""
    found = [
        "The README's loss is nanoGPT's own estimate from random batches of its validation part, on another "
        "machine; losses here are of the whole part, for both.",
        "mlm's GPT-2 has biases and an end-of-document token, which nanoGPT's setting has not; the two draw "
        "other weights and batches from a seed.",
    ]
    if not is_tiny:
        found.insert(
            0,
            "The text is not tiny-shakespeare, which nanoGPT downloads, but as many characters of the plays: "
            "the README's loss is of another text. peer=CHECKOUT whose prepare.py has run has it.",
        )
    if not rounds.told:
        found.append("nanoGPT itself did not run; peer=CHECKOUT runs it beside mlm.")
    return found


def contenders(rounds: Rounds) -> Table:
    """Return losses and times of all."""
    run = rounds.setting
    rows: list[list[str | float]] = [["mlm", str(spread(rounds.loss)), str(spread(rounds.minutes))]]
    if rounds.told:
        rows.append(["nanoGPT, here", str(spread(rounds.loss_peer)), str(spread(rounds.minutes_peer))])
    rows.append(["nanoGPT, its README", f"{run.published}", "about 3"])
    return Table(
        title=f"{run.layers} layers of {run.width}, {run.steps} steps of {run.batch} × {run.block} letters",
        headings=("program", "validation loss", "minutes of training"),
        rows=rows,
        note="Medians of the rounds, least and largest in brackets. Minutes: steps times the median step, "
        "validations not counted.",
    )


def curves(rounds: Rounds) -> Chart:
    """Return validation losses over steps, with the README's."""
    run, pairs = rounds.setting, [rounds.results.validation(name) for name in rounds.names]
    at = [step for step, _ in pairs[0]]
    series = [line("mlm", at, [[curve[i][1] for curve in pairs] for i in range(len(at))])]
    if rounds.told:
        estimates = [[each for each in told["estimates"] if each[0]] for told in rounds.told]
        x = [step for step, *_ in estimates[0]]
        series.append(
            line("nanoGPT's estimate", x, [[curve[i][2] for curve in estimates] for i in range(len(x))])
        )
    ends = [at[0], run.steps]
    series.append(Series(name="nanoGPT's README", x=ends, y=[run.published] * 2, published=True))
    return Chart(
        name="validation",
        title="Validation loss of characters",
        x_label="step",
        y_label="nats per character",
        series=series,
    )


def planned_gpt2(results: Results) -> Conclusion:
    """Return what nanoGPT's reproduction of GPT-2 on 8 A100 would take."""
    found = planned(results, PLAN)
    assert found is not None  # 124M parameters fit
    return Conclusion(
        verdict=Verdict.PLANNED,
        seen=f"the plan gives GPT-2 124M {found['days']:.1f} days on 8 A100 in layout {found['layout']}, "
        "nanoGPT's README about 4",
        limits=("Nothing was trained; the plan's time is a formula.",),
        tables=[
            Table(
                title="GPT-2 124M on OpenWebText, 600,000 steps of 0.5M tokens, 8 A100 of 40 GB",
                headings=("program", "days", "validation loss"),
                rows=[["mlm, planned", found["days"], "–"], ["nanoGPT, its README", "about 4", "about 2.85"]],
            )
        ],
        commands=[
            (
                "GPT-2 124M on 8 A100; data.path is a corpus by `mlm data build`",
                "mlm pretrain model=gpt2_124m precision=bf16 data.path=corpora/openwebtext "
                f"dp={found['dp']} zero={found['zero']} train.micro_batch_size={found['micro_batch_size']} "
                "train.global_batch_size=480 train.steps=600000 optimizer=adamw_v1 optimizer.lr=6e-4 "
                "optimizer.betas=[0.9,0.95] optimizer.weight_decay=0.1 schedule=cosine "
                "schedule.warmup_steps=2000 schedule.min_lr=6e-5",
            )
        ],
    )


EXPERIMENT = Experiment(
    name="nanogpt-shakespeare",
    title="nanoGPT's Shakespeare characters: loss and time",
    source="nanoGPT, README.md",
    claim="4 layers of 128 learn Shakespeare's characters in 2,000 iterations, about 3 minutes on a CPU, to "
    "a validation loss of 1.88. The same model, data and steps should cost mlm no more.",
    minutes=15,
    steps=steps,
    conclude=conclude,
)
