"""A layout with its batch, as plans compare them, and a model's operations on it."""

from dataclasses import dataclass, fields
from typing import Literal

from mlm.models.config import ModelConfig
from mlm.parallel.config import ParallelConfig

Schedule = Literal["1f1b", "gpipe", "zb_h1"]
Recompute = Literal["none", "selective", "full"]
ALWAYS_SET = ("tp", "pp", "dp", "micro_batch", "global_batch")
"""Fields of a layout that are named at their defaults too."""
FIRST, LAST, BOTH = "first", "last", "both"
"""Homes of parameters besides the layers: the ends of a pipeline, and those of a model in one stage, which
share a table where it is tied."""


def model_flops(model: ModelConfig, seq: int, samples: int, tp: int = 1) -> float:
    """Operations of a step: forward once, backward twice that (arXiv:2205.05198, appendix A)."""
    return model.flops_per_token(seq, tp) * seq * samples


def hardware_flops(model: ModelConfig, seq: int, samples: int, recompute: str, tp: int = 1) -> float:
    """Operations of a step with those that full recomputation repeats: another forward pass of every layer.

    Equation (3) of arXiv:2104.04473. Fused attention kernels recompute scores too, which is not counted.
    """
    whole = model_flops(model, seq, samples, tp)
    head = 6 * model.family.head_products(model, tp) * seq * samples
    return whole + (whole - head) / 3 * (recompute == "full")


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """All of a layout that the counts of a layer depend on."""

    tp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False
    tp_overlap: int = 1
    recompute: str = "none"

    @property
    def of_state(self) -> "Split":
        """All that parameters depend on."""
        split = self.sequence_parallel and self.expert_tp is not None  # whole experts need it
        return Split(tp=self.tp, ep=self.ep, expert_tp=self.expert_tp, sequence_parallel=split)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout:
    """A layout with its batch: all that a step's time and memory depend on besides model and hardware."""

    tp: int = 1
    pp: int = 1
    vp: int = 1
    dp: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    sequence_parallel: bool = False
    tp_overlap: int = 1
    pipeline: Schedule = "1f1b"
    zero: Literal[0, 2, 3] = 0
    zero_reduce: Literal["last", "every"] = "last"
    recompute: Recompute = "none"
    micro_batch: int = 1
    global_batch: int = 1

    @classmethod
    def of(cls, parallel: ParallelConfig, *, dp: int, micro_batch: int, global_batch: int) -> "PlannedLayout":
        """The layout of these settings, with dp filled in."""
        zero = parallel.zero if dp * parallel.cp > 1 else 0
        return cls(
            tp=parallel.tp,
            pp=parallel.pp,
            vp=parallel.vp,
            dp=dp,
            cp=parallel.cp,
            ep=parallel.ep,
            expert_tp=parallel.expert_tp if parallel.tp > 1 else None,
            sequence_parallel=parallel.sequence_parallel and parallel.tp > 1,
            tp_overlap=parallel.tp_overlap if parallel.tp > 1 else 1,
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
        return self.tp * self.cp * self.pp * self.dp

    @property
    def split(self) -> Split:
        """The fields on which the counts of a layer depend."""
        return Split(
            tp=self.tp,
            cp=self.cp,
            ep=self.ep,
            expert_tp=self.expert_tp,
            sequence_parallel=self.sequence_parallel,
            tp_overlap=self.tp_overlap,
            recompute=self.recompute,
        )

    @property
    def micro_batches(self) -> int:
        """m: micro-batches of a replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def label(self) -> str:
        """The layout in few words: `tp8 pp4 vp2 dp16 sp zero2 full mb4`."""
        words = [f"tp{self.tp}", f"pp{self.pp}"]
        words += [f"vp{self.vp}"] if self.vp > 1 else []
        words += [f"dp{self.dp}", *([f"cp{self.cp}"] if self.cp > 1 else [])]
        words += [f"ep{self.ep}"] if self.ep > 1 else []
        words += [f"etp{self.expert_tp}"] if self.expert_tp is not None else []
        words += ["sp"] if self.sequence_parallel else []
        words += [f"overlap{self.tp_overlap}"] if self.tp_overlap > 1 else []
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
