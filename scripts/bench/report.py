"""Report for people: one table per shape."""

from typing import Any

from rich.console import Console
from rich.table import Table


def print_shape(console: Console, result: dict[str, Any], description: str) -> None:
    """Contenders of one shape, and how the reference compares with each."""
    peak = result["peak_flops"]
    console.print(f"\n{result['shape']['name']}: {description}", style="bold", highlight=False)
    console.print(
        f"MFU is against the best square matrix product, {peak / 1e9:,.0f} GFLOP/s; spreads are quartiles; "
        "memory is the peak above weights and optimizer state",
        highlight=False,
        soft_wrap=True,
    )
    table = Table("contender")
    for heading in ("tokens/s", "quartiles", "model GFLOP/s", "MFU", "memory, MB"):
        table.add_column(heading, justify="right")
    for name, entry in result["contenders"].items():
        table.add_row(name, *speed_cells(entry), memory_cell(entry))
    console.print(table)
    ratios = Table("ratios of pairs")
    for heading in ("tokens/s", "model FLOP/s", "quartiles", "memory", "kept", "dropped"):
        ratios.add_column(heading, justify="right")
    for series in result["series"]:
        memory = memory_ratio(result["contenders"], series["reference"], series["other"])
        ratios.add_row(
            f"{series['reference']} : {series['other']}",
            "" if series["tokens_ratio"] is None else f"{series['tokens_ratio']['median']:.3f}",
            *ratio_cells(series["flops_ratio"]),
            memory,
            str(series["kept"]),
            str(series["dropped"]),
        )
    if result["series"]:
        console.print(ratios)
    for name, entry in result["contenders"].items():
        for note in entry["notes"]:
            console.print(f"{name}: {note}", style="dim", highlight=False, soft_wrap=True)
    for doubt in result["doubts"]:
        console.print(f"not a result: {doubt}", style="yellow", highlight=False, soft_wrap=True)


def speed_cells(entry: dict[str, Any]) -> tuple[str, str, str, str]:
    """tokens/s, its quartiles, model GFLOP/s, MFU."""
    if "tokens_per_s" not in entry:
        return "not timed", "", "", ""
    tokens = entry["tokens_per_s"]
    return (
        f"{tokens['median']:,.0f}",
        f"{tokens['low']:,.0f} to {tokens['high']:,.0f}",
        f"{entry['model_flops']['median'] / 1e9:,.1f}",
        f"{entry['mfu']:.1%}",
    )


def memory_cell(entry: dict[str, Any]) -> str:
    """Peak memory in MB (10^6 bytes)."""
    return f"{entry['memory']['peak_above_bytes'] / 1e6:,.1f}" if entry["memory"] else "not measured"


def ratio_cells(spread: dict[str, float] | None) -> tuple[str, str]:
    """A ratio and its quartiles."""
    if spread is None:
        return "none kept", ""
    return f"{spread['median']:.3f}", f"{spread['low']:.3f} to {spread['high']:.3f}"


def memory_ratio(contenders: dict[str, Any], reference: str, other: str) -> str:
    """Peak memory of the reference over that of the other."""
    ours, theirs = contenders[reference]["memory"], contenders[other]["memory"]
    if not ours or not theirs or theirs["peak_above_bytes"] <= 0:
        return ""
    return f"{ours['peak_above_bytes'] / theirs['peak_above_bytes']:.2f}"
