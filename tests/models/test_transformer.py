"""Arguments that every model hands to its layers: settings, and a dropout mask for each place."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from mlm.models.backbone import Inputs, Transformer
from mlm.models.bert.model import BERT
from mlm.models.config import ModelConfig
from mlm.models.gpt2.model import GPT2
from mlm.models.transformer import LayerNorm
from mlm.parallel.init import init_parameters
from mlm.parallel.mesh import Axis
from mlm.parallel.random import DropoutStream

ONE = Axis("tp")


def config(kind: str, **changed: object) -> ModelConfig:
    return ModelConfig(
        kind=kind,  # type: ignore[arg-type]
        token_types=2 if kind == "bert" else 0,
        num_layers=2,
        hidden_size=8,
        num_heads=2,
        max_positions=6,
        vocab_size=11,
        **changed,  # type: ignore[arg-type]
    )


@dataclass(frozen=True)
class Noted(DropoutStream):
    """A stream that notes where masks are drawn."""

    places: list[tuple[int, str]] = field(default_factory=list)

    def enter(self, layer: int, site: str, tp_rank: int) -> None:
        self.places.append((layer, site))
        super().enter(layer, site, tp_rank)


def places_of(model: Transformer, tokens: Tensor) -> list[tuple[int, str]]:
    """Places where a forward pass up to the head draws masks, in order."""
    init_parameters(model, 1, ONE)
    stream = Noted(5, torch.device("cpu"))
    model.outputs(Inputs(tokens, torch.tensor([6, 6])), stream)
    return stream.places


def test_no_two_places_of_a_model_share_a_dropout_mask() -> None:
    model = BERT(config("bert", head="classification", num_labels=3), tp=ONE)
    sites = ("attention", "attention out", "mlp out")
    each = [(layer, site) for layer in range(2) for site in sites]
    expected = [(-1, "embedding"), *each, (2, "classifier")]
    assert places_of(model, torch.zeros(2, 6, dtype=torch.int64)) == expected


@pytest.mark.parametrize("norm", ["pre", "post"])
def test_every_norm_has_the_eps_of_the_model(norm: str) -> None:
    for model in (
        GPT2(config("gpt2", layer_norm_eps=0.25), tp=ONE),
        BERT(config("bert", layer_norm_eps=0.25, norm=norm), tp=ONE),
    ):
        assert {module.eps for module in model.modules() if isinstance(module, LayerNorm)} == {0.25}
