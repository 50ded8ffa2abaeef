"""What a model says of all examples of a split, and what that scores."""

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from mlm.errors import UserError
from mlm.finetune.answers import Output, Prediction
from mlm.finetune.batches import Dealing, TaskBatch
from mlm.finetune.examples import Example
from mlm.finetune.material import Evaluation
from mlm.finetune.metrics import score
from mlm.finetune.objective import Finetuning
from mlm.finetune.predictions import predict
from mlm.finetune.task_config import TaskConfig
from mlm.models.backbone import Transformer
from mlm.parallel.collectives import all_reduce
from mlm.terminal import count_progress
from mlm.train.pipelined import PipelinedModel


def dealing_of(model: PipelinedModel, micro_batch_size: int, max_length: int) -> Dealing:
    """How batches are cut for this rank of a model: micro-batches of so many texts of `max_length` tokens."""
    ctx = model.ctx
    return Dealing(
        budget=micro_batch_size * max_length,
        rank=ctx.dp.rank,
        size=ctx.dp.size,
        groups_of=ctx.pp.size,
        multiple=ctx.tp.size if model.chunks[0].sequence_parallel else 1,
    )


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
    spans = model.chunks[0].config.head == "span"
    width = 2 if spans else model.chunks[0].config.num_labels
    sizes = [width * (len(e.texts[0]) if spans else len(e.texts)) for e in examples]
    ends = np.cumsum(sizes)
    flat = torch.zeros(int(ends[-1]), dtype=torch.float64)  # each number is written by one rank

    def forward(chunk: Transformer, batch: TaskBatch, x: Tensor | None) -> Tensor:
        return chunk.outputs(objective.inputs(chunk, batch), None, x)

    def batches() -> Iterator[TaskBatch]:
        for step in dealing.all_batches(examples):
            yield from step

    for batch, result in model.evaluate(batches(), forward):
        advance(len(batch.examples) * dealing.size)
        if model.ctx.tp.rank:
            continue  # tp ranks know the same; one of them speaks
        rows = iter(result.cpu().double())  # of each text [num_labels], or [S, 2] with padding
        for number in batch.examples:
            mine = torch.cat([next(rows) for _ in examples[number].texts])
            flat[ends[number] - sizes[number] : ends[number]] = mine.flatten()[: sizes[number]]
    found = all_reduce(flat, model.ctx.world).numpy().astype(np.float32)
    return [part.reshape(-1, 2) if spans else part for part in np.split(found, ends[:-1])]


def evaluate(
    model: PipelinedModel,
    objective: Finetuning,
    task: TaskConfig,
    evaluation: Evaluation,
    dealing: Dealing,
    *,
    shown: bool = False,
) -> tuple[dict[str, float], list[Prediction]]:
    """(metrics, none without labels; a prediction per row) of a split. Collective; the same on every rank.

    `shown` draws a bar. Raises UserError when the model's outputs are not finite.
    """
    split, examples = evaluation.split, evaluation.examples
    with count_progress(f"scoring {split.name}", len(examples), shown=shown) as advance:
        outputs = outputs_of(model, objective, examples, dealing, advance)
    for number, output in enumerate(outputs):
        if not np.isfinite(output).all():
            raise UserError(
                f"{split.places[examples[number].row]}: the model's outputs are not finite in "
                f"precision={str(model.dtype).removeprefix('torch.')}: use another checkpoint, a lower "
                "optimizer.lr, or precision=fp32"
            )
    predictions = predict(task, split, examples, outputs)
    return (score(task, split, predictions) if split.has_labels else {}), predictions
