"""Self-contained HTML pages, and the curves of runs on them.

```python
curves, data = curves_of([read_run(Path("runs/a"), "a"), read_run(Path("runs/b"), "b")])
content = page("Two runs", [("runs", "Runs", table(…)), ("curves", "Curves", curves)], data=data)
write_result("two.html", content)
```

Templates escape all values but Markup, by `text`. The script `assets/curves.js` draws the curves with uPlot
from thinned data: each bucket of neighbours keeps its first, last, lowest and highest point, so that no spike
is lost, and its mean for smoothed curves.
"""

import math
import shlex
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from mlm.tracking.display import duration
from mlm.tracking.runs import LARGEST, MISSING, Column, RunRecords, number, when
from mlm.util.errors import escape_controls, format_value
from mlm.util.results import HTML_MARK

MAX_TEXT = 300
"""Most characters of a value on a page."""
AXES = ("step", "tokens", "time")
CHARTS: tuple[tuple[str, str, str, str], ...] = (
    ("step", "loss", "Training loss", ""),
    ("validation", "loss", "Validation loss", ""),
    ("step", "grad_norm", "Gradient norm", "L2, before clipping"),
    ("step", "lr", "Learning rate", ""),
    ("step", "tokens_per_s", "Throughput", "tokens per second, all ranks"),
    ("step", "memory_gib", "Memory", "GiB, rank 0"),
)
"""Record, name, title and unit of the charts that come first."""
NOT_CURVES = frozenset(
    (*AXES, "seconds", "waited", "loss_scale", "skipped_steps", "step_time_s", "tflops", "mfu")
) | {"perplexity", "epoch", "examples_per_s", "memory_bytes"}
"""Numbers without a chart: they follow from others, or are rarely useful."""


def text(value: object, longest: int = MAX_TEXT) -> Markup:
    """Escape a value of any type, with its control characters and unpaired surrogates."""
    if isinstance(value, Markup):
        return value
    content = value if isinstance(value, str) else format_value(value)
    end = "…" if len(content) > longest else ""
    return escape("\n".join(map(escape_controls, content[:longest].split("\n"))) + end)


def figure(value: float, form: str = "{:.4f}") -> str:
    if abs(value) >= 1e6 and form == "{:.4f}":
        form = "{:.4g}"
    return form.format(value) if value == value else MISSING


def command_line(words: object) -> Markup:
    """Return a command line as typed, untruncated for copying."""
    return text(shlex.join(map(str, words)), 10_000) if isinstance(words, list) else Markup(MISSING)


@cache
def environment() -> Environment:
    templates = Environment(
        loader=PackageLoader("mlm.tracking.page"),
        autoescape=True,
        finalize=text,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "text": text,
        "figure": figure,
        "number": number,
        "when": when,
        "duration": duration,
    }
    templates.filters["command"] = command_line
    templates.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    return templates


def macro(template: str, name: str, *args: object, **values: object) -> Markup:
    return Markup(getattr(environment().get_template(template).module, name)(*args, **values).strip())


def table(headings: Sequence[str], rows: Iterable[Sequence[object]], caption: str = "") -> Markup:
    """Return a scrolling table whose first column names its rows; empty without rows."""
    return macro("parts.html", "table", headings, list(rows), caption)


def paragraph(*parts: object) -> Markup:
    return macro("parts.html", "paragraph", parts)


@cache
def asset(name: str) -> Markup:
    return Markup((files("mlm.tracking.page") / "assets" / name).read_text("utf-8"))


def page(
    title: str, sections: Sequence[tuple[str, str, Markup]], *, data: Mapping[str, Any] | None = None
) -> bytes:
    """Return a page of sections (anchor, heading, content), without empty ones.

    `data`: curves from `curves_of`, which adds the scripts that draw them. With `reload` in it, a browser
    reloads the page after that many seconds.
    """
    shown = [section for section in sections if section[2]]
    template = environment().get_template("page.html")
    # Content security policy: the browser loads nothing.
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    mark = Markup(HTML_MARK)
    content = template.render(title=title, sections=shown, data=data, mark=mark, policy=policy, asset=asset)
    return content.encode()


def curves_of(runs: Sequence[RunRecords]) -> tuple[Markup, dict[str, Any]]:
    """Return the charts section of some runs, and the page's `data` for it.

    A page has one such section, empty if no run has logged a number.
    """
    charted = {(kind, name): (kind, name, title, unit) for kind, name, title, unit in CHARTS}
    for run in runs:
        for kind, columns in run.tables.items():
            part = kind.partition("/")[2] or ("validation" if kind == "validation" else "training")
            for name in (name for name in columns if name not in NOT_CURVES):
                label = name.removeprefix("validation/").replace("_", " ")
                charted.setdefault((kind, name), (kind, name, f"{label}, {part}", ""))
    charts = [chart for chart in charted.values() if any(len(run.column(*chart[:2])) for run in runs)][:40]
    present = sum(bool(len(run.column(kind, name))) for run in runs for kind, name, _, _ in charts)
    most = max(30_000 // max(present, 1), 25)  # points of a curve, about 36 bytes each
    curves, buckets = [dict[str, Any]() for _ in runs], dict[str, int]()
    for kind, name, _, _ in charts:
        for run, curves_of_run in zip(runs, curves, strict=True):
            if not len(run.column(kind, name)):
                continue
            columns = run.tables[kind]
            x = {axis: columns[axis] for axis in AXES if axis in columns}
            curve = thin(x, columns[name], most)
            curves_of_run[f"{kind}:{name}"] = curve
            if "bucket" in curve:
                buckets[run.name] = max(buckets.get(run.name, 0), curve["bucket"])
    units = {unit[:80] for run in runs if isinstance(unit := run.latest.get("loss_unit"), str)}
    loss_unit = units.pop() if len(units) == 1 else ""
    return macro("curves.html", "curves", buckets) if charts else Markup(), {
        "runs": [{"name": run.name, "curves": plots} for run, plots in zip(runs, curves, strict=True)],
        "charts": [
            {"key": f"{kind}:{name}", "title": title, "unit": loss_unit if name == "loss" else unit}
            for kind, name, title, unit in charts
        ],
    }


def thin(x: Mapping[str, Column], y: Column, most: int) -> dict[str, Any]:
    """Return the JSON of a curve thinned to about `most` points.

    Keys: each axis and y; for a thinned curve also bucket, the number of points in each bucket, and mean, the
    axes and y of each bucket's middle and mean.
    """
    if len(y) <= most:
        return {**rounded(x), **rounded({"y": y})}
    # Keep the first, last, lowest, highest and first non-finite point of each bucket.
    edges = np.linspace(0, len(y), max(most // 5, 1) + 1).astype(int)
    keep, middles, means = set[int](), list[int](), list[float]()
    for start, end in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = y[start:end]
        finite = np.isfinite(part)
        keep |= {start, end - 1}
        middles.append((start + end - 1) // 2)
        means.append(float(part[finite].mean()) if finite.any() else math.nan)
        if finite.any():
            keep |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))}
        if not finite.all():
            keep.add(start + int(np.argmin(finite)))
    indices, middle = np.array(sorted(keep)), np.array(middles)
    return {
        **rounded({name: column[indices] for name, column in x.items()} | {"y": y[indices]}),
        "bucket": round(len(y) / len(middles)),
        "mean": rounded({name: column[middle] for name, column in x.items()} | {"y": np.array(means)}),
    }


def rounded(columns: Mapping[str, Column]) -> dict[str, list[float | int | None]]:
    """Numbers for JSON: integers, others to 7 digits, null for NaN."""

    def round_value(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        is_whole = value.is_integer() and abs(value) < LARGEST
        return int(value) if is_whole else float(f"{value:.7g}")

    return {name: list(map(round_value, column.tolist())) for name, column in columns.items()}
