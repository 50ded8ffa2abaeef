"""nanoGPT's Shakespeare character run, beside nanoGPT itself."""

import statistics
from collections.abc import Sequence

from mlm.util.errors import UserError
from reproduce.experiment import Conclusion, Curves, Experiment, Settings, Step, Table, Verdict
from reproduce.nanogpt import CHARACTERS, INPUT
from reproduce.results import MIN_ROUNDS, WARM_UP, Results, above, ratios, spread

STEPS, EVERY, BLOCK, BATCH = 2000, 250, 64, 12
LAYERS = HEADS = 4
WIDTH = 128
README_LOSS, README_MINUTES = 1.88, "about 3"
"""Of nanoGPT's README.md."""


def our_words(settings: Settings, name: str, seed: int) -> tuple[str, ...]:
    """Return nanoGPT's run as a command of mlm."""
    return (
        *("mlm", "pretrain", "model=gpt2_tiny", f"model.num_layers={LAYERS}", f"model.num_heads={HEADS}"),
        *(
            f"model.hidden_size={WIDTH}",
            f"model.max_positions={BLOCK}",
            f"model.vocab_size={len(CHARACTERS) + 1}",
        ),
        *(
            "model.activation=gelu",
            "model.hidden_dropout=0",
            "model.attention_dropout=0",
            "data.path=corpora/tiny",
        ),
        *(f"train.steps={STEPS}", f"train.global_batch_size={BATCH}", f"train.micro_batch_size={BATCH}"),
        *(f"train.validate_every={EVERY}", "train.validate_batches=10000", "optimizer=adamw_v1"),
        *(
            "optimizer.lr=0.001",
            "optimizer.betas=[0.9,0.99]",
            "optimizer.weight_decay=0.1",
            "schedule=cosine",
        ),
        *("schedule.warmup_steps=100", "schedule.min_lr=0.0001", "checkpoint.save_every=0", "log.every=1"),
        *("log.live=off", f"dist.threads_per_rank={settings.cores}", "dist.device=cpu"),
        *(f"seed={seed}", f"out=runs/{name}"),
    )


def their_words(settings: Settings, name: str, seed: int) -> tuple[str, ...]:
    """Return the command that runs nanoGPT's train.py; what is not named is as in its config file."""
    return (
        *("python", "-m", "reproduce.nanogpt", "train", str(settings.peer), "corpora/tiny", f"runs/{name}"),
        *(f"--seed={seed}", f"--threads={settings.cores}", f"--n_layer={LAYERS}", f"--n_head={HEADS}"),
        *(f"--n_embd={WIDTH}", f"--block_size={BLOCK}", f"--batch_size={BATCH}", "--dropout=0.0"),
        *(
            f"--max_iters={STEPS}",
            f"--lr_decay_iters={STEPS}",
            f"--eval_interval={EVERY}",
            "--log_interval=1",
        ),
        *("--device=cpu", "--compile=False", "--eval_iters=20", "--always_save_checkpoint=True"),
    )


def stages_of(settings: Settings) -> list[list[Step]]:
    """Return the corpus, and rounds in which mlm and nanoGPT train one after the other."""
    if settings.peer is None or not (settings.peer / INPUT).is_file():
        raise UserError(f"--peer={settings.peer}: give a checkout of nanoGPT with {INPUT}, by its prepare.py")
    text = ("python", "-m", "reproduce.nanogpt", "text", str(settings.peer), "text/tiny")
    build = (
        *("mlm", "data", "build", "input=text/tiny/text", "tokenizer=text/tiny/tokenizer.json"),
        *("out=corpora/tiny", "recipe=plain", "append_eod=false"),
    )
    rounds = list[list[Step]]()
    for n in range(1, settings.seeds + 1):
        ours, theirs = f"nanogpt-mlm-round{n}", f"nanogpt-peer-round{n}"
        rounds.append([Step(ours, our_words(settings, ours, n), f"runs/{ours}", 2)])
        rounds.append([Step(theirs, their_words(settings, theirs, n), f"runs/{theirs}/result.json", 2)])
    texts = [Step("tiny-text", text, "text/tiny/tokenizer.json", 0.1)]
    return [texts, [Step("tiny-corpus", build, "corpora/tiny/tokenizer.json", 0.1)], *rounds]


def conclude(results: Results) -> Conclusion:
    """Compare losses and times with nanoGPT's, and with those of its README."""
    runs = [f"nanogpt-mlm-round{n}" for n in results.seeds]
    peers = [results.json(f"nanogpt-peer-round{n}") for n in results.seeds]
    curves = [results.validation(run) for run in runs]
    loss, loss_peer = [curve[-1][1] for curve in curves], [each["validation_loss"] for each in peers]
    minutes = [STEPS * results.step_seconds(run) / 60 for run in runs]
    minutes_peer = [STEPS * statistics.median(each["seconds"][WARM_UP:]) / 60 for each in peers]
    estimates = [[(step, value) for step, value in each["estimates"] if step] for each in peers]
    return Conclusion(
        verdict=verdict(loss, loss_peer, ratios(minutes_peer, minutes)),
        seen=f"mlm: validation loss {spread(loss)}, {spread(minutes)} minutes of training; nanoGPT beside "
        f"it: {spread(loss_peer)}, {spread(minutes_peer)} minutes, {spread(ratios(minutes_peer, minutes))} "
        f"times ours; medians of {len(loss)} rounds, least and largest; its README says {README_LOSS}",
        limits=[
            "The README's loss is nanoGPT's own estimate from random batches of its validation part, on "
            "another machine; losses here are of the whole part, for both.",
            "mlm's GPT-2 has biases and an end-of-document token, which nanoGPT's setting has not; the two "
            "draw other weights and batches from a seed.",
        ],
        tables=[
            Table(
                title=f"{LAYERS} layers of {WIDTH}, {STEPS} steps of {BATCH} × {BLOCK} letters",
                headings=("program", "validation loss", "minutes of training"),
                rows=[
                    ("mlm", spread(loss), spread(minutes)),
                    ("nanoGPT, here", spread(loss_peer), spread(minutes_peer)),
                    ("nanoGPT, its README", f"{README_LOSS}", README_MINUTES),
                ],
                note="Medians of the rounds, least and largest in brackets. Minutes: steps times the "
                "median step, validations not counted.",
            )
        ],
        curves=Curves(
            name="validation",
            title="Validation loss of characters",
            x_label="step",
            y_label="nats per character",
            lines={
                "mlm": [(at, [curve[i][1] for curve in curves]) for i, (at, _) in enumerate(curves[0])],
                "nanoGPT's estimate": [
                    (at, [each[i][1] for each in estimates]) for i, (at, _) in enumerate(estimates[0])
                ],
            },
        ),
    )


def verdict(loss: Sequence[float], loss_peer: Sequence[float], slower: Sequence[float]) -> Verdict:
    """Return if mlm's loss is as low, and if it is faster.

    Args:
        loss: of mlm in each round.
        loss_peer: of nanoGPT.
        slower: nanoGPT's time over that of mlm.
    """
    if len(loss) < MIN_ROUNDS:
        return Verdict.NOTHING
    if statistics.median(loss) > max(loss_peer):
        return Verdict.CONTRADICTS
    return Verdict.AGREES if above(slower, 1.0) else Verdict.PARTLY


EXPERIMENT = Experiment(
    name="nanogpt-shakespeare",
    title="nanoGPT's Shakespeare characters: loss and time",
    source="nanoGPT, README.md",
    claim="4 layers of 128 learn Shakespeare's characters in 2,000 iterations, about 3 minutes on a CPU, "
    "to a validation loss of 1.88. The same model, data and steps should cost mlm no more.",
    minutes=15,
    stages=stages_of,
    conclude=conclude,
)
