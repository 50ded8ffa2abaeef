"""Training on a type of task and scoring it: objective, outputs of all examples, predictions, metrics."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from mlm.finetune.batches import Batcher, TaskBatch, make_batcher
from mlm.finetune.chat import Preferences
from mlm.finetune.config import TaskConfig
from mlm.finetune.examples import Example
from mlm.finetune.packing import AnswerLoss, PairLoss
from mlm.finetune.registry import task_type
from mlm.finetune.splits import TaskSplit, TokenizedSplit
from mlm.finetune.task_type import Output, Prediction, TaskType
from mlm.models.backbone import Inputs, Transformer
from mlm.models.documents import padding_spans
from mlm.models.family import family_of
from mlm.optim.precision import DTYPES
from mlm.parallel.collectives import all_reduce, to_device
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.dropout import DropoutStream
from mlm.parallel.logits import loss_dtype
from mlm.parallel.mesh import ParallelContext
from mlm.training.pipelined import PipelinedModel
from mlm.training.pipelined import evaluate as mean_parts
from mlm.util.errors import CheckFailedError, writing_to
from mlm.util.files import write_atomic
from mlm.util.ownership import claim_folder
from mlm.util.terminal import progress_bar

NOT_FINITE = ": use another checkpoint, a lower optimizer.lr, or precision=fp32"


class ExampleLoss:
    """The objective of finetuning on a type of task: the mean loss per example."""

    metrics: tuple[str, ...] = ("loss",)
    num_losses = 1
    methods: tuple[str, ...] = ("outputs",)

    def __init__(self, kind: TaskType, ctx: ParallelContext, dtype: torch.dtype) -> None:
        self.loss, self.ctx, self.dtype = kind.loss, ctx, dtype

    def inputs(self, chunk: Transformer, batch: TaskBatch) -> Inputs:
        device, config = self.ctx.device, chunk.config
        spans = None
        if not family_of(config.kind).causal:  # in a causal model no token attends to padding
            spans = padding_spans(batch.lengths, batch.tokens.shape[1], self.dtype, device)
        tokens, lengths, types = (
            to_device(t, device) for t in (batch.tokens, batch.lengths, batch.token_types)
        )
        return Inputs(tokens, lengths, types if config.token_types > 1 else None, spans)

    def counts(self, batch: TaskBatch) -> Sequence[int]:
        labels = batch.labels
        if labels.is_floating_point():
            return (int((~labels.isnan()).sum()),)
        return (int((labels.reshape(len(labels), -1)[:, 0] != IGNORE_INDEX).sum()),)

    def output(
        self,
        chunk: Transformer,
        batch: TaskBatch,
        scale: Tensor,
        stream: DropoutStream | None,
        x: Tensor | None,
    ) -> Tensor:
        """Return hidden states, or in the last stage the scaled sum of the losses."""
        y = chunk.outputs(self.inputs(chunk, batch), stream, x)
        if not chunk.stage.is_last:
            return y
        labels, lengths = (to_device(t, y.device) for t in (batch.labels, batch.lengths))
        return scale * self.loss(y.to(loss_dtype(y.dtype)), labels, lengths)

    def sums(self, chunk: Transformer, batch: TaskBatch, x: Tensor | None) -> Tensor:
        scale = torch.ones(1, dtype=torch.float64, device=self.ctx.device)
        y = self.output(chunk, batch, scale, None, x)
        return y.double() if chunk.stage.is_last else y


Objective = ExampleLoss | AnswerLoss


def make_objective(task: TaskConfig, ctx: ParallelContext, dtype: torch.dtype) -> Objective:
    kind = task_type(task.kind)
    if isinstance(kind, Preferences):
        return PairLoss(ctx, dtype, task)
    return AnswerLoss(ctx, dtype) if kind.is_chat else ExampleLoss(kind, ctx, dtype)


@dataclass(frozen=True, kw_only=True)
class ScoredSplit:
    """Metrics and predictions of a split."""

    tokenized: TokenizedSplit
    metrics: dict[str, float]
    """Empty for a split without labels."""
    files: tuple[str, ...]
    """Files of predictions, on the main rank."""
    predictions: Sequence[Prediction] = ()
    """One per row."""


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """Scores splits of a task. Methods are collective over all ranks and return the same on each."""

    model: PipelinedModel
    objective: Objective
    task: TaskConfig
    batcher: Batcher

    @classmethod
    def of(cls, model: PipelinedModel, task: TaskConfig, *, batch_size: int, max_length: int) -> "Scorer":
        """Score with micro-batches of `batch_size` texts of `max_length` tokens."""
        objective = make_objective(task, model.ctx, model.dtype)
        batcher = make_batcher(model, batch_size, max_length, task_type(task.kind).batcher)
        return cls(model=model, objective=objective, task=task, batcher=batcher)

    def score(
        self, tokenized: TokenizedSplit, *, shown: bool = False
    ) -> tuple[dict[str, float], list[Prediction]]:
        """Return (metrics, empty without labels; a prediction per row, none of conversations) of a split.

        `shown` draws a bar. Raises CheckFailedError if the model's outputs are not finite.
        """
        split, task, objective = tokenized.split, self.task, self.objective
        if isinstance(objective, AnswerLoss):
            batches = self.batcher.all_batches(tokenized.examples)
            values = objective.scores(mean_parts(self.model, objective, batches)[0])  # type: ignore[arg-type]
            if not math.isfinite(values["loss"]):
                problem = f"the loss of split {split.name}, {split.source}, is not finite"
                raise CheckFailedError(f"{problem}{NOT_FINITE}")
            return {name: values[name] for name in task.metrics}, []
        with progress_bar(f"scoring {split.name}", len(tokenized.examples), shown=shown) as advance:
            predictions = self.predict(tokenized, advance)
        metrics = task_type(task.kind).score(task, split.rows, predictions) if split.has_labels else {}
        return metrics, predictions

    def predict(
        self, tokenized: TokenizedSplit, advance: Callable[[int], None] = lambda count: None
    ) -> list[Prediction]:
        """Return a prediction per row. Raises CheckFailedError if the model's outputs are not finite."""
        split, examples = tokenized.split, tokenized.examples
        outputs = self.compute_outputs(examples, advance)
        for example, output in zip(examples, outputs, strict=True):
            if not np.isfinite(output).all():
                precision = next(name for name, dtype in DTYPES.items() if dtype == self.model.dtype)
                location = split.locations[example.row]
                raise CheckFailedError(
                    f"the model's outputs of {location} are not finite in precision={precision}{NOT_FINITE}"
                )
        kind, predictions = task_type(self.task.kind), list[Prediction]()
        for row, pairs in groupby(zip(examples, outputs, strict=True), key=lambda pair: pair[0].row):
            predictions.append(kind.predict(self.task, split.rows[row], *zip(*pairs, strict=True)))
        assert len(predictions) == len(split), "every row has examples, in the order of the rows"
        return predictions

    def compute_outputs(
        self, examples: Sequence[Example], advance: Callable[[int], None] = lambda count: None
    ) -> list[Output]:
        """Return the head's outputs for each example in float32; `advance` receives counts of examples done.

        Every example runs through the model exactly once.
        """
        model, objective = self.model, self.objective
        assert isinstance(objective, ExampleLoss), "conversations have no predictions"
        spans = model.chunks[0].config.head == "span"
        width = 2 if spans else model.chunks[0].config.num_labels
        sizes = [width * (len(e.texts[0]) if spans else len(e.texts)) for e in examples]
        ends = np.cumsum(sizes)
        flat = torch.zeros(int(ends[-1]), dtype=torch.float64)  # each number is written by one rank

        def forward(chunk: Transformer, batch: TaskBatch, x: Tensor | None) -> Tensor:
            return chunk.outputs(objective.inputs(chunk, batch), None, x)

        for batch, result in model.evaluate(self.batcher.all_batches(examples), forward):
            advance(len(batch.examples) * self.batcher.size)
            if model.ctx.tp.rank:
                continue  # tp ranks have equal outputs
            rows = iter(result.cpu().double())  # of each text [num_labels], or [S, 2] with padding
            for number in batch.examples:
                output = torch.cat([next(rows) for _ in examples[number].texts])
                flat[ends[number] - sizes[number] : ends[number]] = output.flatten()[: sizes[number]]
        outputs = all_reduce(flat, model.ctx.world).numpy().astype(np.float32)
        return [part.reshape(-1, 2) if spans else part for part in np.split(outputs, ends[:-1])]

    def score_and_write(self, tokenized: TokenizedSplit, folder: Path | None) -> ScoredSplit:
        """Score a split; the main rank writes its predictions to `folder`. Raises UserError."""
        is_main = self.model.ctx.is_main
        metrics, predictions = self.score(tokenized, shown=is_main)
        files: list[Path] = []
        if folder is not None and is_main:
            with writing_to(str(folder)):
                files = write_predictions(self.task, tokenized.split, predictions, folder)
        names = tuple(map(str, files))
        return ScoredSplit(tokenized=tokenized, metrics=metrics, files=names, predictions=predictions)


def one_label_warning(task: TaskConfig, split: TaskSplit, predictions: Sequence[Prediction]) -> str | None:
    """Return a line on a classifier that predicts one label for all rows of a split with several."""
    labels, values = [row.label for row in split.rows], {prediction.value for prediction in predictions}
    if not (task.labels and split.has_labels) or len(values) != 1 or len(set(labels)) == 1:
        return None
    (value,) = values
    return (
        f"warning: all {len(labels):,} rows of {split.name} are predicted {task.labels[int(value)]}, the "
        f"label of {labels.count(value) / len(labels):.0%}; train longer, or with another optimizer.lr"
    )


def write_predictions(
    task: TaskConfig, split: TaskSplit, predictions: Sequence[Prediction], folder: Path
) -> list[Path]:
    """Write the predictions of a split below a folder and return the files. Raises OSError."""
    names = prediction_files(task, split.name)
    claim_folder(folder, "predictions", key="predictions", writes=names)
    contents = task_type(task.kind).contents(task, predictions)
    for name, content in zip(names, contents, strict=True):
        write_atomic(folder / name, content.encode())
    return [folder / name for name in names]


def prediction_files(task: TaskConfig, split: str) -> list[str]:
    stem = dict(zip(task.tests, task.submission, strict=False)).get(split, split)
    return task_type(task.kind).files(task, stem)
