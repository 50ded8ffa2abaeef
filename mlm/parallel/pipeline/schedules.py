"""Pipeline schedules: the order of each rank's actions. Pure Python.

Letters: p ranks (pp), v chunks per rank (vp), m micro-batches, r a rank. F, B and W are durations of one
micro-batch on one rank. Tests compare the stated bubbles and memory with lower().
"""

from mlm.parallel.pipeline.actions import Action, Op, Schedule
from mlm.util.errors import UserError

NAMES = ("1f1b", "gpipe", "zb_h1")


def build_schedule(name: str, *, stages: int, chunks: int, micro_batches: int) -> Schedule:
    """The schedule `name` (one of NAMES) for p = `stages` ranks, v = `chunks`, m = `micro_batches`.

    1f1b interleaves when `chunks` > 1. Raises UserError (a ValueError) that names setting and remedy for
    interleaving with m no multiple of p, and for zb_h1 with chunks.
    """
    assert name in NAMES, f"{name}: use one of {', '.join(NAMES)}"
    assert min(stages, chunks, micro_batches) > 0, f"{stages=} {chunks=} {micro_batches=}: at least 1 each"
    if name == "gpipe":
        return gpipe(stages, chunks, micro_batches)
    if chunks == 1:
        return (zb_h1 if name == "zb_h1" else one_f_one_b)(stages, micro_batches)
    if name == "zb_h1":
        raise UserError(
            f"vp={chunks}: parallel.pipeline=zb_h1 has one chunk per rank; set vp=1 or parallel.pipeline=1f1b"
        )
    return interleaved(stages, chunks, micro_batches)


def gpipe(p: int, v: int, m: int) -> Schedule:
    """All forwards, then all backwards (arXiv:2104.04473, section 2.2.1, figure 3).

    Bubble (p-1)/m; with chunks (p-1)/(v*m) if m >= p. In flight on every rank: all v*m.
    """
    forwards, backwards = _in_groups(Op.FORWARD, p, v, m), _in_groups(Op.BACKWARD, p, v, m)
    return tuple((*forwards, *backwards) for _ in range(p))


def one_f_one_b(p: int, m: int) -> Schedule:
    """PipeDream-Flush: p-r-1 forwards to warm up, then one forward, one backward (arXiv:2104.04473, 2.2.1).

    Bubble (p-1)/m, as GPipe's; in flight on rank r: min(p-r, m) micro-batches rather than m.
    """
    forwards, backwards = _in_groups(Op.FORWARD, p, 1, m), _in_groups(Op.BACKWARD, p, 1, m)
    return tuple(_alternate(forwards, backwards, warm_up=p - r - 1) for r in range(p))


def interleaved(p: int, v: int, m: int) -> Schedule:
    """Interleaved 1F1B (arXiv:2104.04473, section 2.2.2, figure 4): v chunks per rank.

    A group of p micro-batches goes through a rank's first chunk, then through its next; backward in reverse.

    Bubble (p-1)/(v*m). In flight on rank r: min((v+1)*p - 2*r - 1, v*m) pairs of chunk and micro-batch, each
    1/v of a rank's layers. Raises UserError if m is not a multiple of p.
    """
    if m % p:
        valid = [n for n in (m // p * p, (m // p + 1) * p) if n]
        remedy = " or ".join(f"micro_batches={n}" for n in valid)
        raise UserError(
            f"micro_batches={m} is not a multiple of pp={p}, which interleaving (vp={v}) needs; "
            f"use {remedy}, or vp=1"
        )
    forwards, backwards = _in_groups(Op.FORWARD, p, v, m), _in_groups(Op.BACKWARD, p, v, m)
    # One more warm-up forward per rank to the end would suffice if transfers took no time; the second hides
    # them. Rank 0 then holds p*v + p - 1 pairs, as in arXiv:2205.05198, section 4.2.3.
    return tuple(_alternate(forwards, backwards, warm_up=2 * (p - r - 1) + (v - 1) * p) for r in range(p))


def zb_h1(p: int, m: int) -> Schedule:
    """ZB-H1 (arXiv:2401.10241, section 2.1): 1F1B with weight gradients deferred into the bubble.

    Rank r computes W r backwards late: gradients go upstream sooner, and W fills the wait at the end. In
    flight on every rank, pending W included: min(p, m), the largest of 1F1B. F, B, W as in that paper (B is
    the input's gradient alone), a rank idles (p-1)(F + B) - (min(p, m) - 1) * min(F, B, W). Table 2's
    (p-1)(F + B - W) is the case m >= p with W the shortest; 1F1B idles (p-1)(F + B + W).
    """
    ranks = []
    for r, actions in enumerate(one_f_one_b(p, m)):
        order: list[Action] = []
        for action in actions:
            order.append(action)
            if action.op is Op.BACKWARD and action.micro_batch >= r:
                order.append(Action(Op.WEIGHT, 0, action.micro_batch - r))
        order += (Action(Op.WEIGHT, 0, i) for i in range(max(m - r, 0), m))
        ranks.append(tuple(order))
    return tuple(ranks)


def forward_only(p: int, v: int, m: int) -> Schedule:
    """Forwards alone, for evaluation: any p, v, m. Idle time (p-1) * F / v if m >= p."""
    forwards = tuple(_in_groups(Op.FORWARD, p, v, m))
    return (forwards,) * p


def _in_groups(op: Op, p: int, v: int, m: int) -> list[Action]:
    """`op` for all chunks and micro-batches: a group of micro-batches through every chunk, then the next.

    A group's first micro-batch is back from rank p-1 once p have left rank 0. So a group has at least p of
    them (p where p divides m) if there are that many. Backward goes through the chunks in reverse.
    """
    groups = max(m // p, 1)
    chunks = range(v) if op is Op.FORWARD else range(v - 1, -1, -1)
    return [
        Action(op, chunk, micro_batch)
        for group in range(groups)
        for chunk in chunks
        for micro_batch in range(m * group // groups, m * (group + 1) // groups)
    ]


def _alternate(forwards: list[Action], backwards: list[Action], *, warm_up: int) -> tuple[Action, ...]:
    """`warm_up` forwards (or all, if fewer), then forwards and backwards in turns, then more backwards."""
    warm_up = min(warm_up, len(forwards))
    turns = zip(forwards[warm_up:], backwards, strict=False)
    return (
        *forwards[:warm_up],
        *(action for turn in turns for action in turn),
        *backwards[len(forwards) - warm_up :],
    )
