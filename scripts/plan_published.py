"""The time model of `mlm plan` beside published runs and our own: four constants, fitted on one table.

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
4. What another program does differently is a switch below, a fact of its code, or one of our own settings
   (tp_overlap, fp8). What a source leaves open is one rule per table, stated at its rows.
5. Errors of all other tables are reported as they come: median and worst, beside the naive forecast, the
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

scripts/results/published/*.csv hold the numbers, each row with its source.
"""

import csv
import json
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from itertools import accumulate
from math import exp, log
from pathlib import Path
from random import Random
from statistics import correlation, fmean, median, pstdev
from typing import Any

from bench.shapes import PADDED_VOCAB
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
ATTAINABLE = {
    "dgx_a100_40g": 0.859,
    "dgx_a100_80g": 0.859,
    "dgx_h100": 0.801,
    "dgx_h100_500w": 0.801,
    "dgx_h200": 0.801,
    "dgx2h_v100_32g": 0.859,
}
"""Share of the datasheet's peak that the fastest product reaches."""
FLASH_2, CUDNN = 0.35, 0.5
"""Share of an H100's peak that fused attention reaches."""


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


class ProgramCost(CostModel):
    """Times of another program."""

    software: Program

    def repeated(self, forward: Times, layout: ParallelConfig) -> Times:
        """The part of a layer's forward pass that recomputation adds to its backward pass."""
        share = self.software.repeated_products if layout.recompute == "selective" else 0.0
        if not share:
            return super().repeated(forward, layout)
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


MEGATRON_2021 = Program(overlaps=False, gradient_bytes=2, splits_transfers=True)
"""Megatron-LM of arXiv:2104.04473: kernels between products fused, gradients in fp16, attention unfused."""
MEGATRON_2022 = replace(MEGATRON_2021, overlaps=True)
"""Megatron-LM of arXiv:2205.05198: products of weight gradients hide messages of backward (section 4.2.2)."""
DEEPSPEED_2021 = Program(
    overlaps=False,
    overlaps_dp=False,
    gradient_bytes=2,
    dp_messages=4,
    backward_gathers=5 / 3,
    slices=1,
    fills_gathered=True,
)
"""DeepSpeed of April 2021 (c83e49f9e, runtime/zero). A module gathers its matrix as it runs and waits: all
are above `stage3_prefetch_bucket_size`. `torch.distributed.all_gather` of a list copies each rank's part, out
of one tensor into another, filled with zeros before (partition_parameters.py, `_allgather_param`); gradients
are divided by the ranks, then copied likewise (`_reduce_scatter_gradient`). What recomputation gathered is
freed, but for a layer's last third: the rest is further than `stage3_max_reuse_distance` from its backward
pass."""
NANOTRON = Program(balances_stages=True)
"""nanotron of February 2025 (0e0a27ea): norms and rotations are fused kernels (TritonRMSNorm, flash-attn's
rotary), tp_linear_async_communication, sums of gradients in float32; build_model balances the stages."""
NANOTRON_ZERO = replace(NANOTRON, overlaps_dp=False, reduces_whole=True, slices=6)
"""With ZeRO-1 and such sums it wraps no DDP (make_ddp in trainer.py): after backward it all-reduces, and
after the update it gathers lists of a layer's six weights (all_gather_coalesced in distributed.py)."""
MCORE = Program(gradient_bytes=2, splits_transfers=True, passes_parts=True)
"""Megatron Core: --tp-comm-overlap is our tp_overlap, with user buffers of Transformer Engine. Its Llama
scripts set --grad-reduce-in-bf16; without it --bf16 sums gradients in float32 (training/arguments.py)."""
TORCHTITAN = Program(overlaps=False, repeated_products=0.5, passes_parts=True)
"""It keeps the result of every other product, and overlaps tp only with async TP, our tp_overlap."""


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

    Its H100 have 96 GB of HBM2e with 2.4 TB/s and a limit of 500 W. Peaks are between those of the H100 NVL
    of 400 W, 835 TFLOP/s in bf16, and of the SXM of 700 W, as the power is.
    """
    if name != GRAND_TETON:
        return preset(name)
    usual = preset("dgx_h100")
    share = (835 / 989.4 * 2 + 1) / 3
    peaks = {dtype: peak and share * peak for dtype, peak in asdict(usual.peak_tflops).items()}
    return replace(usual, memory_gbps=2400.0, peak_tflops=PeakConfig(**peaks))


def predicted(row: Row, constants: dict[str, float]) -> float:
    hardware: HardwareConfig = load_hardware(row.hardware)
    share = constants["matmul"] * ATTAINABLE[row.hardware]
    efficiency = replace(
        hardware.efficiency, **{**constants, "matmul": share, "attention": row.attention or 1.0}
    )
    counts = counts_of(row.run, "gpu" if row.attention else "unfused")
    model = ProgramCost(counts, replace(hardware, efficiency=efficiency), row.layout.gpus, row.software)
    return model.step(row.layout).total


def read(name: str) -> list[dict[str, str]]:
    with open(PUBLISHED / f"{name}.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def run_of(model: ModelConfig, dtype: str) -> PretrainConfig:
    """A run of sequences as long as the model takes."""
    data = DataConfig(kind="synthetic", seq_length=model.max_positions)
    precision = PrecisionConfig(dtype=dtype)  # type: ignore[arg-type]
    return PretrainConfig(name="published", out="", model=model, data=data, precision=precision)  # type: ignore[arg-type]


def gpt(row: Mapping[str, Any], dtype: str = "fp16", dropout: float = 0.1) -> PretrainConfig:
    """A run of the GPT of a row."""
    model = ModelConfig(
        num_layers=int(row["layers"]),
        hidden_size=int(row["hidden"]),
        num_heads=int(row["heads"]),
        vocab_size=int(row.get("vocab", 51200)),
        vocab_multiple=1,
        max_positions=int(row.get("seq", 2048)),
        hidden_dropout=dropout,
        attention_dropout=dropout,
    )
    return run_of(model, dtype)


COLUMNS = {name: name for name in ("tp", "pp", "vp", "cp", "dp", "micro_batch", "global_batch")}
COLUMNS |= {"virtual": "vp", "mbs": "micro_batch", "gbs": "global_batch"}
"""Fields of a layout by the columns of the tables."""


def layout_of(row: Mapping[str, str], **open_fields: Any) -> PlannedLayout:
    """The layout of a row, with what its columns leave open; dp fills its GPUs."""
    fields = {field: int(row[column]) for column, field in COLUMNS.items() if column in row} | open_fields
    layout = PlannedLayout(**fields)
    return layout if "dp" in fields else replace(layout, dp=int(row["gpus"]) // layout.gpus)


def seconds_of(run: PretrainConfig, layout: PlannedLayout, tflops: float, recompute: str) -> float:
    """Step time of a published TFLOP/s per GPU, which counts `recompute`'s operations."""
    flops = hardware_flops(run.model, run.data.seq_length, layout.global_batch, recompute)
    return flops / (layout.gpus * tflops * 1e12)


def seconds_of_tokens(run: PretrainConfig, layout: PlannedLayout, row: Mapping[str, str]) -> float:
    """Step time of a published number of tokens a second and GPU."""
    return layout.global_batch * run.data.seq_length / (float(row["tok_s_gpu"]) * layout.gpus)


def megatron(name: str, run: PretrainConfig, layout: PlannedLayout, tflops: float, **habits: bool) -> Row:
    """A row of Megatron-LM of 2021 on A100, whose TFLOP/s count recomputed operations."""
    seconds = seconds_of(run, layout, tflops, "full")
    return Row(name, run, layout, replace(MEGATRON_2021, **habits), "dgx_a100_80g", 0.0, seconds, "full")  # type: ignore[arg-type]


def sc21() -> Iterator[Row]:
    """arXiv:2104.04473, table 1."""
    for row in read("sc21_table1"):
        layout, tflops = layout_of(row, recompute="full"), float(row["tflops_per_gpu"])
        yield megatron(row["model"], gpt(row), layout, tflops, overlaps_dp=row["ddp_impl"] == "torch")


def january_2021() -> Iterator[Row]:
    """Weak scaling of January 2021: no interleaving yet; tp up to a node, micro-batches as in SC21."""
    micro = {row["hidden"]: int(row["micro_batch"]) for row in read("sc21_table1")}
    for row in read("megatron_jan2021"):
        ranks, tflops = int(row["model_parallel"]), float(row["tflops_per_gpu"])
        tp = min(8, ranks)
        layout = layout_of(row, tp=tp, pp=ranks // tp, recompute="full", micro_batch=micro[row["hidden"]])
        habits = {"overlaps_dp": layout.pp == 1, "splits_transfers": False}
        yield megatron(row["model"], gpt(row), layout, tflops, **habits)


def sc21_zero3() -> Iterator[Row]:
    """arXiv:2104.04473, table 2: ZeRO-3 of all ranks beside tp and pp; it does not state v, taken to be 1."""
    for row in read("sc21_table2"):
        layout = layout_of(row, zero=3 if row["scheme"] == "zero3" else 0, recompute="full")
        name = f"{row['params_b']}B {row['scheme']} {row['gpus']}"
        found = megatron(name, gpt(row), layout, float(row["tflops_per_gpu"]), overlaps_dp=False)
        yield replace(found, software=DEEPSPEED_2021) if layout.zero else found


def korthikanti() -> Iterator[Row]:
    """arXiv:2205.05198, table 5: full recomputation, and sequence parallelism with selective."""
    for row in read("korthikanti_table5"):
        for recompute in ("full", "selective"):
            is_full = recompute == "full"
            layout = layout_of(row, dp=1, sequence_parallel=not is_full, tp_overlap=1, recompute=recompute)
            name, seconds = f"{row['model']} {recompute}", float(row[f"{recompute}_s"])
            again = "full" if is_full else "none"
            yield Row(name, gpt(row), layout, MEGATRON_2022, "dgx_a100_80g", 0.0, seconds, again)


def september_2020() -> Iterator[Row]:
    """Weak scaling of September 2020, seq 1024, activations recomputed, on DGX-2 and DGX A100 40GB."""
    software = replace(MEGATRON_2021, overlaps_dp=False)
    for row in read("megatron_sep2020"):
        layout = layout_of(row, recompute="full", global_batch=int(row["micro_batch"]) * int(row["dp"]))
        hardware = "dgx2h_v100_32g" if row["gpu"] == "V100" else "dgx_a100_40g"
        name, seconds = f"{row['case']} {row['gpu']} dp={layout.dp}", float(row["iteration_ms"]) / 1e3
        yield Row(name, gpt(row), layout, software, hardware, 0.0, seconds, "full")


V1_TFLOPS = 39.0
"""Of arXiv:1909.08053's one GPU, of which its efficiencies are shares."""


def v1() -> Iterator[Row]:
    """arXiv:1909.08053, figure 5, with data parallelism: shares of 39 TFLOP/s, recomputation counted.

    Its program is of 2019, a year before the first fused kernel (51a2e6b0f, September 2020). Its README
    (93ab4bea5) says which models gain from overlapping gradients: 8.3B, not 1.2B and 2.5B; 4.2B is assumed.
    """
    for row in read("v1_table1_fig5"):
        dp, batch = int(row["gpus_mpdp"]) // int(row["tp"]), int(row["batch_mpdp"])
        layout = layout_of(row, dp=dp, recompute="full", micro_batch=8, global_batch=batch)
        tflops = V1_TFLOPS * float(row["eff_mpdp_pct"]) / 100
        habits = {"compiled": False, "overlaps_dp": layout.tp > 2}
        found = megatron(f"{row['params_b']}B", gpt(row), layout, tflops, **habits)
        yield replace(found, hardware="dgx2h_v100_32g")


def overlap(tp: int, tokens: int) -> int:
    """Parts of a rank's tokens that are communicated while others are multiplied: as many as ranks."""
    return tp if tokens // tp % tp == 0 else 1


def mcore_layout(row: Mapping[str, str], **open_fields: Any) -> PlannedLayout:
    """Sequence parallelism with tp, communication in parts, and the distributed optimizer."""
    tp, tokens = int(row["tp"]), int(row["seq"]) // int(row.get("cp", 1))
    habits = {"sequence_parallel": tp > 1, "tp_overlap": overlap(tp, tokens), "zero": 2}
    return layout_of(row, **habits | open_fields)


def mcore() -> Iterator[Row]:
    """Megatron Core's weak scaling, without recomputation.

    Assumed: without a pipeline a replica's four samples at once, else a sample and a layer a chunk.
    """
    for row in read("mcore_h100_weak_scaling"):
        run, pp = gpt(row, "bf16", 0.0), int(row["pp"])
        chunks = {"vp": run.model.num_layers // pp, "micro_batch": 1} if pp > 1 else {"micro_batch": 4}
        layout, software = mcore_layout(row, **chunks), replace(MCORE, gradient_bytes=4)
        seconds = seconds_of(run, layout, float(row["tflops_per_gpu"]), "none")
        yield Row(row["model"], run, layout, software, "dgx_h100", CUDNN, seconds)


LLAMA = {"8B": (32, 4096, 32, 14336), "70B": (80, 8192, 64, 28672), "405B": (126, 16384, 128, 53248)}
"""Layers, hidden size, heads and width of the MLP."""


def llama(name: str, seq: int) -> ModelConfig:
    """A Llama 3.1."""
    layers, hidden, heads, ffn = LLAMA[name]
    return ModelConfig(
        kind="llama",
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        ffn_hidden_size=ffn,
        vocab_size=128256,
        vocab_multiple=1,
        max_positions=seq,
        activation="silu",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        options={"num_kv_heads": 8},
    )


def mcore_fp8() -> Iterator[Row]:
    """Megatron Core's Llama 3 in fp8."""
    for row in read("mcore_llama_fp8"):
        run, layout = run_of(llama(row["model"].split("-")[1], int(row["seq"])), "fp8"), mcore_layout(row)
        seconds = seconds_of_tokens(run, layout, row)
        yield Row(row["model"], run, layout, MCORE, "dgx_h100", CUDNN, seconds)


def bridge() -> Iterator[Row]:
    """Megatron Bridge's Llama 3 in fp8 on H100; where FSDP is not 0, weights are sharded over it."""
    for row in read("megatron_bridge_h100"):
        run = run_of(llama(row["model"], int(row["seq"])), row["precision"])
        layout = mcore_layout(row, zero=3 if int(row["fsdp"]) else 2)
        name, seconds = f"{row['model']} {row['container']}", seconds_of_tokens(run, layout, row)
        yield Row(name, run, layout, MCORE, "dgx_h100", CUDNN, seconds)


H100_TFLOPS = 989.0


def nanotron() -> Iterator[Row]:
    """nanotron's best layouts on H100, of four sizes; ZeRO-1 is our zero=2."""
    for row in read("nanotron"):
        layers, hidden, heads, ffn = (int(row[name]) for name in ("layers", "hidden", "heads", "ffn"))
        model = replace(
            llama("8B", int(row["seq"])),
            num_layers=layers,
            hidden_size=hidden,
            num_heads=heads,
            ffn_hidden_size=ffn,
            vocab_size=int(row["vocab"]),
            options={"num_kv_heads": heads, "tied": float(row["params_b"]) < 4},
        )
        run, is_sharded = run_of(model, "bf16"), row["zero"] == "1"
        batch = int(row["dp"]) * int(row["micro_batch"]) * int(row["accumulation"])
        habits = {"sequence_parallel": int(row["tp"]) > 1, "tp_overlap": 1, "zero": 2 * is_sharded}
        layout = layout_of(row, **habits, global_batch=batch)
        seconds = seconds_of(run, layout, H100_TFLOPS * float(row["mfu_pct"]) / 100, "none")
        software = NANOTRON_ZERO if is_sharded else NANOTRON
        yield Row(f"{row['params_b']}B {layout.label}", run, layout, software, "dgx_h100", FLASH_2, seconds)


def torchtitan() -> Iterator[Row]:
    """torchtitan's Llama 3.1; its pipelines have as many micro-batches as stages in a row (its default)."""
    for row in read("torchtitan"):
        options, name, words = row["options"], row["model"].split("-")[1], row["layout"].split()
        run = run_of(llama(name, int(row["seq"])), "fp8" if "fp8" in options else "bf16")
        sizes = {word.rstrip("0123456789"): word for word in words}
        tp, pp = (int(sizes.get(axis, "1").removeprefix(axis)) for axis in ("tp", "pp"))
        local, gpus, recompute = int(row["local_batch"]), int(row["gpus"]), row["recompute"]
        layout = PlannedLayout(
            tp=tp,
            pp=pp,
            vp=2 if "interleaved" in words else 1,
            dp=gpus // (tp * pp),
            sequence_parallel=tp > 1,
            tp_overlap=overlap(tp, run.data.seq_length) if "asyncTP" in options else 1,
            zero=3 if pp == 1 else 2,
            recompute="full" if recompute == "full" else "selective",
            micro_batch=local // pp,
            global_batch=local * gpus // (tp * pp),
        )
        software = replace(TORCHTITAN, compiled="eager" not in options, overlaps="asyncTP" in options)
        hardware = "dgx_h200" if "H200" in options else GRAND_TETON
        seconds = seconds_of_tokens(run, layout, row)
        yield Row(f"{name} {row['layout']} {options}", run, layout, software, hardware, FLASH_2, seconds)


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
        run = gpt({**sizes, "seq": row["S"], "vocab": PADDED_VOCAB}, "bf16", row["dropout"])
        layout = PlannedLayout(micro_batch=row["micro-batch"], global_batch=row["micro-batch"])
        software = Program(compiled=row["compiled"])
        words = f"{row['model']} S={row['S']} micro-batch {row['micro-batch']}"
        words += f"{' compiled' * row['compiled']}{' dropout' * bool(row['dropout'])}"
        yield Row(words, run, layout, software, OWN, CUDNN, row["step ms"] / 1e3)


TABLES = {
    "sc21": ("arXiv:2104.04473, table 1", sc21),
    "january_2021": ("Megatron-LM, January 2021, A100", january_2021),
    "september_2020": ("Megatron-LM, September 2020, V100 and A100", september_2020),
    "v1": ("arXiv:1909.08053, figure 5, V100", v1),
    "sc21_zero3": ("arXiv:2104.04473, table 2, ZeRO-3 and tp + pp", sc21_zero3),
    "korthikanti": ("arXiv:2205.05198, table 5, A100", korthikanti),
    "mcore": ("Megatron Core, H100", mcore),
    "mcore_fp8": ("Megatron Core, Llama 3 in fp8, H100", mcore_fp8),
    "bridge": ("Megatron Bridge, Llama 3 in fp8, H100", bridge),
    "nanotron": ("nanotron, H100", nanotron),
    "torchtitan": ("torchtitan, H100 and H200", torchtitan),
    "own_h200": ("this toolkit, one H200", own_h200),
}
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


def order(values: Sequence[float]) -> list[float]:
    """Ranks of values; equal ones share the mean of theirs."""
    inorder = sorted(values)
    return [inorder.index(x) + (inorder.count(x) - 1) / 2 for x in values]


def bearable_scatter(rates: Sequence[float]) -> float:
    """Scatter of errors, as the deviation of their logarithms, with which these rates keep an order of 0.9.

    That is the rank correlation of the rates with themselves after errors at random, the mean of 200 draws.
    """
    random = Random(1)
    draws = [[random.gauss() for _ in rates] for _ in range(200)]

    def kept(scatter: float) -> float:
        changed = ([x * exp(scatter * e) for x, e in zip(rates, errors, strict=True)] for errors in draws)
        return fmean(correlation(order(rates), order(values)) for values in changed)

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
        "rank_step": round(correlation(*map(order, seconds)), 3),
        "rank_gpu": round(correlation(*map(order, rates)), 3),
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
    """The range of four of five rows, that of nine of ten, and the rows of each table that others' contain.

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
    constants = fit(list(sc21())) if arguments.fit or "constants" not in saved else saved["constants"]
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
