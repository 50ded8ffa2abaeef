"""Settings of a training run: every section that a rank needs."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlm.config.fields import (
    NOT_NEGATIVE,
    POSITIVE,
    PROBABILITY,
    SEED,
    Aliases,
    Bound,
    CheckpointPath,
    ImportPath,
    ObserverEntry,
    OnlyIf,
    OutFolder,
    StoreFolder,
)
from mlm.data.config import DataConfig, MicroBatchSize
from mlm.launch.config import DistConfig
from mlm.models.config import LoraConfig, ModelConfig
from mlm.optim.config import EmaConfig, OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.tracking.config import LogConfig

SAMPLE_TOKENS = Bound(lambda x: 0 < x <= 4096, "1 to 4096")
TEMPERATURE = Bound(lambda x: 0 <= x <= 100, "0 to 100")
AttentionKernel = Literal["auto", "cudnn", "flash", "efficient", "math"]


FALSE_ALARM = Bound(
    lambda x: 0 <= x < 1 or x >= 1000, "1000 or more clean steps for a false alarm, or 0 for no outliers"
)
"""A number such as 10 is one of deviations, as other programs count: it would be an alarm every ten steps."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """Length of training, batch sizes and validation."""

    steps: Annotated[
        int,
        POSITIVE,
        Aliases("max_iters", "max_steps", "train_iters", "num_steps", "iterations", "num_train_steps"),
    ] = 300_000
    """Optimizer steps."""
    global_batch_size: Annotated[int, POSITIVE, Aliases("train_batch_size")] = 512
    """Samples per step over all data-parallel ranks. A multiple of dp * micro_batch_size."""
    ramp_batch: Annotated[tuple[int, int, int] | None, POSITIVE, Aliases("rampup_batch_size")] = None
    """Smaller steps first: [32,32,12000000] begins with 32 samples and grows by 32, evenly, until
    global_batch_size is reached after 12 million samples. Steps and the schedule count as ever."""
    micro_batch_size: MicroBatchSize = 8
    """Samples one rank runs through the model at once, B; the rest are accumulated."""
    validate_every: Annotated[
        int, NOT_NEGATIVE, Aliases("eval_interval", "eval_steps", "val_interval", "val_every")
    ] = 1000
    """Steps between validations; 0 turns them off. The last step is validated too."""
    validate_batches: Annotated[int, POSITIVE, OnlyIf("validate_every"), Aliases("eval_iters")] = 10
    """Global batches of validation samples per validation."""
    keep_best: Annotated[bool, OnlyIf("validate_every"), Aliases("load_best_model_at_end")] = False
    """Keep the weights of the lowest validation loss in out/best; the newest checkpoints stay. ckpt=RUN and
    ckpt=RUN/best name them, resume=RUN continues from the newest."""
    patience: Annotated[int, NOT_NEGATIVE, OnlyIf("validate_every"), Aliases("early_stopping_patience")] = 0
    """Stop after this many validations without a lower loss; 0 trains all steps."""
    sample_prompts: Annotated[tuple[str, ...], OnlyIf("validate_every")] = ()
    """Texts that the model continues at each validation, at most 64: sample_prompts=["The","ROMEO:"]. What it
    writes is in metrics.jsonl and in `mlm report`. Of models that read from left to right."""
    sample_tokens: Annotated[int, SAMPLE_TOKENS, OnlyIf("sample_prompts")] = 40
    """New tokens of each prompt, at most 4096. A pass each, as of a validation's micro-batch."""
    sample_temperature: Annotated[float, TEMPERATURE, OnlyIf("sample_prompts")] = 0.0
    """Draws below 1 prefer the probable tokens, above 1 the improbable; 0 takes the most probable one. Draws
    are a function of `seed`, and do not change the training."""
    observers: Annotated[tuple[ObserverEntry, ...], ImportPath()] = ()
    """Observers by import path, alone or with fields, which its class takes by name:
    observers=[my_module:Mine,{use: mlm.training.gradient_norms:GradientNorms, every: 10}]. Each is an
    `Observer` (mlm/training/observer.py), whose methods see each step; what it reports reaches every tracker.
    Shipped: gradient norms by layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Intervals of saving, and checkpoints to keep."""

    save_every: Annotated[int, NOT_NEGATIVE, Aliases("save_interval", "save_steps")] = 1000
    """Steps between checkpoints; 0 saves only the last."""
    keep_last: Annotated[int, POSITIVE] = 2
    """Newest checkpoints kept."""
    keep_every: Annotated[int, NOT_NEGATIVE] = 0
    """Checkpoints at multiples of this step are never deleted; 0 keeps none for ever."""
    resume: bool = True
    """Continue from the newest whole checkpoint in `out`; false rejects an `out` that already holds one."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training continues; false waits for the disk."""
    mirror: StoreFolder | None = None
    """s3://BUCKET/PREFIX of an S3-compatible store, to which each checkpoint is uploaded while training
    continues; `resume=` of it continues the run on any machine. One run to a prefix."""
    from_mirror: Annotated[bool, OnlyIf("mirror")] = False
    """Begin with the newest good checkpoint of the mirror if `out` lacks it, as resume=s3://… does. Not kept
    for the next resume."""
    from_step: Annotated[int | None, NOT_NEGATIVE, OnlyIf("from_mirror")] = None
    """Step of the checkpoint that from_mirror begins with, as resume=s3://…@STEP does; newer ones are set
    aside. null takes the newest good one. Not kept for the next resume."""
    from_run: CheckpointPath | None = None
    """Run, or checkpoint of one, that `out` continues until it has its own: set by resume=RUN out=NEW."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IncidentConfig:
    """Steps that go wrong, which leave a folder in out/incidents that `mlm replay` reads."""

    action: Literal["log", "skip", "rewind", "stop"] = "log"
    """Action after an incident: log only reports it; skip leaves out the update; rewind returns to the last
    good checkpoint, from the same incident to the one before, and leaves out the samples of the step; stop
    ends the run. Updates by gradients that are not finite are always left out."""
    threshold: Annotated[float, FALSE_ALARM] = 1e6
    """Steps in which a clean run reaches a loss or gradient norm once, by the tail of recent steps: such a
    number is an incident. 0 looks for numbers that are not finite only; between 0 and 1 each high number is
    one, for trials."""
    window: Annotated[int, POSITIVE] = 512
    """Recent steps from which that tail is estimated, in which the first 32 are not judged; and those with
    whose best losses the weights of each checkpoint are judged."""
    patience: Annotated[int, NOT_NEGATIVE] = 8
    """Steps in a row without finite gradients after which the run has diverged and ends; 0 never ends it."""
    keep: Annotated[int, NOT_NEGATIVE] = 16
    """Most incidents recorded in a run folder; later ones are a line in the log. Outliers, slow ranks and
    uneven loads may take half of the places, the others are for numbers not finite and bits that differ."""
    rewinds: Annotated[int, NOT_NEGATIVE, OnlyIf("action", "rewind")] = 8
    """Most returns to a checkpoint; further incidents end the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckConfig:
    """Comparisons that find silent corruption and slow ranks during training."""

    every: Annotated[int, NOT_NEGATIVE] = 500
    """Steps between comparisons of state that several ranks must hold bit for bit, besides one before each
    save; 0 never compares."""
    ranks_every: Annotated[int, NOT_NEGATIVE] = 100
    """Steps between lines that name the slowest rank and what it spends time on; 0 for none."""
    slow_factor: Annotated[float, POSITIVE, OnlyIf("ranks_every")] = 2.0
    """A rank that is busy this many times as long as the median of the others is an incident."""
    expert_steps: Annotated[int, NOT_NEGATIVE, OnlyIf("model.options.num_experts")] = 100
    """Steps in a row in which no token chooses an expert, or nearly every one does, that are an incident; 0
    for none. Judged in each step, reported in logged ones."""
    expert_share: Annotated[float, PROBABILITY, OnlyIf("expert_steps")] = 0.9
    """Tokens of the global batch from which nearly every one has chosen an expert: its router collapses."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """The run spec of `mlm pretrain`: everything a rank needs to know."""

    name: str
    """Name of the run; the default of `out` is runs/{name}."""
    out: OutFolder
    """Run directory: config, checkpoints, metrics.jsonl, curves."""
    seed: Annotated[int, SEED] = 1234
    """Weights, dropout and sample order are functions of it."""
    ckpt: CheckpointPath | None = None
    """Checkpoint or run directory, or model folder of transformers, whose weights a new run begins with: at
    step 0, with its own schedule and data."""
    compile: Annotated[bool | None, Aliases("torch_compile")] = None
    """torch.compile each transformer layer; null does on a GPU that has a compiler."""
    attention: Annotated[AttentionKernel, Aliases("attn_implementation")] = "auto"
    """Kernel of attention on a GPU; auto takes the first that can: cudnn (first on H100 and later; only where
    all micro-batches have one shape), flash, efficient, math. With flash, padding and data.reset_attention
    cost no bias: sequences are packed."""
    deterministic: Annotated[bool, Aliases("deterministic_mode")] = False
    """Kernels that repeat every bit, where a GPU's fastest (attention's backward pass) do not; an operation
    without one is an error. CPUs repeat theirs anyway."""
    exact: Literal[0, 2, 4, 8, 16] = 0
    """Make all sums in one order: losses, weights and moments are the same bit for bit at every layout whose
    tp, cp and dp divide this number, with any pp, vp, ep and zero. Each save then has a digest, which `mlm
    ckpt verify` shows too. On CPUs."""
    fuse_accumulation: Annotated[bool | None, Aliases("gradient_accumulation_fusion")] = None
    """Add a weight's gradient to the sum over micro-batches inside its product (addmm), not after it. null
    does on GPUs in half precision where a rank has several micro-batches and nothing conflicts."""
    cuda_graphs: bool | Literal["stack"] | None = None
    """Replay each compiled layer's launches as a CUDA graph: the host launches a layer at once, not some 100
    kernels. Of one rank's layers (tp=1, pp=1). It gains where the device waits for the host: 1.5 times the
    speed of GPT-2 124M with 8 sequences on an H200; with 32 it costs 1 %, 4 % at 1.2B. null does in
    pretraining where a layer is that small and nothing conflicts. stack captures all layers in one graph for
    each direction: fewer launches still, and no GPU has run it yet."""
    profile: bool = False
    """Write a trace of a few steps with named phases to out/profile, for Perfetto or chrome://tracing."""
    model: ModelConfig
    lora: LoraConfig = field(default_factory=LoraConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    ema: EmaConfig = field(default_factory=EmaConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    incident: IncidentConfig = field(default_factory=IncidentConfig)
    check: CheckConfig = field(default_factory=CheckConfig)
    dist: DistConfig = field(default_factory=DistConfig)
