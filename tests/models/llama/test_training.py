"""Twenty steps of AdamW beside `transformers`: as close as `transformers` is to itself."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from mlm.convert.huggingface.llama import MAPPING
from mlm.models.llama.model import Llama
from mlm.parallel.mesh import Axis
from mlm.parallel.sharding import load_full
from tests.models.llama.table import our_config

VOCAB, SEQ, STEPS = 256, 64, 20


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "tied"), [("Llama", False), ("Qwen2", True)])
def test_training_is_that_of_transformers_from_weights_an_ulp_away(kind: str, tied: bool) -> None:
    """Tied models amplify rounding: gradient norms of equal ones part by 2e-5 and more, losses by 1e-6."""
    config = getattr(transformers, f"{kind}Config")(
        hidden_size=64,
        intermediate_size=172,
        num_hidden_layers=4,
        num_attention_heads=4,
        vocab_size=VOCAB,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=tied,
        attn_implementation="eager",
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    theirs = getattr(transformers, f"{kind}ForCausalLM")(config)
    ours = Llama(our_config(theirs))
    load_full(ours, MAPPING.to_ours(theirs.state_dict(), our_config(theirs)), Axis("tp"))
    moved = [copy.deepcopy(theirs) for _ in range(4)]
    for seed, model in enumerate(moved):  # each weight one float32 ulp up or down
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data.mul_(1 + (2 * torch.randint(0, 2, p.shape, generator=generator) - 1) * 2.0**-23)
    losses, norms = train(theirs, their_loss)
    apart = [train(model, their_loss) for model in moved]
    our_losses, our_norms = train(ours, lambda m, x, y: m(x, y, torch.tensor(1 / y.numel())))
    assert (our_losses - losses).abs().max() <= 3 * max((each[0] - losses).abs().max() for each in apart)
    differences = [(each[1] / norms - 1).abs().max() for each in apart]
    assert (our_norms / norms - 1).abs().max() <= 3 * max(differences)
    assert max(differences) <= 1e-3


def their_loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x).logits.flatten(0, 1), y.flatten())


def train(model: nn.Module, loss_of: Any) -> tuple[Tensor, Tensor]:
    """Losses and gradient norms of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=True)
    samples = torch.randint(0, VOCAB, (STEPS, 4, SEQ + 1), generator=torch.Generator().manual_seed(5))
    found = []
    for batch in samples:
        optimizer.zero_grad()
        loss = loss_of(model, batch[:, :-1], batch[:, 1:])
        loss.backward()
        norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None])
        optimizer.step()
        found.append(torch.stack([loss.detach(), norm]).double())
    losses, norms = torch.stack(found).t()
    return losses, norms
