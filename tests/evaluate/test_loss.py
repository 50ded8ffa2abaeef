"""`mlm eval loss`: windows that ranks split by cp score as on one process, and the corpus of a run."""

import random
from pathlib import Path

import pytest

from mlm.cli.compose.composition import load_config
from mlm.cli.evaluate import loss
from mlm.cli.evaluate.settings import EvalLossConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import shape_context
from mlm.runs.config import PretrainConfig
from mlm.util.errors import UserError
from tests.data.corpora import write_corpus
from tests.finetune.chats import POSITIONS, write_llama
from tests.finetune.runs import BERT, GPT2, read, write_model
from tests.ranks import command, run_on_ranks

TOKENS = 5 * POSITIONS + 17
"""Not a multiple of a window: the last is filled up."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("context")
    write_llama(made / "llama")
    write_model(made / "gpt2", GPT2)
    draw = random.Random(1)
    write_corpus(made / "corpus", [[draw.randrange(300) for _ in range(TOKENS)]])
    return made


def evaluating(folder: Path, model: str, **changes: object) -> EvalLossConfig:
    values = {
        "ckpt": str(folder / model),
        "path": str(folder / "corpus"),
        "seq_length": 48,
        "batch_size": 2,
        "precision": PrecisionConfig(dtype="fp64"),
    }
    return EvalLossConfig(**values | changes)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("model", "parallel"),
    [("llama", ParallelConfig(tp=2, cp=2)), ("gpt2", ParallelConfig(cp=2, pp=2))],
    ids=["llama-tp2-cp2", "gpt2-cp2-pp2"],
)
def test_split_windows_score_as_whole_ones(folder: Path, model: str, parallel: ParallelConfig) -> None:
    whole, split = (folder / f"{model}-{name}.json" for name in ("whole", "split"))
    loss.run(evaluating(folder, model, out=str(whole)), shape_context())
    config = evaluating(folder, model, out=str(split), parallel=parallel)
    assert loss.preflight(config) == []
    sizes = {"tp": parallel.tp, "cp": parallel.cp, "pp": parallel.pp, "dp": parallel.dp or 1}
    run_on_ranks(command, loss.run, config, **sizes)
    expected, found = read(whole), read(split)
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-12)
    assert found["tokens"] == expected["tokens"] == TOKENS - 1


def test_windows_and_models_that_ranks_cannot_split_are_rejected(folder: Path, tmp_path: Path) -> None:
    parallel = ParallelConfig(cp=2)
    assert loss.preflight(evaluating(folder, "gpt2", seq_length=46, parallel=parallel)) == [
        "cp=2 splits sequences into 4 pieces, but 4 does not divide seq_length=46; use seq_length=44 or "
        "seq_length=48"
    ]
    bert = str(write_model(tmp_path / "bert", BERT))
    (problem,) = loss.preflight(evaluating(folder, "bert", ckpt=bert, seq_length=None, parallel=parallel))
    assert problem.startswith("cp=2: model.kind=bert has no attention over sequences that ranks split")


def test_a_validation_set_of_the_run_that_is_not_there_is_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`mlm eval loss` with path=null, started in another folder than the run."""
    step = tmp_path / "moved/step-00000001"
    for folder in (step, tmp_path / "elsewhere"):
        folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "elsewhere")
    trained: PretrainConfig = load_config("pretrain", ["out=runs/a", "data.path=corpus"])
    with pytest.raises(UserError, match=r"data.path=corpus is not below .*elsewhere; start in the folder"):
        loss.corpus_prefix(load_config("eval_loss", [f"ckpt={step}"]), trained)


def test_a_corpus_in_a_store_without_a_validation_part_is_not_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No folder that the command could start in would have it."""
    monkeypatch.setattr(loss, "validation_prefixes", lambda data: {})
    trained: PretrainConfig = load_config("pretrain", ["data.path=s3://bucket/corpus", "data.cache=cache"])
    with pytest.raises(UserError, match=r"the run had no validation set: give path="):
        loss.corpus_prefix(load_config("eval_loss", [f"ckpt={tmp_path}"]), trained)
