"""The time model of `mlm plan` against published runs and our own: four constants, fitted on one table.

    python scripts/plan_published.py          # prints every row, and the table of the guide planning.md
    python scripts/plan_published.py --fit    # fits the constants anew on arXiv:2104.04473, table 1

Stated before any error of this model was looked at:

1. A step is what `mlm plan layouts` says: counts of this toolkit's own modules at the layout, composed by
   mlm/plan/cost.py.
2. Four constants are fitted, on arXiv:2104.04473, table 1, by least squares of relative errors: the share of
   the attainable peak that large products reach (`matmul`), the size of a dimension at which half of it is
   left (`matmul_half`), the shares of the memory's and of the links' bandwidth (`memory`, `network`).
3. The attainable peak of a GPU is the fastest matrix product that was measured on it, as a share of the
   datasheet's (github.com/stas00/ml-engineering, maximum achievable matmul FLOPS): 0.859 on A100, 0.801 on
   H100; H200 as H100, V100 as A100. Fused attention reaches what papers measured forward and backward on
   causal heads of 128: FlashAttention 2 on A100 0.55 (arXiv:2307.08691) and on H100 0.35, cuDNN on H100 0.5
   (arXiv:2407.08608).
4. What another program does differently is a switch of tables.yaml, a fact of its code, or one of our own
   settings (tp_overlap, fp8). What a source leaves open is one rule per table, stated there.
5. Errors of all other tables are reported as they come: median and worst, with the naive forecast, the
   table's FLOPs over its best TFLOP/s. The goal is 5 % median and 12 % worst. So are the rank correlations of
   step times and of FLOP/s per GPU; a table of sizes has the first by itself.
6. The range is that between the quantiles 10 % and 90 % of measured over predicted time, of all tables but
   the fitted one, each with the same weight. How many rows of a table it contains is told with quantiles of
   the others. Finer groups were tried: by type of GPU alone they contain 69 % of such rows, by precision too
   65 %; the tables are too few.

Not stated before, but chosen when the errors of the tables were known: the hops of rings and their protocol,
the multiprocessors of messages, what hides messages of interleaved pipelines, the micro-batches of Megatron
Core's weak scaling, the habits of Megatron-LM of 2019, DeepSpeed, nanotron and Megatron Core, torchtitan's
hardware, each from the source that is named at it.

scripts/results/published holds the numbers, each row with its source, and tables.yaml.
"""

import csv
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from dataclasses import fields as fields_of
from functools import cache, partial
from itertools import accumulate
from math import exp, log
from pathlib import Path
from random import Random
from statistics import fmean, median, pstdev
from typing import Any

import yaml
from bench.shapes import PADDED_VOCAB
from bench.stats import rank_correlation
from gpu.shapes import SIZES

from mlm.data.config import DataConfig
from mlm.models.config import ModelConfig
from mlm.optim.config import PrecisionConfig
from mlm.parallel.config import ParallelConfig
from mlm.plan.cost import RING_HOP_S, CostModel, Software, Times
from mlm.plan.hardware import HardwareConfig, PeakConfig, preset, preset_of_gpu
from mlm.plan.layer_counts import counts_of
from mlm.plan.layout import FIRST, LAST, PlannedLayout, hardware_flops
from mlm.runs.config import PretrainConfig

ROOT = Path(__file__).resolve().parents[1]
PUBLISHED = ROOT / "scripts/results/published"
RESULTS = ROOT / "scripts/results/plan_published.json"
CHECKED = ROOT / "scripts/results/gpu/gpu_check.json"
FITTED = "sc21"
OWN = "dgx_h200"
"""Hardware of our own record."""
SOURCES = yaml.safe_load((PUBLISHED / "tables.yaml").read_text("utf-8"))
"""Programs, tables, what rows and tables state no other value for, and shares of peaks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Program(Software):
    """Habits of another program."""

    splits_transfers: bool = False
    """True if tensor-parallel ranks send 1/t of a boundary each (arXiv:2104.04473, section 4.1)."""
    repeated_products: float = 0.0
    """Share of forward's products that recompute=selective repeats, with all other kernels."""
    slices: int = 0
    """Tensors of a message that are copied rank by rank, each rank's part by a kernel of its own."""
    fills_gathered: bool = False
    """True if such a message's bytes are written once more: zeros before a gather, means before a scatter."""
    balances_stages: bool = False
    """True if a stage ends with the layer that takes it past its share of all weights in products."""
    passes_parts: bool = False
    """True if the parts of tp_overlap go from a rank to its neighbour, not through a collective each."""


VIEW_S, LAUNCH_S = 5e-6, 5e-6
"""Seconds of a host that makes the view of such a part and dispatches (measured on a Zen 4), and of launching
a kernel, assumed."""


PROGRAM, LAYOUT = ([field.name for field in fields_of(kind)] for kind in (Program, PlannedLayout))


class ProgramCost(CostModel):
    """Times of another program."""

    software: Program

    def recompute_times(self, forward: Times, layout: ParallelConfig) -> Times:
        """The part of a layer's forward pass that recomputation adds to its backward pass."""
        share = self.software.repeated_products if layout.recompute == "selective" else 0.0
        if not share:
            return super().recompute_times(forward, layout)
        return (share * forward[0], 0.0, forward[2], *(0.0 for _ in forward[3:]))

    def stage_homes(self, pp: int, vp: int, stage_rank: int) -> Counter[str]:
        """Homes of a pipeline rank, and how many of each it has."""
        if not self.software.balances_stages or pp == 1:
            return super().stage_homes(pp, vp, stage_rank)
        model = self.run.model
        layer = 4 * model.hidden_size**2 + 3 * model.hidden_size * model.ffn_size
        share = (model.num_layers * layer + model.vocab_size * model.hidden_size) / pp
        before = (min(int(share * n / layer) + 1, model.num_layers) for n in range(1, pp))
        ends = [0, *before, model.num_layers]
        ends_of_model = {0: FIRST, pp - 1: LAST}
        homes = Counter({str(self.counts.kinds[0]): ends[stage_rank + 1] - ends[stage_rank]})
        return homes + Counter([ends_of_model[stage_rank]] if stage_rank in ends_of_model else [])

    def gather(self, size: float, ranks: int, stride: int) -> float:
        """All-gather or reduce-scatter, as the program does it."""
        is_tp = stride == 1 < ranks <= self.hardware.devices_per_node
        if not (self.software.passes_parts and is_tp and size):
            return super().gather(size, ranks, stride)
        return RING_HOP_S + (ranks - 1) / ranks * size / self.link(ranks, stride)[0]

    def gather_shards(self, size: float, ranks: int, stride: int) -> float:
        """All-gather of a layer's weights or reduce-scatter of its gradients, as the program does it."""
        whole = super().gather_shards(size, ranks, stride)
        if not (self.software.slices and size) or ranks == 1:
            return whole
        copies = self.software.slices * ranks
        copied = copies * (VIEW_S + max(LAUNCH_S, 2 * size / copies / self.bandwidth))
        return whole + copied + self.software.fills_gathered * size / self.bandwidth

    def transfer(self, layout: PlannedLayout) -> float:
        """Seconds that a boundary tensor takes to the next pipeline rank."""
        divided = layout.sequence_parallel or self.software.splits_transfers
        return super().transfer(replace(layout, sequence_parallel=divided))


@dataclass(frozen=True)
class Row:
    """One published measurement."""

    name: str
    run: PretrainConfig
    layout: PlannedLayout
    software: Program
    hardware: str
    attention: float
    """Share of the peak that its fused attention reaches; 0 for attention by its formula."""
    seconds: float
    """Measured time of a step."""
    again: str = "none"
    """Recomputation that its TFLOP/s count."""

    @property
    def flops(self) -> float:
        return hardware_flops(self.run.model, self.run.data.seq_length, self.layout.global_batch, self.again)

    @property
    def tflops(self) -> float:
        return self.flops / self.seconds / self.layout.gpus / 1e12


GRAND_TETON = "dgx_h100_500w"
"""Hardware of torchtitan's H100 runs: a DGX H100's, but for the GPUs."""


@cache
def load_hardware(name: str) -> HardwareConfig:
    """A preset, or Meta's Grand Teton (torchtitan, benchmarks/llama3_h100_202412_torchtitan.md).

    Its H100 have 96 GB of HBM2e with 2.4 TB/s and a limit of 500 W. Its peaks lie between
    the H100 NVL's at 400 W, 835 TFLOP/s in bf16, and the SXM's at 700 W, as its power does.
    """
    if name != GRAND_TETON:
        return preset(name)
    usual = preset("dgx_h100")
    share = (835 / 989.4 * 2 + 1) / 3
    peaks = {dtype: peak and share * peak for dtype, peak in asdict(usual.peak_tflops).items()}
    return replace(usual, memory_gbps=2400.0, peak_tflops=PeakConfig(**peaks))


def predicted(row: Row, constants: dict[str, float]) -> float:
    hardware: HardwareConfig = load_hardware(row.hardware)
    share = constants["matmul"] * SOURCES["attainable"][row.hardware]
    efficiency = replace(
        hardware.efficiency, **{**constants, "matmul": share, "attention": row.attention or 1.0}
    )
    counts = counts_of(row.run, "gpu" if row.attention else "unfused")
    model = ProgramCost(counts, replace(hardware, efficiency=efficiency), row.layout.gpus, row.software)
    return model.step(row.layout).total


def read(name: str) -> list[dict[str, str]]:
    with open(PUBLISHED / f"{name}.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def run_of(fields: Mapping[str, Any]) -> PretrainConfig:
    """A run of a row's GPT, or Llama where a width of the MLP is given, on sequences as long as it takes."""
    model = ModelConfig(
        num_layers=fields["layers"],
        hidden_size=fields["hidden"],
        num_heads=fields["heads"],
        vocab_size=fields["vocab"],
        vocab_multiple=1,
        max_positions=fields["seq"],
        hidden_dropout=fields["dropout"],
        attention_dropout=fields["dropout"],
    )
    if "ffn" in fields:
        options = {"num_kv_heads": fields["kv_heads"]} | {k: fields[k] for k in ("tied",) if k in fields}
        width = fields["ffn"]
        model = replace(model, kind="llama", ffn_hidden_size=width, activation="silu", options=options)
    data = DataConfig(kind="synthetic", seq_length=model.max_positions)
    precision = PrecisionConfig(dtype=fields["dtype"])
    return PretrainConfig(name="published", out="", model=model, data=data, precision=precision)  # type: ignore[arg-type]


def step_seconds(fields: Mapping[str, Any], run: PretrainConfig, layout: PlannedLayout) -> float:
    """Step time of a row, which states it in seconds, tokens a second and GPU, or FLOP/s per GPU."""
    if "seconds" in fields or "iteration_ms" in fields:
        return float(fields["seconds"] if "seconds" in fields else fields["iteration_ms"] / 1e3)
    seq = run.data.seq_length
    if "tok_s_gpu" in fields:
        return float(layout.global_batch * seq / (float(fields["tok_s_gpu"]) * layout.gpus))
    tflops = fields.get("tflops_per_gpu") or fields["peak_tflops"] * fields["pct_of_peak"] / 100
    flops = hardware_flops(run.model, seq, layout.global_batch, fields["counted"])
    return flops / (layout.gpus * tflops * 1e12)


def published(name: str) -> Iterator[Row]:
    """Rows of a table, whose own values come before the table's."""
    table = SOURCES["usual"] | SOURCES["tables"][name]
    for row in read(table["file"]):
        cells = {key: value for key, value in row.items() if value and key not in ("name", "source")}
        fields = table | {key: yaml.safe_load(value) for key, value in cells.items()}
        run, own = run_of(fields), SOURCES["programs"][fields["program"]]
        layout = PlannedLayout(**{key: fields[key] for key in LAYOUT if key in fields})
        software = Program(**own | {key: fields[key] for key in PROGRAM if key in fields})
        seconds, attention = step_seconds(fields, run, layout), SOURCES["attention"][fields["attention"]]
        yield Row(
            row["name"], run, layout, software, fields["hardware"], attention, seconds, fields["counted"]
        )


def own_h200() -> Iterator[Row]:
    """One H200 by this toolkit (scripts/gpu_check.py): every size that fitted, micro-batches of one step."""
    steps = json.loads(CHECKED.read_text("utf-8"))["steps"]
    (gpu,) = (e["row"]["value"] for e in steps["facts"]["entries"] if e["row"].get("fact") == "gpu")
    if preset_of_gpu(gpu) != preset(OWN):
        raise SystemExit(f"{CHECKED}: measured on {gpu}, which is not {OWN}; check out an H200's record")
    entries = [entry for name in steps if name.startswith("speed-") for entry in steps[name]["entries"]]
    for row in (entry["row"] for entry in entries if entry.get("table") == "speed"):
        if row["result"] != "ok":
            continue
        sizes = dict(zip(("layers", "hidden", "heads"), SIZES[row["model"]], strict=True))
        sizes |= {"seq": row["S"], "vocab": PADDED_VOCAB}
        run = run_of(sizes | {"dtype": "bf16", "dropout": row["dropout"]})
        layout = PlannedLayout(micro_batch=row["micro-batch"], global_batch=row["micro-batch"])
        software = Program(compiled=row["compiled"])
        words = f"{row['model']} S={row['S']} micro-batch {row['micro-batch']}"
        words += f"{' compiled' * row['compiled']}{' dropout' * bool(row['dropout'])}"
        yield Row(words, run, layout, software, OWN, SOURCES["attention"]["cudnn"], row["step ms"] / 1e3)


TABLES = {name: (table["title"], partial(published, name)) for name, table in SOURCES["tables"].items()}
TABLES["own_h200"] = ("this toolkit, one H200", own_h200)
START = {"matmul": 0.85, "matmul_half": 60.0, "memory": 0.7, "network": 0.7}
LIMITS = {"matmul": (0.5, 1.0), "matmul_half": (8.0, 400.0), "memory": (0.3, 0.95), "network": (0.2, 0.95)}


def errors(rows: Sequence[Row], constants: dict[str, float]) -> list[float]:
    return [predicted(row, constants) / row.seconds - 1 for row in rows]


def naive_errors(rows: Sequence[Row]) -> list[float]:
    """Those of dividing FLOPs by the best TFLOP/s of the table."""
    best = max(row.tflops for row in rows)
    return [row.tflops / best - 1 for row in rows]


def fit(rows: Sequence[Row]) -> dict[str, float]:
    """Constants of the least mean squared error, by a search along one constant after the other."""

    def loss(constants: dict[str, float]) -> float:
        return fmean(error**2 for error in errors(rows, constants))

    best = dict(START)
    least, step = loss(best), 0.2
    while step > 0.004:
        improved = False
        for name, (low, high) in LIMITS.items():
            for factor in (1 + step, 1 / (1 + step)):
                tried = {**best, name: min(max(best[name] * factor, low), high)}
                if (found := loss(tried)) < least * (1 - 1e-6):
                    best, least, improved = tried, found, True
        step = step if improved else step / 2
    return {name: float(f"{value:.3g}") for name, value in best.items()}


def bearable_scatter(rates: Sequence[float]) -> float:
    """Scatter of errors, as the deviation of their logarithms, with which these rates keep an order of 0.9.

    That is the rank correlation of the rates with themselves after errors at random, the mean of 200 draws.
    """
    random = Random(1)
    draws = [[random.gauss() for _ in rates] for _ in range(200)]

    def kept(scatter: float) -> float:
        changed = ([x * exp(scatter * e) for x, e in zip(rates, errors, strict=True)] for errors in draws)
        return fmean(rank_correlation(rates, values) for values in changed)

    low, high = 0.0, 1.0
    for _ in range(10):
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) >= 0.9 else (low, middle)
    return low


def result(rows: Sequence[Row], constants: dict[str, float]) -> dict[str, Any]:
    found, naive = errors(rows, constants), naive_errors(rows)
    seconds = [
        [row.seconds * (1 + e) for row, e in zip(rows, es, strict=True)] for es in (found, [0] * len(rows))
    ]
    rates = [[row.flops / row.layout.gpus / s for row, s in zip(rows, its, strict=True)] for its in seconds]
    return {
        "rank_step": round(rank_correlation(*seconds), 3),
        "rank_gpu": round(rank_correlation(*rates), 3),
        "scatter": round(pstdev(log(1 + error) for error in found), 4),
        "bearable": round(bearable_scatter(rates[1]), 4),
        "median": round(median(map(abs, found)), 4),
        "worst": round(max(map(abs, found)), 4),
        "naive_median": round(median(map(abs, naive)), 4),
        "naive_worst": round(max(map(abs, naive)), 4),
        "rows": [
            {
                "name": row.name,
                "hardware": row.hardware,
                "measured_s": round(row.seconds, 4),
                "error": round(error, 4),
                "naive": round(other, 4),
            }
            for row, error, other in zip(rows, found, naive, strict=True)
        ],
    }


Tables = dict[str, list[dict[str, Any]]]
"""Rows of `result` by table."""


def time_quantiles(tables: Tables, tails: float = 0.1) -> tuple[float, float]:
    """Shares of the predicted time below and above which `tails` of these tables' rows lie.

    Every table weighs the same, however many rows it has.
    """
    weighed = sorted((1 / (1 + row["error"]), 1 / len(rows)) for rows in tables.values() for row in rows)
    sums = list(accumulate(weight for _, weight in weighed))
    low, high = (bisect_left(sums, share * sums[-1]) for share in (tails, 1 - tails))
    return round(weighed[low][0], 2), round(weighed[high][0], 2)


def ranges(results: dict[str, Any]) -> dict[str, Any]:
    """The ranges of four of five and nine of ten rows, and the rows of each table that others' contain.

    The fitted table is in none.
    """
    tables: Tables = {name: results[name]["rows"] for name in TABLES if name != FITTED}
    contained = {}
    for name, rows in tables.items():
        low, high = time_quantiles({other: its for other, its in tables.items() if other != name})
        contained[name] = sum(low <= 1 / (1 + row["error"]) <= high for row in rows)
    return {
        "compared": time_quantiles(tables),
        "uncompared": time_quantiles(tables, 0.05),
        "held_out": contained,
        "share": sum(contained.values()) / sum(map(len, tables.values())),
    }


def markdown(results: dict[str, Any]) -> str:
    lines = ["| table | error: median, worst | in range | order: steps, FLOP/s | scatter, bearable |"]
    lines.append("| --- | --- | --- | --- | --- |")
    for name, (title, _) in TABLES.items():
        its, inside = results[name], results["ranges"]["held_out"].get(name)
        errors, scatters = (
            ", ".join(f"{its[key]:.1%}" for key in keys)
            for keys in (("median", "worst"), ("scatter", "bearable"))
        )
        held = "fitted" if inside is None else f"{inside} of {len(its['rows'])}"
        orders = f"{its['rank_step']:.2f}, {its['rank_gpu']:.2f}"
        lines.append(f"| {title} | {errors} | {held} | {orders} | {scatters} |")
    return "\n".join(lines)


def main() -> None:
    """Fit if it is asked for; print and save the errors of every table."""
    parser = ArgumentParser(description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true", help="fit the constants anew")
    arguments = parser.parse_args()
    saved = json.loads(RESULTS.read_text("utf-8")) if RESULTS.exists() else {}
    constants = (
        fit(list(published(FITTED))) if arguments.fit or "constants" not in saved else saved["constants"]
    )
    results = {"constants": constants}
    for name, (title, rows_of) in TABLES.items():
        results[name] = result(list(rows_of()), constants)
        print(title)
        for row in results[name]["rows"]:
            measured = f"{row['measured_s']:8.3f} s {row['error']:+.1%}"
            print(f"  {row['name']:50s} {measured} (naive {row['naive']:+.1%})")
    results["ranges"] = ranges(results)
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", "utf-8")
    print(constants, markdown(results), results["ranges"], sep="\n")


if __name__ == "__main__":
    main()
