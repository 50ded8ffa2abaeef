"""A run that begins with the weights of a model folder of `transformers`."""

import shutil
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import transformers

from mlm.cli import main
from mlm.cli.pretrain.run import model_of_ckpt, run
from mlm.convert.source import open_source
from mlm.data.config import DataConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.runs.corpora import train_dataset
from mlm.tracking.config import LogConfig
from mlm.training.preflight import preflight
from mlm.util.errors import UserError
from tests.data.corpora import write_corpus
from tests.finetune.chats import write_llama
from tests.finetune.runs import losses
from tests.ranks import command, run_on_ranks

STEPS, BATCH = 3, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("continued")
    write_llama(made / "llama")
    draw = torch.Generator().manual_seed(0)
    documents = [torch.randint(0, 330, (40,), generator=draw).tolist() for _ in range(20)]
    (made / "corpus").mkdir()
    write_corpus(made / "corpus" / "train", documents)
    return made


def settings(folder: Path, out: str, **changes: object) -> PretrainConfig:
    model = open_source(str(folder / "llama")).config.model
    config = PretrainConfig(
        name="more",
        out=str(folder / out),
        ckpt=str(folder / "llama"),
        model=model,
        data=DataConfig(path=str(folder / "corpus"), seq_length=16),
        optimizer=OptimizerConfig(lr=1e-2, weight_decay=0.0),
        schedule=ScheduleConfig(decay="constant", warmup_steps=0),
        precision=PrecisionConfig(dtype="fp32"),
        train=TrainConfig(steps=STEPS, global_batch_size=BATCH, micro_batch_size=2, validate_every=0),
        log=LogConfig(every=1),
    )
    return replace(config, **changes)  # type: ignore[arg-type]


def test_continued_pretraining_at_tp_2_equals_a_plain_loop_of_transformers(folder: Path) -> None:
    config = settings(folder, "out", parallel=ParallelConfig(tp=2))
    assert preflight(config) == []
    run_on_ranks(command, run, config, tp=2)
    samples = torch.from_numpy(train_dataset(config, STEPS * BATCH).gather(range(STEPS * BATCH)))
    model, given = transformers.LlamaForCausalLM.from_pretrained(folder / "llama"), config.optimizer
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=given.lr, betas=given.betas, eps=given.eps, weight_decay=0.0
    )
    found = []
    for rows in samples.split(BATCH):
        logits = model(rows[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), given.clip_grad_norm)
        optimizer.step()
        found.append(loss.item())
    assert losses(Path(config.out)) == pytest.approx(found, rel=0, abs=1e-5)


def test_run_that_names_no_model_takes_the_folder_s(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    llama = tmp_path / "llama"
    shutil.copytree(folder / "llama", llama)
    words = [f"ckpt={llama}", f"data.path={folder / 'corpus'}", "data.seq_length=16"]
    words += ["train.steps=1", "train.global_batch_size=2", "train.micro_batch_size=2", "dist.device=cpu"]
    words += ["schedule.warmup_steps=0", "train.validate_every=0"]
    assert main(["pretrain", *words, f"out={tmp_path / 'out'}"]) == 0
    said = capsys.readouterr()
    assert "llama, 2 layers, hidden size 32, 4 heads" in said.err
    assert f"weights from {llama} (step 0)" not in said.err
    assert main(["pretrain", f"resume={tmp_path / 'out'}", "train.steps=2"]) == 0
    assert "resuming from" in capsys.readouterr().out
    # the same command continues the run when the folder that it began with is gone
    shutil.rmtree(llama)
    assert main(["pretrain", *words, f"out={tmp_path / 'out'}", "train.steps=3"]) == 0
    said = capsys.readouterr()
    assert f"model of out={tmp_path / 'out'}: llama, 2 layers" in said.err
    assert "resuming from" in said.out


@pytest.mark.parametrize("name", ["gone", "empty"])
def test_folder_without_a_model_is_the_only_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    """Settings that the default model would fail are not judged by it."""
    (tmp_path / "empty").mkdir()
    words = [f"ckpt={tmp_path / name}", f"out={tmp_path / 'out'}", "tp=5", "data.seq_length=4096"]
    assert main(["pretrain", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert str(tmp_path / name) in line


def test_folder_without_weights_is_an_error(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "llama" / "config.json").read_bytes())
    (problem,) = preflight(settings(folder, "none", ckpt=str(tmp_path)))
    assert str(tmp_path) in str(problem)
    with pytest.raises(UserError, match="a pickle could run any code"):
        model_of_ckpt(str(tmp_path), str(tmp_path))
    llama = str(folder / "llama")
    assert model_of_ckpt(llama, "") == (f"ckpt={llama}", asdict(settings(folder, "any").model))
