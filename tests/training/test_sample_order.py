"""No sample is seen twice or skipped when dp and the micro-batch change on resume.

A real corpus, the loader of the training loop for each replica, and a consumed-sample counter that travels
through checkpoints. What is listed are the ids that the loaders read of each step, and the tokens they got.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from mlm.checkpoint.native.save_load import latest_checkpoint
from mlm.cli.pretrain.run import PretrainLoop
from mlm.data.gpt import GPTDataset
from mlm.data.indexed import IndexedDataset
from mlm.data.sampler import Loader
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.training.state import load
from mlm.training.trainer import Trainer
from tests.data.corpora import counting_corpus
from tests.ranks import run_on_ranks
from tests.slow import thinned
from tests.training.saving import save
from tests.training.test_trainer import config

SEQ, GLOBAL_BATCH, STEPS = 4, 8, 12
DOCUMENTS = [30, 45, 20, 35, 20]
"""Their 150 tokens make 37.5 windows an epoch: twelve steps of eight samples end in the third epoch."""

Step = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]
"""Samples of a step: their ids, and their tokens."""


class Leg(NamedTuple):
    """Steps at one layout, up to a checkpoint."""

    dp: int
    micro_batch: int
    steps: int
    lost: int = 0
    """Steps done after the checkpoint, which a kill takes back."""


JOURNEYS = {
    "dp 2, 4, 1": [Leg(2, 2, 4), Leg(4, 1, 3), Leg(1, 8, 5)],
    "dp 4, 1, 2": [Leg(4, 2, 1), Leg(1, 1, 4), Leg(2, 4, 7)],
    "dp 2, 4, 1 with kills between saves": [Leg(2, 2, 4, lost=1), Leg(4, 1, 3, lost=2), Leg(1, 8, 5)],
    "dp 1, other micro-batches": [Leg(1, 4, 5, lost=3), Leg(1, 2, 7)],
}


class Recording:
    """A dataset that notes the ids of each call. A loader calls once for each step."""

    def __init__(self, dataset: GPTDataset) -> None:
        self.dataset, self.calls = dataset, list[list[int]]()

    def __len__(self) -> int:
        return len(self.dataset)

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        self.calls.append(np.asarray(sample_ids).tolist())
        return self.dataset.gather(sample_ids)


def spec_of(leg: Leg) -> PretrainConfig:
    spec = config(global_batch_size=GLOBAL_BATCH, micro_batch_size=leg.micro_batch, steps=STEPS)
    return replace(spec, model=replace(spec.model, vocab_size=sum(DOCUMENTS), num_layers=1))


def travel(ctx: ParallelContext, folder: Path, leg: Leg) -> list[Step]:
    """Return the samples of this rank in a leg, begun at the newest checkpoint and saved at its end."""
    trainer = Trainer(spec_of(leg), ctx)
    if (start := latest_checkpoint(folder / "run" / "checkpoints")) is not None:
        load(trainer, start)
    needed = trainer.consumed_samples + (leg.steps + leg.lost) * GLOBAL_BATCH
    indexed = IndexedDataset(folder / "corpus")
    samples = Recording(GPTDataset(indexed, seq_length=SEQ, num_samples=needed, seed=5))
    done = []
    with loader_of(trainer, samples) as loader:
        for number in range(leg.steps + leg.lost):
            batches = next(loader)
            trainer.train_step(batches)
            rows = [tuple(row) for batch in batches for row in batch.tokens.tolist()]
            done.append((tuple(samples.calls[number]), tuple(rows)))
            if number + 1 == leg.steps:
                save(trainer, folder / "run")
    return done[: leg.steps]


def loader_of(trainer: Trainer, samples: Any) -> Loader:
    """The loader that the training loop makes."""
    return PretrainLoop.batches(SimpleNamespace(trainer=trainer, samples=samples))  # type: ignore[arg-type]


def together(ranks: list[list[Step]]) -> list[Step]:
    """The global batch of each step, in the order of the ids."""
    steps = []
    for parts in zip(*ranks, strict=True):
        ids, rows = ([x for part in parts for x in part[kind]] for kind in (0, 1))
        ordered = sorted(zip(ids, rows, strict=True))
        steps.append((tuple(i for i, _ in ordered), tuple(row for _, row in ordered)))
    return steps


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> list[Step]:
    """Twelve steps on one process."""
    folder = tmp_path_factory.mktemp("straight")
    counting_corpus(folder / "corpus", DOCUMENTS)
    return together([travel(shape_context(), folder, Leg(dp=1, micro_batch=2, steps=STEPS))])


def test_one_process_reads_every_sample_once_across_epochs(uninterrupted: list[Step]) -> None:
    ids = [i for step_ids, _ in uninterrupted for i in step_ids]
    assert ids == list(range(STEPS * GLOBAL_BATCH))
    assert ids[-1] * SEQ > 2 * sum(DOCUMENTS)  # in the third epoch


@pytest.mark.parametrize("journey", thinned(JOURNEYS, 4))
def test_each_step_has_the_samples_of_one_process_wherever_it_is_resumed(
    uninterrupted: list[Step], tmp_path: Path, journey: str
) -> None:
    """The same ids and the same tokens in every global batch, so none twice and none left out."""
    counting_corpus(tmp_path / "corpus", DOCUMENTS)
    seen: list[Step] = []
    for leg in JOURNEYS[journey]:
        alone = [travel(shape_context(), tmp_path, leg)] if leg.dp == 1 else None
        seen += together(alone or run_on_ranks(travel, tmp_path, leg, dp=leg.dp))
    assert seen == uninterrupted
