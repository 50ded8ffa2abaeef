"""Settings of the optimizer, its schedule and the precision of compute."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from mlm.config.fields import FRACTION, NOT_NEGATIVE, POSITIVE, Aliases, ImportPath, OnlyIf, Options, exact

OPTIMIZERS = ImportPath("adamw", "muon")
DECAYS = ImportPath("cosine", "linear", "constant", "inverse_sqrt")
STABLE_DECAYS = ("constant", "inverse_sqrt")
"""Decays that do not depend on the length of the run: a cooldown may begin at any step."""
STABLE = OnlyIf("decay", *STABLE_DECAYS)
DECAY_NAMES = Aliases("lr_decay_style", "lr_scheduler_type", "scheduler")
MinLearningRate = Annotated[float, NOT_NEGATIVE, Aliases("min_learning_rate", "lr_min")]
WARMUP_NAMES = Aliases("warmup_iters", "num_warmup_steps", "lr_warmup_iters")
WARMUP_SHARE_NAMES = Aliases("warmup_ratio", "warmup_fraction", "lr_warmup_fraction")
HALF = OnlyIf("dtype", "bf16", "fp16", "fp8")
FP16 = OnlyIf("dtype", "fp16")


@dataclass(frozen=True, kw_only=True, slots=True)
class MuonConfig:
    """Muon (Jordan et al. 2024, kellerjordan.github.io/posts/muon): momentum of matrices made orthogonal."""

    matrices: str = "layers.*"
    """Names of the weights that Muon updates, of two and more dimensions; AdamW updates the rest."""
    momentum: Annotated[float, FRACTION] = 0.95
    """Decay rate of the average of gradients."""
    nesterov: bool = True
    """Look a step ahead: average the gradient with its average once more."""
    scale: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """Factor of an update by its matrix's shape, as torch.optim.Muon names it: match_rms_adamw is
    0.2 sqrt(max(rows, columns)), so that learning rate and decay are AdamW's (arXiv:2502.16982, section 2.2);
    original is sqrt(max(1, rows / columns)), whose rates are about a hundred times AdamW's."""
    ns_steps: Annotated[int, POSITIVE] = 5
    """Newton-Schulz iterations."""
    ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315)
    """a, b, c of an iteration X <- a X + (b A + c A A) X with A = X X^T; Jordan's, as in torch.optim.Muon."""
    per_head: bool = False
    """Orthogonalise the queries, keys and values of each head separately, not all heads together."""
    dtype: Literal["auto", "bf16", "fp32"] = "auto"
    """Format of the iterations; auto is bf16 on GPUs and on processors that multiply it faster, else fp32.
    With precision=fp64 they are in float64."""
    adamw_lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate of what AdamW updates; null means optimizer.lr."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """Adam with decoupled weight decay (arXiv:1909.08053, section 4.2), Muon, or an optimizer of your own."""

    kind: Annotated[str, OPTIMIZERS] = "adamw"
    """adamw; muon, for the matrices of layers, with adamw for the rest; or your own by its import path: a
    class derived from torch.optim.Optimizer, called as Lion(groups, lr=lr, **options), or a function, called
    as build(groups, config), that returns one. Either declares elementwise = True if the update of an element
    reads no other; else tp=1 pp=1 zero=0."""
    lr: Annotated[float, POSITIVE, Aliases("learning_rate", "max_lr", "base_lr", "peak_lr")] = 1.5e-4
    """Peak learning rate."""
    betas: Annotated[tuple[float, float], FRACTION] = (0.9, 0.999)
    """Decay rates of the first and second moment."""
    eps: Annotated[float, POSITIVE, Aliases("adam_eps", "adam_epsilon", "epsilon")] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: Annotated[float, NOT_NEGATIVE, Aliases("wd")] = 0.01
    """Decoupled weight decay; biases and norm parameters have none."""
    cautious_decay: Annotated[bool, Aliases("cautious_weight_decay")] = False
    """Decay an element only where its update moves it towards 0, too (arXiv:2510.12402, algorithm 1)."""
    clip_grad_norm: Annotated[
        float, NOT_NEGATIVE, Aliases("grad_clip", "clip_grad", "max_grad_norm", "gradient_clip_val")
    ] = 1.0
    """Largest global L2 norm of the gradient; 0 turns clipping off."""
    embedding_lr: Annotated[float | None, POSITIVE] = None
    """Peak learning rate of the tables of tokens, positions and segments; null means the other weights'."""
    groups: tuple[str, ...] = ()
    """Other rates or decay of some parameters, by patterns of their names of which the first that fits
    counts: groups=["*.mlp.* lr_scale=0.5","*.bias lr=1e-3 weight_decay=0.1"]. lr_scale is a factor of the
    rate that it would have, lr its peak."""
    muon: Annotated[MuonConfig, OnlyIf("kind", "muon")] = field(default_factory=MuonConfig)
    options: Options = field(default_factory=dict)
    """Settings of an optimizer of your own, by name; adamw and muon have none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Learning rate over steps: linear warm-up to optimizer.lr, then decay to min_lr."""

    decay: Annotated[str, DECAYS, DECAY_NAMES] = "cosine"
    """Shape of the decay: cosine, linear, constant or inverse_sqrt (lr sqrt(warmup_steps / step), as in
    arXiv:1706.03762); or a function of your own by its import path, my_package.my_module:decay.
    decay(progress, **options), with progress from 0 after the warm-up to 1 at decay_steps, is the share of
    the way from min_lr up to optimizer.lr: 0 to 1."""
    warmup_steps: Annotated[int | None, NOT_NEGATIVE, WARMUP_NAMES] = None
    """Steps of linear warm-up from 0; null means the share schedule.warmup of train.steps."""
    warmup: Annotated[float, FRACTION, OnlyIf("warmup_steps", None), WARMUP_SHARE_NAMES] = 0.01
    """Share of train.steps that warms up where warmup_steps is null; a hundredth as in arXiv:1909.08053."""
    decay_steps: Annotated[
        int | None, POSITIVE, OnlyIf("decay", "cosine", "linear"), Aliases("lr_decay_iters", "decay_iters")
    ] = None
    """Step at which min_lr is reached; null means train.steps, whose last step repeats the rate of the step
    before where min_lr=0."""
    min_lr: MinLearningRate = 1e-5
    """Learning rate at decay_steps and after; at the end of a cooldown; the least of inverse_sqrt."""
    cooldown: Annotated[
        int | None, NOT_NEGATIVE, STABLE, Aliases("lr_wsd_decay_iters", "num_decay_steps")
    ] = None
    """Last steps of the run, in which the rate falls to min_lr, of decay=constant or inverse_sqrt; null means
    the share schedule.cooldown_share of train.steps. For a run that is resumed, without
    train.steps: the next so many steps, the last of the run."""
    cooldown_share: Annotated[float, FRACTION, OnlyIf("cooldown", None)] = 0.0
    """Share of train.steps that cools down where cooldown is null."""
    cooldown_shape: Annotated[Literal["linear", "1-sqrt"], STABLE, Aliases("lr_wsd_decay_style")] = "1-sqrt"
    """The share of the rate that is left after a share x of the cooldown: 1 - x, or 1 - sqrt(x)
    (arXiv:2405.18392, section 3)."""
    options: Options = field(default_factory=dict)
    """Settings of a decay of your own, by name; the shipped ones have none."""

    def warmup_end(self, steps: int) -> int:
        """Step at which the warm-up of a run of `steps` ends."""
        if self.warmup_steps is not None:
            return self.warmup_steps
        return int(steps * exact(self.warmup))

    def decay_end(self, steps: int) -> int:
        """Step at which a run of `steps` reaches min_lr."""
        return self.decay_steps or steps

    def cooldown_start(self, steps: int) -> int:
        """Step of a run of `steps` after which the rate cools down; `steps` if it does not."""
        cooldown = int(steps * exact(self.cooldown_share)) if self.cooldown is None else self.cooldown
        return max(0, steps - cooldown)


@dataclass(frozen=True, kw_only=True, slots=True)
class EmaConfig:
    """Exponential moving average of the weights: sharded, saved and resumed as the optimizer's state is."""

    decay: Annotated[float, FRACTION, Aliases("ema_decay")] = 0.0
    """Share of the average that an update keeps: 0.999 averages about the last thousand. 0 keeps none. `mlm
    reshard ema=true` writes it as a checkpoint of its own."""
    validate: Annotated[bool, OnlyIf("decay")] = False
    """Validate the average too: validation/ema_loss in metrics.jsonl, by which train.keep_best then keeps the
    average, and train.patience ends the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """Number format of compute. Master weights and optimizer state stay float32 (float64 under fp64)."""

    dtype: Annotated[
        Literal["fp32", "tf32", "bf16", "fp16", "fp8", "fp64"], Aliases("mixed_precision", "torch_dtype")
    ] = "fp32"
    """Format of activations and matrix products; tf32: float32, multiplied with 10-bit mantissas;
    fp8: bf16 whose linear layers multiply 8-bit floats, on an H100 or later."""
    cast: Annotated[Literal["step", "use"], HALF] = "step"
    """Cast of parameters to a half format: once for all micro-batches of a step, which takes 2 bytes a
    parameter, or at every use. No effect where zero=2|3 gathers them in that format."""
    initial_loss_scale: Annotated[float, POSITIVE, FP16] = 2.0**32
    """fp16: the loss is multiplied by this before backward."""
    min_loss_scale: Annotated[float, POSITIVE, FP16] = 1.0
    """fp16: training aborts with a diagnosis when the scale would fall below."""
    loss_scale_window: Annotated[int, POSITIVE, FP16] = 1000
    """fp16: the scale doubles after this many steps without overflow."""
