"""Commands for a cluster: a folder for each run, and what the corpora that they read must be."""

from collections import Counter
from collections.abc import Sequence

PRETRAIN = "mlm pretrain "
MODEL = "model="
SENTENCES = "-bert"
"""End of the names of corpora for BERT."""


def with_places(experiment: str, commands: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Return (what it does, command line) pairs that can be typed one after another.

    A run's folder is named after its model unless `out` names one: runs that share a model receive one each,
    as the second would otherwise continue the first.
    """
    models = Counter(_word(line, MODEL) for _, line in commands if line.startswith(PRETRAIN))
    found = list[tuple[str, str]]()
    for number, (what, line) in enumerate(commands, 1):
        is_shared = line.startswith(PRETRAIN) and models[_word(line, MODEL)] > 1
        place = f" out=runs/{experiment}-{number}" if is_shared and not _word(line, "out=") else ""
        found.append((what + _corpus(what, line), line + place))
    return found


def _corpus(what: str, line: str) -> str:
    """Return what to build the corpus of a command with; "" if it reads none, or `what` says so."""
    build = "mlm data build"
    path = _word(line, "data.path=")
    if not path or build in what:
        return ""
    settings = " sentences=true append_eod=false" if path.endswith(SENTENCES) else ""
    return f"; data.path is a corpus by `{build}{settings}`"


def _word(line: str, key: str) -> str:
    """Return the value of a key in a command line; "" without it."""
    return next((word.removeprefix(key) for word in line.split() if word.startswith(key)), "")
