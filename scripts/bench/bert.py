"""BERTs to pretrain: their shapes, weights and micro-batches, and `transformers`' classes as a contender.

The loss is masked-language-model loss plus sentence-order loss, each a mean over what is scored. Equality is
checked without dropout: masks are drawn differently.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from bench.contenders import TransformersTrainee, imported
from bench.shapes import NUM_BATCHES, Shape
from mlm.data.sampler import collate
from mlm.models.bert.samples import BERTBatch, SyntheticBERT
from mlm.models.config import ModelConfig
from mlm.util.errors import UserError

TIED = frozenset({"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"})


@dataclass(frozen=True)
class BertShape(Shape):
    """Sizes of a BERT and of the micro-batch of one step; vocab_size is not padded."""

    norm: Literal["pre", "post"] = "post"

    @classmethod
    def of(cls, shape: Shape, norm: Literal["pre", "post"], dropout: float) -> "BertShape":
        """The BERT with the sizes of a GPT-2. Raises UserError."""
        if not 0 <= dropout < 1:
            raise UserError(f"--dropout {dropout:g} must be from 0 to below 1")
        if shape.seq_length < 8:
            raise UserError(f"--shape {shape.name}: S={shape.seq_length} must be at least 8")
        return cls(**asdict(shape) | {"dropout": dropout}, norm=norm)

    def model(self) -> ModelConfig:
        """The configuration of `mlm`: that of model=bert_base but for its sizes."""
        return ModelConfig(
            kind="bert",
            num_layers=self.num_layers,
            hidden_size=self.hidden_size,
            num_heads=self.num_heads,
            max_positions=self.seq_length,
            vocab_size=self.vocab_size,
            token_types=2,
            norm=self.norm,
            activation="gelu",
            layer_norm_eps=1e-12,
            hidden_dropout=self.dropout,
            attention_dropout=self.dropout,
        )

    def describe(self) -> str:
        """The sizes in words."""
        return f"BERT, {super().describe()}, norm={self.norm}, dropout {self.dropout:g}"

    def batches(self, seed: int) -> list[BERTBatch]:
        """Random tokens, a tenth of the samples short; the micro-batch with most padding first."""
        dataset = SyntheticBERT(self.vocab_size, self.seq_length, NUM_BATCHES * self.batch_size, seed)
        samples = dataset.gather(range(len(dataset)))
        # 0 is [PAD], which no text holds: the input table of transformers would not learn it
        samples.tokens[samples.padding_mask & (samples.tokens == 0)] = 1
        out = []
        for first in range(0, len(dataset), self.batch_size):
            batch = collate(samples[first : first + self.batch_size], first)
            assert isinstance(batch, BERTBatch)
            out.append(batch)
        return sorted(out, key=lambda batch: int(batch.lengths.sum()))  # the first one's losses are compared

    def state(self, seed: int) -> dict[str, Tensor]:
        """Random float32 weights in the names of transformers' BertForPreTraining, or with norm=pre of
        MegatronBertForPreTraining; nothing is zero, so all of it shows."""
        generator = torch.Generator().manual_seed(seed)
        h, f, state = self.hidden_size, self.model().ffn_size, dict[str, Tensor]()

        def normal(*size: int, mean: float = 0.0) -> Tensor:
            return torch.empty(size).normal_(mean, 0.02, generator=generator)

        def add(name: str, *size: int, mean: float = 0.0) -> None:
            state[f"{name}.weight"], state[f"{name}.bias"] = normal(*size, mean=mean), normal(size[0])

        tables = {"word": self.vocab_size, "position": self.seq_length, "token_type": 2}
        for table, rows in tables.items():
            state[f"bert.embeddings.{table}_embeddings.weight"] = normal(rows, h)
        norms = ("attention.output.LayerNorm", "output.LayerNorm")
        if self.norm == "pre":
            norms = ("attention.ln", "ln")
        add("bert.encoder.ln" if self.norm == "pre" else "bert.embeddings.LayerNorm", h, mean=1.0)
        for n in range(self.num_layers):
            layer = f"bert.encoder.layer.{n}"
            for part in ("query", "key", "value"):
                add(f"{layer}.attention.self.{part}", h, h)
            add(f"{layer}.attention.output.dense", h, h)
            add(f"{layer}.intermediate.dense", f, h)
            add(f"{layer}.output.dense", h, f)
            for norm in norms:
                add(f"{layer}.{norm}", h, mean=1.0)
        add("bert.pooler.dense", h, h)
        add("cls.predictions.transform.dense", h, h)
        add("cls.predictions.transform.LayerNorm", h, mean=1.0)
        add("cls.seq_relationship", 2, h)
        state["cls.predictions.bias"] = normal(self.vocab_size)
        return state


class TransformersBert(TransformersTrainee):
    """BertForPreTraining with sdpa attention, or MegatronBertForPreTraining, which has eager attention only.

    It is given what its users give it: the padding mask, and labels of which -100 is not scored.
    """

    tied = TIED

    def build(self) -> tuple[Any, Sequence[nn.Module]]:
        shape, transformers = self.spec.shape, imported("transformers")
        assert isinstance(shape, BertShape)
        kind = "Bert" if shape.norm == "post" else "MegatronBert"
        config = getattr(transformers, f"{kind}Config")(
            vocab_size=shape.vocab_size,
            hidden_size=shape.hidden_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_heads,
            intermediate_size=shape.model().ffn_size,
            hidden_act="gelu",
            hidden_dropout_prob=shape.dropout,
            attention_probs_dropout_prob=shape.dropout,
            max_position_embeddings=shape.seq_length,
            type_vocab_size=2,
            layer_norm_eps=shape.model().layer_norm_eps,
        )
        config._attn_implementation = "eager" if shape.norm == "pre" else "sdpa"
        model = getattr(transformers, f"{kind}ForPreTraining")(config)
        self.notes = (f"{type(model).__name__}, {config._attn_implementation} attention",)
        return model, list(model.bert.encoder.layer)

    def prepare_batches(self) -> list[tuple[Any, ...]]:
        shape, device = self.spec.shape, self.device
        assert isinstance(shape, BertShape)
        return [
            (
                {
                    "input_ids": batch.tokens.to(device),
                    "token_type_ids": batch.token_types.to(device),
                    "attention_mask": (torch.arange(shape.seq_length) < batch.lengths[:, None])
                    .long()
                    .to(device),
                    "labels": batch.labels.to(device),
                    "next_sentence_label": batch.is_swapped.to(device),
                },
            )
            for batch in shape.batches(self.spec.seed)
        ]

    def loss(self, inputs: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        loss: Tensor = self.model(**inputs).loss
        return loss

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        self.model.eval()  # dropout is all that it changes
        try:
            return super().loss_and_gradients()
        finally:
            self.model.train()
