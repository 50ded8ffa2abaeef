"""Loss and gradients of each kind of task against transformers, same weights and no dropout, in float64."""

import re
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from mlm.convert.huggingface.families import mapping_of_kind
from mlm.finetune.batches import TaskBatch
from mlm.finetune.registry import task_type
from mlm.finetune.scoring import ExampleLoss
from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.parallel.config import IGNORE_INDEX
from mlm.parallel.mesh import Axis, ParallelContext
from mlm.parallel.sharding import load_full, parameter_shards

VOCAB, ONE = 61, Axis("tp")
SHAPE = {"num_layers": 2, "hidden_size": 16, "num_heads": 2, "max_positions": 16, "vocab_size": VOCAB}
SHAPE |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
BERT = ModelConfig(**SHAPE, kind="bert", norm="post", token_types=2, activation="gelu")
ROBERTA = replace(BERT, kind="roberta", token_types=1, max_positions=14, options={"position_offset": 2})
DISTILBERT = replace(
    BERT, kind="roberta", token_types=0, layer_norm_eps=1e-12, options={"pooler_activation": "relu"}
)
OURS = {"Bert": BERT, "Roberta": ROBERTA, "DistilBert": DISTILBERT}
HEADS = {
    "classification": ("ForSequenceClassification", "classification", 3),
    "regression": ("ForSequenceClassification", "classification", 1),
    "choice": ("ForMultipleChoice", "classification", 1),
    "span": ("ForQuestionAnswering", "span", 0),
}
"""transformers' class, our head and num_labels."""
LABELS = {
    "classification": torch.tensor([2, 0, 1]),
    "regression": torch.tensor([3.8, 0.0, -1.5], dtype=torch.float64),
    "choice": torch.tensor([3, 0]),
    "span": torch.tensor([[2, 5], [0, 0], [7, 7]]),
}


def batch_of(kind: str, model: str) -> TaskBatch:
    """Texts of unequal lengths; of kind span of equal ones, since transformers scores padding too."""
    draw = torch.Generator().manual_seed(1)
    texts = {"choice": 8}.get(kind, 3)
    lengths = torch.full((texts,), 8) if kind == "span" else torch.randint(2, 9, (texts,), generator=draw)
    lengths[0] = 8
    inside = torch.arange(8) < lengths[:, None]
    tokens = torch.randint(2, VOCAB, (texts, 8), generator=draw).where(inside, 1 if model == "Roberta" else 0)
    types = ((torch.arange(8) > 3) & inside).long() * (model == "Bert")
    return TaskBatch(tokens, types, lengths, LABELS[kind], 0)


def theirs(kind: str, model: str, batch: TaskBatch) -> tuple[ModelConfig, Any]:
    name, head, num_labels = HEADS[kind]
    torch.manual_seed(0)
    shape = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": VOCAB}
    shape["max_position_embeddings"] = 16
    if model in OURS:
        config = OURS[model]
        off = dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob"), 0.0)
        if model == "DistilBert":
            off |= dict.fromkeys(("dropout", "attention_dropout", "seq_classif_dropout", "qa_dropout"), 0.0)
        settings = getattr(transformers, f"{model}Config")(
            **shape,
            **off,
            intermediate_size=64,
            hidden_dim=64,
            layer_norm_eps=BERT.layer_norm_eps,
            type_vocab_size=config.token_types,
            num_labels=num_labels or 2,
        )
    else:
        off = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        settings = transformers.GPT2Config(**shape, **off, pad_token_id=0, num_labels=num_labels)
        config = replace(BERT, kind="gpt2", norm="pre", activation="gelu_tanh", token_types=0)
    found = getattr(transformers, f"{model}{name}")(settings).double().eval()
    with torch.no_grad():
        for p in found.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    size = (len(LABELS[kind]), -1, 8) if kind == "choice" else (-1, 8)
    mask = (torch.arange(8) < batch.lengths[:, None]).long()
    inputs: dict[str, Any] = {"input_ids": batch.tokens.view(size), "attention_mask": mask.view(size)}
    if model == "Bert":
        inputs["token_type_ids"] = batch.token_types.view(size)
    if kind == "span":
        inputs |= {"start_positions": batch.labels[:, 0], "end_positions": batch.labels[:, 1]}
    else:
        inputs["labels"] = batch.labels
    found.loss = found(**inputs).loss
    found.loss.backward()
    return replace(config, head=head, num_labels=num_labels), found


def in_our_names(tensors: dict[str, Tensor | None], config: ModelConfig) -> dict[str, Tensor]:
    """Parameters or gradients of theirs by the names of our model."""
    mapping = mapping_of_kind(config.kind)
    for pattern, replacement in mapping.renamings(tensors).items():
        tensors = {re.sub(pattern, replacement, name): value for name, value in tensors.items()}
    ours = mapping.to_parameters(tensors, config)
    # transformers' GPT-2 has no bias there
    return ours if config.kind != "gpt2" else {**ours, "classifier.bias": torch.zeros(config.num_labels)}


@pytest.mark.parametrize(
    ("kind", "model"),
    [
        *((kind, model) for model in OURS for kind in HEADS),
        *(("classification", "GPT2"), ("regression", "GPT2")),
    ],
)
def test_loss_and_gradients_are_those_of_transformers(kind: str, model: str) -> None:
    batch = batch_of(kind, model)
    config, other = theirs(kind, model, batch)
    mine = family_of(config.kind).model(config, tp=ONE, dtype=torch.float64).double()
    load_full(mine, in_our_names(dict(other.state_dict()), config), ONE)
    objective = ExampleLoss(task_type(kind), ParallelContext(), torch.float64)
    scale = torch.ones(1, dtype=torch.float64) / objective.counts(batch)[0]
    loss = objective.output(mine, batch, scale, None, None)
    loss.sum().backward()
    torch.testing.assert_close(loss[0], other.loss, rtol=0, atol=1e-12)
    wanted = in_our_names({name: p.grad for name, p in other.named_parameters()}, config)
    for shard in parameter_shards(mine, ONE):
        if (shard.name, model) != ("classifier.bias", "GPT2"):  # transformers' head has none
            grad = shard.without_padding(shard.parameter.grad)
            torch.testing.assert_close(grad, wanted[shard.name], rtol=0, atol=1e-12, msg=shard.name)


@pytest.mark.parametrize("kind", HEADS)
def test_what_is_not_scored_changes_nothing(kind: str) -> None:
    """A micro-batch that only fills up has no loss, no gradient, and counts for nothing."""
    batch = batch_of(kind, "Bert")
    unscored = np.nan if kind == "regression" else IGNORE_INDEX
    batch = replace(batch, labels=torch.full_like(batch.labels, unscored))
    config = replace(BERT, head=HEADS[kind][1], num_labels=HEADS[kind][2])
    model = family_of("bert").model(config, tp=ONE, dtype=torch.float64).double()
    torch.nn.init.normal_(model.classifier.weight)
    for p in model.parameters():
        torch.nn.init.normal_(p, std=0.1)
    objective = ExampleLoss(task_type(kind), ParallelContext(), torch.float64)
    assert objective.counts(batch) == (0,)
    loss = objective.output(model, batch, torch.ones(1, dtype=torch.float64), None, None)
    loss.sum().backward()
    assert loss.tolist() == [0.0]
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
