"""The end of a benchmark: a line for a mistake, no traceback for Ctrl-C."""

from collections.abc import Callable

from rich.console import Console

from mlm.errors import UserError


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
