"""README.md of a run directory: its settings, results, files, and the commands to continue."""

import math
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mlm.config.imports import TRUST
from mlm.tracking.history import FILE_NAME
from mlm.tracking.panel import duration, format_significant
from mlm.tracking.runs import Column, RunRecords, read_run, when
from mlm.util.files import read_regular, write_atomic

Rows = Sequence[tuple[str, str]]
SUMMARY_MARK = "<!-- Written by mlm, which replaces this file. -->"
MAX_ATTEMPTS = 6  # listed with their commands: the first and the newest

FILES = (  # pattern in the run directory, what it holds
    ("*.yaml", "the composed configuration: every setting of this run"),
    ("checkpoints", "weights, optimizer state and counters: safetensors and a manifest per step"),
    (FILE_NAME, "one JSON object per line: every logged step, validation and save"),
    ("tokenizer.json", "the tokenizer of the training text"),
    ("eval-*.json", "scores, each with its protocol"),
    ("tensorboard", "events for `tensorboard --logdir`"),
    ("wandb", "files of Weights & Biases"),
)


@dataclass(frozen=True, slots=True)
class Predicted:
    """Numbers that were expected of a run."""

    step_s: float | None
    memory_bytes: float
    """Of rank 0."""
    mfu: float | None
    hardware: str
    """The hardware that the time is of; empty without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NextCommands:
    """Commands that resume a run, evaluate it and generate with it."""

    resume: Sequence[str]
    """The words that continue the run: `["mlm", "pretrain", "resume=runs/a"]`."""
    total_steps: int
    """Steps that the run is to take."""
    decays: bool = True
    """True if the learning rate ends with schedule.decay_steps."""
    prompt: str | None = None
    """Starts the example of `mlm generate`; None leaves that out (no tokenizer, or no text)."""
    validation: Sequence[str] = ()
    """The validation sets, one per corpus of a blend; without any `mlm eval loss` is left out."""
    trusted: str | None = None
    """Module of a custom model family, which other commands load only if it is trusted."""

    def block(self, out: Path, done: int) -> str:
        """Return the commands for a run that has taken `done` steps, as a block of shell."""
        resume, total_steps = self.resume, self.total_steps
        lines = [f"# resume after step {done}", shlex.join(resume)]
        if done >= total_steps:
            keep = f"schedule.decay_steps={total_steps}"
            note = f"; {keep} keeps the learning rate where it ended" if self.decays else ""
            longer = [*resume, f"train.steps={2 * total_steps}", *[keep] * self.decays]
            lines = [f"# train on{note}", shlex.join(longer)]
        trust = f"{TRUST}={self.trusted} " if self.trusted else ""
        if self.validation:
            score = f"{trust}mlm eval loss {override('ckpt', str(out))}"
            several = len(self.validation) > 1
            paths = [f" {override('path', path)}" for path in self.validation] if several else [""]
            lines += ["", "# loss and perplexity on held-out text", *(score + path for path in paths)]
        if self.prompt is not None:
            sample = f"{trust}mlm generate {override('ckpt', str(out))} {override('prompt', self.prompt)}"
            lines += ["", "# sample a continuation", sample]
        lines += ["", "# curves, in a browser", shlex.join(["mlm", "report", str(out)])]
        return "\n".join(["```sh", *lines, "```"])


def write_summary(
    out: Path,
    commands: NextCommands,
    *,
    header: Rows,
    unit: str = "nats per token",
    predicted: Predicted | None = None,
    failure: str | None = None,
    checkpoint: Rows = (),
) -> Path:
    """Write `out`/README.md, or README.mlm.md next to a user's file, from metrics.jsonl and return its path.

    Args:
        out: the run directory.
        commands: the run's next commands.
        header: further rows on what ran (model, layout, precision …).
        unit: unit of the loss.
        predicted: numbers to compare with the measured ones.
        failure: the error that ended the run.
        checkpoint: rows on the newest good checkpoint, and the way back to it.

    Raises:
        OSError: the summary cannot be written.
        UserError: metrics.jsonl cannot be read.
    """
    run, total_steps = read_run(out, out.resolve().name), commands.total_steps
    state = "Failed" if failure else "Finished" if run.done >= total_steps else "Stopped early"
    parts = [
        SUMMARY_MARK,
        f"# {run.name}",
        f"{state}: {run.done:,} of {total_steps:,} steps." + (f"\n\n{escaped(failure)}" if failure else ""),
        "## What ran",
        table([*started(run), *header, *ran(run)]),
        "## Results",
        table([*results(run, unit), *checkpoint]) or "Nothing was logged.",
        compare_prediction(run, predicted),
        "## Files",
        table([(f"`{path.name}`", text) for pattern, text in FILES for path in sorted(out.glob(pattern))]),
        "## How to continue",
        "From the folder that it was started in:",
        commands.block(out, run.done),
    ]
    path = out / "README.md"
    if path.exists() and not is_summary(path):  # the user's, come since the run began
        path = out / "README.mlm.md"
    write_atomic(path, "\n\n".join(filter(None, parts)).encode() + b"\n")
    return path


def is_summary(path: Path) -> bool:
    with suppress(OSError):
        return SUMMARY_MARK.encode() in read_regular(path, 1 << 10)
    return False


def started(run: RunRecords) -> Rows:
    attempts = [attempt for attempt in run.attempts if "command" in attempt]
    shown = attempts if len(attempts) <= MAX_ATTEMPTS else [attempts[0], *attempts[1 - MAX_ATTEMPTS :]]
    rows = []
    for attempt in shown:
        step, typed = attempt["start_step"], code(shlex.join(attempt["command"]))
        rows.append((f"command after step {step:,}" if step else "command", typed))
        if "job" in attempt:
            rows.append(("job of the sweep", code(attempt["job"])))
        places = {"on": "host", "in": "folder", "by": "launcher"}
        words = [f"{word} {attempt[key]}" for word, key in places.items() if key in attempt]
        rows.append(("started", " ".join([when(attempt["time"]), *words])))
    return rows


def code(text: str) -> str:
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def ran(run: RunRecords) -> Rows:
    newest, rows = run.latest, list[tuple[str, str]]()
    if digest := newest.get("config_digest"):
        rows.append(("configuration", f"`{digest}`"))
    if versions := newest.get("versions"):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    for corpus in newest.get("corpora", []):
        digest = f"receipt `{corpus['receipt']}`" if corpus["receipt"] else f"index `{corpus['digest']}`"
        rows.append((f"corpus {corpus['name']}", f"{corpus['weight']:.2%}, {digest}"))
    if (tokens := run.highest("step", "tokens")) > 0:
        rows.append(("tokens seen", f"{tokens:,.0f}"))
    spent, attempts = duration(run.seconds), len(run.attempts)
    return [*rows, ("time, h:mm:ss", spent if attempts == 1 else f"{spent} in {attempts} attempts")]


def results(run: RunRecords, unit: str) -> Rows:
    """Return the final numbers that were logged, losses in `unit`."""
    rows = list[tuple[str, str]]()

    def loss(table: Mapping[str, Column], row: int = -1) -> str:
        return f"{number(table['loss'][row])} {unit} at step {table['step'][row]:,.0f}"

    if steps := run.tables.get("step"):
        rows.append(("training loss", loss(steps)))
    if validations := run.tables.get("validation"):
        rows.append(("validation loss", loss(validations)))
        rows.append(("validation perplexity", number(validations["perplexity"][-1], digits=2)))
        parts = {name: column[-1] for name, column in validations.items() if name.startswith("validation/")}
        for part, value in parts.items():  # the loss of a corpus or a head, or an accuracy
            name = part.partition("/")[2]
            if name.endswith("_accuracy"):
                rows.append((f"validation {name.replace('_', ' ')}", number(value)))
            else:
                name = f"validation loss of {name.removesuffix('_loss')}"
                rows.append((name, f"{number(value)} {unit.partition(',')[0]}"))
        if len(run.column("validation", "loss")):
            rows.append(("best validation loss", loss(validations, int(np.nanargmin(validations["loss"])))))
    rates: tuple[tuple[str, float, Callable[[float], str]], ...] = (
        ("tokens/s of all ranks (median)", run.median("tokens_per_s"), "{:,.0f}".format),
        ("model TFLOP/s per device (median)", run.median("tflops"), format_significant),
        ("MFU (median)", run.median("mfu"), "{:.1%}".format),
        ("memory of rank 0 (most logged)", run.highest("step", "memory_gib"), "{:.2f} GiB".format),
    )
    rows += [(name, form(value)) for name, value, form in rates if not math.isnan(value)]
    if (skipped := run.last("step", "skipped_steps")) > 0:
        rows.append(("steps skipped, not finite", f"{skipped:,.0f}"))
    return rows


def compare_prediction(run: RunRecords, predicted: Predicted | None) -> str:
    """Return a table of the predicted numbers, the measured ones and how far apart they are; or nothing."""
    if predicted is None or not len(run.column("step", "step")):
        return ""
    later = {name: run.column("step", name) for name in ("step_time_s", "mfu")}
    later = {name: column[1:] if len(column) > 1 else column for name, column in later.items()}
    sizes = run.column("step", "memory_gib")  # the first step warms up
    pairs = (
        ("seconds per step", "{:.4g}", predicted.step_s, later["step_time_s"], np.median),
        ("memory of rank 0, GiB", "{:.2f}", predicted.memory_bytes / 2**30, sizes, np.max),
        ("MFU", "{:.1%}", predicted.mfu, later["mfu"], np.median),
    )
    rows = []
    for name, form, expected, measured, pick in pairs:
        if expected is not None and len(measured):
            actual = float(pick(measured))
            rows.append((name, form.format(expected), form.format(actual), f"{actual / expected - 1:+.0%}"))
    of = f" for {escaped(predicted.hardware)}" if predicted.hardware else ""
    compared = table(rows, ("", "predicted", "measured", ""))
    return f"Predicted{of} (`mlm plan`), and measured:\n\n{compared}"


def number(value: float, digits: int = 4) -> str:
    return "not finite" if math.isnan(value) else f"{value:.{digits}f}"


def override(key: str, value: str) -> str:
    if re.fullmatch(r"[\w.,:;?'-]+( [\w.,:;?'-]+)+", value):
        return f'{key}="{value}"'  # easier on the eye than quotes around the whole word
    return shlex.quote(f"{key}={value}")


def table(rows: Sequence[Sequence[str]], headings: Sequence[str] = ("", "")) -> str:
    lines = [headings, ["---"] * len(headings), *rows] if rows else []
    return "\n".join(f"| {' | '.join(map(escaped, line))} |" for line in lines)


def escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
