"""Definition of a finetuning task: its columns, labels, metrics and files.

Everything a task needs is here and in its type (mlm/finetune/task_type.py).
"""

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from mlm.config.fields import FRACTION, NOT_NEGATIVE, POSITIVE, Forbid, ImportPath

SHIPPED = {
    "classification": "mlm.finetune.classification:CLASSIFICATION",
    "regression": "mlm.finetune.classification:REGRESSION",
    "choice": "mlm.finetune.multiple_choice:CHOICE",
    "span": "mlm.finetune.span:SPAN",
    "chat": "mlm.finetune.chat:CHAT",
}
"""Import paths of the shipped types of task."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """A finetuning task: its rows, its metrics, and the files of predictions it submits."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str
    """Name of the task, such as sst2."""
    kind: Annotated[str, ImportPath(*SHIPPED)] = "classification"
    """Type of task: classification (one of `labels`), regression (a number), choice (one of a row's options),
    span (the words of a context that answer a question), chat (conversations), or a custom TaskType,
    package.module:NAME."""
    columns: tuple[str, ...]
    """Columns of the texts. classification, regression: one or two texts; choice: article, question, options;
    span: context, question; chat: messages, or else conversations, or prompt and completion."""
    label: str = "label"
    """Column of the label: its number, its name in `labels`, a number in label_range; of kind span the
    answers: text and answer_start."""
    id: str | None = "idx"
    """Column that names a row in files of predictions; rows are counted from 0 where there is none."""
    labels: tuple[str, ...] = ()
    """Names of the labels by number; of kind choice those of the options."""
    label_range: tuple[float, float] | None = None
    """Least and largest label of kind regression; null admits all numbers."""
    unanswerable: bool = False
    """Kind span: a question may have no answer in its context (SQuAD 2.0)."""
    allow_empty: bool = False
    """Take rows with an empty text; false names them and stops."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Metrics to report; the best checkpoint is chosen by the first. classification: accuracy, f1, macro_f1,
    accuracy_f1 (mean of both), matthews; regression: pearson, spearman, pearson_spearman (mean of both),
    mse, rmse, mae; choice: accuracy; span: f1, exact_match and, of the questions with and without an answer,
    has_answer_f1, has_answer_exact_match, no_answer_f1, which is also its exact match; chat: loss,
    perplexity. Of mse, rmse, mae, loss and perplexity less is better."""
    hub: str | None = None
    """Hub dataset that rows come from when no path is given: OWNER/NAME."""
    hub_config: str | None = None
    """Its configuration."""
    subsets: tuple[str, ...] = ()
    """Prefixes of the ids of the task's rows, such as middle and high of RACE; other rows are left out. Files
    may be in folders of these names. Empty takes all."""
    train: str = "train"
    """Split to train on."""
    validations: tuple[str, ...] = ("validation",)
    """Splits to validate on; the best checkpoint is chosen on the first."""
    tests: tuple[str, ...] = ("test",)
    """Splits to predict. They need no labels."""
    submission: tuple[str, ...] = ()
    """Names of the files of predictions of `tests`, in their order, without .tsv; a file is named after its
    split where there is none."""
    submit_names: bool = True
    """Submit the names of labels; false submits their numbers."""
    max_length: Annotated[int, POSITIVE] = 512
    """Maximum tokens of a sequence, special tokens included; at most the model's max_positions.

    Longer ones are truncated."""
    question_length: Annotated[int | None, POSITIVE] = None
    """Tokens kept of a question (kind span), or of a question with its option (kind choice); null keeps all
    that leave room for the rest."""
    doc_stride: Annotated[int, NOT_NEGATIVE] = 128
    """Kind span: tokens that two neighbouring windows of a context share."""
    max_answer_length: Annotated[int, POSITIVE] = 30
    """Kind span: most tokens of an answer."""
    answers: Literal["all", "last"] = "all"
    """Kind chat: the assistant's messages that the loss is taken on."""
    held_out: Annotated[float, FRACTION] = 0.05
    """Kind chat: share of a single file's conversations that are validated on, and not trained on; one at
    least."""
    n_best: Annotated[int, POSITIVE] = 20
    """Kind span: begins and ends of answers that are tried for each window, and answers that are kept."""
    null_threshold: float = 0.0
    """Kind span, unanswerable: how much the score of no answer must exceed that of the best answer."""
    lr: float = 2.0e-5
    """Peak learning rate: default of optimizer.lr."""
    weight_decay: float = 0.01
    """Default of optimizer.weight_decay."""
    epochs: int = 3
    """Default of train.epochs."""
    batch_size: int = 32
    """Rows per step: default of train.global_batch_size."""
    warmup: float = 0.06
    """Default of schedule.warmup."""
