"""Habits of training programs that change a step's time."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Software:
    """The habits of a training program that change a step's time: of this one facts of its code.

    Of others partly guesses, made with published errors in view.

    The defaults are this toolkit. Passes count reads and writes of a tensor of activations in forward.
    """

    fused_attention: bool = True
    """True if scores never leave the chip."""
    score_passes: float = 5.0
    """Of scores: softmax, dropout. Unfused attention only."""
    branch_passes: float = 7.5
    """Of a residual branch's output: bias, dropout with its mask, addition."""
    norm_passes: float = 2.0
    """Of a norm's input and output."""
    activation_passes: float = 2.0
    """Of the MLP's activation."""
    dropout_passes: float = 0.0
    """Of a residual branch's output where it is dropped out, beyond `branch_passes`."""
    weight_bytes: float = 12.0
    """Bytes moved per weight and micro-batch besides the products: casts, addition to the gradient."""
    gathered_weight_bytes: float = 14.0
    """The same where sharded weights are gathered: they arrive cast."""
    table_bytes: float = 0.0
    """Bytes moved per element of the token table and micro-batch, to make and add its gradient."""
    optimizer_bytes: float = 46.0
    """Bytes moved per parameter and step: zeroing, norm, Adam, and the cast for the next step."""
    gradient_bytes: float = 4.0
    """Bytes of a gradient on the wire."""
    tied_bytes: float = 4.0
    """Bytes of a gradient of the token table between the pipeline's ends."""
    overlaps_tp: bool = True
    """True if the sum of an input's gradient hides behind the weight's gradient."""
    hidden_tp: float = 0.0
    """Share of all tensor-parallel communication hidden by splitting it beside its product (async TP)."""
    overlaps_dp: bool = True
    """True if gradients are reduced while backward runs."""
    splits_transfers: bool = False
    """True if tensor-parallel ranks send 1/t of a boundary each (arXiv:2104.04473, section 4.1)."""
    loss_in_forward: bool = True
    """True if the vocabulary projection's gradients are computed in forward."""
    selective_products: float | None = None
    """Share of forward's products that recompute=selective repeats, with all elementwise kernels; None for
    one that repeats attention alone, where it is not fused."""
    kernel_dtype: str | None = None
    """Dtype of the layers' products; None for that of activations."""


MLM = Software()
"""This toolkit on GPUs."""
MLM_ON_CPU = Software(
    branch_passes=3,  # an addition
    activation_passes=6,  # tanh is arithmetic
    dropout_passes=12,  # masks are hashes of their places, in integer kernels
    weight_bytes=12,
    table_bytes=16,
    overlaps_tp=False,
    overlaps_dp=False,
)
"""This toolkit on CPUs: the ratios of its kernels; `EfficiencyConfig.elementwise` has their speed."""
