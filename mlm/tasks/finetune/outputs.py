"""What a model says of all examples of a split, and what that scores."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mlm.config.downstream_schema import TaskConfig
from mlm.config.errors import UserError
from mlm.models.backbone import Transformer
from mlm.parallel.collectives import all_reduce
from mlm.tasks.finetune.answers import Output, Prediction
from mlm.tasks.finetune.batches import Dealing, TaskBatch
from mlm.tasks.finetune.examples import Example, Examples
from mlm.tasks.finetune.metrics import score
from mlm.tasks.finetune.objective import Finetuning
from mlm.tasks.finetune.predictions import predict
from mlm.tasks.finetune.rows import Split
from mlm.train.pipelined import PipelinedModel


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """A split and what is made of it."""

    split: Split
    examples: Examples
    dealing: Dealing


def outputs_of(
    model: PipelinedModel,
    objective: Finetuning,
    examples: Sequence[Example],
    dealing: Dealing,
    advance: Callable[[int], None] = lambda count: None,
) -> list[Output]:
    """The head's outputs for each example, float32 as `predict` takes them; the same on every rank.

    Every example goes through the model exactly once. Collective over all ranks. `advance` is told how many
    more examples are done.
    """
    sizes = [output_size(example, model) for example in examples]
    ends = np.cumsum(sizes)
    flat = torch.zeros(int(ends[-1]), dtype=torch.float64)  # each element is written by one rank

    def forward(chunk: Transformer, batch: TaskBatch, x: Tensor | None) -> Tensor:
        return chunk.outputs(objective.inputs(chunk, batch), None, x)

    def batches() -> Iterator[TaskBatch]:
        for step in dealing.all_batches(examples):
            yield from step

    for batch, result in model.evaluate(batches(), forward):
        advance(len(batch.examples) * dealing.size)
        if model.ctx.tp.rank:
            continue  # tp ranks know the same; one of them speaks
        rows = iter(result.cpu().double())
        for number in batch.examples:
            parts = [next(rows) for _ in examples[number].texts]
            mine = torch.stack(
                [
                    p[: len(t)] if p.dim() > 1 else p
                    for p, t in zip(parts, examples[number].texts, strict=True)
                ]
            )
            flat[ends[number] - sizes[number] : ends[number]] = mine.flatten()
    found = all_reduce(flat, model.ctx.world).numpy().astype(np.float32)
    return [
        shaped(part, example, model)
        for part, example in zip(np.split(found, ends[:-1]), examples, strict=True)
    ]


def output_size(example: Example, model: PipelinedModel) -> int:
    """Numbers that the head gives for an example."""
    config = model.chunks[0].config
    if config.head == "span":
        return 2 * len(example.texts[0])
    return config.num_labels * len(example.texts)


def shaped(part: Output, example: Example, model: PipelinedModel) -> Output:
    """The numbers of an example as `predict` takes them: [n, 2] of head=span, else [n]."""
    return part.reshape(-1, 2) if model.chunks[0].config.head == "span" else part


def evaluate(
    model: PipelinedModel,
    objective: Finetuning,
    task: TaskConfig,
    evaluation: Evaluation,
    advance: Callable[[int], None] = lambda count: None,
) -> tuple[dict[str, float], list[Prediction]]:
    """(metrics, none without labels; a prediction per row) of a split. Collective; the same on every rank.

    Raises UserError when the model's outputs are not finite.
    """
    split, examples = evaluation.split, evaluation.examples
    outputs = outputs_of(model, objective, examples, evaluation.dealing, advance)
    for number, output in enumerate(outputs):
        if not np.isfinite(output).all():
            place = split.places[examples[number].row]
            raise UserError(
                f"{place}: the model's outputs are not finite in {str(model.dtype).removeprefix('torch.')}: "
                "use another checkpoint, a lower optimizer.lr, or precision=fp32"
            )
    predictions = predict(task, split, examples, outputs)
    return (score(task, split, predictions) if split.has_labels else {}), predictions
