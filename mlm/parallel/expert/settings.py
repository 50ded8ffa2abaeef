"""Settings of the choice and balance of experts: model.options.NAME of a mixture of experts."""

from dataclasses import dataclass
from typing import Annotated

from mlm.config.fields import OnlyIf

GROUP_MEMBERS = 2
"""Experts of a group whose scores, added, are the group's (arXiv:2412.19437)."""
EXPERTS = OnlyIf("num_experts")


@dataclass(frozen=True, kw_only=True, slots=True)
class RouterSettings:
    """Choice of the experts of each token, and balance of their loads (router.py)."""

    num_experts: int = 0
    """Experts of each layer, E, in place of its MLP; 0 for a dense model. A multiple of ep."""
    experts_per_token: Annotated[int, EXPERTS] = 2
    """Experts that each token goes through, k."""
    router_scores: Annotated[str, EXPERTS] = "softmax"
    """Scores of experts from their logits: softmax, or sigmoid (arXiv:2412.19437, section 2.1.2)."""
    router_normalise: Annotated[bool, EXPERTS] = True
    """Divide the weights of a token's experts by their sum."""
    router_scale: Annotated[float, EXPERTS] = 1.0
    """Factor of those weights."""
    router_groups: Annotated[int, EXPERTS] = 1
    """Groups of consecutive experts, of which each token chooses some first (arXiv:2412.19437)."""
    router_top_groups: Annotated[int, EXPERTS] = 1
    """Groups that a token's experts are of."""
    router_bias: Annotated[bool, EXPERTS] = False
    """Add a bias to the scores for the choice alone; balance=bias has one too."""
    balance: Annotated[str, EXPERTS] = "none"
    """What keeps the loads of experts even: none, bias (arXiv:2408.15664), or a loss of the loads of each
    sequence (arXiv:2412.19437), of the global_batch before (arXiv:2501.11873), or of the micro_batch, which
    makes training depend on the layout."""
    balance_rate: Annotated[float, OnlyIf("balance", "bias")] = 0.001
    """Of bias: its step after each global batch."""
    balance_coefficient: Annotated[float, OnlyIf("balance", "sequence", "global_batch", "micro_batch")] = 0.01
    """Of the losses: their coefficient."""
    z_loss: Annotated[float, EXPERTS] = 0.0
    """Coefficient of the squared logarithm of the router's partition function (arXiv:2202.08906)."""
    capacity_factor: Annotated[float, EXPERTS] = 0.0
    """In pretraining, tokens of a sequence that an expert takes, over its even share of them: later ones pass
    it by (arXiv:2101.03961, section 2.2). 0 takes all, as evaluation, generation and finetuning do anyway."""

    @property
    def has_router_bias(self) -> bool:
        """True if routers have a bias."""
        return self.num_experts > 0 and (self.router_bias or self.balance == "bias")
