"""README.md of a run directory: its settings, results, files, and the commands to continue."""

import re
import shlex
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

from mlm.config.imports import TRUST
from mlm.tracking.history import FILE_NAME, read_records
from mlm.tracking.panel import duration, format_significant
from mlm.util.files import read_regular, write_atomic

Rows = Sequence[tuple[str, str]]
SUMMARY_MARK = "<!-- Written by mlm, which replaces this file. -->"
HEAD = 1 << 10  # bytes in which the mark is
PROGRESS = ("step", "validation", "scores", "saved", "save_failed")
"""Records of steps that are done; one of an incident may be of a step that was taken back."""
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


def write_summary(
    out: Path,
    *,
    resume: Sequence[str],
    header: Rows,
    total_steps: int,
    unit: str = "nats per token",
    prompt: str | None = None,
    validation: Sequence[str] = (),
    trusted: str | None = None,
    predicted: Predicted | None = None,
    failure: str | None = None,
    checkpoint: Rows = (),
) -> Path:
    """Write `out`/README.md from `out`/metrics.jsonl and return its path (README.mlm.md beside a user's own).

    Args:
        out: the run directory.
        resume: the words that continue the run: `["mlm", "pretrain", "resume=runs/a"]`.
        header: further rows on what ran (model, layout, precision …).
        total_steps: steps that the run is to take.
        unit: unit of the loss.
        prompt: starts the example of `mlm generate`; None leaves that out (no tokenizer, or no text).
        validation: the validation sets, of a blend one each; without any `mlm eval loss` is left out.
        trusted: module of the user's own model family, which other commands load only if it is trusted.
        predicted: numbers to show beside the measured ones.
        failure: the error that ended the run.
        checkpoint: rows on the newest good checkpoint, and the way back to it.

    Raises:
        OSError: metrics.jsonl cannot be read, or the summary written.
    """
    records = list(read_records(out / FILE_NAME))
    steps = [r for r in records if r["kind"] == "step"]
    done = max((r["step"] for r in records if r["kind"] in PROGRESS), default=0)
    state = "Failed" if failure else "Finished" if done >= total_steps else "Stopped early"
    parts = [
        SUMMARY_MARK,
        f"# {out.resolve().name}",
        f"{state}: {done:,} of {total_steps:,} steps." + (f"\n\n{escaped(failure)}" if failure else ""),
        "## What ran",
        table([*started(records), *header, *ran(records)]),
        "## Results",
        table([*results(steps, [r for r in records if r["kind"] == "validation"], unit), *checkpoint])
        or "Nothing was logged.",
        compare_prediction(steps, predicted),
        "## Files",
        table([(f"`{path.name}`", text) for pattern, text in FILES for path in sorted(out.glob(pattern))]),
        "## How to continue",
        "From the folder that it was started in:",
        commands(out, resume, done, total_steps, prompt, validation, trusted),
    ]
    path = out / "README.md"
    if path.exists() and not is_summary(path):  # the user's, come since the run began
        path = out / "README.mlm.md"
    write_atomic(path, "\n\n".join(filter(None, parts)).encode() + b"\n")
    return path


def is_summary(path: Path) -> bool:
    """True if a README.md is the summary of a run or sweep."""
    with suppress(OSError):
        return SUMMARY_MARK.encode() in read_regular(path, HEAD)
    return False


def started(records: Sequence[dict[str, Any]]) -> Rows:
    """Return rows on each attempt: the command as it was typed, and when and where it was started."""
    attempts = [r for r in records if r["kind"] == "run" and "command" in r]
    shown = attempts if len(attempts) <= MAX_ATTEMPTS else [attempts[0], *attempts[1 - MAX_ATTEMPTS :]]
    rows = []
    for run in shown:
        step = run["start_step"]
        rows.append((f"command after step {step:,}" if step else "command", code(shlex.join(run["command"]))))
        if "job" in run:
            rows.append(("job of the sweep", code(run["job"])))
        when = datetime.fromtimestamp(run["time"], UTC).strftime("%Y-%m-%d %H:%M UTC")
        words = [when, f"on {run['host']}" if "host" in run else ""]
        words += [f"in {run['folder']}" if "folder" in run else ""]
        words += [f"by {run['launcher']}" if "launcher" in run else ""]
        rows.append(("started", " ".join(filter(None, words))))
    return rows


def code(text: str) -> str:
    """Return text as code in Markdown, whatever backticks it holds."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def ran(records: Sequence[dict[str, Any]]) -> Rows:
    """Return rows from the metrics: configuration digest, versions, tokens, time."""
    run: dict[str, Any] = next((r for r in reversed(records) if r["kind"] == "run"), {})
    rows = []
    if digest := run.get("config_digest"):
        rows.append(("configuration", f"`{digest}`"))
    if versions := run.get("versions"):
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in versions.items())))
    for corpus in run.get("corpora", []):
        digest = f"receipt `{corpus['receipt']}`" if corpus["receipt"] else f"index `{corpus['digest']}`"
        rows.append((f"corpus {corpus['name']}", f"{corpus['weight']:.2%}, {digest}"))
    if tokens := max((r["tokens"] for r in records if r["kind"] == "step"), default=0):
        rows.append(("tokens seen", f"{tokens:,}"))
    attempts = sum(r["kind"] == "run" for r in records)
    spent = duration(wall_time(records))
    return [*rows, ("time, h:mm:ss", spent if attempts == 1 else f"{spent} in {attempts} attempts")]


def wall_time(records: Sequence[dict[str, Any]]) -> float:
    """Return the sum of the seconds from each attempt's start to its last record."""
    total, previous = 0.0, None
    for record in records:
        now = record.get("time", 0.0)
        if previous is not None and record["kind"] != "run":
            total += max(0.0, now - previous)
        previous = now
    return total


def results(steps: Sequence[dict[str, Any]], validations: Sequence[dict[str, Any]], unit: str) -> Rows:
    """Return the final numbers that were logged, losses in `unit`."""

    def loss(record: dict[str, Any]) -> str:
        return f"{number(record['loss'])} {unit} at step {record['step']:,}"

    rows = [("training loss", loss(steps[-1]))] if steps else []
    if validations:
        last = validations[-1]
        rows += [
            ("validation loss", loss(last)),
            ("validation perplexity", number(last["perplexity"], digits=2)),
        ]
        parts = {key: part for key, part in last.items() if key.startswith("validation/")}
        rows += [part_row(key.partition("/")[2], value, unit) for key, value in parts.items()]
        if scored := [v for v in validations if v["loss"] is not None]:
            rows.append(("best validation loss", loss(min(scored, key=lambda v: v["loss"]))))
    summaries = (
        ("tokens/s of all ranks (median)", "tokens_per_s", median, "{:,.0f}".format),
        ("model TFLOP/s per device (median)", "tflops", median, format_significant),
        ("MFU (median)", "mfu", median, "{:.1%}".format),
        ("memory of rank 0 (most logged)", "memory_bytes", max, lambda size: f"{size / 2**30:.2f} GiB"),
    )
    for name, key, pick, form in summaries:
        if numbers := values(steps, key):
            rows.append((name, form(pick(numbers))))
    if steps and steps[-1]["skipped_steps"]:
        rows.append(("steps skipped for overflow", f"{steps[-1]['skipped_steps']:,}"))
    return rows


def compare_prediction(steps: Sequence[dict[str, Any]], predicted: Predicted | None) -> str:
    """Return a table of the predicted numbers, the measured ones and how far apart they are; or nothing."""
    if predicted is None or not steps:
        return ""
    later = steps[1:] or steps  # the first step warms up
    sizes = [size / 2**30 for size in values(steps, "memory_bytes")]
    pairs = (
        ("seconds per step", "{:.4g}", predicted.step_s, values(later, "step_time_s"), median),
        ("memory of rank 0, GiB", "{:.2f}", predicted.memory_bytes / 2**30, sizes, max),
        ("MFU", "{:.1%}", predicted.mfu, values(later, "mfu"), median),
    )
    lines = ["| | predicted | measured | |", "| --- | --- | --- | --- |"]
    for name, form, expected, measured, pick in pairs:
        if expected is not None and measured:
            number = pick(measured)
            off = f"{number / expected - 1:+.0%}"
            lines.append(f"| {name} | {form.format(expected)} | {form.format(number)} | {off} |")
    of = f" for {escaped(predicted.hardware)}" if predicted.hardware else ""
    return "\n".join([f"Predicted{of} (`mlm plan`), and measured:\n", *lines])


def part_row(name: str, value: float | None, unit: str) -> tuple[str, str]:
    """Return the row of a validation's part: the loss of a corpus or a head, or an accuracy."""
    if name.endswith("_accuracy"):
        return f"validation {name.replace('_', ' ')}", number(value)
    return f"validation loss of {name.removesuffix('_loss')}", f"{number(value)} {unit.partition(',')[0]}"


def values(records: Iterable[dict[str, Any]], name: str) -> list[float]:
    """Return the values of a field that are not null."""
    return [r[name] for r in records if r.get(name) is not None]


def number(value: float | None, digits: int = 4) -> str:
    """Return a loss or perplexity; null stands for a number that is not finite."""
    return "not finite" if value is None else f"{value:.{digits}f}"


def commands(
    out: Path,
    resume: Sequence[str],
    done: int,
    total_steps: int,
    prompt: str | None,
    validation: Sequence[str],
    trusted: str | None,
) -> str:
    """Return a shell block: resume or extend, evaluate, generate."""
    lines = [f"# resume after step {done}", shlex.join(resume)]
    if done >= total_steps:
        keeps = f"schedule.decay_steps={total_steps} keeps the learning rate where it ended"
        lines = [f"# train on; {keeps}", extended(resume, total_steps)]
    trust = f"{TRUST}={trusted} " if trusted else ""
    if validation:
        score = f"{trust}mlm eval loss {override('ckpt', str(out))}"
        scores = (
            [f"{score} {override('path', path)}" for path in validation] if len(validation) > 1 else [score]
        )
        lines += ["", "# loss and perplexity on held-out text", *scores]
    if prompt is not None:
        sample = f"{trust}mlm generate {override('ckpt', str(out))} {override('prompt', prompt)}"
        lines += ["", "# sample a continuation", sample]
    lines += ["", "# curves, in a browser", shlex.join(["mlm", "report", str(out)])]
    return "\n".join(["```sh", *lines, "```"])


def extended(command: Sequence[str], total_steps: int) -> str:
    """Return `command` for twice `total_steps`."""
    kept, words = [], iter(command)
    for word in words:
        key, equals, _ = word.lstrip("-").lstrip("+").partition("=")
        if key not in ("train.steps", "schedule.decay_steps"):
            kept.append(word)
        elif not equals:  # --train.steps 2000
            next(words, None)
    tail = [f"train.steps={2 * total_steps}", f"schedule.decay_steps={total_steps}"]
    return shlex.join([*kept, *tail])


def override(key: str, value: str) -> str:
    """Return `key=value` quoted for the shell."""
    if re.fullmatch(r"[\w.,:;?'-]+( [\w.,:;?'-]+)+", value):
        return f'{key}="{value}"'  # easier on the eye than quotes around the whole word
    return shlex.quote(f"{key}={value}")


def table(rows: Rows) -> str:
    """Return a Markdown table of two columns without a heading; empty for no rows."""
    if not rows:
        return ""
    lines = [f"| {escaped(label)} | {escaped(value)} |" for label, value in rows]
    return "\n".join(["| | |", "| --- | --- |", *lines])


def escaped(text: str) -> str:
    """Return text escaped for a table cell."""
    return text.replace("|", "\\|").replace("\n", " ")
