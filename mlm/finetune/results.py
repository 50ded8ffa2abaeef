"""Results of finetuning: the best checkpoint, result.json of each seed, the median over seeds, and tables.

A run directory has two folders of checkpoints: `checkpoints`, to resume from, and `best/checkpoints`, weights
alone with the validations up to them. A run that is resumed takes the same steps again, and with them the
same best ones; its result is read from the checkpoint in `best`.
"""

from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from mlm.checkpoint.native.folders import BEST, CHECKPOINTS, latest_checkpoint
from mlm.checkpoint.native.run_state import FINETUNING
from mlm.checkpoint.native.save_load import read_manifest
from mlm.config.build import from_dict
from mlm.convert.source import ModelFolder
from mlm.finetune.config import FinetuneConfig
from mlm.finetune.inputs import StartModel
from mlm.finetune.registry import task_type
from mlm.training.loop import layout_row, model_row, run_row
from mlm.training.trainer import Trainer
from mlm.util.errors import CorruptFileError, writing_to
from mlm.util.files import dump_json, parse_json, write_atomic
from mlm.util.ownership import claim_folder
from mlm.util.terminal import add_row, console, one_line, table

DATA_PATH = "data.path"
"""Key in the state of the absolute path of the rows; null for the Hub."""
DATA_COLUMNS = "data.columns"
"""Key in the state of the file's columns by the task's."""
BAD_ROWS = "data.bad_rows"
"""Key in the state of data.bad_rows."""
BASE = "base"
"""Key in the state of the name of the model before finetuning: an id of the Hub, or a run's name."""

Scores = dict[str, dict[str, float]]
"""Metrics by split."""


@dataclass
class Progress:
    """The validations of a run so far."""

    best_step: int | None = None
    """Step of the best score; None before the first validation."""
    scores: Scores = field(default_factory=dict)
    """Metrics of that step."""
    merit: float = 0.0
    without_gain: int = 0
    """Validations since then."""
    tokens: int = 0
    """Tokens trained on, padding left out."""

    def add(self, step: int, scores: Scores, errors: Collection[str] = ()) -> bool:
        """Add a validation; return True if it is the best by the first metric of the first split.

        The earlier of equals is the best; less is better for a metric in `errors`.
        """
        value = merit(scores, errors)
        if self.best_step is None or value > self.merit:
            self.best_step, self.scores, self.merit, self.without_gain = step, scores, value, 0
            return True
        self.without_gain += 1
        return False

    @classmethod
    def read(cls, checkpoint: Path) -> "Progress":
        state: Any = read_manifest(checkpoint).state
        try:
            return from_dict(cls, state[FINETUNING]["progress"])
        except (KeyError, TypeError, ValueError) as error:
            problem = f"{checkpoint}: its state is not a finetuning run's of this version ({error!r})"
            raise CorruptFileError(f"{problem}; use the version of mlm that saved it") from error


def merit(scores: Scores, errors: Collection[str] = ()) -> float:
    """Return the score that the best checkpoint maximises: the first metric, negative for an error."""
    name, value = next(iter(next(iter(scores.values())).items()))
    return -value if name in errors else value


def resolve_best(ckpt: str) -> str:
    """Return the folder of a finetuning run's best checkpoint; any other path as it is."""
    best = Path(ckpt, BEST)
    return ckpt if latest_checkpoint(best / CHECKPOINTS) is None else str(best)


RESULT = "result.json"


@dataclass(frozen=True, kw_only=True)
class Result:
    """Content of result.json for one seed."""

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
    notes: tuple[str, ...] = ()
    """Rows left out or rewritten."""


def read_finished_result(config: FinetuneConfig, settings: dict[str, Any]) -> Result | None:
    """Return the result of a finished run with these settings and all requested predictions; else None."""
    try:
        result = from_dict(Result, parse_json(Path(config.out, RESULT).read_bytes()))
        best = resolve_best(config.out)
    except (OSError, ValueError, RecursionError):  # missing or damaged: the run continues
        return None
    predicted = bool(result.predictions) and all(Path(file).exists() for file in result.predictions)
    is_whole = best != config.out and (predicted or not config.data.predict_tests)
    return replace(result, checkpoint=best) if result.depends_on == settings and is_whole else None


def report(config: FinetuneConfig, results: Sequence[Result], *, is_new: bool) -> None:
    is_several = len(results) > 1
    lines: list[tuple[object, Scores, object]] = [
        (result.seed, {**result.scores, **result.tests}, result.best_step) for result in results
    ]
    if is_several:
        medians = median_scores([result.scores for result in results])
        tests = median_scores([result.tests for result in results])
        lines.append(("median", {**medians, **tests}, ""))
        document = {
            "task": config.task.name,
            "seeds": [result.seed for result in results],
            "medians": medians,
            "test_medians": tests,
            "results": [asdict(result) for result in results],
        }
        with writing_to(config.out):
            claim_folder(config.out, "run", writes=(RESULT,))
            write_atomic(Path(config.out) / RESULT, dump_json(document))
    title = f"finetune {config.task.name} · {one_line(config.ckpt)}"
    grid, screen = table(title, *["seed"] * is_several, "split", "metric", "value#", "best step#"), console()
    for seed, scores, best_step in lines:
        for split, metrics in scores.items():
            for name, value in metrics.items():
                add_row(grid, *(seed,) * is_several, split, name, f"{value:.4f}", best_step)
    if not is_new:
        screen.print(f"{one_line(config.out)} is finished: set another out=… to train again")
    screen.print(grid)
    screen.print(f"written to {one_line(Path(config.out) / RESULT)}")
    errors = task_type(config.task.kind).errors
    best = max(results, key=lambda result: merit(result.scores, errors))
    screen.print(f"best checkpoint: {one_line(best.checkpoint)}")
    for result in results:
        for file in result.predictions:
            screen.print(f"predictions: {one_line(file)}")


def median_scores(scores_by_seed: Sequence[Scores]) -> Scores:
    return {
        split: {name: median(scores[split][name] for scores in scores_by_seed) for name in metrics}
        for split, metrics in scores_by_seed[0].items()
    }


def header(
    config: FinetuneConfig, trainer: Trainer, start: StartModel, examples: int
) -> list[tuple[str, str]]:
    train, epochs = config.train, config.train.epochs
    assert epochs, "set by choose_epochs_and_batch"
    steps = trainer.config.train.steps // epochs
    origin = "transformers" if isinstance(start.source, ModelFolder) else "mlm"
    return [
        run_row(config.name, Path(config.out)),
        ("task", f"{config.task.name}: {config.task.kind}, {', '.join(config.task.metrics)}"),
        model_row(trainer, f", {origin} weights"),
        layout_row(trainer, even_batches=False),
        (
            "batches",
            f"{examples:,} examples in {steps:,} steps of {train.global_batch_size}, {epochs} epochs; "
            f"texts of at most {start.max_length} tokens",
        ),
        ("precision", config.precision.dtype),
        ("seed", str(config.seed)),
        ("out", config.out),
    ]
