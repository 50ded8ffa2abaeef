"""Report for people: one table per shape."""

from collections.abc import Iterator
from typing import Any

from rich.console import RenderableType

from bench.harness import table_of


def tables_of(result: dict[str, Any]) -> Iterator[RenderableType]:
    """Contenders of one shape, and how the reference compares with each."""
    peaks = ", ".join(f"{dtype} {peak / 1e9:,.0f}" for dtype, peak in result["peak_flops"].items())
    by = {entry["rates_by"] for entry in result["contenders"].values()}
    yield f"\n[bold]{result['shape']['name']}: {result['description']}"
    yield (
        f"rates are by {' and '.join(sorted(by))} time; MFU is against the best square matrix product, "
        f"GFLOP/s: {peaks}; memory is the peak above weights and optimizer state"
    )
    contenders, rows = result["contenders"], []
    for name, entry in contenders.items():
        wall, cpu = entry["step_s"], entry["step_cpu_s"]
        seconds = (f"{value:.4f}" for value in (wall["median"], wall["least"], cpu["median"]))
        memory = f"{entry['memory']['peak_above_bytes'] / 1e6:,.1f}" if entry["memory"] else "not measured"
        rows.append((name, f"{entry['tokens_per_s']:,.0f}", f"{entry['mfu']:.1%}", *seconds, memory))
    yield table_of(("contender", "tokens/s", "MFU", "step, s", "least", "cpu s", "memory, MB"), rows)
    rows = []
    for series in result["series"]:
        ours, theirs = (contenders[series[role]]["memory"] for role in ("reference", "other"))
        is_known = ours and theirs and theirs["peak_above_bytes"] > 0
        memory = f"{ours['peak_above_bytes'] / theirs['peak_above_bytes']:.2f}" if is_known else ""
        name = f"{series['reference']} : {series['other']}"
        for measure, suffix in (("wall", ""), ("cpu", "_cpu")):
            cells = ratio_cells(series[f"tokens_ratio{suffix}"], series["rounds"])
            minima = f"{series['ratio_of_minima'][measure]:.3f}"
            rows.append((name, measure, *cells[:-1], minima, memory, cells[-1]))
            name = memory = ""
    if rows:
        ratios = ("speed", "quartiles", "range", "of minima", "memory", "kept")
        yield table_of(("ratios of pairs", "by", *ratios), rows)
    for name, entry in contenders.items():
        yield from (f"[dim]{name}: {note}" for note in entry["notes"])
    yield from (f"[yellow]not a result: {doubt}" for doubt in result["doubts"])


def ratio_cells(ratio: dict[str, float] | None, rounds: int) -> list[str]:
    if ratio is None:
        return ["none kept", "", "", f"0 of {rounds}"]
    return [
        f"{ratio['median']:.3f}",
        f"{ratio['low']:.3f} to {ratio['high']:.3f}",
        f"{ratio['least']:.3f} to {ratio['most']:.3f}",
        f"{ratio['kept']} of {rounds}",
    ]
