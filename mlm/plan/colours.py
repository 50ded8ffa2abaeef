"""Colours of a computation: one hue per op as in arXiv:2104.04473, figure 4, later chunks lighter."""

from mlm.parallel.pipeline.actions import Action, Op

HUES = {Op.FORWARD: (43, 108, 176), Op.BACKWARD: (39, 119, 73), Op.WEIGHT: (192, 86, 33)}
LIGHTEST = 0.65  # share of white in the last chunk's colour


def fill(action: Action, num_chunks: int) -> str:
    """The colour of a computation's cell, as #rrggbb."""
    white = LIGHTEST * action.chunk / max(num_chunks - 1, 1)
    return "#" + "".join(f"{round(value + white * (255 - value)):02x}" for value in HUES[action.op])


def ink(colour: str) -> str:
    """Black or white, whichever reads better on a colour given as #rrggbb."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#000000" if 0.299 * red + 0.587 * green + 0.114 * blue > 140 else "#ffffff"
