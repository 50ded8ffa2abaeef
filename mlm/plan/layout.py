"""A layout with its batch sizes, and a model's FLOPs."""

import re
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args

from mlm.models.config import ModelConfig
from mlm.models.family import family_of
from mlm.models.shape import flops_per_token
from mlm.parallel.config import ParallelConfig, Recompute, Schedule
from mlm.runs.config import PretrainConfig

ALWAYS_SET = ("tp", "pp", "dp", "micro_batch", "global_batch")
"""Fields of a layout that its label and settings name even at their defaults."""
FIRST, LAST, BOTH = "first", "last", "both"
"""Homes of parameters outside the layers: the first and the last pipeline stage, and both in one stage, which
hold one embedding table if it is tied."""


def model_flops(model: ModelConfig, seq: int, samples: int, tp: int = 1) -> float:
    """Return the FLOPs of a step: forward, and twice as many backward (arXiv:2205.05198, appendix A)."""
    return flops_per_token(model, seq, tp) * seq * samples


def hardware_flops(model: ModelConfig, seq: int, samples: int, recompute: str, tp: int = 1) -> float:
    """Return the FLOPs of a step; full recomputation adds another forward pass of every layer.

    Equation (3) of arXiv:2104.04473. Scores that fused attention recomputes are not counted.
    """
    flops = model_flops(model, seq, samples, tp)
    head = 6 * family_of(model.kind).head_products(model, tp) * seq * samples
    return flops + (flops - head) / 3 * (recompute == "full")


SPLIT = ("tp", "cp", "ep", "expert_tp", "sequence_parallel", "tp_overlap", "recompute", "recompute_budget")
"""Fields of a layout that the counts of a layer depend on."""


def split_of_state(split: ParallelConfig) -> ParallelConfig:
    """Return the settings of a split that parameters depend on."""
    needs_sp = split.sequence_parallel and split.expert_tp is not None  # expert_tp=1 requires it
    return ParallelConfig(tp=split.tp, ep=split.ep, expert_tp=split.expert_tp, sequence_parallel=needs_sp)


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedLayout(ParallelConfig):
    """A layout with its batch sizes; with model and hardware it determines a step's time and memory."""

    dp: int = 1
    micro_batch: int = 1
    global_batch: int = 1

    @classmethod
    def of(cls, run: PretrainConfig, dp: int) -> "PlannedLayout":
        """Return the layout of a run with this dp."""
        return cls(**{**settings_of(run), "dp": dp}).effective

    @property
    def effective(self) -> "PlannedLayout":
        """The same layout with settings that have no effect at its sizes at their defaults."""
        values: dict[str, Any] = {}
        if self.tp == 1:
            values |= {"expert_tp": None, "sequence_parallel": False, "tp_overlap": None}
        if self.recompute != "budget":
            values["recompute_budget"] = ParallelConfig().recompute_budget
        if self.dp * self.cp == 1:
            values["zero"] = 0
        if not values.get("zero", self.zero):
            values["zero_reduce"] = "last"
        return replace(self, **values)

    @property
    def gpus(self) -> int:
        return self.tp * self.cp * self.pp * self.dp

    @property
    def split(self) -> ParallelConfig:
        """The settings that counts of a layer depend on; others have their defaults."""
        return ParallelConfig(**{name: getattr(self, name) for name in SPLIT})

    @property
    def micro_batches(self) -> int:
        """m: micro-batches of a replica in a step."""
        return self.global_batch // (self.dp * self.micro_batch)

    @property
    def label(self) -> str:
        """The layout as one line: `tp8 pp4 vp2 dp16 sp zero2 full mb4`."""
        changed = {name for name, default in DEFAULTS.items() if getattr(self, name) != default}
        named = {name: form for name, form in WORDS.items() if name in changed or name in ALWAYS_SET}
        return " ".join(form.format(getattr(self, name)) for name, form in named.items())

    @classmethod
    def named(cls, label: str, run: PretrainConfig) -> "PlannedLayout":
        """Return a label's layout, with the run's value of each other field. Raises ValueError."""
        values: dict[str, Any] = {}
        for word in label.split():
            size = re.fullmatch(r"(\D+)([1-9]\d*)", word)
            if word in CHOICES:
                named = CHOICES[word]
            elif size is not None and size[1] in SIZES:
                named = {SIZES[size[1]]: int(size[2])}
            else:
                raise ValueError(f"{word} is not a word of a layout's name")
            if named.keys() & values.keys():
                raise ValueError(f"{word} comes after another word of the same setting")
            values |= named
        layout = cls(**{**settings_of(run), **values}).effective
        return replace(layout, **values)  # words without effect stay, so that the checks report them

    def settings(self, *, defaults: bool = False) -> dict[str, object]:
        """Return the settings of `mlm pretrain` for this layout, with or without those at their defaults."""
        return {
            BATCH_NAMES.get(name, name): value
            for name, default in DEFAULTS.items()
            if (value := getattr(self, name)) != default or defaults or name in ALWAYS_SET
        }


def settings_of(run: PretrainConfig) -> dict[str, Any]:
    """Return the fields of PlannedLayout from a run."""
    values = {name: getattr(run.parallel, name) for name in ParallelConfig.__slots__}
    batch = {"micro_batch": run.train.micro_batch_size, "global_batch": run.train.global_batch_size}
    return {**values, **batch, "dp": run.parallel.dp or 1}


BATCH_NAMES = {"micro_batch": "train.micro_batch_size", "global_batch": "train.global_batch_size"}
"""Keys of `mlm pretrain` for fields of a layout with another name."""
DEFAULTS = asdict(PlannedLayout())
WORDS = {
    **{"tp": "tp{}", "pp": "pp{}", "vp": "vp{}", "dp": "dp{}", "cp": "cp{}", "ep": "ep{}"},
    **{"expert_tp": "etp{}", "sequence_parallel": "sp", "tp_overlap": "overlap{}", "pipeline": "{}"},
    **{"zero": "zero{}", "zero_reduce": "{}", "recompute": "{}", "micro_batch": "mb{}"},
}
"""Words of a layout's name by its fields, in their order."""
SIZES = {form[:-2]: name for name, form in WORDS.items() if form not in ("{}", "zero{}", "sp")}
CHOICES: dict[str, dict[str, Any]] = {
    "sp": {"sequence_parallel": True},
    **{name: {"pipeline": name} for name in get_args(Schedule)},
    **{f"zero{stage}": {"zero": stage} for stage in (0, 2, 3)},
    **{name: {"zero_reduce": name} for name in ("last", "every")},
    **{name: {"recompute": name} for name in get_args(Recompute)},
}
"""Fields and values by a label's words without a number."""
