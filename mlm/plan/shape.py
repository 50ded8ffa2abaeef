"""Architecture that the plan's formulas read: a transformer's shape, a layout, and floating-point operations.

Letters of the papers: L layers, H hidden, S sequence, V vocabulary, B micro-batch; t, p, v, d = tp, pp, vp,
dp and m micro-batches per replica.
"""

from dataclasses import dataclass, fields
from functools import cached_property
from typing import Literal

from mlm.models.config import ModelConfig
from mlm.models.family import Architecture
from mlm.parallel.config import ParallelConfig

Schedule = Literal["1f1b", "gpipe", "zb_h1"]
Recompute = Literal["none", "selective", "full"]
ALWAYS_SET = ("tp", "pp", "dp", "micro_batch", "global_batch")
"""Fields of a layout that are named at their defaults too."""


@dataclass(frozen=True)
class Shape:
    """A model on sequences of a length, as matrix products see it."""

    model: ModelConfig
    seq: int
    tp: int = 1
    """Tensor-parallel size, for which the vocabulary is padded."""
    imbalance: float = 1.0
    """Tokens of the fullest rank's experts over the mean."""

    @cached_property
    def sizes(self) -> Architecture:
        """Parts and sizes that the family decides."""
        return self.model.architecture

    @cached_property
    def vocab(self) -> int:
        """Rows of the vocabulary projection, padding included."""
        return self.model.padded_vocab_size(self.tp)

    @cached_property
    def layer_weights(self) -> float:
        """Elements of a layer's matrices that a token goes through."""
        return self.model.layer_weights

    def held_weights(self, ep: int) -> tuple[float, float]:
        """Elements of a layer's matrices in a tp group, the mean over the layers: of experts, of the rest."""
        mixtures = 1 - self.sizes.dense_layers / self.model.num_layers
        each = mixtures * self.model.mlp_weights(self.sizes.expert_size)
        rest = self.layer_weights - self.sizes.experts_per_token * each
        return self.sizes.experts / ep * each, rest

    @cached_property
    def table(self) -> int:
        """Elements of the token table."""
        return self.vocab * self.model.hidden_size

    @property
    def query_size(self) -> int:
        """Width of all queries."""
        return self.sizes.head_dim * self.model.num_heads

    @property
    def layer_flops(self) -> float:
        """Forward operations of one layer on one sequence: 2 per weight and token, 4 S^2 H for attention."""
        attention = 4 * self.seq * self.sizes.attended(self.seq) * self.query_size
        return 2 * self.seq * self.layer_weights + attention

    def model_flops(self, samples: int = 1) -> float:
        """Operations of a step: forward once, backward twice that (arXiv:2205.05198, appendix A)."""
        head = 2 * self.seq * self.table * self.model.family.scored
        return samples * 3 * (self.model.num_layers * self.layer_flops + head)

    def hardware_flops(self, recompute: Recompute = "none", samples: int = 1) -> float:
        """Operations of a step with those recomputed.

        Full recomputation is another forward pass of every layer: 96 B S L H^2 (1 + S/6H + V/16LH), equation
        (3) of arXiv:2104.04473. Fused attention kernels recompute scores too, which no formula counts.
        """
        again = samples * self.model.num_layers * self.layer_flops if recompute == "full" else 0
        return self.model_flops(samples) + again


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout:
    """A layout with its batch: all that a step's time and memory depend on besides model and hardware."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    ep: int = 1
    sequence_parallel: bool = False
    pipeline: Schedule = "1f1b"
    zero: Literal[0, 2, 3] = 0
    zero_reduce: Literal["last", "every"] = "last"
    recompute: Recompute = "none"
    micro_batch: int = 1
    global_batch: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, *, dp: int, micro_batch: int, global_batch: int) -> "PlannedLayout":
        """The layout of these settings, with dp filled in."""
        zero = parallel.zero if dp > 1 else 0
        return cls(
            tp=parallel.tp,
            pp=parallel.pp,
            vp=parallel.vp,
            dp=dp,
            ep=parallel.ep,
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            pipeline=parallel.pipeline,
            zero=zero,
            zero_reduce=parallel.zero_reduce if zero else "last",
            recompute=parallel.recompute,
            micro_batch=micro_batch,
            global_batch=global_batch,
        )

    @property
    def gpus(self) -> int:
        """Devices."""
        return self.tp * self.pp * self.dp

    @property
    def micro_batches(self) -> int:
        """m: micro-batches of a replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def label(self) -> str:
        """The layout in few words: `tp8 pp4 vp2 dp16 sp zero2 full mb4`."""
        words = [f"tp{self.tp}", f"pp{self.pp}"]
        words += [f"vp{self.vp}"] if self.vp > 1 else []
        words += [f"dp{self.dp}", *([f"ep{self.ep}"] if self.ep > 1 else [])]
        words += ["sp"] if self.sequence_parallel else []
        words += [self.pipeline] if self.pipeline != "1f1b" else []
        words += [f"zero{self.zero}"] if self.zero else []
        words += ["every"] if self.zero_reduce == "every" else []
        words += [self.recompute] if self.recompute != "none" else []
        return " ".join([*words, f"mb{self.micro_batch}"])

    def settings(self) -> dict[str, object]:
        """Settings of `mlm pretrain` that give this layout; those at their defaults left out."""
        changed = self.settings_changed_from(PlannedLayout())
        return {
            key: getattr(self, name) for name, key in SETTINGS.items() if key in changed or name in ALWAYS_SET
        }

    def settings_changed_from(self, other: "PlannedLayout") -> dict[str, object]:
        """Settings in which this layout differs from another, with its values."""
        values = ((key, getattr(self, name), getattr(other, name)) for name, key in SETTINGS.items())
        return {key: mine for key, mine, others in values if mine != others}


BATCH_NAMES = {"micro_batch": "train.micro_batch_size", "global_batch": "train.global_batch_size"}
SETTINGS = {each.name: BATCH_NAMES.get(each.name, each.name) for each in fields(PlannedLayout)}
"""Settings of `mlm pretrain` by the field of a layout."""
