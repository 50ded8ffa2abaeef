"""Token ids of the user's own datasets."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.config.imports import TRUST, OwnCodeError
from mlm.data.config import DataConfig
from mlm.data.sampler import CheckedDataset, Loader, eval_batches
from mlm.models.bert.samples import BERTSamples
from mlm.parallel.config import IGNORE_INDEX
from mlm.runs.corpora import dataset_without_corpus, train_dataset, validation_sets
from tests.training.test_trainer import config

VOCAB, SEQ = 64, 4


class Windows:
    """Samples of token 1, but for one place."""

    def __init__(self, value: int, sample: int = 5, position: int = 2, dtype: Any = np.int64) -> None:
        self.value, self.sample, self.position, self.dtype = value, sample, position, dtype

    def __len__(self) -> int:
        return 8

    def gather(self, sample_ids: Any) -> Any:
        ids = np.asarray(sample_ids)
        found = np.ones((len(ids), SEQ + 1), dtype=self.dtype)
        found[ids == self.sample, self.position] = self.value
        return found


class Blocks(Windows):
    def __init__(self, value: int, part: str) -> None:
        super().__init__(value)
        self.part = part

    def gather(self, sample_ids: Any) -> BERTSamples:
        ids = np.asarray(sample_ids)
        parts = {name: np.ones((len(ids), SEQ), dtype=np.int64) for name in ("tokens", "labels")}
        parts["labels"][:] = IGNORE_INDEX
        parts[self.part][ids == self.sample, self.position] = self.value
        zeros = np.zeros((len(ids), SEQ), dtype=np.int64)
        return BERTSamples(token_types=zeros, lengths=zeros[:, 0] + SEQ, is_swapped=zeros[:, 0], **parts)


def checked(dataset: Any) -> CheckedDataset:
    return CheckedDataset(dataset, "mine:dataset", VOCAB, SEQ)


@pytest.mark.parametrize(("value", "position"), [(VOCAB, 0), (-1, 2), (10**9, SEQ)])
def test_token_outside_the_vocabulary_is_named(value: int, position: int) -> None:
    with pytest.raises(OwnCodeError) as error:
        checked(Windows(value, position=position)).gather([4, 5, 6])
    assert str(error.value) == (
        f"data.kind=mine:dataset: sample 5 has token {value} at position {position}, and model.vocab_size=64"
        "; return ids from 0 to 63, or -100 where there is none, or raise model.vocab_size"
    )


@pytest.mark.parametrize(
    ("value", "part", "words"),
    [
        (VOCAB, "tokens", "has token 64 at position 2"),
        (IGNORE_INDEX, "tokens", "has token -100 at position 2"),
        (VOCAB, "labels", "has label 64 at position 2"),
        (-1, "labels", "has label -1 at position 2"),
    ],
)
def test_token_and_label_of_a_block_are_named(value: int, part: str, words: str) -> None:
    with pytest.raises(OwnCodeError, match=f"sample 5 {words}"):
        checked(Blocks(value, part)).gather([4, 5, 6])


@pytest.mark.parametrize("dataset", [Windows(0), Windows(VOCAB - 1), Windows(-100), Blocks(-100, "labels")])
def test_ids_of_the_vocabulary_and_places_without_a_token_are_read(dataset: Any) -> None:
    assert len(checked(dataset).gather([4, 5, 6])) == 3
    widened = checked(Windows(3, dtype=np.uint16)).gather([5])
    assert (widened.dtype, widened.tolist()) == (np.int64, [[1, 1, 3, 1, 1]])  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("returned", "words"),
    [
        (np.ones((2, SEQ), dtype=np.int64), "int64 of shape (2, 4); return whole numbers of shape (2, 5)"),
        (np.ones((2, SEQ + 1)), "returned float64 of shape (2, 5); return whole numbers"),
        ([[1] * 5] * 2, "gather() returned a list; return a NumPy array"),
    ],
)
def test_samples_of_another_form_are_rejected(returned: Any, words: str) -> None:
    class Other(Windows):
        def gather(self, sample_ids: Any) -> Any:
            return returned

    with pytest.raises(OwnCodeError, match=re.escape(words)):
        checked(Other(1)).gather([0, 1])


def test_training_and_validation_read_checked_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = "from tests.data.test_own_dataset import Windows\ndef build(data, **k): return Windows(64)\n"
    (tmp_path / "mine.py").write_text(source + "def nothing(data, **k): return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)
    monkeypatch.setenv(TRUST, "mine")
    model = replace(config().model, vocab_size=VOCAB)
    spec = replace(config(), data=DataConfig(kind="mine:build", seq_length=SEQ), model=model)
    train, validation = train_dataset(spec, 8), validation_sets(spec)[0].windows
    sizes = {"global_batch_size": 2, "micro_batch_size": 2, "rank": 0, "size": 1}
    with (
        Loader(train, consumed_samples=0, **sizes) as steps,
        pytest.raises(OwnCodeError, match=": sample 5 "),
    ):
        list(steps)
    with pytest.raises(OwnCodeError, match="validation sample 5 has token 64"):
        list(eval_batches(validation, micro_batch_size=2, rank=0, size=1))
    nothing = replace(spec, data=replace(spec.data, kind="mine:nothing"))
    with pytest.raises(OwnCodeError, match="returned None; return a Dataset"):
        dataset_without_corpus(nothing, 8, 0)
