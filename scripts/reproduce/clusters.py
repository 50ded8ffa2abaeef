"""What the papers measured on clusters, planned and counted: table 1 and scatter/gather of
arXiv:2104.04473."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from plan_published import MEGATRON_2021

from mlm.plan.cost import CostModel
from mlm.plan.hardware import preset
from mlm.plan.shape import PlannedLayout
from reproduce.counts import Case, sent_bytes
from reproduce.experiment import Cell, Conclusion, Experiment, Settings, Step, Table, Verdict
from reproduce.plans import A100, gpt_shape, layout_step, planned, published_rows
from reproduce.results import Results

TABLE1 = "ptdp-table1"
CLOSE = 0.1
"""Largest error of a row at which the plan agrees."""
Row = Mapping[str, str]


def row_layout(row: Row) -> PlannedLayout:
    """Return a row's layout."""
    size = {key: int(row[key]) for key in ("tp", "pp", "gpus", "micro_batch", "global_batch")}
    dp = size.pop("gpus") // (size["tp"] * size["pp"])
    return PlannedLayout(**size, vp=int(row["virtual"]), dp=dp, recompute="full")  # type: ignore[arg-type]


def row_step(row: Row) -> Step:
    """Return the plan of a row."""
    name = row["model"].lower()
    model = f"model=gpt2_sc21_{name.replace('.', '_')}"
    return layout_step(f"{TABLE1}-{name}", (model,), row_layout(row), A100)


def modelled_tflops(row: Row) -> float:
    """Return the TFLOP/s per GPU by the time model, with the habits of the paper's program."""
    layout, seq = row_layout(row), int(row["seq"])
    shape = gpt_shape(layers=int(row["layers"]), hidden=int(row["hidden"]), heads=int(row["heads"]), seq=seq)
    software = replace(MEGATRON_2021, overlaps_dp=row["ddp_impl"] == "torch")
    seconds = CostModel(shape, preset(A100), "fp16", software).step(layout).total
    return shape.hardware_flops("full", layout.global_batch) / (layout.gpus * seconds * 1e12)


def table1_conclusion(results: Results) -> Conclusion:
    """Compare the time model with the published throughput, row by row."""
    published = published_rows("sc21_table1")
    theirs = [float(row["tflops_per_gpu"]) for row in published]
    model = [modelled_tflops(row) for row in published]
    errors = [a / b - 1 for a, b in zip(model, theirs, strict=True)]
    rows = list[Sequence[Cell]]()
    for row, measured, modelled, error in zip(published, theirs, model, errors, strict=True):
        ours = planned(results, f"{TABLE1}-{row['model'].lower()}")["hardware_tflops"]
        layout = (int(row[key]) for key in ("gpus", "tp", "pp", "virtual"))
        rows.append((row["model"], *layout, measured, modelled, f"{error:+.1%}", ours))
    return Conclusion(
        verdict=table1_verdict(errors, model),
        seen="Planned, not measured: the time model of `mlm plan`, fitted on these ten rows, gives "
        f"{model[0]:.0f} to {model[-1]:.0f} TFLOP/s per GPU from {published[0]['model']} to "
        f"{published[-1]['model']}, where the paper measured {theirs[0]:.0f} to {theirs[-1]:.0f}; mean error "
        f"{fmean(map(abs, errors)):.1%}, largest {max(map(abs, errors)):.1%}.",
        limits=[
            "Four constants of the model are fitted on this very table (scripts/plan_published.py): "
            "agreement shows that one set of constants describes all rows, not that new ones are foretold.",
            "The column of mlm is a forecast of this toolkit on those GPUs; nobody has run it there.",
        ],
        tables=[
            Table(
                title="TFLOP/s per GPU",
                headings=(
                    *("parameters", "GPUs", "tp", "pp", "vp", "published", "modelled", "error"),
                    "mlm's plan",
                ),
                rows=rows,
                note=f"Recomputed operations count, as in the paper. Published: {published[0]['source']}. "
                "Modelled: with the habits of the paper's program (unfused attention, fp16 gradients, "
                "scatter/gather). mlm's plan: the same layouts with this toolkit's habits.",
            )
        ],
    )


def table1_verdict(errors: Sequence[float], model: Sequence[float]) -> Verdict:
    """Return if each row is close, and if throughput per GPU holds from the smallest model to the largest."""
    is_close, holds = max(map(abs, errors)) <= CLOSE, model[-1] >= model[0]
    if is_close and holds:
        return Verdict.PLANNED
    return Verdict.PARTLY if is_close or holds else Verdict.CONTRADICTS


# Scatter/gather, which sequence parallelism replaces.

SEQ, HIDDEN, HEADS = 2048, 12288, 96
"""GPT-3, of which a boundary does not depend on the number of layers."""
TP, PP, CHUNKS, COUNT = 8, 12, 2, 12
"""96 GPUs, and the micro-batches of a step."""


@dataclass(frozen=True)
class Sent:
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
        """Bytes to other stages: 2 bsh a message (section 3.1), of which scatter/gather sends 1/t (4.1)."""
        return 2 * self.chunks * COUNT * 2 * SEQ * HIDDEN // (TP if self.is_split else 1)


def count_sent() -> list[Sent]:
    """Count the bytes of each layout without devices."""
    sizes = {"num_layers": PP * CHUNKS, "hidden_size": HIDDEN, "num_heads": HEADS, "vocab_size": 51200}
    counts = []
    for chunks in (1, CHUNKS):
        for is_split in (False, True):
            parallel = {"tp": TP, "pp": PP, "vp": chunks, "sequence_parallel": is_split}
            case = Case(model=sizes, seq=SEQ, parallel=parallel, global_batch=COUNT)
            totals = sent_bytes(case, rank=PP // 2 * TP)
            tensor = sum(size for (axis, _), size in totals.items() if axis == "tp")
            counts.append(Sent(chunks, is_split, totals["pp", "send"], tensor))
    return counts


def scatter_gather_conclusion(results: Results) -> Conclusion:
    """Compare the bytes that are sent with the paper's formulas."""
    counts = count_sent()
    plain, split = counts[-2:]
    return Conclusion(
        verdict=scatter_gather_verdict(counts),
        seen=f"A rank of GPT-3 on {TP * PP} GPUs (tp={TP} pp={PP} vp={plain.chunks}) sends "
        f"{plain.stages / 2**20:.0f} MiB to other stages a step of {COUNT} micro-batches, and with sequence "
        f"parallelism {split.stages / 2**20:.0f} MiB: {plain.stages / split.stages:.3g} times fewer. Over "
        f"tp, inside the node, it sends {split.tensor / plain.tensor:.3g} times as many.",
        limits=[
            "Bytes are counted, time is not measured.",
            "Scatter/gather itself is not in mlm: sequence parallelism keeps activations split at the "
            "boundary, so that nothing is left to scatter. Its further bytes over tp are the inputs that "
            "the backward pass gathers again, beside the gradients of weights.",
        ],
        tables=[
            Table(
                title=f"Bytes that a rank sends in a step of {COUNT} micro-batches, bf16",
                headings=("layout", "to stages, counted", "to stages, formula", "over tp, ring"),
                rows=[
                    (
                        f"vp={each.chunks}{' sequence_parallel' if each.is_split else ''}",
                        *(each.stages, each.formula, each.tensor),
                    )
                    for each in counts
                ],
                note=f"Counted: messages of the trainer of stage {PP // 2} (`mlm plan dry-run "
                f"rank={PP // 2 * TP}`), of {PP * CHUNKS} layers. Formula: 2 bytes x b s h for each "
                "micro-batch, chunk and direction (section 3.1), over t with scatter/gather (section 4.1).",
            ),
        ],
    )


def scatter_gather_verdict(counts: Sequence[Sent]) -> Verdict:
    """Return if all counts are those of the formula."""
    is_exact = [each.stages == each.formula for each in counts]
    if all(is_exact):
        return Verdict.AGREES
    return Verdict.PARTLY if any(is_exact) else Verdict.CONTRADICTS


def table1_stages(settings: Settings) -> list[list[Step]]:
    """Return the plans of all rows."""
    return [[row_step(row) for row in published_rows("sc21_table1")]]


EXPERIMENTS = (
    Experiment(
        name=TABLE1,
        title="Weak scaling to a trillion parameters, planned",
        source="PTD-P, arXiv:2104.04473, table 1",
        claim="From 1.7 billion parameters on 32 A100 to a trillion on 3,072, throughput per GPU rises "
        "from 137 to 163 TFLOP/s, 44 to 52 % of the peak.",
        minutes=1,
        stages=table1_stages,
        conclude=table1_conclusion,
    ),
    Experiment(
        name="ptdp-scatter-gather",
        title="Bytes between stages: scatter/gather by sequence parallelism",
        source="PTD-P, arXiv:2104.04473, section 4.1",
        claim="Tensor-parallel ranks of neighbouring stages send the same activations t times; scattering "
        "them sends 1/t from each.",
        minutes=0.5,
        stages=lambda settings: [],
        conclude=scatter_gather_conclusion,
    ),
)
