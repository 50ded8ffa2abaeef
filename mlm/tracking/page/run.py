"""`mlm report`: read runs and write their page, once or while they go on."""

import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.text import Text

from mlm.launch.stop import Stopped, requests_raised
from mlm.tracking.history import FILE_NAME
from mlm.tracking.html.runs import RESULT, Run, RunReader, names_of
from mlm.tracking.page import terminal
from mlm.tracking.page.checks import choose
from mlm.tracking.page.config import ReportConfig
from mlm.tracking.page.page import make_page
from mlm.util.errors import visible
from mlm.util.results import named, write_result
from mlm.util.terminal import Screen, size

Sleep = Callable[[float], None]
WATCHED = (FILE_NAME, "config.yaml", "checkpoints", RESULT)


def run(config: ReportConfig, console: Console | None = None, sleep: Sleep = time.sleep) -> int:
    """Write the page of some runs; return the exit code. Raises UserError, CorruptFileError."""
    console = console or Screen()
    chosen = choose(config.runs)
    for problem in chosen.skipped:
        print(f"mlm report: skipped: {visible(problem)}", file=sys.stderr)
    reader = Reader(chosen.runs)
    if not config.watch:
        say(console, written(config, reader.read(), None))
        return 0
    with requests_raised():
        try:
            watch(config, reader, console, sleep)
        except KeyboardInterrupt:
            stop(config, reader, console)
            raise
        except Stopped as stopped:
            stop(config, reader, console)
            return stopped.exit_code
    say(console, f"all runs are finished; {written(config, reader.runs, None)}")
    return 0


def stop(config: ReportConfig, reader: "Reader", console: Console) -> None:
    """Write the page as it stays; a page of some runs only would replace an earlier one."""
    if len(reader.runs) == len(reader.folders):
        say(console, f"stopped; {written(config, reader.runs, None)}")


class Reader:
    """Reads runs, those again whose files have changed."""

    def __init__(self, folders: Sequence[str]) -> None:
        self.folders = list(dict.fromkeys(folders))
        names = names_of(self.folders)
        self.readers = {
            folder: RunReader(Path(folder), name) for folder, name in zip(self.folders, names, strict=True)
        }
        self.seen: dict[str, tuple[object, Run]] = {}

    @property
    def runs(self) -> list[Run]:
        """The runs as they were read last."""
        return [run for _, run in self.seen.values()]

    def read(self) -> list[Run]:
        """Return the runs as they are now. Raises UserError, CorruptFileError."""
        for folder, reader in self.readers.items():
            now = state_of(Path(folder))
            if folder not in self.seen or self.seen[folder][0] != now:
                self.seen[folder] = now, reader.read()
        return self.runs


def state_of(folder: Path) -> object:
    """Return what changes when a file of a run's page does."""
    found = []
    for path in [*(folder / name for name in WATCHED), *sorted(folder.glob("eval-*.json"))]:
        try:
            status = path.stat()
            found.append((path.name, status.st_size, status.st_mtime_ns, status.st_ino))
        except OSError:
            found.append((path.name, 0, 0, 0))
    return found


def watch(config: ReportConfig, reader: Reader, console: Console, sleep: Sleep) -> None:
    """Write the page and show the runs, again and again, until all are finished."""
    with ExitStack() as stack:
        live = None
        if console.is_terminal:
            live = stack.enter_context(Live(console=console, auto_refresh=False))
        before = dict[str, int]()
        while True:
            runs = reader.read()
            is_over = all(run.is_finished for run in runs)
            written(config, runs, None if is_over else config.every_s)
            if live is not None:
                live.update(terminal.overview(runs, ascii_only=console.options.ascii_only), refresh=True)
            else:
                for each in runs:
                    if before.get(each.name) != each.done:
                        say(console, terminal.line(each))
                    before[each.name] = each.done
            if is_over:
                return
            sleep(config.every_s)


def written(config: ReportConfig, runs: Sequence[Run], reload_s: float | None) -> str:
    """Write the page and return a line on it. Raises UserError."""
    page = make_page(runs, reload_s=reload_s)
    write_result(config.out, page, inputs=config.runs)
    return f"written to {named(config.out)} ({size(len(page))})"


def say(console: Console, line: str) -> None:
    """Print one line as it is."""
    console.print(Text(line), soft_wrap=True)
