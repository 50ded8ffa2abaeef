"""Results of finetuning: result.json of each seed, the median over seeds, and tables."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch

import mlm
from mlm.config.build import config_digest, from_dict
from mlm.finetune.best import Progress, Scores, best_folder, best_of, merit
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.inputs import Start
from mlm.finetune.scoring import Scored
from mlm.finetune.task_type import task_type
from mlm.inference.trained import is_model_folder
from mlm.training.session import layout_row, model_row, run_row
from mlm.training.trainer import Trainer
from mlm.util.atomic import as_json, parse_json, write_atomic
from mlm.util.errors import UserError, writing_to
from mlm.util.ownership import claim_folder
from mlm.util.terminal import add_row, console, plain, table

RESULT = "result.json"
MAX_BYTES = 1 << 20  # of a result.json


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one seed."""

    task: str
    seed: int
    scores: Scores
    """Metrics of the best checkpoint, by split; the first metric of the first split chose it."""
    tests: Scores
    """Metrics of the test splits with labels, if data.predict_tests."""
    predictions: tuple[str, ...]
    """Files of predictions of the test splits."""
    best_step: int
    steps: int
    """Steps taken."""
    steps_per_epoch: int
    checkpoint: str
    """Folder of the best checkpoint."""
    seconds: float
    """Duration of the command that ended the run."""
    precision: str
    layout: dict[str, Any]
    depends_on: dict[str, Any]
    """The settings, and digests of weights, tokenizer and rows (inputs.py)."""
    config_digest: str
    versions: dict[str, str]
    warnings: tuple[str, ...] = ()
    """Lines on the predictions of the best checkpoint."""

    @classmethod
    def of(
        cls,
        config: FinetuneConfig,
        trainer: Trainer,
        progress: Progress,
        *,
        settings: dict[str, Any],
        steps_per_epoch: int,
        tests: Sequence[Scored],
        seconds: float,
    ) -> "Result":
        """Return the result of a finished run."""
        assert progress.best_step is not None, "the last step is validated"
        return cls(
            task=config.task.name,
            seed=config.seed,
            scores=progress.scores,
            tests={test.evaluation.split.name: test.metrics for test in tests if test.metrics},
            predictions=tuple(file for test in tests for file in test.files),
            best_step=progress.best_step,
            steps=trainer.step,
            steps_per_epoch=steps_per_epoch,
            checkpoint=str(best_folder(Path(config.out))),
            seconds=round(seconds, 1),
            precision=config.precision.dtype,
            layout={**asdict(config.parallel), "dp": trainer.ctx.dp.size},
            depends_on=settings,
            config_digest=config_digest(config),
            versions={"mlm": mlm.__version__, "torch": torch.__version__},
            warnings=tuple(progress.warnings),
        )

    @classmethod
    def read(cls, saved: Any) -> "Result":
        """Read the output of `asdict`. Raises UserError if it is not of this version."""
        if not isinstance(saved, dict):
            raise UserError("no result of a finetuning run")
        return from_dict(cls, saved)


def write_result(out: Path, result: Result) -> None:
    """Write result.json. Raises OSError."""
    write_atomic(out / RESULT, as_json(asdict(result)))


def finished(config: FinetuneConfig, settings: dict[str, Any]) -> Result | None:
    """Return the result of a finished run with these settings and all requested predictions; else None."""
    path = Path(config.out, RESULT)
    try:
        if path.stat().st_size > MAX_BYTES:
            return None
        found = Result.read(parse_json(path.read_bytes()))
        best = best_of(config.out)
    except (OSError, ValueError, RecursionError):  # none, damaged, or of another version: the run continues
        return None
    predicted = bool(found.predictions) and all(Path(file).exists() for file in found.predictions)
    is_whole = best != config.out and (predicted or not config.data.predict_tests)
    return replace(found, checkpoint=best) if found.depends_on == settings and is_whole else None


def report(config: FinetuneConfig, results: Sequence[Result], *, is_new: bool) -> None:
    """Print the table, and write the medians of several seeds to out/result.json. Raises UserError."""
    several = len(results) > 1
    title = f"finetune {config.task.name} · {plain(config.ckpt)}"
    made = table(title, *["seed"] * several, "split", "metric", "value#", "best step#")
    for result in results:
        rows(made, (result.seed,) * several, {**result.scores, **result.tests}, result.best_step)
    screen = console()
    if several:
        medians = medians_of([result.scores for result in results])
        tests = medians_of([result.tests for result in results])
        rows(made, ("median",), {**medians, **tests}, "")
        document = {
            "task": config.task.name,
            "seeds": [result.seed for result in results],
            "medians": medians,
            "test_medians": tests,
            "results": [asdict(result) for result in results],
        }
        with writing_to(config.out):
            claim_folder(config.out, "run", writes=(RESULT,))
            write_atomic(Path(config.out) / RESULT, as_json(document))
    if not is_new:
        screen.print(f"{plain(config.out)} is finished: set another out=… to train again")
    screen.print(made)
    screen.print(f"written to {plain(Path(config.out) / RESULT)}")
    errors = task_type(config.task.kind).errors
    best = max(results, key=lambda result: merit(result.scores, errors))
    screen.print(f"best checkpoint: {plain(best.checkpoint)}")
    for line in dict.fromkeys(line for result in results for line in result.warnings):
        screen.print(plain(line))
    for result in results:
        for file in result.predictions:
            screen.print(f"predictions: {plain(file)}")


def rows(made: Any, before: tuple[object, ...], scores: Scores, best_step: object) -> None:
    """Add a row to the table for each metric."""
    for split, metrics in scores.items():
        for name, value in metrics.items():
            add_row(made, *before, split, name, f"{value:.4f}", best_step)


def medians_of(found: Sequence[Scores]) -> Scores:
    """Return the median over the seeds of each metric (arXiv:1909.08053, section 5.3)."""
    return {
        split: {name: median(scores[split][name] for scores in found) for name in metrics}
        for split, metrics in found[0].items()
    }


def header(config: FinetuneConfig, trainer: Trainer, start: Start, examples: int) -> list[tuple[str, str]]:
    """Rows shown above the numbers."""
    train = config.train
    steps = trainer.config.train.steps // train.epochs
    origin = "transformers" if is_model_folder(start.named.path) else "mlm"
    return [
        run_row(config.name, Path(config.out)),
        ("task", f"{config.task.name}: {config.task.kind}, {', '.join(config.task.metrics)}"),
        model_row(trainer, f", {origin} weights"),
        layout_row(trainer, even_batches=False),
        (
            "batches",
            f"{examples:,} examples in {steps:,} steps of {train.global_batch_size}, {train.epochs} epochs; "
            f"texts of at most {start.max_length} tokens",
        ),
        ("precision", config.precision.dtype),
        ("seed", str(config.seed)),
        ("out", config.out),
    ]
