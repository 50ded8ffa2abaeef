"""Rows as a model reads them: one text or pair for most tasks, one per option, or windows over a context."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import overload

from mlm.data.tokenizer import Tokenizer
from mlm.errors import UserError
from mlm.finetune.kinds import KINDS
from mlm.finetune.making import Example
from mlm.finetune.rows import Split
from mlm.finetune.task_config import TaskConfig
from mlm.finetune.tokens import ModelKind, Text, frame

__all__ = ["Example", "Examples", "Text", "make_examples"]


@dataclass(frozen=True, kw_only=True)
class Examples(Sequence[Example]):
    """The examples of a split, in the order of its rows."""

    items: tuple[Example, ...]
    truncated: int
    """Rows that lost tokens because they were too long."""
    max_length: int
    """Tokens of a text at the most."""

    def __len__(self) -> int:
        return len(self.items)

    @overload
    def __getitem__(self, index: int) -> Example: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Example, ...]: ...
    def __getitem__(self, index: int | slice) -> Example | tuple[Example, ...]:
        return self.items[index]

    def __iter__(self) -> Iterator[Example]:
        return iter(self.items)

    def note(self, split: Split) -> str:
        """What was cut, in one line; empty when nothing was."""
        if not self.truncated:
            return ""
        return (
            f"{split.source}: {self.truncated:,} of {len(split):,} rows of {split.name} were cut to "
            f"{self.max_length} tokens"
        )


def make_examples(
    task: TaskConfig, split: Split, tokenizer: Tokenizer, *, kind: ModelKind, max_length: int
) -> Examples:
    """The tokenised examples of a split: at least one for each row, none left out.

    `max_length` counts special tokens. Raises UserError for a tokenizer without the special tokens, or when
    so few tokens leave no room for a text.
    """
    whole = frame(tokenizer, kind=kind, max_length=max_length)
    made = KINDS[task.kind]
    if whole.room(2) < (least := made.least_room(task)):
        raise UserError(
            f"task.max_length={max_length} leaves no room for texts: "
            f"set {least + max_length - whole.room(2)} or more"
        )
    items, truncated = list[Example](), 0
    for examples, was_cut in made.make(task, split.rows, tokenizer, whole):
        items += examples
        truncated += was_cut
    return Examples(items=tuple(items), truncated=truncated, max_length=max_length)
