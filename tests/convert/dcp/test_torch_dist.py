"""`mlm convert` of Llamas: it computes what `transformers` computes."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

import mlm
from mlm.cli.convert.run import run
from mlm.convert.config import ConvertConfig
from mlm.util.errors import UserError
from tests.convert.dcp.llamas import (
    VOCAB,
    arguments,
    core_state,
    random_llama,
    torchtitan_state,
    write_torch_dist,
)

TOKENS = torch.randint(0, VOCAB, (2, 19), generator=torch.Generator().manual_seed(1))


def assert_same_logits(folder: Path, theirs: Tensor) -> None:
    """Within 1e-4 of the largest: float32 sums in another order."""
    ours = mlm.load(str(folder)).logits(TOKENS)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-4 * theirs.abs().max().item())


def import_to(tmp_path: Path) -> Path:
    run(ConvertConfig(source=str(tmp_path / "theirs"), out=str(tmp_path / "run")))
    return tmp_path / "run"


@torch.no_grad()
@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "numbered"])
def test_llama_of_torch_dist_computes_what_transformers_does(tmp_path: Path, stacked: bool) -> None:
    model = random_llama()
    write_torch_dist(tmp_path / "theirs", core_state(model, stacked=stacked))
    assert_same_logits(import_to(tmp_path), model(TOKENS).logits)


def test_missing_layer_is_named(tmp_path: Path) -> None:
    state = core_state(random_llama(), stacked=False)
    del state["decoder.layers.1.mlp.linear_fc2.weight"]
    write_torch_dist(tmp_path / "theirs", state)
    with pytest.raises(UserError, match=r"layers\.1\.mlp\.down\.weight is missing"):
        import_to(tmp_path)


def test_unsupported_argument_is_named(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "theirs", core_state(random_llama()), arguments(multi_latent_attention=True))
    with pytest.raises(UserError, match=r"args\.multi_latent_attention=True.*Llama"):
        import_to(tmp_path)


def test_names_of_torchtitan_need_the_model_that_convert_takes(tmp_path: Path) -> None:
    write_torch_dist(tmp_path / "theirs", torchtitan_state(random_llama()))
    with pytest.raises(UserError, match=r"torchtitan's names.*mlm convert"):
        import_to(tmp_path)
