"""A split scored by the model as it is now, its predictions written where that is wanted."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mlm.errors import writing_to
from mlm.finetune.answers import Prediction
from mlm.finetune.batches import Dealing
from mlm.finetune.material import Evaluation
from mlm.finetune.objective import Finetuning
from mlm.finetune.outputs import evaluate
from mlm.finetune.submission import write_predictions
from mlm.finetune.task_config import TaskConfig
from mlm.train.pipelined import PipelinedModel


@dataclass(frozen=True, kw_only=True)
class Scored:
    """What came out of a split."""

    evaluation: Evaluation
    metrics: dict[str, float]
    """Empty for a split without labels."""
    files: tuple[str, ...]
    """Files of predictions; the main rank knows them."""
    predictions: Sequence[Prediction] = ()
    """One per row."""


def score_split(
    task: TaskConfig,
    evaluation: Evaluation,
    model: PipelinedModel,
    objective: Finetuning,
    dealing: Dealing,
    folder: Path | None,
) -> Scored:
    """Score a split, and write its predictions to `folder`. Collective over all ranks; raises UserError."""
    is_main = model.ctx.is_main
    metrics, predictions = evaluate(model, objective, task, evaluation, dealing, shown=is_main)
    files: list[Path] = []
    if folder is not None and is_main:
        with writing_to(str(folder)):
            files = write_predictions(task, evaluation.split, predictions, folder)
    return Scored(
        evaluation=evaluation, metrics=metrics, files=tuple(map(str, files)), predictions=predictions
    )
