"""What the papers measured on clusters, planned: table 1 of arXiv:2104.04473."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from mlm.plan.cost import CostModel
from mlm.plan.hardware import preset
from mlm.plan.shape import Layout
from mlm.plan.software import MEGATRON_2021
from reproduce.experiment import Cell, Conclusion, Experiment, Settings, Step, Table, Verdict
from reproduce.plans import A100, gpt_shape, layout_step, planned, published_rows
from reproduce.results import Results

TABLE1 = "ptdp-table1"
CLOSE = 0.1
"""Largest error of a row at which the plan agrees."""
Row = Mapping[str, str]


def row_layout(row: Row) -> Layout:
    """Return a row's layout."""
    size = {key: int(row[key]) for key in ("tp", "pp", "gpus", "micro_batch", "global_batch")}
    dp = size.pop("gpus") // (size["tp"] * size["pp"])
    return Layout(**size, vp=int(row["virtual"]), dp=dp, recompute="full")  # type: ignore[arg-type]


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


def table1_stages(settings: Settings) -> list[list[Step]]:
    """Return the plans of all rows."""
    return [[row_step(row) for row in published_rows("sc21_table1")]]


EXPERIMENT = Experiment(
    name=TABLE1,
    title="Weak scaling to a trillion parameters, planned",
    source="PTD-P, arXiv:2104.04473, table 1",
    claim="From 1.7 billion parameters on 32 A100 to a trillion on 3,072, throughput per GPU rises "
    "from 137 to 163 TFLOP/s, 44 to 52 % of the peak.",
    minutes=1,
    stages=table1_stages,
    conclude=table1_conclusion,
)
