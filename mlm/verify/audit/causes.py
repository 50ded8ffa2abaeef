"""Patterns of numbers in words, and their causes by kind of tensor: a short name, and what to do."""

TIMES = "it is {factor:.6g} times that of one process{right}"
FACTS = {
    "addends": "each {axis} rank has one addend, and their sum is right",
    "mean": "each {axis} rank has its own, and their mean is right",
    "times": TIMES,
    "divided": TIMES,
    "scaled": TIMES,
    "permuted": "it holds the right numbers in another order",
    "shifted": "it is right but for a shift of all rows",
    "times and shifted": "it is {factor:.6g} times right, but for a shift of all rows",
    "affine": "it is right but for a scale and a shift",
}
CAUSES = {
    ("activation", "addends"): ("missing all-reduce{of}", "sum it over {axis}{where}"),
    ("activation", "times"): ("doubled all-reduce{of}", "sum it over {axis} once, in backward not again"),
    ("activation", "divided"): ("averaged instead of summed", "sum it over {axis} without a division"),
    ("activation", "scaled"): ("wrong divisor", "look at products and divisions between, in backward too"),
    ("activation", "permuted"): ("shards permuted", "look at gathers, all-to-alls, the order of ranks"),
    ("activation", "shifted"): ("bias added on every rank", "add it once, after the sum over {axis}"),
    ("activation", "times and shifted"): ("doubled all-reduce", "sum over {axis} once, before the bias"),
    ("activation", "affine"): ("local statistics", "a mean, variance or sum is of a rank's part: reduce it"),
    ("gradient", "addends"): ("gradients not summed", "sum them over {axis}, in sequence parallelism too"),
    ("gradient", "mean"): ("gradients not reduced", "reduce them over {axis}"),
    ("gradient", "times"): (
        "unscaled mean",
        "a sum over {axis} lacks its division or is made twice, or a bias is added before the sum",
    ),
    ("gradient", "divided"): ("wrong divisor", "look at divisions of the loss, and for one too many"),
    ("gradient", "scaled"): ("wrong divisor", "look at divisions of the loss, and for one too many"),
}
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
NEITHER = "it is no sum, mean, multiple or order of what ranks have"
"""Of a difference that no hypothesis reproduces."""
