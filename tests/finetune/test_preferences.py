"""Preferences: losses and gradients of TRL, every layout as one process, rows that are malformed."""

import random
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mlm.convert.huggingface.families import mapping_of
from mlm.convert.source import open_source
from mlm.convert.weights import fill_parameters
from mlm.finetune import training
from mlm.finetune.batches import make_batcher
from mlm.finetune.config import FinetuneCheckpointConfig, FinetuneConfig
from mlm.finetune.inputs import read_start, tokenize_split
from mlm.finetune.packing import PairLoss, PairPacker, example_tokens, set_reference
from mlm.finetune.splits import read_split
from mlm.models.config import LoraConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import parameter_shards
from mlm.training.pipelined import PipelinedModel
from tests.data.chats import theirs
from tests.finetune.chats import POSITIONS, write_llama
from tests.finetune.material import shipped, write_rows
from tests.finetune.runs import check_layout, finetuning, read, records, weights, words
from tests.slow import slow_but

LAYOUTS = {
    "tp2-sp": ParallelConfig(tp=2, sequence_parallel=True),
    "dp2-zero3": ParallelConfig(dp=2, zero=3),
}


def pair(draw: random.Random) -> dict[str, Any]:
    prompt, chosen, rejected = words(draw, 2, 6), words(draw, 1, 9), words(draw, 1, 9)
    return {"prompt": prompt, "chosen": f" {chosen}", "rejected": f" {rejected}"}


def messages(row: dict[str, Any]) -> dict[str, Any]:
    said = {key: [{"role": "assistant", "content": row[key].strip()}] for key in ("chosen", "rejected")}
    return {"prompt": [{"role": "user", "content": row["prompt"]}], **said}


@pytest.fixture(scope="module")
def folder(chats: Path) -> Path:
    draw = random.Random(3)
    rows = [pair(draw) for _ in range(14)]
    write_rows(chats / "pairs" / "train.jsonl", rows[:10])
    write_rows(chats / "pairs" / "validation.jsonl", map(messages, rows[10:]))
    training.run(preferring(chats), ParallelContext())
    return chats


def preferring(folder: Path, **changes: Any) -> FinetuneConfig:
    task = shipped("preferences", max_length=POSITIONS, **changes.pop("task", {}))
    data = {"path": str(folder / "pairs")}
    values = {"ckpt": str(folder / "llama"), "optimizer": OptimizerConfig(lr=3e-3, weight_decay=0.0)}
    return finetuning(folder, "classification", task=task, data=data, **values | changes)


def our_gradients(folder: Path, **task: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor], PairLoss]:
    """Loss of all pairs and its gradients by `other`, where `llama` is the reference."""
    config, ctx = preferring(folder, task=task), ParallelContext()
    start = read_start(config)
    split = read_split(config.task, "train", path=str(folder / "pairs" / "train.jsonl"))
    examples = tokenize_split(config.task, split, start).examples
    model = PipelinedModel(start.model, ParallelConfig(), PrecisionConfig(dtype="fp64"), ctx)
    objective = PairLoss(ctx, torch.float64, config.task)
    packer = make_batcher(model, 2, POSITIONS, PairPacker)
    shards = tuple(parameter_shards(model.chunks[0], ctx.tp))
    fill_parameters(shards, open_source(str(folder / "llama")), ctx)
    set_reference(model, objective, examples, packer)
    fill_parameters(shards, open_source(str(folder / "other")), ctx)
    numbers = sorted(range(len(examples)), key=lambda n: -sum(map(len, examples[n].texts)))
    batches = packer.micro_batches(examples, numbers, 0)
    assert len(batches) > 1
    scale = torch.full((len(objective.metrics),), 1 / len(examples), dtype=torch.float64)
    parts = torch.stack(model.train(batches, objective, scale, lambda _: None)).sum(0)
    return parts, {s.name: s.without_padding(s.parameter.grad) for s in shards}, objective  # type: ignore[arg-type]


def test_orpo_of_nearly_certain_answers_is_that_of_float64() -> None:
    """In float32 1 - p is p's rounding: 6 % off at a likelihood of -1e-6, and 0 at one of -1e-8."""
    objective = PairLoss(ParallelContext(), torch.float32, shipped("preferences", loss="orpo", beta=0.5))
    likelihoods = torch.tensor([[-1e-6, -3.0], [-2.0, -1e-6], [0.0, -3.0], [-3.0, 0.0]], requires_grad=True)
    losses = objective.parts_of(likelihoods, torch.ones(4, 2), torch.zeros(4, 2))[0]
    losses.sum().backward()
    exact = likelihoods.detach().double()[:2].requires_grad_()
    odds = exact - (-exact.expm1()).log()
    wanted = -exact[:, 0] - 0.5 * F.logsigmoid(odds[:, 0] - odds[:, 1])
    wanted.sum().backward()
    torch.testing.assert_close(losses[:2].double(), wanted, rtol=1e-6, atol=1e-6)
    assert likelihoods.grad is not None
    assert exact.grad is not None
    torch.testing.assert_close(likelihoods.grad[:2].double(), exact.grad, rtol=1e-6, atol=1e-6)
    assert losses.isfinite().all()
    assert likelihoods.grad.isfinite().all()


@pytest.mark.parametrize("loss", slow_but({0}, ["dpo", "ipo"]))
def test_losses_and_gradients_equal_those_of_trl(folder: Path, tmp_path: Path, loss: str) -> None:
    datasets, transformers, trl = (pytest.importorskip(name) for name in ("datasets", "transformers", "trl"))
    parts, mine, _ = our_gradients(folder, loss=loss, beta=0.3)
    theirs, reference = (
        transformers.LlamaForCausalLM.from_pretrained(folder / name, dtype=torch.float64)
        for name in ("other", "llama")
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "llama")
    tokenizer.pad_token = "<|endoftext|>"
    off = {"use_cpu": True, "bf16": False, "report_to": [], "gradient_checkpointing": False}
    loss_type = "sigmoid" if loss == "dpo" else loss
    settings = trl.DPOConfig(
        str(tmp_path), loss_type=loss_type, beta=0.3, per_device_train_batch_size=10, **off
    )
    file = str(folder / "pairs" / "train.jsonl")
    rows = datasets.load_dataset("json", data_files=file, split="train", cache_dir=str(tmp_path))
    trainer = trl.DPOTrainer(theirs, reference, settings, train_dataset=rows, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    theirs.train()
    their_loss = trainer.compute_loss(theirs, batch)
    their_loss.backward()
    assert parts[0].item() == pytest.approx(their_loss.item(), abs=1e-5)
    logged = {key: values[-1] for key, values in trainer._metrics["train"].items()}
    names = ("rewards/accuracies", "rewards/margins", "rewards/chosen", "rewards/rejected")
    assert parts[1:5].tolist() == pytest.approx([logged[name] for name in names], abs=1e-5)
    # theirs are beta (log p - log p_reference): the mean of both answers
    kl = -(logged["rewards/chosen"] + logged["rewards/rejected"]) / 2 / 0.3
    assert parts[5].item() == pytest.approx(kl, abs=1e-5)
    model = read_start(preferring(folder)).model
    mapping = mapping_of(model)
    assert mapping is not None
    gradients = {name: p.grad for name, p in theirs.named_parameters() if p.grad is not None}
    for name, gradient in mapping.to_parameters(gradients, model).items():
        torch.testing.assert_close(mine[name], gradient.double(), rtol=0, atol=1e-5)


def test_reference_free_losses_equal_their_published_formulas(folder: Path) -> None:
    """SimPO, equation 6 of arXiv:2405.14734; ORPO, equations 3 to 7 of arXiv:2403.07691; smoothed DPO."""
    y = torch.tensor([[-3.0, -8.0], [-6.0, -2.0]], dtype=torch.float64)
    lengths, reference = torch.tensor([[2, 4], [3, 5]]), torch.tensor([[-4.0, -7.0], [-5.0, -2.5]])
    mean = y / lengths

    def loss(name: str, **settings: Any) -> torch.Tensor:
        task = shipped("preferences", loss=name, **settings)
        return PairLoss(ParallelContext(), torch.float64, task).parts_of(y, lengths, reference)[0]

    simpo = -torch.log(torch.sigmoid(2.5 * mean[:, 0] - 2.5 * mean[:, 1] - 1.4))
    torch.testing.assert_close(loss("simpo", beta=2.5, margin=1.4), simpo)
    p = mean.exp()
    odds = p / (1 - p)
    orpo = -mean[:, 0] - 0.2 * torch.log(torch.sigmoid(torch.log(odds[:, 0] / odds[:, 1])))
    torch.testing.assert_close(loss("orpo", beta=0.2), orpo)
    lead = 0.3 * ((y - reference)[:, 0] - (y - reference)[:, 1])
    smoothed = -0.9 * F.logsigmoid(lead) - 0.1 * F.logsigmoid(-lead)
    torch.testing.assert_close(loss("dpo", beta=0.3, label_smoothing=0.1), smoothed)


@pytest.mark.parametrize("layout", slow_but({1}, LAYOUTS))
def test_a_run_is_the_same_at_every_layout(folder: Path, tmp_path: Path, layout: str) -> None:
    check_layout(preferring(folder, parallel=LAYOUTS[layout], out=str(tmp_path / "out")), folder / "out")


def test_a_run_logs_rewards_and_starts_at_its_reference(folder: Path) -> None:
    first, *_, last = records(folder / "out", "step")
    assert first["loss"] == pytest.approx(0.6931471805599453)  # log 2: nothing differs from the reference
    assert first["kl"] == first["margin"] == 0
    assert last["margin"] > 0
    assert last["chosen_reward"] - last["rejected_reward"] == pytest.approx(last["margin"])
    scores = read(folder / "out" / "result.json")["scores"]["validation"]
    assert {"loss", "accuracy", "margin"} <= scores.keys()


def test_beside_adapters_the_frozen_base_is_the_reference(folder: Path, tmp_path: Path) -> None:
    config = preferring(folder, out=str(tmp_path / "out"), lora=LoraConfig(rank=4))
    training.run(config, ParallelContext())
    first, *_, last = records(tmp_path / "out", "step")
    assert first["kl"] == 0
    assert last["margin"] > 0
    assert all(".lora." in name for name in weights(tmp_path / "out" / "checkpoints"))


def test_a_resumed_run_has_the_same_reference(folder: Path, tmp_path: Path) -> None:
    config = preferring(
        folder, out=str(tmp_path / "out"), checkpoint=FinetuneCheckpointConfig(save_every=3, keep_last=9)
    )
    training.run(config, ParallelContext())
    saved = tmp_path / "out" / "checkpoints"
    first, *later = sorted(saved.glob("step-*"))
    assert later
    for path in (*later, tmp_path / "out" / "best"):
        shutil.rmtree(path)
    (saved / "latest").write_text(f"{first.name}\n")
    training.run(config, ParallelContext())
    want = weights(folder / "out" / "checkpoints")
    for path in sorted(saved.glob("step-*"))[:-1]:
        shutil.rmtree(path)
    found = weights(saved)
    assert all(torch.equal(found[name], want[name]) for name in want)


TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
SHOWN = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for m in messages %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}{{ c | tojson }}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def called(name: str) -> dict[str, Any]:
    calls = [{"function": {"name": name, "arguments": {"a": 1}}}]
    return {"role": "assistant", "content": "", "tool_calls": calls}


def said(*texts: str) -> list[dict[str, Any]]:
    roles = ("user", "assistant") * 2
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


TRIPLES: dict[str, dict[str, Any]] = {
    "tools": {"prompt": said("q"), "chosen": [called("f")], "rejected": said("q", "no")[1:], "tools": [TOOL]},
    "equal last turns": {"chosen": said("q", "a", "and?", "c"), "rejected": said("q", "b", "and?", "c")},
    "several turns": {
        "prompt": said("q"),
        "chosen": [called("f"), {"role": "tool", "content": "3"}, *said("q", "yes")[1:]],
        "rejected": [called("g"), {"role": "tool", "content": "3"}, *said("q", "no")[1:]],
    },
    "texts without a prompt": {"chosen": "Human: q Assistant: good", "rejected": "Human: q Assistant: bad"},
    "an empty answer": {"prompt": said("q"), "chosen": said("q", "a")[1:], "rejected": said("q", "")[1:]},
}


@pytest.mark.parametrize("form", TRIPLES)
def test_answers_of_a_pair_are_those_of_trl(folder: Path, tmp_path: Path, form: str) -> None:
    """What DPOTrainer's own preparation takes for the prompt, the chosen and the rejected tokens."""
    datasets, trl = pytest.importorskip("datasets"), pytest.importorskip("trl")
    row, ckpt = TRIPLES[form], write_llama(tmp_path / "llama", SHOWN)
    tokenizer = theirs(ckpt)
    tokenizer.eos_token = "<|im_end|>"
    args = SimpleNamespace(dataset_num_proc=None, max_length=None, truncation_mode="keep_start")
    self = SimpleNamespace(_tokenizer=tokenizer)
    (their,) = trl.DPOTrainer._prepare_dataset(
        self, datasets.Dataset.from_list([row]), tokenizer, args, "rows"
    )
    write_rows(tmp_path / "pairs" / "train.jsonl", [row])
    config = replace(preferring(folder), ckpt=str(ckpt))
    task = replace(config.task, max_length=POSITIONS)
    start = replace(read_start(config), max_length=1000)
    (example,) = tokenize_split(task, read_split(task, "train", path=str(tmp_path / "pairs")), start).examples
    end = [start.tokenizer.eod_id] if "texts" in form else []
    for text, label, name in zip(example.texts, example.label.texts, ("chosen", "rejected"), strict=True):
        ids = [*their["prompt_ids"], *their[f"{name}_ids"]]
        assert text.tokens.tolist() == [*ids[: len(ids) - len(end)], *end]
        assert int(np.sum(np.array(label) >= 0)) == len(their[f"{name}_ids"])


def test_padding_has_positions_that_every_model_has(folder: Path) -> None:
    """A GPT-2 has none for the padding of a short pair beside a long one, if that is longer than any text."""
    config = preferring(folder)
    split = read_split(config.task, "train", path=str(folder / "pairs" / "train.jsonl"))
    pairs = sorted(tokenize_split(config.task, split, read_start(config)).examples, key=example_tokens)
    packer = PairPacker(rank=0, size=1, budget=1, length=POSITIONS)
    batch = packer.batch([pairs[0], *pairs[-2:]], [[0], [1, 2]], 0, 0)
    longest = max(len(text) for pair in pairs for text in pair.texts)
    assert batch.tokens.shape[1] - example_tokens(pairs[0]) > longest
    _, _, documents = PairLoss(ParallelContext(), torch.float32, config.task).inputs(batch)
    assert documents is not None
    assert int(documents.positions.max()) < longest
