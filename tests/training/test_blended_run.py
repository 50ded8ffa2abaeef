"""Runs on several corpora: what they read across resumes and layouts, and which corpora they reject."""

import itertools
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlm.checkpoint.native.save_load import latest_checkpoint
from mlm.cli.pretrain.run import PretrainLoop
from mlm.data.config import DataConfig
from mlm.parallel.mesh import ParallelContext, shape_context
from mlm.runs.config import PretrainConfig
from mlm.runs.corpora import corpus_problems, train_dataset
from mlm.training.resume import continue_data
from mlm.training.state import load
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError
from tests.checkpoint.native.helpers import edit_manifest
from tests.data.corpora import counting_corpus
from tests.ranks import run_on_ranks
from tests.training.blended import VOCAB, add_receipt, segments, write_corpora
from tests.training.saving import save
from tests.training.test_trainer import config

SEQ, BATCH = 4, 8


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def corpora(made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy, in the working folder."""
    shutil.copytree(made, tmp_path / "corpora")
    monkeypatch.chdir(tmp_path)
    return tmp_path / "corpora"


def spec(blend: tuple[str, ...] = (), **data: Any) -> PretrainConfig:
    base = config(global_batch_size=BATCH, micro_batch_size=2, steps=40)
    model = replace(base.model, vocab_size=VOCAB, num_layers=1)
    return replace(
        base, model=model, data=DataConfig(seq_length=SEQ, blend=blend, **({"change": True} | data))
    )


WIKI_WEB = ("3 corpora/wiki", "1 corpora/web")
Row = tuple[int, ...]


def leg(
    ctx: ParallelContext, run: Path, of: PretrainConfig, steps: int, lost: int = 0
) -> tuple[list[list[Row]], str | None]:
    """This rank's samples of each step from the newest checkpoint on, and what changed.

    A checkpoint is at the end; a kill takes back the `lost` steps after it.
    """
    trainer = Trainer(of, ctx)
    if (start := latest_checkpoint(run / "checkpoints")) is not None:
        load(trainer, start)
    said = continue_data(trainer)
    end = trainer.consumed_samples + (steps + lost) * BATCH
    samples = train_dataset(of, end, trainer.history)
    rows: list[list[Row]] = []
    loop: Any = SimpleNamespace(trainer=trainer, samples=samples)
    with PretrainLoop.batches(loop) as loader:
        for batches in loader:
            trainer.train_step(batches)
            rows.append([tuple(row) for batch in batches for row in batch.tokens.tolist()])
            if len(rows) == steps:
                save(trainer, run)
    return rows[:steps], said


def read_on(
    run: Path,
    blend: tuple[str, ...] | str,
    steps: int,
    dp: int = 1,
    tp: int = 1,
    micro: int = 2,
    lost: int = 0,
) -> list[Row]:
    """Return the samples that all replicas read in a leg, step by step: a global batch has no order."""
    of = spec(path=blend) if isinstance(blend, str) else spec(blend)
    of = replace(of, train=replace(of.train, micro_batch_size=micro))
    if dp * tp == 1:
        ranks = [leg(shape_context(), run, of, steps, lost)]
    else:
        ranks = run_on_ranks(leg, run, of, steps, lost, dp=dp, tp=tp)
    assert all(ranks[i][0] == ranks[i - i % tp][0] for i in range(len(ranks)))  # a replica's ranks read alike
    by_step = zip(*(rows for rows, _ in ranks[::tp]), strict=True)
    return [row for parts in by_step for row in sorted(itertools.chain(*parts))]


def at(corpora: Path, blend: tuple[str, ...]) -> tuple[str, ...]:
    """With absolute paths: the pooled ranks have another working folder."""
    return tuple(entry.replace("corpora", str(corpora)) for entry in blend)


def test_legs_at_other_layouts_read_the_steps_of_an_uninterrupted_run(corpora: Path, tmp_path: Path) -> None:
    """dp, tp and the micro-batch change at a checkpoint, two kills lose steps, and epochs end in between."""
    path = at(corpora, WIKI_WEB)
    straight = read_on(tmp_path / "straight", path, 20)
    legs: list[dict[str, int]] = [
        {"steps": 4, "lost": 1},
        {"steps": 6, "dp": 2, "lost": 2},
        {"steps": 3, "tp": 2, "micro": 8},
        {"steps": 6, "dp": 4, "micro": 1},
        {"steps": 1, "micro": 4},
    ]
    assert [row for each in legs for row in read_on(tmp_path / "run", path, **each)] == straight
    assert len(straight) == 20 * BATCH > 2 * 290 / SEQ  # in the third epoch of a corpus
    assert segments(tmp_path / "run") == segments(tmp_path / "straight")
    assert len(segments(tmp_path / "run")) == 1


def test_a_run_on_one_corpus_continues_in_a_blend_and_back(corpora: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    read = read_on(run, "corpora/wiki", 2) + read_on(run, WIKI_WEB, 2) + read_on(run, "corpora/wiki", 3)
    mine = [row for row in read if max(row) < 300]  # of wiki, the first corpus
    assert len(mine) == (2 + 3) * BATCH + 12
    alone = train_dataset(spec(path="corpora/wiki"), len(mine)).gather(np.arange(len(mine)))
    assert sorted(mine) == sorted(map(tuple, alone[:, :-1].tolist()))


def test_corpora_of_equal_shape_come_in_orders_of_their_own(corpora: Path) -> None:
    """The tokens of wiki and web differ by 300 throughout: one seed would give one order."""
    blend = train_dataset(spec(("0.5 corpora/wiki", "0.5 corpora/web")), 40)
    source, _ = blend.locate(np.arange(40))  # type: ignore[attr-defined]
    samples = np.asarray(blend.gather(np.arange(40)))
    assert set(samples[source == 0][:, 0]) != set(samples[source == 1][:, 0] - 300)


def test_a_changed_blend_needs_data_change(corpora: Path, tmp_path: Path) -> None:
    leg(shape_context(), tmp_path / "run", spec(WIKI_WEB), 1)
    other = spec(("1 corpora/web", "1 corpora/code"), change=False)
    with pytest.raises(UserError, match=r"data.blend=.*code 50.00% \(new\).*set data.change=true"):
        leg(shape_context(), tmp_path / "run", other, 1)
    same = spec(("6 corpora/wiki", "2 corpora/web"), change=False)
    assert leg(shape_context(), tmp_path / "run", same, 1)[1] is None


def test_a_corpus_that_changed_under_its_path_is_rejected_on_all_ranks(corpora: Path, tmp_path: Path) -> None:
    blend = at(corpora, WIKI_WEB)
    read_on(tmp_path / "run", blend, 1)
    counting_corpus(corpora / "web" / "train", [100, 200])
    add_receipt(corpora / "web")
    with pytest.raises(AssertionError, match=r"web/train\.idx is not what this run was trained"):
        read_on(tmp_path / "run", blend, 1, dp=2)


@pytest.mark.parametrize("has_receipt", [True, False])
def test_tokens_that_changed_are_noticed(corpora: Path, tmp_path: Path, has_receipt: bool) -> None:
    """The lengths, so the index, are the same."""
    if not has_receipt:
        (corpora / "web" / "corpus.json").unlink()
    read_on(tmp_path / "run", WIKI_WEB, 1)
    path = corpora / "web" / "train.bin"
    path.write_bytes(path.read_bytes()[::-1])
    if has_receipt:
        add_receipt(corpora / "web")
    with pytest.raises(UserError, match=r"web/train\.bin is not what this run was trained on"):
        read_on(tmp_path / "run", WIKI_WEB, 1)


def test_a_state_of_another_kind_is_rejected(corpora: Path, tmp_path: Path) -> None:
    read_on(tmp_path / "run", WIKI_WEB, 1)
    step = tmp_path / "run/checkpoints/step-00000001"
    for data in ("ab", {}, {"segments": [{"from_sample": 0, "sources": []}]}, {"segments": 3}, None):
        edit_manifest(step, lambda body, data=data: body["state"].update(data=data))  # type: ignore[misc]
        with pytest.raises(UserError, match="not that of a training run") as caught:
            load(Trainer(spec(WIKI_WEB), shape_context()), step)
        assert len(str(caught.value).splitlines()) == 1


def test_problems_of_corpora_are_named_before_any_rank_starts(corpora: Path) -> None:
    assert corpus_problems(spec(WIKI_WEB)) == []
    shutil.copytree(corpora / "wiki", corpora / "copy")
    (problem,) = corpus_problems(spec(("corpora/wiki", "corpora/copy")))
    assert "corpora/wiki/train and corpora/copy/train are copies of one corpus" in problem
    add_receipt(corpora / "web", tokenizer="2")
    (problem,) = corpus_problems(spec(WIKI_WEB))
    assert problem.startswith("data.blend: written with different tokenizers: corpora/wiki/train by xxh3:0")
    (corpora / "web" / "validation.bin").write_bytes(b"")
    assert any("web/validation.bin" in problem for problem in corpus_problems(spec(WIKI_WEB)))
