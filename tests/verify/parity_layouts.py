"""The layouts that are compared with one process, and the tiny run they are compared on."""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations, product
from typing import Any

import yaml

from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig
from mlm.optim.config import OptimizerConfig, PrecisionConfig, ScheduleConfig
from mlm.parallel.config import ParallelConfig
from mlm.parallel.mesh import ParallelContext
from mlm.runs.config import TrainConfig
from mlm.verify.config import ParityConfig
from mlm.verify.parity import Report, compare, shared_verdict
from mlm.verify.verdict import Verdict

VOCAB, SEQ, MICRO_BATCH = 61, 16, 2
VOCAB_OF_DOCUMENTS, EOD = 11, 3
"""Random tokens of so few kinds end a document or two in every sample."""


LLAMAS: dict[str, dict[str, bool | int | float | str]] = {
    "llama": {"num_kv_heads": 2, "rope_scaling": "llama3", "rope_factor": 2.0},
    "qwen": {
        **{"num_kv_heads": 1, "head_dim": 6, "qk_norm": True, "qkv_bias": True, "tied": True, "window": 5},
        **{"rope_scaling": "yarn", "rope_factor": 3.0, "rope_original_positions": 6, "rope_theta": 50.0},
    },
    "whole norms": {"num_kv_heads": 2, "qk_norm": True, "qk_norm_whole": True},
    "gemma": {
        **{"num_kv_heads": 2, "qk_norm": True, "output_norms": True, "zero_centered_norms": True},
        **{"window": 5, "window_layers": "sf", "window_rope_theta": 30.0, "rotary_layers": "rrn"},
        **{"attention_softcap": 2.0, "logit_softcap": 1.5, "attention_multiplier": 0.7},
        **{"embedding_multiplier": 4.0, "tied": True},
    },
    "latent": {
        **{"kv_lora_rank": 5, "q_lora_rank": 7, "head_dim": 6, "rope_head_dim": 4, "v_head_dim": 3},
        **{"rope_scaling": "yarn", "rope_factor": 3.0, "rope_original_positions": 6, "rope_mscale": 1.0},
    },
}
"""Options of the Llamas, of 4 heads: all that the family has."""


MIXTURES: dict[str, dict[str, bool | int | float | str]] = {
    "softmax": {
        **{"num_experts": 4, "expert_ffn_size": 12, "balance": "global_batch", "balance_coefficient": 0.1},
        "z_loss": 0.01,
    },
    "sigmoid": {
        **{"num_experts": 8, "experts_per_token": 3, "expert_ffn_size": 8, "shared_experts": 1},
        **{"router_scores": "sigmoid", "router_groups": 4, "router_top_groups": 2, "router_scale": 2.5},
        **{"balance": "bias", "balance_rate": 0.01, "dense_layers": 1},
    },
    "sequence": {
        **{"num_experts": 4, "expert_ffn_size": 8, "balance": "sequence", "balance_coefficient": 0.1},
        **{"router_normalise": False, "shared_experts": 1, "shared_gate": True},
        **{"router_groups": 4, "router_top_groups": 3, "router_group_best": 1},
    },
    "biases": {
        **{"num_experts": 4, "expert_ffn_size": 8, "router_logit_bias": True, "qkv_bias": True, "bias": True},
        **{"swiglu_limit": 0.2, "swiglu_alpha": 1.3, "num_kv_heads": 2, "dense_layers": 1},
        **{"attention_sinks": True, "window": 5, "window_layers": "sf"},
    },
    "capacity": {
        **{"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8, "capacity_factor": 0.7},
        **{"balance": "bias", "dense_layers": 1},
    },
}
"""Options of the mixtures of experts: all that the family has."""


KIN: dict[str, dict[str, bool | int | float | str]] = {
    "roberta": {"position_offset": 3, "pooler_activation": "relu"},
}
"""Options of BERT's kin: all that the family has."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A way to run the tiny model; the defaults are one process in float64."""

    tp: int = 1
    sequence_parallel: bool = False
    tp_overlap: int = 1
    cp: int = 1
    ep: int = 1
    expert_tp: int | None = None
    pp: int = 1
    layers: int = 4
    vp: int = 1
    dp: int = 1
    zero: int = 0
    zero_reduce: str = "last"
    recompute: str = "none"
    pipeline: str = "1f1b"
    precision: str = "fp64"
    dropout: float = 0.0
    documents: bool = False
    """Positions and attention (not over cp ranks) restart after a token, and the next one is not scored."""
    micro_batches: int = 2
    """Of each replica, in a step."""
    bert: str | None = None
    """A BERT with its norms there, pre or post, or of its kin a roberta; None is a GPT-2."""
    llama: str | None = None
    """A Llama of LLAMAS; None is a GPT-2."""
    moe: str | None = None
    """A Llama with experts, of MIXTURES."""
    seq: int = SEQ
    """Tokens of a sequence."""

    def __str__(self) -> str:
        changed = {k: v for k, v in vars(self).items() if v != type(self).__dataclass_fields__[k].default}
        return " ".join(k if v is True else f"{k}={v}" for k, v in changed.items())

    @property
    def sizes(self) -> dict[str, int]:
        """For run_on_ranks."""
        sizes = {"tp": self.tp, "pp": self.pp, "dp": self.dp, "cp": self.cp}
        return sizes | ({"ep": self.ep, "expert_tp": self.expert_tp} if self.moe else {})

    @property
    def axes(self) -> dict[str, Any]:
        """Its value on each axis of AXES."""
        return {
            **{name: getattr(self, name) for name in AXES if hasattr(self, name)},
            "uneven": self.layers % (self.pp * self.vp) > 0,
            "dropout": self.dropout > 0,
        }

    @property
    def kind(self) -> str:
        if self.llama or self.moe:
            return "llama"
        return "gpt2" if self.bert is None else "roberta" if self.bert in KIN else "bert"

    def config(self, steps: int = 2) -> ParityConfig:
        """The tiny run at this layout: hidden 16, 4 heads, a vocabulary with padding."""
        return ParityConfig(
            name="test",
            out="unused",
            seed=3,
            steps=steps,
            model=ModelConfig(
                kind=self.kind,
                activation="silu" if self.llama or self.moe else "gelu_tanh",
                options=LLAMAS[self.llama] if self.llama else (MIXTURES | KIN).get(self.moe or self.bert, {}),
                token_types={"gpt2": 0, "llama": 0, "roberta": 1, "bert": 2}[self.kind],
                norm="post" if self.bert in ("post", "roberta") else "pre",
                num_layers=self.layers,
                hidden_size=16,
                num_heads=4,
                max_positions=self.seq + 4,
                vocab_size=VOCAB_OF_DOCUMENTS if self.documents else VOCAB,
                vocab_multiple=8,
                hidden_dropout=self.dropout,
                attention_dropout=self.dropout,
            ),
            parallel=ParallelConfig(
                tp=self.tp,
                cp=self.cp,
                ep=self.ep,
                expert_tp=self.expert_tp,
                pp=self.pp,
                vp=self.vp,
                dp=self.dp,
                sequence_parallel=self.sequence_parallel,
                tp_overlap=self.tp_overlap,
                pipeline=self.pipeline,  # type: ignore[arg-type]
                zero=self.zero,  # type: ignore[arg-type]
                zero_reduce=self.zero_reduce,  # type: ignore[arg-type]
                recompute=self.recompute,  # type: ignore[arg-type]
            ),
            optimizer=OptimizerConfig(lr=1e-3, clip_grad_norm=0.1),
            schedule=ScheduleConfig(decay="constant", warmup_steps=0),
            precision=PrecisionConfig(dtype=self.precision, initial_loss_scale=2.0**12),  # type: ignore[arg-type]
            data=DataConfig(
                kind="synthetic",
                seq_length=self.seq,
                reset_positions=self.documents,
                reset_attention=self.documents and self.cp == 1,
                mask_eod_loss=self.documents,
                eod_id=EOD if self.documents else None,
            ),
            train=TrainConfig(
                global_batch_size=self.micro_batches * self.dp * MICRO_BATCH, micro_batch_size=MICRO_BATCH
            ),
        )


AXES: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4),
    "sequence_parallel": (False, True),
    "cp": (1, 2),
    "pp": (1, 2, 4),
    "uneven": (False, True),
    "vp": (1, 2),
    "dp": (1, 2),
    "zero": (0, 2, 3),
    "recompute": ("none", "selective", "full"),
    "pipeline": ("1f1b", "gpipe", "zb_h1"),
    "dropout": (False, True),
    "documents": (False, True),
}
"""Values of a layout. `uneven`: stages of unequal numbers of layers."""

Pair = frozenset[tuple[str, Any]]


def is_compatible(axes: dict[str, Any]) -> bool:
    """True if the values are compatible and each has an effect, on two to eight ranks."""
    a = axes
    return (
        2 <= a["tp"] * a["cp"] * a["pp"] * a["dp"] <= 8
        and (a["tp"] > 1 or not a["sequence_parallel"])
        and (a["pp"] > 1 or (a["vp"] == 1 and a["pipeline"] == "1f1b" and not a["uneven"]))
        and (a["vp"] == 1 or (a["pipeline"] != "zb_h1" and not a["uneven"]))
        and (a["dp"] * a["cp"] > 1 or a["zero"] == 0)
        and (a["pp"] == 1 or a["zero"] < 3)
    )


def pairs(axes: dict[str, Any]) -> set[Pair]:
    """Every two values that occur together."""
    return {frozenset(pair) for pair in combinations(axes.items(), 2)}


@cache
def compatible_pairs() -> set[Pair]:
    """Every two values that any layout can combine."""
    all_axes = (dict(zip(AXES, values, strict=True)) for values in product(*AXES.values()))
    return set().union(*(pairs(axes) for axes in all_axes if is_compatible(axes)))


def verdict_of(ctx: ParallelContext, layout: Layout, steps: int = 2) -> tuple[Verdict, Report | None]:
    """Body of a rank: compare the layout with one process."""
    report = compare(layout.config(steps), ctx)
    return shared_verdict(report, ctx), report


def parse_layouts(*each: str) -> tuple[Layout, ...]:
    """The layouts that print as these lines; a name alone is true."""
    pairs = ([word.partition("=") for word in line.split()] for line in each)
    return tuple(Layout(**{k: yaml.safe_load(v or "true") for k, _, v in words}) for words in pairs)


LAYOUTS = parse_layouts(
    "pp=2 vp=2 recompute=selective",
    "tp=2 sequence_parallel pp=2 layers=5 dp=2 zero=2 recompute=full pipeline=zb_h1 dropout=0.1 documents "
    "micro_batches=1",
    "tp=4 sequence_parallel dp=2 zero=3 documents",
    "pp=4 layers=5 recompute=full pipeline=gpipe dropout=0.1 micro_batches=5",
    "pp=4 layers=8 vp=2 dp=2 zero=2 dropout=0.1 documents micro_batches=8",
    "tp=2 sequence_parallel pp=4 recompute=selective pipeline=zb_h1 micro_batches=5",
    "tp=4 sequence_parallel pp=2 layers=5 pipeline=gpipe micro_batches=5",
    "tp=2 dp=2 zero=3 recompute=selective dropout=0.1 micro_batches=1",
    "dp=2 recompute=full micro_batches=1",
    "tp=2 sequence_parallel pp=2 layers=5 dp=2 zero=2 recompute=selective pipeline=gpipe micro_batches=5",
    "tp=4 pp=2 vp=2 recompute=full dropout=0.1",
    "pp=2 layers=5 pipeline=zb_h1 dropout=0.1 micro_batches=5",
    "tp=2 dropout=0.1",
    "tp=4 sequence_parallel dp=2 zero=2 recompute=selective micro_batches=3",
    "dp=2 zero=3 recompute=full micro_batches=1",
    "tp=2 sequence_parallel pp=2 vp=2 recompute=full dropout=0.1 micro_batches=4",
    "pp=2 layers=5 recompute=full micro_batches=3",
    "pp=2 recompute=selective pipeline=gpipe dropout=0.1 documents",
    "tp=4 pp=2 pipeline=zb_h1 micro_batches=1",
    "pp=2 vp=2 pipeline=gpipe micro_batches=3",
    # sequences split over ranks
    "tp=2 sequence_parallel cp=2 dp=2 zero=3 recompute=full dropout=0.1 micro_batches=1",
    "cp=2 pp=4 layers=5 zero=2 pipeline=gpipe documents micro_batches=3",
    "cp=2 pp=2 vp=2 dp=2 zero=2 recompute=selective dropout=0.1",
    "tp=4 cp=2 zero=3 micro_batches=1",
    "tp=2 cp=2 pp=2 pipeline=zb_h1 dropout=0.1 documents micro_batches=3",
    "cp=4 zero=2",
    # narrower formats, which tests/verify/half_precision.py combines with every other axis
    "tp=2 sequence_parallel dp=2 zero=3 precision=bf16 dropout=0.1 micro_batches=1",
    "pp=2 layers=5 pipeline=zb_h1 precision=fp32 dropout=0.1 documents micro_batches=5",
    "tp=2 pp=2 dp=2 precision=fp16",
    # gradients reduced in every micro-batch
    "dp=4 zero=2 zero_reduce=every dropout=0.1 micro_batches=3",
    "tp=2 sequence_parallel dp=2 zero=3 zero_reduce=every recompute=full micro_batches=3",
    "pp=2 vp=2 dp=2 zero=2 zero_reduce=every micro_batches=4",
    "pp=2 layers=5 dp=2 zero=2 zero_reduce=every pipeline=zb_h1 micro_batches=5",
    # communication over tp beside the products of other parts
    "tp=4 tp_overlap=2 dp=2 zero=3 dropout=0.1",
    "tp=2 sequence_parallel tp_overlap=2 pp=2 layers=5 pipeline=zb_h1 micro_batches=5",
)
"""Every two compatible values of AXES occur together in float64."""

BERT_LAYOUTS = (
    *(
        replace(LAYOUTS[n], bert=norm, documents=False)
        for norm, n in (("pre", 2), ("post", 1), ("roberta", 5))
    ),
    Layout(tp=2, sequence_parallel=True, precision="bf16", dropout=0.1, bert="pre"),
    Layout(tp=2, tp_overlap=4, bert="post"),
    Layout(tp=4, sequence_parallel=True, dp=2, zero=3, bert="roberta"),
)
"""Each split, with norms in both places; GPT-2 has every pair."""

LLAMA_LAYOUTS = (
    *(replace(LAYOUTS[n], llama=name) for name, n in (("llama", 2), ("llama", 13), ("qwen", 1), ("qwen", 6))),
    Layout(tp=4, sequence_parallel=True, cp=2, zero=2, micro_batches=1, llama="llama"),
    Layout(cp=4, dropout=0.1, recompute="full", micro_batches=1, llama="qwen"),
    Layout(cp=2, pp=2, layers=5, pipeline="zb_h1", documents=True, micro_batches=3, llama="qwen"),
    Layout(tp=4, precision="bf16", micro_batches=1, llama="llama"),
    Layout(tp=4, sequence_parallel=True, dp=2, zero=3, dropout=0.1, llama="whole norms"),
    Layout(tp=2, sequence_parallel=True, pp=2, layers=5, dropout=0.1, recompute="full", llama="gemma"),
    Layout(tp=2, cp=2, dropout=0.1, micro_batches=1, llama="gemma"),
    Layout(tp=4, dp=2, zero=3, documents=True, recompute="selective", micro_batches=1, llama="gemma"),
    Layout(tp=2, sequence_parallel=True, pp=2, layers=5, pipeline="zb_h1", recompute="full", llama="latent"),
    Layout(tp=2, sequence_parallel=True, cp=2, dp=2, zero=3, micro_batches=1, llama="latent"),
)
"""Fewer heads of keys and values than tp ranks, each split and schedule; GPT-2 has every pair."""

MOE_LAYOUTS = parse_layouts(
    "tp=2 dp=2 ep=2 moe=sigmoid",
    "tp=2 sequence_parallel dp=2 ep=2 tp_overlap=2 recompute=selective moe=softmax",
    "tp=2 sequence_parallel expert_tp=1 moe=softmax",
    "tp=4 sequence_parallel expert_tp=1 dp=2 ep=4 zero=3 micro_batches=1 moe=softmax",
    "dp=4 ep=2 zero=2 zero_reduce=every micro_batches=3 moe=sigmoid",
    "pp=2 vp=2 dp=2 ep=2 recompute=selective moe=softmax",
    "pp=2 layers=5 dp=2 ep=2 pipeline=gpipe recompute=full dropout=0.1 micro_batches=3 moe=sequence",
    "tp=2 sequence_parallel pp=2 layers=5 dp=2 ep=2 zero=2 recompute=full pipeline=zb_h1 dropout=0.1 "
    "micro_batches=1 moe=sigmoid",
    "cp=2 pp=2 dp=2 ep=4 zero=2 dropout=0.1 moe=sequence",
    "tp=2 sequence_parallel expert_tp=1 cp=2 dp=2 ep=4 zero=3 recompute=full dropout=0.1 micro_batches=1 "
    "moe=sequence",
    "tp=2 cp=2 dp=2 ep=2 zero=3 recompute=selective moe=sigmoid",
    "dp=2 ep=2 documents moe=softmax",
    "dp=2 ep=2 zero=3 recompute=full moe=capacity",
    "cp=2 ep=2 pp=2 pipeline=zb_h1 micro_batches=3 moe=capacity",
    "tp=4 sequence_parallel cp=2 ep=2 recompute=selective micro_batches=1 moe=capacity",
    "tp=2 sequence_parallel pp=2 recompute=full moe=biases",
    "tp=2 cp=2 dp=2 ep=2 zero=3 moe=biases",
    # narrower formats round the scores: some choices of nearly equal experts differ
    "tp=2 sequence_parallel expert_tp=1 ep=2 precision=bf16 moe=softmax",
    "dp=2 ep=2 precision=fp16 moe=sequence",
)
"""Experts over ranks of their own, with each other axis, schedule and sharding."""

_LONG = {"seq": 1024, "layers": 2, "micro_batches": 1}
LONG_LAYOUTS = (
    Layout(cp=2, **_LONG),
    Layout(cp=4, llama="llama", **_LONG),
    Layout(cp=2, dp=2, zero=3, llama="llama", **_LONG),
)
"""Sequences of as many tokens as a machine with two cores compares in seconds."""
