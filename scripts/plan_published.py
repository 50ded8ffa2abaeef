"""The time model of `mlm plan` beside published measurements, its constants fitted on each table.

    python scripts/plan_published.py               # prints every row, and the table of the guide planning.md
    python scripts/plan_published.py --fit [sc21]  # fits the constants anew, into scripts/results

scripts/results/published/*.csv hold the numbers, each row with its source. A table has one set of constants
(EfficiencyConfig) for all its rows; facts of its program are a `Software`. What a source leaves open (often
the micro-batch, and how far a pipeline is interleaved) is one rule per table, stated at its rows.
"""

import csv
import json
import re
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

from mlm.models.config import ModelConfig
from mlm.plan.cost import CostModel, Software
from mlm.plan.hardware import HardwareConfig, preset
from mlm.plan.shape import PlannedLayout, Shape

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "scripts/results/published"
RESULTS = ROOT / "scripts/results/plan_published.json"

MEGATRON_2021 = Software(
    fused_attention=False,
    score_passes=4.5,  # scale, mask and softmax in one kernel; dropout
    branch_passes=3.5,  # bias, dropout and addition in one
    activation_passes=2,
    weight_bytes=6,
    gathered_weight_bytes=6,  # fp16 weights and gradients
    optimizer_bytes=40,
    gradient_bytes=2,
    tied_bytes=2,
    splits_transfers=True,
    overlaps_tp=False,
    loss_in_forward=False,
)
"""Megatron-LM of arXiv:2104.04473."""
MCORE = Software(
    branch_passes=3.5,
    gathered_weight_bytes=8,  # gradients are added in the product's epilogue
    gradient_bytes=2,
    optimizer_bytes=44,
    loss_in_forward=False,
    hidden_tp=0.5,  # --tp-comm-overlap
    splits_transfers=True,
)
TORCHTITAN = Software(
    branch_passes=3.0,  # no bias, no dropout
    norm_passes=2,
    activation_passes=3,
    gathered_weight_bytes=10,
    optimizer_bytes=44,
    loss_in_forward=False,
    overlaps_tp=False,
    selective_products=0.5,  # it keeps the result of every other product
)


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    name: str
    shape: Shape
    layout: PlannedLayout
    software: Software
    seconds: float
    """Measured time of a step."""


@dataclass(frozen=True)
class Table:
    """Measurements that share hardware and constants."""

    name: str
    title: str
    hardware: str
    dtype: str
    rows: tuple[Row, ...]
    constants: tuple[str, ...]
    """Fitted names of EfficiencyConfig, or `fp8` for its peak's share."""
    target: float


load_hardware = cache(preset)


def with_constants(hardware: HardwareConfig, constants: dict[str, float]) -> HardwareConfig:
    """Hardware with other constants; `fp8` scales the 8-bit peak."""
    constants = dict(constants)
    peak = hardware.peak_tflops
    if "fp8" in constants and peak.fp8:
        peak = replace(peak, fp8=peak.fp8 * constants.pop("fp8"))
    return replace(hardware, efficiency=replace(hardware.efficiency, **constants), peak_tflops=peak)


def predicted(row: Row, hardware: HardwareConfig, dtype: str) -> float:
    """Predicted seconds of a step."""
    return CostModel(row.shape, hardware, dtype, row.software).step(row.layout).total


def read(name: str) -> list[dict[str, str]]:
    """Rows of a published table."""
    with open(PUBLISHED / f"{name}.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def gpt(row: dict[str, str], seq: int, vocab: int) -> Shape:
    """A GPT of Megatron-LM's tables."""
    layers, hidden, heads = (int(row[name]) for name in ("layers", "hidden", "heads"))
    model = ModelConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, vocab_size=vocab, vocab_multiple=1
    )
    return Shape(model, seq)


def seconds_of(shape: Shape, layout: PlannedLayout, tflops: float, recompute: str) -> float:
    """Step time of a published TFLOP/s per GPU, which counts `recompute`'s operations."""
    flops = shape.hardware_flops(recompute, layout.global_batch)
    return flops / (layout.gpus * tflops * 1e12)


def sc21() -> list[Row]:
    """arXiv:2104.04473, table 1. It counts recomputed operations."""
    rows = []
    for row in read("sc21_table1"):
        shape = gpt(row, int(row["seq"]), int(row["vocab"]))
        layout = PlannedLayout(
            tp=int(row["tp"]),
            pp=int(row["pp"]),
            vp=int(row["virtual"]),
            dp=int(row["gpus"]) // (int(row["tp"]) * int(row["pp"])),
            recompute="full",
            micro_batch=int(row["micro_batch"]),
            global_batch=int(row["global_batch"]),
        )
        software = replace(MEGATRON_2021, overlaps_dp=row["ddp_impl"] == "torch")
        seconds = seconds_of(shape, layout, float(row["tflops_per_gpu"]), "full")
        rows.append(Row(row["model"], shape, layout, software, seconds))
    return rows


def january_2021() -> list[Row]:
    """Weak scaling of January 2021: no interleaving yet; tp up to a node, micro-batches as in SC21."""
    micro = {row["hidden"]: row["micro_batch"] for row in read("sc21_table1")}
    rows = []
    for row in read("megatron_jan2021"):
        shape = gpt(row, 2048, 51200)
        tp = min(8, int(row["model_parallel"]))
        pp = int(row["model_parallel"]) // tp
        layout = PlannedLayout(
            tp=tp,
            pp=pp,
            dp=int(row["gpus"]) // (tp * pp),
            recompute="full",
            micro_batch=int(micro[row["hidden"]]),
            global_batch=int(row["global_batch"]),
        )
        seconds = seconds_of(shape, layout, float(row["tflops_per_gpu"]), "full")
        software = replace(MEGATRON_2021, overlaps_dp=pp == 1, splits_transfers=False)
        rows.append(Row(row["model"], shape, layout, software, seconds))
    return rows


def mcore() -> list[Row]:
    """Megatron Core's weak scaling, without recomputation; assumed: one layer a chunk, micro-batches of 1."""
    rows = []
    for row in read("mcore_h100_weak_scaling"):
        shape = gpt(row, int(row["seq"]), int(row["vocab"]))
        tp, pp = int(row["tp"]), int(row["pp"])
        layout = PlannedLayout(
            tp=tp,
            pp=pp,
            vp=shape.model.num_layers // pp if pp > 1 else 1,
            dp=int(row["dp"]),
            sequence_parallel=tp > 1,
            zero=2,  # its distributed optimizer
            micro_batch=1,
            global_batch=int(row["global_batch"]),
        )
        seconds = seconds_of(shape, layout, float(row["tflops_per_gpu"]), "none")
        rows.append(Row(row["model"], shape, layout, MCORE, seconds))
    return rows


LLAMA = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}
"""Layers, hidden size, heads and width of the MLP."""


def llama(name: str, seq: int) -> Shape:
    """A Llama 3.1."""
    layers, hidden, heads, ffn = LLAMA[name]
    model = ModelConfig(
        kind="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        ffn_hidden_size=ffn,
        vocab_size=128256,
        vocab_multiple=1,
        options={"num_kv_heads": 8},
    )
    return Shape(model, seq)


def torchtitan() -> list[Row]:
    """torchtitan's Llama 3.1; its pipelines have as many micro-batches as stages in a row (its default)."""
    rows = []
    for row in read("torchtitan"):
        if "H200" in row["options"]:
            continue
        shape = llama(row["model"].split("-")[1], int(row["seq"]))
        words = row["layout"].split()
        found = (re.fullmatch(r"([a-z]+)(\d+)", word) for word in words)
        sizes = {match[1]: int(match[2]) for match in found if match}
        tp, pp = sizes.get("tp", 1), sizes.get("pp", 1)
        local = int(row["local_batch"])
        dp = int(row["gpus"]) // (tp * pp)
        layout = PlannedLayout(
            tp=tp,
            pp=pp,
            vp=2 if "interleaved" in words else 1,
            dp=dp,
            sequence_parallel=tp > 1,
            zero=3 if pp == 1 else 2,
            recompute="full" if row["recompute"] == "full" else "selective",
            micro_batch=local // pp,
            global_batch=local * dp,
        )
        options = row["options"]
        software = replace(
            TORCHTITAN,
            kernel_dtype="fp8" if "fp8" in options else None,
            hidden_tp=0.7 if "asyncTP" in options else 0.0,
            branch_passes=9 if "eager" in options else TORCHTITAN.branch_passes,
            norm_passes=6 if "eager" in options else 2,
            activation_passes=5 if "eager" in options else 3,
        )
        tokens = float(row["tok_s_gpu"]) * int(row["gpus"])
        seconds = layout.global_batch * shape.seq / tokens
        rows.append(
            Row(f"{row['model'].split('-')[1]} {row['layout']} {options}", shape, layout, software, seconds)
        )
    return rows


BASE = ("matmul", "matmul_half", "memory", "network")
TABLES = (
    Table("sc21", "arXiv:2104.04473, table 1", "dgx_a100_80g", "fp16", tuple(sc21()), BASE, 0.05),
    Table(
        "january_2021", "Megatron-LM, January 2021", "dgx_a100_80g", "fp16", tuple(january_2021()), BASE, 0.08
    ),
    Table("mcore", "Megatron Core, H100", "dgx_h100", "bf16", tuple(mcore()), (*BASE, "attention"), 0.08),
    Table(
        "torchtitan",
        "torchtitan, H100",
        "dgx_h100",
        "bf16",
        tuple(torchtitan()),
        (*BASE, "attention", "fp8"),
        0.08,
    ),
)
START = {"matmul": 0.75, "matmul_half": 100.0, "memory": 0.7, "network": 0.7, "attention": 0.45, "fp8": 0.7}
LIMITS = {
    "matmul": (0.3, 0.95),
    "matmul_half": (16.0, 400.0),
    "memory": (0.3, 0.95),
    "network": (0.2, 0.95),
    "attention": (0.15, 0.8),
    "fp8": (0.3, 1.0),
}


def errors(table: Table, rows: Sequence[Row], constants: dict[str, float]) -> list[float]:
    """Relative error of each row's step time."""
    hardware = with_constants(load_hardware(table.hardware), constants)
    return [predicted(row, hardware, table.dtype) / row.seconds - 1 for row in rows]


def fit(table: Table, rows: Sequence[Row], start: dict[str, float] | None = None) -> dict[str, float]:
    """Constants of the least mean squared error, by a search along one constant after the other."""

    def loss(constants: dict[str, float]) -> float:
        return fmean(error**2 for error in errors(table, rows, constants))

    best = start or {name: START[name] for name in table.constants}
    least, step = loss(best), 0.05 if start else 0.2
    while step > 0.004:
        improved = False
        for name in table.constants:
            low, high = LIMITS[name]
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**best, name: min(max(best[name] * factor, low), high)}
                if (found := loss(tried)) < least * (1 - 1e-6):
                    best, least, improved = tried, found, True
        step = step if improved else step / 2
    return {name: float(f"{value:.3g}") for name, value in best.items()}


def mean_absolute(values: Sequence[float]) -> float:
    """Mean of absolute values."""
    return fmean(map(abs, values))


def leave_one_out(table: Table, start: dict[str, float]) -> list[float]:
    """Error of each row by constants fitted on the others, beginning with those fitted on all."""
    found = []
    for row in table.rows:
        others = [other for other in table.rows if other is not row]
        found += errors(table, [row], fit(table, others, start))
    return found


def result(table: Table) -> dict[str, Any]:
    """Constants of a table, and its errors."""
    constants = fit(table, table.rows)
    found, left_out = errors(table, table.rows, constants), leave_one_out(table, constants)
    return {
        "constants": constants,
        "mean_absolute_error": round(mean_absolute(found), 4),
        "leave_one_out": round(mean_absolute(left_out), 4),
        "rows": [
            {
                "name": row.name,
                "measured_s": round(row.seconds, 4),
                "error": round(error, 4),
                "left_out": round(other, 4),
            }
            for row, error, other in zip(table.rows, found, left_out, strict=True)
        ],
    }


def saved() -> dict[str, Any]:
    """Results of the last fit."""
    found: dict[str, Any] = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    return found


def markdown(results: dict[str, Any]) -> str:
    """The table of the guide."""
    lines = [
        "| table | rows | mean error | largest | leave-one-out | constants |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for table in TABLES:
        its = results[table.name]
        worst = max(abs(row["error"]) for row in its["rows"])
        constants = ", ".join(f"{name} {value:g}" for name, value in its["constants"].items())
        lines.append(
            f"| {table.title} | {len(table.rows)} | {its['mean_absolute_error']:.1%} | {worst:.1%} "
            f"| {its['leave_one_out']:.1%} | {constants} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Fit the tables that are named, print and save them."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--fit", nargs="*", metavar="TABLE", help="fit these tables anew; none named: all")
    arguments = parser.parse_args()
    for table in TABLES:
        if arguments.fit is not None and (not arguments.fit or table.name in arguments.fit):
            its = result(table)
            print(table.name, its["constants"], its["mean_absolute_error"], its["leave_one_out"], flush=True)
            RESULTS.write_text(json.dumps({**saved(), table.name: its}, indent=1) + "\n", "utf-8")
    results = saved()
    for table in TABLES:
        print(table.title)
        for row in results[table.name]["rows"]:
            print(
                f"  {row['name']:60s} {row['measured_s']:8.3f} s {row['error']:+.1%} {row['left_out']:+.1%}"
            )
    print(markdown(results))


if __name__ == "__main__":
    main()
