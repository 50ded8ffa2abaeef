"""A benchmark script described by its options, its measurement and its tables."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console, RenderableType
from rich.table import Table

from bench.machine import machine_facts
from mlm.util.errors import UserError
from mlm.util.files import write_atomic
from mlm.util.terminal import add_row, table

Result = dict[str, Any]
Say = Callable[[str], None]


@dataclass(frozen=True)
class Bench:
    """A benchmark: `main` parses, measures, prints the tables and writes the JSON file of --out."""

    name: str
    """Of the script, without .py."""
    doc: str
    """Text of --help."""
    add_options: Callable[[argparse.ArgumentParser], None]
    measure: Callable[[argparse.Namespace, Say], Result]
    tables: Callable[[Result], Iterable[RenderableType]]
    is_success: Callable[[Result], bool] = lambda result: True
    packages: tuple[str, ...] = ("torch",)
    """Packages whose versions the record holds."""
    epilog: str = ""

    def parse(self, arguments: Sequence[str] | None) -> argparse.Namespace:
        """The options. Exits with 2 after a mistake."""
        parser = argparse.ArgumentParser(
            prog=f"{self.name}.py",
            description=self.doc,
            epilog=self.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self.add_options(parser)
        parser.add_argument("--out", type=Path, help="JSON file for machines")
        return parser.parse_args(arguments)

    def main(self, arguments: Sequence[str] | None = None) -> int:
        """Exit code: 0 a result, 1 one with doubts or below its target, 2 a mistake, 130 Ctrl-C."""
        log = Console(stderr=True)
        words = sys.argv[1:] if arguments is None else list(arguments)
        threads = torch.get_num_threads()
        try:
            args = self.parse(arguments)
            if args.out is not None and not args.out.parent.is_dir():
                raise UserError(f"--out {args.out}: its folder does not exist")
            result = self.record(args, words, lambda line: log.print(line, highlight=False, markup=False))
        except UserError as error:
            text = f"{self.name}: {error}"
            log.print(text, style="bold red", markup=False, highlight=False, soft_wrap=True)
            return 2
        except SystemExit as end:  # argparse: --help, or an unknown option
            return int(end.code or 0)
        except KeyboardInterrupt:
            log.print(f"{self.name}: stopped; nothing was written", highlight=False)
            return 130
        finally:
            torch.set_num_threads(threads)
        screen = Console(width=None if sys.stdout.isatty() else 150)
        for part in self.tables(result):
            screen.print(part, highlight=False, soft_wrap=isinstance(part, str))
        if args.out is not None:
            write_atomic(args.out, (json.dumps(result, indent=1) + "\n").encode())
        return 0 if self.is_success(result) else 1

    def record(self, args: argparse.Namespace, words: Sequence[str], say: Say) -> Result:
        measured = self.measure(args, say)
        # without the folders of this machine
        names = (Path(word).name if Path(word).is_absolute() else word for word in words)
        command = [f"scripts/{self.name}.py", *names]
        when = datetime.now(UTC).isoformat(timespec="seconds")
        return {"command": command, "when": when, "machine": machine_facts(self.packages), **measured}


def positive(word: str) -> int:
    """Type of an option: a whole number above 0."""
    number = int(word)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{word} must be at least 1")
    return number


def table_of(headings: Sequence[str], rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """Rows of text; every column but the first is aligned at its right."""
    made = table(title, headings[0], *(f"{heading}#" for heading in headings[1:]))
    for row in rows:
        add_row(made, *row)
    return made
