"""The text of `mlm --help`, and the layout of all help: tables, examples, paragraphs."""

import shutil
import textwrap
from collections.abc import Iterable

from mlm.cli.commands import COMMANDS
from mlm.cli.compose.groups import takes_task, task_summaries

SPELLINGS = "key=value, --key=value and --key value mean the same. Values you type win over every group."
FLAGS = (
    ("--help", "this text; after it a section or key (model, tp) for all about it"),
    ("--check, --check=N", "check the settings for the GPUs of the layout, or for N, and start nothing"),
    ("--cfg job", "print the composed config and stop; --resolve fills in its interpolations"),
    ("--config-dir DIR", "add a folder of your own YAML, laid out like configs/; its choices are trusted"),
)
EXIT_CODES = (
    ("0", "done, or saved on SIGUSR1, the signal before a time limit"),
    ("1", "the run failed, or a file is damaged"),
    ("2", "a mistake in the command, its settings or its input: one line for each"),
    (
        "130, 143, 129",
        "stopped by Ctrl-C, SIGTERM or a hang-up: training has saved (as a rank of torchrun or srun it then "
        "ends with 0)",
    ),
)


def main_help(first: str | None = None) -> str:
    """Help of `mlm`, or of the commands that begin with one word (`mlm eval --help`)."""
    listed = [c for c in COMMANDS if first in (None, c.words[0])]
    blocks = [
        "mlm: Megatron-style model parallelism, small, readable and exact.",
        "Usage: mlm COMMAND [TASK] [key=value …]",
        "Commands:\n" + table((c.usage if takes_task(c) else c.name, c.summary) for c in listed),
        *([tasks_block(None)] if first and any(map(takes_task, listed)) else []),
        "Examples:\n" + example_lines([e for c in listed for e in c.example_pairs[: 2 if first else 1]]),
        wrap(f"Settings: {SPELLINGS} `mlm COMMAND --help` lists keys and groups."),
        "Exit codes:\n" + table(EXIT_CODES),
    ]
    return "\n\n".join(blocks)


def tasks_block(config_dir: str | None) -> str:
    return "Tasks:\n" + table(task_summaries(config_dir))


def example_lines(examples: Iterable[tuple[str, str]]) -> str:
    return "\n".join(f"  # {purpose}\n  {line}" for purpose, line in examples)


def table(rows: Iterable[tuple[str, str]]) -> str:
    """Two columns: names, and descriptions wrapped to the terminal."""
    pairs = list(rows)
    indent = max((len(name) for name, _ in pairs), default=0) + 4
    lines = []
    for name, meaning in pairs:
        wrapped = textwrap.wrap(meaning, max(_width() - indent, 30), break_on_hyphens=False) or [""]
        lines.append(f"  {name:<{indent - 2}}{wrapped[0]}".rstrip())
        lines += [" " * indent + line for line in wrapped[1:]]
    return "\n".join(lines)


def wrap(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), _width(), break_on_hyphens=False)


def _width() -> int:
    return min(shutil.get_terminal_size().columns, 110)
