"""Steps of all contenders in turn: ABC, CBA, ABC, …, with a fixed product between any two."""

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count

from bench.machine import Probe
from bench.ranks import WARM_UP_STEPS, Ranks
from bench.stats import Measure, Round, Turn, pairs_of

Say = Callable[[str], None]

PATIENCE = 9
"""Times `seconds` that short rounds continue where a busy machine keeps few pairs."""
PROBE_SHARE, PROBE_MOST = 0.1, 0.2
"""Repeat the fixed product for this share of the step before it, at most for this many seconds.

Three runs of 5 ms could all fall into one slow spell, which a long step evens out.
"""


def take_rounds(
    contenders: Mapping[str, Ranks],
    opponents: Sequence[tuple[str, str]],
    probe: Probe,
    *,
    measures: Sequence[Measure],
    pairs: int,
    limit: int,
    seconds: float,
    say: Say,
) -> list[Round]:
    """Rounds, every second one in reverse, until each pair of opponents has its pairs.

    At least `pairs` rounds and `seconds`. At most `limit` rounds, or PATIENCE times `seconds` where that many
    take less. Of `measures` one must have its pairs.
    """
    rounds: list[Round] = []
    begin = time.perf_counter()
    backwards = dict(reversed(contenders.items()))
    for index in count(WARM_UP_STEPS):
        # one step of each on the same batch, every step between two probes
        turns, before = dict[str, Turn](), probe(PROBE_MOST)
        for name, ranks in (contenders if len(rounds) % 2 == 0 else backwards).items():
            timing = ranks.time(index, 1)
            after = probe(min(PROBE_MOST, PROBE_SHARE * timing.seconds))
            turns[name], before = Turn(name, timing, before, after), after
        rounds.append(turns)
        kept = min((kept_pairs(rounds, both, measures) for both in opponents), default=pairs)
        elapsed = time.perf_counter() - begin
        say(f"round {len(rounds)}, {elapsed:.0f} s: {kept} pairs kept")
        done = kept >= pairs and elapsed >= seconds
        if done or (len(rounds) >= limit and elapsed >= PATIENCE * seconds):
            return rounds
    raise AssertionError


def kept_pairs(rounds: Sequence[Round], both: tuple[str, str], measures: Sequence[Measure]) -> int:
    pairs = pairs_of(rounds, *both)
    return max(sum(pair.counts(measure) for pair in pairs) for measure in measures)
