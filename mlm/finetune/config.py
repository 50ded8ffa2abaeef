"""A finetuning task, and the run specs of `mlm finetune` and `mlm eval TASK`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlm.config.fields import (
    FRACTION,
    NOT_NEGATIVE,
    POSITIVE,
    SEED,
    Aliases,
    Bound,
    CheckpointPath,
    Columns,
    ImportPath,
    InputPath,
    OnlyIf,
    OutFolder,
    ResultFile,
)
from mlm.data.config import DataPath, MicroBatchSize
from mlm.launch.config import DistConfig
from mlm.models.config import LoraConfig
from mlm.optim.config import DECAY_NAMES, WARMUP_NAMES, MinLearningRate, OptimizerConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.runs.config import CheckConfig, IncidentConfig
from mlm.tracking.config import LogConfig

SHIPPED = ("classification", "regression", "choice", "span", "chat", "preferences")
"""Shipped types of task; registry.py has their objects."""
LABELLED = OnlyIf("task.kind", "classification", "regression", "choice", "span")
NAMED = OnlyIf("kind", "classification", "choice")
SPAN = OnlyIf("kind", "span")
CONVERSATIONS = OnlyIf("task.kind", "chat", "preferences")
TRAINS = OnlyIf("optimizer.kind")
"""Marks defaults of training, which evaluation does not read."""
PreferenceLoss = Literal["dpo", "ipo", "simpo", "orpo"]
REFERENCE_FREE = ("simpo", "orpo")
SMOOTHING = Bound(lambda x: 0 <= x < 0.5, "at least 0 and below 0.5")


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskConfig:
    """A finetuning task: its rows, its metrics, and the files of predictions it submits."""

    name: str
    """Name of the task, such as sst2."""
    kind: Annotated[str, ImportPath(*SHIPPED)] = "classification"
    """Type of task: classification (one of `labels`), regression (a number), choice (one of a row's options),
    span (the words of a context that answer a question), chat (conversations), preferences (a better and a
    worse answer), or a custom TaskType, package.module:NAME."""
    columns: tuple[str, ...]
    """Columns of the texts. classification, regression: one or two texts; choice: article, question, options;
    span: context, question; chat: messages, or else conversations, or prompt and completion."""
    label: Annotated[str, LABELLED] = "label"
    """Column of the label: its number, its name in `labels`, a number in label_range; for kind span the
    answers: text and answer_start."""
    id: str | None = "idx"
    """Column that names a row in files of predictions; rows are counted from 0 without one."""
    labels: Annotated[tuple[str, ...], NAMED] = ()
    """Names of the labels by number; for kind choice the names of the options."""
    label_range: Annotated[tuple[float, float] | None, OnlyIf("kind", "regression")] = None
    """Least and largest label of kind regression; null admits all numbers."""
    unanswerable: Annotated[bool, SPAN] = False
    """Kind span: a question may have no answer in its context (SQuAD 2.0)."""
    allow_empty: Annotated[bool, LABELLED] = False
    """Take rows with an empty text; false names them and stops."""
    metrics: tuple[str, ...] = ("accuracy",)
    """Metrics to report; the best checkpoint is chosen by the first. classification: accuracy, f1, macro_f1,
    accuracy_f1 (mean of both), matthews; regression: pearson, spearman, pearson_spearman (mean of both),
    mse, rmse, mae; choice: accuracy; span: f1, exact_match and, of the questions with and without an answer,
    has_answer_f1, has_answer_exact_match, no_answer_f1, which is also its exact match; chat: loss,
    perplexity; preferences: loss, accuracy, margin. Less is better of mse, rmse, mae, loss and perplexity."""
    hub: str | None = None
    """Hub dataset that rows come from when no path is given: OWNER/NAME."""
    hub_config: str | None = None
    """Its configuration."""
    subsets: tuple[str, ...] = ()
    """Prefixes of the ids of the task's rows, such as middle and high of RACE; other rows are left out. Files
    may be in folders of these names. Empty takes all rows."""
    train: str = "train"
    """Split to train on."""
    validations: tuple[str, ...] = ("validation",)
    """Splits to validate on; the best checkpoint is chosen on the first."""
    tests: tuple[str, ...] = ("test",)
    """Splits to predict. They need no labels."""
    submission: Annotated[tuple[str, ...], LABELLED] = ()
    """Names of the files of predictions of `tests`, in their order, without .tsv; a file is named after its
    split where there is none."""
    submit_names: Annotated[bool, NAMED] = True
    """Submit the names of labels; false submits their numbers."""
    max_length: Annotated[int, POSITIVE] = 512
    """Maximum tokens of a sequence, special tokens included; at most the model's max_positions.

    Longer ones are truncated."""
    question_length: Annotated[int | None, POSITIVE, OnlyIf("kind", "choice", "span")] = None
    """Maximum tokens of a question (kind span), or of a question with its option (kind choice); null allows
    all that leave room for the other text."""
    doc_stride: Annotated[int, NOT_NEGATIVE, SPAN] = 128
    """Kind span: tokens that two neighbouring windows of a context share."""
    max_answer_length: Annotated[int, POSITIVE, SPAN] = 30
    """Kind span: most tokens of an answer."""
    answers: Annotated[Literal["all", "last"], OnlyIf("kind", "chat")] = "all"
    """Kind chat: the assistant's messages that the loss is taken on."""
    held_out: Annotated[float, FRACTION, CONVERSATIONS] = 0.05
    """Kinds chat and preferences: share of a single file's rows that are validated on, and not trained on;
    one at least."""
    keep_nulls: Annotated[bool, CONVERSATIONS] = False
    """Kinds chat and preferences: keep nulls in tools, calls and their arguments; a table fills absent keys
    with them, and false removes them."""
    loss: Annotated[PreferenceLoss, OnlyIf("kind", "preferences")] = "dpo"
    """Kind preferences: dpo (arXiv:2305.18290), ipo (arXiv:2310.12036), and without a reference
    model simpo (arXiv:2405.14734) and orpo (arXiv:2403.07691)."""
    beta: Annotated[float, POSITIVE, OnlyIf("kind", "preferences")] = 0.1
    """Kind preferences: factor of rewards; tau of ipo, weight of the odds ratio of orpo. simpo takes
    2 to 10."""
    label_smoothing: Annotated[float, SMOOTHING, OnlyIf("loss", "dpo", "simpo")] = 0.0
    """Kind preferences, dpo and simpo: probability that an answer was preferred by mistake."""
    margin: Annotated[float, NOT_NEGATIVE, OnlyIf("loss", "simpo")] = 0.5
    """Kind preferences, simpo: reward by which a chosen answer is to lead (gamma)."""
    n_best: Annotated[int, POSITIVE, SPAN] = 20
    """Kind span: begins and ends of answers that are tried for each window."""
    null_threshold: Annotated[float, OnlyIf("unanswerable")] = 0.0
    """Kind span, unanswerable: margin by which the score of no answer must exceed the best answer's."""
    lr: Annotated[float, TRAINS] = 2.0e-5
    """Peak learning rate: default of optimizer.lr, ten times as much with adapters (lora.rank)."""
    weight_decay: Annotated[float, TRAINS] = 0.01
    """Default of optimizer.weight_decay."""
    epochs: Annotated[int, POSITIVE, TRAINS] = 3
    """Default of train.epochs."""
    batch_size: Annotated[int, POSITIVE, TRAINS] = 32
    """Rows per step: default of train.global_batch_size."""
    min_steps: Annotated[int, NOT_NEGATIVE, TRAINS] = 50
    """Steps for which few rows take smaller batches than batch_size, down to 4, then more than `epochs`."""
    warmup: Annotated[float, TRAINS] = 0.06
    """Default of schedule.warmup."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TaskDataConfig:
    """Source of a task's rows."""

    path: DataPath | None = None
    """Folder with a file per split (train.jsonl, validation.jsonl; also .json, .ndjson, .parquet, .csv, .tsv,
    .jsonl.gz, .bz2, .zst; train-00000-of-00002 and so on), or one file, of which chat holds out
    task.held_out; null means the Hub's task.hub."""
    columns: Columns = field(default_factory=dict)
    """Columns by the names that the task gives them: {prompt: instruction, chosen: better} reads the file's
    instruction as the prompt."""
    tokenizer: InputPath | None = None
    """tokenizer.json, or a folder that holds one; null takes the one saved with the checkpoint."""
    chat_template: Annotated[InputPath | None, CONVERSATIONS] = None
    """Jinja file with the chat template of task.kind=chat; chatml is built in; null takes the tokenizer's,
    and turns does too, with each answer rendered as the last message."""
    bad_rows: Literal["stop", "skip"] = "stop"
    """Rows that cannot be read or rendered: stop names the first ten of each split, skip trains on the others
    and lists them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneDataConfig(TaskDataConfig):
    """Source of a task's rows, and whether to predict its tests."""

    predict_tests: Annotated[bool, OnlyIf("task.tests")] = False
    """Write predictions of the task's test splits with the best checkpoint."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneTrainConfig:
    """Length of training and batch sizes."""

    epochs: Annotated[int | None, POSITIVE, Aliases("num_epochs", "num_train_epochs")] = None
    """Passes over the training rows; null takes task.epochs, or more for task.min_steps."""
    global_batch_size: Annotated[int | None, POSITIVE, Aliases("train_batch_size")] = None
    """Rows per step over all data-parallel ranks; the last step of an epoch has the remaining rows. null
    takes task.batch_size, or less for task.min_steps."""
    micro_batch_size: MicroBatchSize = 8
    """Texts of task.max_length tokens one rank runs through the model at once; more of shorter ones. The rest
    of a batch is accumulated."""
    sort_batches: Annotated[int, POSITIVE, LABELLED] = 50
    """Rows of this many batches are sorted by length before they are split into batches, so that little is
    padded; 1 leaves them in random order."""
    validate_every: Annotated[
        int | None, NOT_NEGATIVE, Aliases("eval_interval", "eval_steps", "val_interval", "val_every")
    ] = None
    """Steps between validations; null validates after every epoch. The last step is validated too."""
    patience: Annotated[int, NOT_NEGATIVE] = 0
    """Stop after this many validations in a row without a better score; 0 trains to the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneScheduleConfig:
    """Learning rate over steps: linear warm-up to optimizer.lr, then decay to min_lr at the last step.

    With min_lr=0 the last step repeats the rate of the step before.
    """

    decay: Annotated[Literal["cosine", "linear", "constant"], DECAY_NAMES] = "linear"
    """Shape of the decay."""
    warmup: Annotated[float, FRACTION, WARMUP_NAMES] = 0.06
    """Share of the steps that warm up."""
    min_lr: Annotated[MinLearningRate, OnlyIf("decay", "cosine", "linear")] = 0.0
    """Learning rate at the end."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneCheckpointConfig:
    """Intervals of saving, and checkpoints to keep. The best by the first metric is kept in out/best."""

    save_every: Annotated[int, NOT_NEGATIVE, Aliases("save_interval", "save_steps")] = 0
    """Steps between checkpoints to resume from; 0 saves after each validation."""
    keep_last: Annotated[int, POSITIVE] = 1
    """Newest checkpoints kept, in addition to the best."""
    resume: bool = True
    """Continue from the newest whole checkpoint in `out`; false rejects an `out` that already holds one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneConfig:
    """The run spec of `mlm finetune`."""

    name: str
    """Name of the run; the default of `out` is runs/{name}."""
    out: OutFolder
    """Run directory: config, checkpoints, metrics.jsonl, result.json, predictions."""
    ckpt: CheckpointPath
    """Model to begin with: checkpoint (step-…), run directory, or Hugging Face folder or id (BERT, GPT-2)."""
    seed: Annotated[int, SEED] = 1234
    """The new head, dropout and the order of rows are functions of it."""
    seeds: Annotated[int, POSITIVE] = 1
    """Runs with the seeds seed, seed + 1, …, each in out/seed-…; the median of their scores is reported
    (arXiv:1909.08053, section 5.3)."""
    dropout: Annotated[float | None, FRACTION, Aliases("resid_pdrop", "embd_pdrop", "dropout_rate")] = None
    """Dropout of hidden states and of attention; null takes the checkpoint's."""
    compile: bool = False
    """torch.compile each transformer layer."""
    profile: bool = False
    """Write a trace of a few steps with named phases to out/profile, for Perfetto or chrome://tracing."""
    task: TaskConfig
    data: FinetuneDataConfig = field(default_factory=FinetuneDataConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    train: FinetuneTrainConfig = field(default_factory=FinetuneTrainConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: FinetuneScheduleConfig = field(default_factory=FinetuneScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    checkpoint: FinetuneCheckpointConfig = field(default_factory=FinetuneCheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    incident: IncidentConfig = field(default_factory=IncidentConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    dist: DistConfig = field(default_factory=DistConfig)


@dataclass(frozen=True, kw_only=True, slots=True)
class EvalTaskConfig:
    """The run spec of `mlm eval TASK`: score a finetuned checkpoint, or write its predictions."""

    ckpt: CheckpointPath
    """Output of `mlm finetune`: its run directory (the best checkpoint), or a checkpoint (step-…); or a
    Hugging Face folder or id with a head for such a task."""
    out: ResultFile | None = None
    """JSON file for the scores; null means eval-<task>.json in the run directory."""
    split: str | None = None
    """Split to score; null scores task.validations. A split without labels is only predicted."""
    predictions: OutFolder | None = None
    """Folder for the predictions, in the form of a submission; null writes none, unless the split has
    no labels: then predictions next to `out`."""
    batch_size: MicroBatchSize = 8
    """Texts of task.max_length tokens per micro-batch on each rank; more of shorter ones. No score depends on
    it."""
    task: TaskConfig
    data: TaskDataConfig = field(default_factory=TaskDataConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    dist: DistConfig = field(default_factory=DistConfig)
