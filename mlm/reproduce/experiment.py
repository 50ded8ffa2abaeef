"""An experiment of a paper: command lines in one folder, and a function that concludes from their results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mlm.reproduce.conclusion import Conclusion
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.results import Results

ALL_CORES = 0
DIVERGED = r"gradients (still overflow|are not finite)"
NO_MEMORY = r"too much for the memory"
NO_LAYOUT = r"no layout fits"
"""Errors of `mlm` that say something about what is compared."""


@dataclass(frozen=True, kw_only=True)
class Step:
    """One command, run in the folder of `mlm reproduce`: all its paths are relative to that.

    Steps are shared by name: experiments that name the same step with the same words run it once.
    """

    name: str
    """Of its log and of its record, unique among all experiments' steps: `figure6-3m-seed1`."""
    words: tuple[str, ...]
    """`("mlm", "pretrain", …)`; `("python", …)` for this interpreter; or another program."""
    result: str
    """A file or run folder that it leaves: `results/NAME.json`, `runs/NAME`."""
    minutes: float
    """Minutes that it takes about, of the cores that it uses; for the time left."""
    cores: int = ALL_CORES
    """Cores that it keeps busy. Others run beside it on what it leaves. ALL_CORES: it runs alone, as all do
    that measure time."""
    needs: tuple[str, ...] = ()
    """Names of steps that come first; without any, the order of steps is not kept."""
    may_fail: str = ""
    """Pattern of the error that is a result too, such as DIVERGED; any other ends the experiment."""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One figure or table, as it is measured here."""

    name: str
    """As typed: `v1-figure6`."""
    title: str
    """A line: `Validation perplexity against model size`."""
    source: str
    """`Megatron-LM, arXiv:1909.08053, figure 6`."""
    claim: str
    """What the paper says, in a sentence, with its numbers."""
    minutes: float
    """Minutes that it takes at scale=laptop on two cores."""
    steps: Callable[[ReproduceConfig], Sequence[Step]]
    """Return its steps at a scale, those of other experiments that it shares included. At scale=paper they
    are `mlm plan …`: nothing is trained."""
    conclude: Callable[[Results], Conclusion]
    """Read the results and say what they show. Called only when all steps are done."""
