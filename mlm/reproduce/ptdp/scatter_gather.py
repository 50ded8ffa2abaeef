"""Bytes between pipeline stages: scatter/gather of figure 18, replaced by sequence parallelism, counted."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mlm.plan.cost import CostModel
from mlm.plan.hardware import preset
from mlm.plan.shape import Layout, Shape
from mlm.plan.software import MEGATRON_2021
from mlm.reproduce.conclusion import Chart, Conclusion, Series, Table, Verdict
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.counted import Case, sent
from mlm.reproduce.experiment import Experiment, Step
from mlm.reproduce.results import Results

NAME = "ptdp-scatter-gather"
SEQ, HIDDEN, HEADS, LAYERS, VOCAB = 2048, 12288, 96, 96, 51200
"""GPT-3, of which a boundary does not depend on the number of layers."""
TP, PP, CHUNKS, COUNT = 8, 12, 2, 12
"""96 GPUs as in figure 18, and the micro-batches of a step."""
ELEMENT = 2  # bytes of bf16
BATCHES = (12, 24, 36, 48, 60)
PUBLISHED_GAIN = 1.11
"""Largest ratio of throughput in the paper, from memory."""
CLOSE = 0.03
"""Difference of the ratio at which the plan agrees."""


@dataclass(frozen=True)
class Counted:
    """Bytes that a rank in the middle of the pipeline sends in a step."""

    chunks: int
    is_split: bool
    """True with sequence parallelism."""
    stages: int
    """To other stages."""
    tensor: int
    """Over tp, in a ring."""

    @property
    def formula(self) -> int:
        """Return the bytes to other stages by the paper: bsh a message, of which scatter/gather sends 1/t."""
        boundary = ELEMENT * SEQ * HIDDEN // (TP if self.is_split else 1)
        return 2 * self.chunks * COUNT * boundary


def count() -> list[Counted]:
    """Count the bytes of each layout."""
    found = []
    for chunks in (1, CHUNKS):
        for is_split in (False, True):
            case = Case(
                model={
                    "num_layers": PP * CHUNKS,
                    "hidden_size": HIDDEN,
                    "num_heads": HEADS,
                    "vocab_size": VOCAB,
                },
                seq=SEQ,
                parallel={"tp": TP, "pp": PP, "vp": chunks, "sequence_parallel": is_split},
                global_batch=COUNT,
            )
            totals = sent(case, rank=PP // 2 * TP)
            tensor = sum(size for (axis, _), size in totals.items() if axis == "tp")
            found.append(Counted(chunks, is_split, totals["pp", "send"], tensor))
    return found


def steps(config: ReproduceConfig) -> Sequence[Step]:
    """Return none: bytes are counted without devices."""
    return ()


def conclude(results: Results) -> Conclusion:
    """Compare the bytes that are sent with the paper's formulas."""
    return conclude_from(count(), planned_gains())


def conclude_from(counted: Sequence[Counted], gains: Sequence[tuple[int, float]]) -> Conclusion:
    """Conclude from the counts of plain and interleaved layouts, each without and with the split.

    Args:
        counted: in the order of `count`.
        gains: planned ratios of throughput by batch.
    """
    plain, split = counted[-2], counted[-1]
    most = max(gain for _, gain in gains)
    return Conclusion(
        verdict=verdict(counted, most),
        seen=f"A rank of GPT-3 on {TP * PP} GPUs (tp={TP} pp={PP} vp={plain.chunks}) sends "
        f"{plain.stages / 2**20:.0f} MiB to other stages a step of {COUNT} micro-batches, and with sequence "
        f"parallelism {split.stages / 2**20:.0f} MiB: {plain.stages / split.stages:.3g} times fewer. Over "
        f"tp, inside the node, it sends {split.tensor / plain.tensor:.3g} times as many. Planned, the "
        f"throughput rises by up to {100 * (most - 1):.1f} %.",
        limits=[
            "Bytes are counted, time is not measured: the planned gains in throughput are those of the time "
            "model with the paper's program's habits, with two chunks on each rank, a number that is not "
            "remembered of the paper.",
            "Scatter/gather itself is not in mlm: sequence parallelism keeps activations split at the "
            "boundary, so that nothing is left to scatter. Its further bytes over tp are the inputs that "
            "the backward pass gathers again, beside the gradients of weights.",
        ],
        tables=[byte_table(counted), gain_table(gains)],
        charts=[chart(counted)],
        commands=[
            (
                f"Count the bytes of a rank, sequence_parallel={value}",
                f"mlm plan dry-run model=gpt2_sc21_145b model.num_layers={LAYERS} tp={TP} pp={PP} "
                f"vp={CHUNKS} dp=1 sequence_parallel={value} precision=bf16 data=synthetic "
                f"train.micro_batch_size=1 train.global_batch_size={COUNT} rank={PP // 2 * TP}",
            )
            for value in ("false", "true")
        ],
    )


def verdict(counted: Sequence[Counted], gain: float) -> Verdict:
    """Return if all counts are those of the formula, and if the planned gain is about the published one."""
    exact = [each.stages == each.formula for each in counted]
    if all(exact) and abs(gain - PUBLISHED_GAIN) <= CLOSE:
        return Verdict.AGREES
    return Verdict.PARTLY if any(exact) else Verdict.CONTRADICTS


def byte_table(counted: Sequence[Counted]) -> Table:
    """Return the bytes of each layout."""
    return Table(
        title=f"Bytes that a rank sends in a step of {COUNT} micro-batches, bf16",
        headings=("layout", "to stages, counted", "to stages, formula", "over tp, ring"),
        rows=[
            (
                f"vp={each.chunks}{' sequence_parallel' if each.is_split else ''}",
                each.stages,
                each.formula,
                each.tensor,
            )
            for each in counted
        ],
        note=f"Counted: messages of the trainer of stage {PP // 2} (`mlm plan dry-run`), of {PP * CHUNKS} "
        "layers. Formula: 2 bytes x b s h for each micro-batch, chunk and direction (section 3.1), over t "
        "with scatter/gather (section 4.1).",
    )


def planned_gains() -> list[tuple[int, float]]:
    """Return the throughput with scatter/gather over that without, by the time model, at each batch."""
    shape = Shape(layers=LAYERS, hidden=HIDDEN, heads=HEADS, ffn=4 * HIDDEN, seq=SEQ, vocab=VOCAB)
    hardware = preset("dgx_a100_80g")
    found = []
    for batch in BATCHES:
        layout = Layout(tp=TP, pp=PP, vp=CHUNKS, recompute="full", micro_batch=1, global_batch=batch)
        whole, split = (
            CostModel(shape, hardware, "fp16", replace(MEGATRON_2021, splits_transfers=value))
            .step(layout)
            .total
            for value in (False, True)
        )
        found.append((batch, whole / split))
    return found


def gain_table(gains: Sequence[tuple[int, float]]) -> Table:
    """Return the planned gains in throughput."""
    return Table(
        title="Planned: throughput with scatter/gather over that without",
        headings=("batch", "gain"),
        rows=[(str(batch), f"{100 * (gain - 1):+.1f} %") for batch, gain in gains],
        note="The paper measures up to 11 % (from memory).",
    )


def chart(counted: Sequence[Counted]) -> Chart:
    """Return the bytes to other stages."""
    names = [f"vp={each.chunks}" for each in counted if not each.is_split]
    sizes = {
        kind: [each.stages / 2**20 for each in counted if each.is_split is kind] for kind in (False, True)
    }
    return Chart(
        name="bytes",
        title=f"To other stages in a step of {COUNT} micro-batches, GPT-3 on {TP * PP} GPUs",
        x_label="",
        y_label="MiB of a rank",
        series=[
            Series(name="whole", x=names, y=sizes[False]),
            Series(name="sequence_parallel=true", x=names, y=sizes[True]),
        ],
        from_zero=True,
    )


EXPERIMENT = Experiment(
    name=NAME,
    title="Bytes between stages: scatter/gather by sequence parallelism",
    source="PTD-P, arXiv:2104.04473, section 4.1 and figure 18",
    claim="Tensor-parallel ranks of neighbouring stages send the same activations t times; scattering them "
    "sends 1/t from each, which raises the throughput of GPT-3 with an interleaved pipeline by up to 11 %.",
    minutes=0.5,
    steps=steps,
    conclude=conclude,
)
