"""Predictions of a split from the model's outputs for its examples."""

from collections.abc import Sequence
from itertools import groupby

from mlm.finetune.answers import Candidate, Output, Prediction
from mlm.finetune.examples import Examples
from mlm.finetune.kinds import KINDS
from mlm.finetune.rows import Split
from mlm.finetune.task_config import TaskConfig

__all__ = ["Candidate", "Output", "Prediction", "predict"]


def predict(
    task: TaskConfig, split: Split, examples: Examples, outputs: Sequence[Output]
) -> list[Prediction]:
    """One prediction per row of a split.

    `outputs[i]` is float32 and belongs to `examples[i]`: [labels] of kind classification, [1] of regression,
    [options] of choice, [n, 2] of span for the n tokens of its text, without padding.
    """
    assert len(outputs) == len(examples)
    decode = KINDS[task.kind].decode
    together = groupby(zip(examples, outputs, strict=True), key=lambda pair: pair[0].row)
    found = list[Prediction]()
    for row, pairs in together:
        assert row == len(found), "every row has examples, in the order of the rows"
        mine, of_mine = zip(*pairs, strict=True)
        found.append(decode(task, split.rows[row], mine, of_mine))
    assert len(found) == len(split)
    return found
