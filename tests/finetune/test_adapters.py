"""Finetuning with adapters: every layout as one process, what is saved, and what reads it again."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.checkpoint.native.save_load import resolve
from mlm.cli.pretrain import run as pretrain_run
from mlm.convert.source import open_source
from mlm.data.config import DataConfig
from mlm.finetune import training
from mlm.finetune.config import FinetuneConfig
from mlm.inference.trained import load_trained
from mlm.models.config import LoraConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.checks import check_pretrain
from mlm.runs.config import PretrainConfig, TrainConfig
from mlm.tracking.config import LogConfig
from mlm.training.pipelined import PipelinedModel
from mlm.util.errors import UserError
from tests.checkpoint.native.helpers import edit_manifest
from tests.finetune.chats import chatting, write_llama
from tests.finetune.runs import check_layout, losses, weights
from tests.ranks import command, run_on_ranks
from tests.slow import slow_but

LORA = LoraConfig(rank=4, alpha=32.0, dropout=0.2, dora=True)
LAYOUTS = {
    "pp2-zb": ParallelConfig(pp=2, pipeline="zb_h1"),
    "dp2-zero3": ParallelConfig(dp=2, zero=3),
    "tp2-pp2-sp-recompute": ParallelConfig(tp=2, pp=2, sequence_parallel=True, recompute="full"),
}


@pytest.fixture(scope="module")
def folder(chats: Path) -> Path:
    training.run(adapting(chats), ParallelContext())
    return chats


def adapting(folder: Path, **changes: Any) -> FinetuneConfig:
    return replace(chatting(folder), **{"lora": LORA} | changes)


@pytest.mark.parametrize("layout", slow_but({0, 1}, LAYOUTS))
def test_a_run_with_adapters_is_the_same_at_every_layout(folder: Path, tmp_path: Path, layout: str) -> None:
    check_layout(adapting(folder, parallel=LAYOUTS[layout], out=str(tmp_path / "out")), folder / "out")


def test_checkpoints_hold_the_adapters_alone(folder: Path) -> None:
    saved = weights(folder / "out" / "checkpoints")
    assert all(".lora." in name for name in saved)
    assert {name.partition(".")[0] for name in saved} == {"model", "optimizer"}
    assert all(".lora." in name for name in weights(folder / "out" / "best" / "checkpoints"))
    assert losses(folder / "out")[-1] < losses(folder / "out")[0]


def test_what_reads_a_run_with_adapters_adds_them_to_its_base(folder: Path) -> None:
    tokens = torch.arange(12)[None]
    logits = [logits_of(folder / name, tokens) for name in ("llama", "out")]
    assert not torch.allclose(*logits)
    (split, *_) = run_on_ranks(logits_on_ranks, folder / "out", tokens, tp=2)
    torch.testing.assert_close(split, logits[1], rtol=0, atol=1e-10)


def test_a_run_with_adapters_is_the_base_of_another(folder: Path, tmp_path: Path) -> None:
    tokens = torch.arange(12)[None]
    config = adapting(folder, lora=LoraConfig(rank=2), ckpt=str(folder / "out"), out=str(tmp_path / "out"))
    still = replace(config, optimizer=OptimizerConfig(lr=1e-12), out=str(tmp_path / "still"))
    training.run(still, ParallelContext())
    torch.testing.assert_close(
        logits_of(tmp_path / "still", tokens), logits_of(folder / "out", tokens), rtol=0, atol=1e-8
    )
    training.run(config, ParallelContext())
    assert not torch.allclose(logits_of(tmp_path / "out", tokens), logits_of(folder / "out", tokens))


def logits_of(ckpt: Path, tokens: torch.Tensor) -> torch.Tensor:
    return logits_on_ranks(ParallelContext(), ckpt, tokens)


def logits_on_ranks(ctx: ParallelContext, ckpt: Path, tokens: torch.Tensor) -> torch.Tensor:
    precision, parallel = PrecisionConfig(dtype="fp64"), ParallelConfig(tp=ctx.tp.size)
    model = load_trained(open_source(str(ckpt)), parallel, precision, ctx).model
    return model.chunks[0].logits(tokens)  # type: ignore[operator]


def test_another_base_is_rejected(folder: Path, tmp_path: Path) -> None:
    write_llama(tmp_path / "llama")
    config = adapting(folder, out=str(tmp_path / "out"), ckpt=str(tmp_path / "llama"))
    training.run(config, ParallelContext())
    write_llama(tmp_path / "llama", seed=1)
    with pytest.raises(UserError, match=r"its adapters are of the base xxh3:.*; bring that base back"):
        logits_of(tmp_path / "out", torch.arange(4)[None])
    (tmp_path / "llama" / "config.json").unlink()
    with pytest.raises(UserError, match="the base of these adapters is not there"):
        open_source(str(tmp_path / "out"))


def test_in_bfloat16_the_base_has_no_float32_copy(folder: Path) -> None:
    model = open_source(str(folder / "llama")).config.model
    made = PipelinedModel(model, ParallelConfig(), PrecisionConfig(dtype="bf16"), ParallelContext(), LORA)
    kinds = {(p.dtype, p.requires_grad) for p in made.chunks[0].parameters()}
    assert kinds == {(torch.bfloat16, False), (torch.float32, True)}
    assert not made.casts.reads  # of which float32 parameters would have copies in bfloat16


@pytest.mark.slow
def test_pretraining_with_adapters_is_the_same_over_context_ranks(folder: Path, tmp_path: Path) -> None:
    pretrain_run.run(pretraining(folder, tmp_path / "alone"), ParallelContext())
    parallel = ParallelConfig(tp=2, cp=2, sequence_parallel=True)
    split = pretraining(folder, tmp_path / "split", parallel=parallel)
    run_on_ranks(command, pretrain_run.run, split, tp=2, cp=2)
    assert losses(tmp_path / "split") == pytest.approx(losses(tmp_path / "alone"), abs=1e-9)
    names = weights(tmp_path / "split" / "checkpoints").keys()
    assert {name.split(".lora.")[0].rpartition(".")[2] for name in names} == {"query", "kv"}
    resumed = replace(split, train=replace(split.train, steps=4))
    run_on_ranks(command, pretrain_run.run, resumed, tp=2, cp=2)
    assert len(losses(tmp_path / "split")) == 4


def test_pretraining_goes_on_beside_its_own_base_alone(folder: Path, tmp_path: Path) -> None:
    config = pretraining(folder, tmp_path / "out")
    pretrain_run.run(config, ParallelContext())
    with pytest.raises(UserError, match="holds adapters of another base"):
        pretrain_run.run(replace(config, ckpt=str(folder / "other")), ParallelContext())
    (problem,) = check_pretrain(replace(config, ckpt=None), world_size=None, local_devices=None)
    assert str(problem).startswith("lora.rank=4: adapters are trained beside the weights of a trained model")


def pretraining(folder: Path, out: Path, **changes: Any) -> PretrainConfig:
    values: dict[str, Any] = {
        "name": "tiny",
        "out": str(out),
        "ckpt": str(folder / "llama"),
        "model": open_source(str(folder / "llama")).config.model,
        "lora": replace(LORA, targets=("q_proj", "v_proj")),
        "precision": PrecisionConfig(dtype="fp64"),
        "data": DataConfig(kind="synthetic", seq_length=16),
        "train": TrainConfig(steps=3, global_batch_size=4, micro_batch_size=2, validate_every=0),
        "log": LogConfig(every=1),
    }
    return PretrainConfig(**values | changes)


def test_a_base_that_is_the_adapters_themselves_is_one_line(folder: Path, tmp_path: Path) -> None:
    """A forged checkpoint that names itself is compared with the digest of its base before it is followed."""
    shutil.copytree(folder / "out", source := tmp_path / "run")
    step = resolve(str(source))
    edit_manifest(step, lambda manifest: manifest["state"]["lora"].update(base=str(step)))
    with pytest.raises(UserError, match="bring that base back"):
        open_source(str(step))
