"""The contenders on BERT's pretraining: `mlm` and `transformers`, from the same weights and micro-batches.

A step is zero_grad, forward, backward, clip, fused AdamW, of masked-language-model loss plus sentence-order
loss, each a mean over what is scored. Equality is checked without dropout: masks are drawn differently.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor

from bench.bert_shapes import BertShape, bert_batches, bert_state
from bench.contenders import MlmTrainee, Trainee, adamw, run_config
from bench.shapes import OPTIMIZER
from bench.spec import Spec
from mlm.models.bert.huggingface import MAPPING
from mlm.parallel.mesh import ParallelContext
from mlm.parallel.sharding import load_whole
from mlm.training.trainer import Trainer
from mlm.util.errors import UserError


def shape_of(spec: Spec) -> BertShape:
    """The spec's shape, which is a BERT's."""
    assert isinstance(spec.shape, BertShape)
    return spec.shape


class MlmBert(MlmTrainee):
    """`mlm` by its own Trainer: what `mlm pretrain model=bert_…` runs."""

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        Trainee.__init__(self, name, spec, device)
        self.by_mkl = "mkl" in name
        shape = shape_of(spec)
        self.ctx = ParallelContext(device=device)
        config = self.changed(run_config(spec, shape.batch_size))
        self.trainer = Trainer(replace(config, compile="compiled" in name), self.ctx)
        whole = MAPPING.to_ours(bert_state(shape, spec.seed), shape.model())
        load_whole(self.trainer.model.chunks[0], whole, self.ctx.tp)
        self.batches = bert_batches(shape, spec.seed)

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        with self._library(), without_dropout(self.trainer):
            parts = self.trainer.forward_backward(self.batches[:1])
        gradients = {}
        for shard in self.trainer.shards:
            assert shard.parameter.grad is not None
            gradients[shard.name] = shard.without_padding(shard.parameter.grad).float().cpu()
        self.clear()
        return float(parts[: self.trainer.objective.losses].sum()), gradients


@contextmanager
def without_dropout(trainer: Trainer) -> Iterator[None]:
    """No masks are drawn inside."""
    trainer.dropout = lambda batch: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        del trainer.dropout  # the instance's, which hid the method


class TransformersBert(Trainee):
    """BertForPreTraining with sdpa attention, or MegatronBertForPreTraining, which has eager attention only.

    It is given what its users give it: the padding mask, and labels of which -100 is not scored.
    """

    def __init__(self, name: str, spec: Spec, device: torch.device) -> None:
        super().__init__(name, spec, device)
        shape = shape_of(spec)
        self.model = build_transformers(shape, "eager" if "eager" in name or shape.norm == "pre" else "sdpa")
        load_state(self.model, bert_state(shape, spec.seed))
        self.model.to(device).train()
        self.notes = (f"{type(self.model).__name__}, {self.model.config._attn_implementation} attention",)
        if name.endswith("-compiled"):  # per layer, like ours
            for layer in self.model.bert.encoder.layer:
                layer.compile()
        self.parameters = list(self.model.parameters())
        self.optimizer = adamw(self.parameters)
        self.inputs = [
            {
                "input_ids": batch.tokens.to(device),
                "token_type_ids": batch.token_types.to(device),
                "attention_mask": (torch.arange(shape.seq_length) < batch.lengths[:, None]).long().to(device),
                "labels": batch.labels.to(device),
                "next_sentence_label": batch.is_swapped.to(device),
            }
            for batch in bert_batches(shape, spec.seed)
        ]

    def step(self, index: int) -> None:
        self.clear()
        self.model(**self.inputs[index % len(self.inputs)]).loss.backward()
        torch.nn.utils.clip_grad_norm_(self.parameters, OPTIMIZER.clip_grad_norm)
        self.optimizer.step()

    def loss_and_gradients(self) -> tuple[float, dict[str, Tensor]]:
        self.clear()
        self.model.eval()  # dropout is all that it changes
        loss = self.model(**self.inputs[0]).loss
        loss.backward()
        self.model.train()
        gradients = {}
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None, name
            gradients[name] = parameter.grad.float().cpu()
        self.clear()
        return loss.item(), MAPPING.to_ours(gradients, shape_of(self.spec).model())

    def clear(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)


def build_transformers(shape: BertShape, attention: str):  # type: ignore[no-untyped-def]  # of an optional package
    """transformers' model for pretraining. Raises UserError where the package is missing."""
    try:
        import transformers
    except ImportError:
        raise UserError("--contenders transformers needs `transformers`: pip install 'mlm[dev]'") from None
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
    config._attn_implementation = attention
    return getattr(transformers, f"{kind}ForPreTraining")(config)


def load_state(model: torch.nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load a state in which only the tied output layer is missing."""
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected, unexpected
    assert set(missing) == {"cls.predictions.decoder.weight", "cls.predictions.decoder.bias"}, missing


def build_bert_trainee(name: str, spec: Spec, device: torch.device) -> Trainee:
    """The contender `name`. Raises UserError if its package is missing."""
    return (MlmBert if name.startswith("mlm") else TransformersBert)(name, spec, device)
