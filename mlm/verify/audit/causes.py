"""Causes by kind of tensor and pattern: a short name, and the sentence with what to look at."""

CAUSES = {
    ("activation", "addends"): (
        "missing all-reduce{of}",
        "each {axis} rank has one addend, and their sum is right; sum it over {axis}{where}",
    ),
    ("activation", "times"): (
        "doubled all-reduce{of}",
        "it is {factor:.6g} times that of one process, and that of {before} is right; sum it over {axis} "
        "once between them, and in backward not again",
    ),
    ("activation", "divided"): (
        "averaged instead of summed",
        "it is {factor:.6g} times that of one process, and that of {before} is right; sum it over {axis} "
        "between them without a division",
    ),
    ("activation", "permuted"): (
        "shards permuted",
        "it holds the right numbers in another order; look at the order in which parts are put together "
        "(gather, scatter, all-to-all, order of ranks in the group), in backward too",
    ),
    ("activation", "shifted"): (
        "bias added on every rank",
        "it is right but for a shift of all rows; add the bias once, after the sum over {axis}",
    ),
    ("activation", "times and shifted"): (
        "doubled all-reduce",
        "but for a shift of all rows it is {factor:.6g} times right; sum over {axis} once before its bias",
    ),
    ("activation", "affine"): (
        "local statistics",
        "it is right but for a scale and a shift: a mean, variance or sum is that of a rank's part, to be "
        "reduced over the ranks that hold the others",
    ),
    ("activation", "scaled"): (
        "wrong divisor",
        "it is {factor:.6g} times that of one process, and that of {before} is right; look at what is "
        "multiplied or divided between them, in backward too",
    ),
    ("gradient", "addends"): (
        "gradients not summed",
        "those of {names} are of one {axis} rank alone, and their sum is right; sum them over {axis} (with "
        "sequence parallelism those of norms, whose inputs are split)",
    ),
    ("gradient", "mean"): (
        "gradients not reduced",
        "those of {names} are of one {axis} rank alone, and their mean is right; reduce them over {axis}",
    ),
    ("gradient", "times"): (
        "unscaled mean",
        "those of {names} are {factor:.6g} times those of one process; a sum over {axis} lacks its division "
        "or is made twice, or a bias is added before the sum",
    ),
    ("gradient", "scaled"): (
        "wrong divisor",
        "those of {names} are {factor:.6g} times those of one process; look at what the loss is divided by, "
        "and for a division too many",
    ),
}
CAUSES["gradient", "divided"] = CAUSES["gradient", "scaled"]
FORWARD = (
    "the forward pass differs; look at how weights are split (the order of the qkv rows), a sum over tp, "
    "positions (learned or rotary positions, of tp and cp ranks too), dropout masks, the order in which "
    "tokens come back from experts, the biases of routers, which move once a step, the capacity of experts, "
    "which is of a whole sequence, or which samples each replica reads"
)
"""Of a wrong loss where no output of a module was recorded."""
BACKWARD = (
    "{after} is right and {others}; look at what is done to the gradient of its layer's input (f, its sum "
    "over tp; its way to the stage before), of keys and values (its sum over cp), at a loss that a router "
    "adds (balance, z-loss), and at how gradients are kept and summed: over dp and cp, copies (norms, shared "
    "key-value heads) over tp, experts over the ranks that hold the same ones"
)
"""Of a wrong gradient there: the first in backward."""
