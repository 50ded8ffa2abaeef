"""What a run is: frozen dataclasses, one per config group, one docstring per field.

Values come from the YAML in `configs/` and from the command line; `build.py` checks them.
"""

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from mlm.models.config import MASKED, Forbid, ModelConfig
from mlm.config.path_types import BlendEntry, CacheFolder, InputPath, OutFolder


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """Parallel degrees: tp * pp * dp = world size (arXiv:2104.04473, section 3)."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    tp: int = 1
    """Tensor-parallel size, t: ranks that split each layer. Must divide model.num_heads."""
    pp: int = 1
    """Pipeline-parallel size, p: ranks that hold consecutive layers. At most model.num_layers."""
    vp: int = 1
    """Virtual stages (chunks) per pipeline rank, v; more than 1 interleaves the schedule."""
    dp: int | None = None
    """Data-parallel size, d: replicas. null takes world size / (tp * pp)."""
    sequence_parallel: bool = False
    """Cut activations outside the tensor-parallel regions along the sequence too (arXiv:2205.05198)."""
    pipeline: Literal["1f1b", "gpipe", "zb_h1"] = "1f1b"
    """Pipeline schedule. 1f1b interleaves when vp > 1; zb_h1 puts weight gradients into the bubble."""
    zero: Literal[0, 2, 3] = 0
    """Sharded over dp replicas: 0 nothing, 2 optimizer state and reduced gradients, 3 weights too."""
    zero_reduce: Literal["last", "every"] = "last"
    """zero=2|3: reduce-scatter gradients in the last micro-batch of a step, until which the whole gradient is
    kept, or in every micro-batch, which keeps 1/dp of it."""
    recompute: Literal["none", "selective", "full"] = "none"
    """What backward computes again rather than keep: selective the attention matrices, full each layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay (arXiv:1909.08053, section 4.2)."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    lr: float = 1.5e-4
    """Peak learning rate."""
    betas: tuple[float, float] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: float = 1e-8
    """Added to the root of the second moment."""
    weight_decay: float = 0.01
    """Decoupled weight decay; biases and norm parameters have none."""
    clip_grad_norm: float = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up to optimizer.lr, then decay to min_lr."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    decay: Literal["cosine", "linear", "constant"] = "cosine"
    """Shape of the decay."""
    warmup_steps: int | None = None
    """Steps of linear warm-up from 0; null means a hundredth of train.steps, as in arXiv:1909.08053."""
    decay_steps: int | None = None
    """Step at which min_lr is reached; null means train.steps."""
    min_lr: float = 1e-5
    """Learning rate at decay_steps and after."""

    def warmup(self, steps: int) -> int:
        """Steps of warm-up in a run of `steps`."""
        return steps // 100 if self.warmup_steps is None else self.warmup_steps

    def decay_end(self, steps: int) -> int:
        """Step at which a run of `steps` reaches min_lr."""
        return self.decay_steps or steps


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Number format of compute. Master weights and optimizer state stay float32 (float64 under fp64)."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    dtype: Literal["fp32", "bf16", "fp16", "fp64"] = "fp32"
    """Format of activations and matrix products."""
    initial_loss_scale: float = 2.0**32
    """fp16: the loss is multiplied by this before backward."""
    min_loss_scale: float = 1.0
    """fp16: training aborts with a diagnosis when the scale would fall below."""
    loss_scale_window: int = 1000
    """fp16: the scale doubles after this many steps without overflow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Where tokens come from."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    kind: Literal["indexed", "synthetic"] = "indexed"
    """indexed reads Megatron's .bin/.idx; synthetic draws random tokens, for throughput runs."""
    path: InputPath | None = None
    """Corpus folder written by `mlm data build`: train.bin/.idx, validation.bin/.idx, tokenizer.json."""
    train: InputPath | None = None
    """Prefix of the training .bin/.idx; null means {path}/train."""
    validation: InputPath | None = None
    """Prefix of the validation .bin/.idx; null means {path}/validation, if it exists."""
    tokenizer: InputPath | None = None
    """tokenizer.json the corpus was written with; null means {path}/tokenizer.json, if it exists."""
    cache: CacheFolder | None = None
    """Folder of cached sample indices; null means a folder beside the corpus."""
    seq_length: int = 1024
    """Tokens per sample, S. At most model.max_positions."""
    blend: tuple[BlendEntry, ...] = ()
    """Corpora to mix, each `WEIGHT FOLDER` such as [0.3 corpora/wiki, 0.7 corpora/web], in place of path and
    train. Weights are scaled to sum to 1."""
    change: bool = False
    """Allow a resumed run other corpora or weights than before; what changed is recorded. Not kept for the
    next resume."""
    reset_positions: bool = False
    """Count positions anew after every end-of-document token."""
    reset_attention: bool = False
    """Let tokens attend only to their own document."""
    mask_eod_loss: bool = False
    """Do not score what follows an end-of-document token: the first token of the next document."""
    masked_lm_prob: float = MASKED
    """bert: share of a sample's tokens that are to be predicted."""
    short_seq_prob: float = 0.1
    """bert: share of samples made shorter than seq_length, so that the model learns to read such."""
    max_ngram: int = 3
    """bert: words masked together at the most; n with probability proportional to 1/n."""
    eod_id: int | None = None
    """The end-of-document token, for these three; null takes that of the corpus's receipt or tokenizer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainConfig:
    """How long and in what batches."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    steps: int = 300_000
    """Optimizer steps."""
    global_batch_size: int = 512
    """Samples per step over all data-parallel ranks. A multiple of dp * micro_batch_size."""
    micro_batch_size: int = 8
    """Samples one rank runs through the model at once, B; the rest are accumulated."""
    validate_every: int = 1000
    """Steps between validations; 0 turns them off. The last step is validated too."""
    validate_batches: int = 10
    """Global batches of validation samples per validation."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """When to save and what to keep."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    save_every: int = 1000
    """Steps between checkpoints; 0 saves only the last."""
    keep_last: int = 2
    """Newest checkpoints kept."""
    keep_every: int = 0
    """Checkpoints at multiples of this step are never deleted; 0 keeps none for ever."""
    resume: bool = True
    """Continue from the newest whole checkpoint in `out`; false refuses an `out` that already holds one."""
    asynchronous: bool = True
    """Copy the state to host memory and write it while training goes on; false waits for the disk."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogConfig:
    """What is reported while training. metrics.jsonl is always written."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    every: int = 10
    """Steps between logged lines; numbers leave the device only then."""
    live: Literal["auto", "on", "off"] = "auto"
    """Live panel: auto shows it on a terminal, plain lines elsewhere."""
    tensorboard: bool = False
    """Write TensorBoard events below out/tensorboard (needs the extra `mlm[tensorboard]`)."""
    wandb_project: str | None = None
    """Weights & Biases project to log to (needs the extra `mlm[wandb]`)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DistConfig:
    """Devices, process groups and launching."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto uses CUDA when a GPU is present."""
    backend: Literal["auto", "gloo", "nccl"] = "auto"
    """auto: nccl on CUDA, gloo on CPU."""
    timeout_s: float = 600.0
    """Seconds after which a collective that has not finished counts as hung."""
    checkpoint_timeout_s: float = 1800.0
    """Seconds after which a checkpoint that not all ranks have written counts as failed."""
    threads_per_rank: int | None = None
    """CPU threads of each rank; null shares the cores of this host among its ranks."""
    master_port: int = 0
    """TCP port the ranks of a plain launch meet on; 0 picks a free one."""
    peak_tflops: float | None = None
    """Peak TFLOP/s of one device that MFU is stated against; null takes the table for known GPUs."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainConfig:
    """The run spec of `mlm pretrain`: everything a rank needs to know."""

    __pydantic_config__: ClassVar[dict[str, str]] = Forbid

    name: str
    """Name of the run; the default of `out` is runs/{name}."""
    out: OutFolder
    """Run directory: config, checkpoints, metrics.jsonl, curves."""
    seed: int = 1234
    """Weights, dropout and sample order are functions of it."""
    ckpt: InputPath | None = None
    """Checkpoint or run directory to take initial weights and optimizer state from."""
    compile: bool = False
    """torch.compile each transformer layer."""
    model: ModelConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    log: LogConfig = field(default_factory=LogConfig)
    dist: DistConfig = field(default_factory=DistConfig)
