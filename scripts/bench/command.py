"""Options that benchmarks share, and their end: a line for a mistake, no traceback for Ctrl-C."""

import argparse
from collections.abc import Callable

from rich.console import Console

from bench.stats import MIN_PAIRS
from mlm.util.errors import UserError


def add_round_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of rounds in which all contenders take turns."""
    add = parser.add_argument
    add("--pairs", type=int, default=MIN_PAIRS, help="pairs kept per comparison (default %(default)s)")
    add("--attempts", type=int, help="rounds at most, dropped pairs included (default 3 * pairs)")
    add("--seconds", type=float, default=10.0, help="rounds continue at least this long (%(default)s s)")


def guarded(name: str, run: Callable[[Console], int]) -> int:
    """Exit code of run(console): 0 a result, 1 a run with doubts; 2 a mistake or rejection, 130 Ctrl-C."""
    console = Console(stderr=True)
    try:
        return run(console)
    except UserError as error:
        console.print(f"{name}: {error}", style="bold red", markup=False, highlight=False, soft_wrap=True)
        return 2
    except KeyboardInterrupt:
        console.print(f"{name}: stopped; nothing was written", highlight=False)
        return 130
