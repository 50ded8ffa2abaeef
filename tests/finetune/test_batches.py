"""The rows of a step and micro-batches of a batch, each example once; the length of a run by its rows."""

import random
from itertools import chain
from math import ceil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.cli import main
from mlm.finetune.batches import Batcher, ExampleOrder, TaskBatch
from mlm.finetune.config import FinetuneConfig, FinetuneTrainConfig
from mlm.finetune.examples import Example, InputText
from mlm.finetune.inputs import choose_epochs_and_batch
from mlm.finetune.packing import Packer
from mlm.parallel.config import IGNORE_INDEX
from tests.finetune.chats import write_chats, write_llama
from tests.finetune.material import shipped
from tests.finetune.runs import read


def examples_of(count: int, texts: int = 1, longest: int = 30, seed: int = 0) -> list[Example]:
    """Examples of random lengths; the tokens of a text are the number of its example, from 1."""
    draw = random.Random(seed)

    def text(number: int) -> InputText:
        length = draw.randint(1, longest)
        return InputText(np.full(length, number + 1, dtype=np.int32), draw.randint(0, length))

    return [Example(n, tuple(text(n) for _ in range(texts)), n % 3) for n in range(count)]


@pytest.mark.parametrize("count, batch_size, sort_batches", [(1, 4, 50), (7, 7, 1), (23, 4, 2), (64, 8, 50)])
def test_an_epoch_has_each_example_once(count: int, batch_size: int, sort_batches: int) -> None:
    order = ExampleOrder(examples_of(count), batch_size=batch_size, sort_batches=sort_batches, seed=3)
    steps = order.steps_per_epoch
    assert steps == -(-count // batch_size)
    for epoch in range(3):
        batches = [order.batch(epoch * steps + n).tolist() for n in range(steps)]
        assert sorted(chain.from_iterable(batches)) == list(range(count))
        assert sorted(map(len, batches), reverse=True)[:-1] == [batch_size] * (steps - 1)


def test_epochs_and_seeds_have_other_orders() -> None:
    orders = [ExampleOrder(examples_of(23), batch_size=4, sort_batches=2, seed=seed) for seed in (1, 2)]
    drawn = [np.concatenate(order.epoch(number)).tolist() for order in orders for number in (0, 1)]
    assert all(drawn.count(each) == 1 for each in drawn)


def test_texts_of_a_batch_are_about_as_long() -> None:
    examples = examples_of(400)
    waste = {}
    for sort_batches in (1, 50):
        order = ExampleOrder(examples, batch_size=8, sort_batches=sort_batches, seed=0)
        batches = [[len(examples[n].texts[0]) for n in order.batch(step)] for step in range(50)]
        assert all(lengths == sorted(lengths, reverse=True) for lengths in batches)
        waste[sort_batches] = sum(max(b) * len(b) - sum(b) for b in batches)
    assert waste[50] * 10 < waste[1]


@pytest.mark.parametrize("texts", [1, 4])
@pytest.mark.parametrize(
    "count, budget, size, groups_of, multiple",
    [(9, 64, 1, 1, 1), (1, 64, 4, 1, 2), (10, 90, 3, 2, 2), (5, 7, 2, 4, 4)],
)
def test_a_batch_is_dealt_out_whole(
    count: int, budget: int, size: int, groups_of: int, multiple: int, texts: int
) -> None:
    """Also where ranks are more than rows, and where the longest text alone is more than the budget."""
    examples = examples_of(count, texts)
    numbers = sorted(range(count), key=lambda n: -max(map(len, examples[n].texts)))
    dealt = [
        Batcher(budget=budget, rank=rank, size=size, groups_of=groups_of, multiple=multiple).micro_batches(
            examples, numbers, first_sample=1 << 32
        )
        for rank in range(size)
    ]
    assert {len(batches) for batches in dealt} == {len(dealt[0])}
    assert len(dealt[0]) % groups_of == 0
    every = [batch for batches in dealt for batch in batches]
    assert sorted(n for batch in every for n in batch.examples) == list(range(count))
    (alone,) = Batcher(budget=1 << 40, rank=0, size=1).micro_batches(examples, numbers, first_sample=1 << 32)
    streams = [each for batch in every for each in dropout_streams(batch)]
    assert sorted(streams) == sorted(dropout_streams(alone))
    for batch in every:
        check_batch(batch, examples, budget, multiple, texts)


def dropout_streams(batch: TaskBatch) -> list[tuple[int, int]]:
    """(number of the masks of a text, its example), of those that are scored."""
    numbers = [(batch.first_sample + text, batch.sample(text)) for text in range(len(batch.tokens))]
    return [each for each in numbers if each[1] >= 0]


def check_batch(batch: TaskBatch, examples: list[Example], budget: int, multiple: int, texts: int) -> None:
    """Each text behind the other, padded to the longest; nothing scored that is not of this rank."""
    width = batch.tokens.shape[1]
    assert width % multiple == 0
    assert width - int(batch.lengths.max()) < multiple
    rows = max(1, len(batch.examples))
    assert rows == 1 or rows * texts * int(batch.lengths.max()) <= budget
    assert len(batch.tokens) == rows * texts
    if not batch.examples:
        assert set(batch.labels.tolist()) == {IGNORE_INDEX}
        return
    assert batch.labels.tolist() == [examples[n].label for n in batch.examples]
    there = [text for n in batch.examples for text in examples[n].texts]
    for row, types, length, text in zip(batch.tokens, batch.token_types, batch.lengths, there, strict=True):
        padding = [0] * (width - len(text))
        assert row.tolist() == [*text.tokens.tolist(), *padding]
        assert types.tolist() == [*(int(n >= text.second) for n in range(len(text))), *padding]
        assert length == len(text)


@pytest.mark.parametrize("kind", [Batcher, Packer])
@pytest.mark.parametrize("size, groups_of, multiple", [(3, 2, 4), (16, 1, 1)])
def test_an_evaluation_has_each_example_once(
    kind: type[Batcher], size: int, groups_of: int, multiple: int
) -> None:
    examples = examples_of(11)
    shared = {"budget": 60, "length": 30, "size": size, "groups_of": groups_of, "multiple": multiple}
    dealt = [list(kind(rank=rank, **shared).all_batches(examples)) for rank in range(size)]
    every = [batch for batches in dealt for batch in batches]
    assert sorted(n for batch in every for n in batch.examples) == list(range(11))
    assert all(batch.tokens.shape[1] % multiple == 0 for batch in every)
    assert {len(batches) for batches in dealt} == {len(dealt[0])}
    assert len(dealt[0]) % groups_of == 0


def fitted(task: str, rows: int, **train: Any) -> FinetuneTrainConfig:
    settings = FinetuneTrainConfig(**train)
    config = FinetuneConfig(name="n", out="o", ckpt="c", task=shipped(task), train=settings)
    return choose_epochs_and_batch(config, {config.task.train: range(rows)}).train  # type: ignore[dict-item]


@pytest.mark.parametrize(
    "task, rows, epochs, batch",
    [
        *(("chat", 1, 50, 4), ("chat", 57, 4, 4), ("chat", 800, 2, 32), ("chat", 1600, 2, 64)),
        *(("preferences", 100, 2, 4), ("preferences", 1600, 1, 32)),
    ],
)
def test_few_rows_take_smaller_batches_and_then_more_epochs_unless_typed(
    task: str, rows: int, epochs: int, batch: int
) -> None:
    train = fitted(task, rows)
    assert (train.epochs, train.global_batch_size) == (epochs, batch)
    assert epochs * ceil(rows / batch) >= 50
    train = fitted(task, rows, epochs=3, global_batch_size=64)
    assert (train.epochs, train.global_batch_size) == (3, 64)
    assert fitted("chat", 57, global_batch_size=64).epochs == 50
    assert fitted("chat", 57, epochs=1).global_batch_size == 4


def test_few_conversations_take_more_steps_without_a_warning(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With lora.rank alone: 60 steps at the rate of adapters."""
    words = [
        f"data={write_chats(tmp_path, train=57, validation=3)}",
        f"ckpt={write_llama(tmp_path / 'llama')}",
    ]
    words += ["dist.device=cpu", f"out={tmp_path / 'out'}", "lora.rank=8", "optimizer.lr=1e-2"]
    assert main(["finetune", "chat", *words]) == 0
    out = capsys.readouterr()
    assert "of training change little" not in out.out + out.err
    assert read(tmp_path / "out/result.json")["steps"] == 60
