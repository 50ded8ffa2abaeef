"""HTML pages that open from disk and load nothing, and the curves of runs on them.

```python
curves, data = curves_of([read_run(Path("runs/a"), "a"), read_run(Path("runs/b"), "b")])
content = page("Two runs", [("runs", "Runs", table(…)), ("curves", "Curves", curves)], data=data)
write_result("two.html", content)
```

What a template prints passes through `text` and is escaped; only Markup stays as it is. The script
`assets/curves.js` draws the curves with uPlot, from data that are thinned here: of each bucket of neighbours
the first, last, lowest and highest stay, so that no spike is lost, and its mean for smoothed curves.
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
"""Characters of a value that a page shows."""
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
"""Numbers that no chart shows: they follow from others, or are seldom of interest."""


def text(value: object, longest: int = MAX_TEXT) -> Markup:
    """Escape a value of any type, control characters and half characters written out."""
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
    """Return the words of a command as typed, whole so that it can be copied."""
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
    """Return a table whose first column names its rows; empty without rows. It scrolls where it is wide."""
    return macro("parts.html", "table", headings, list(rows), caption)


def paragraph(*parts: object) -> Markup:
    return macro("parts.html", "paragraph", parts)


@cache
def asset(name: str) -> Markup:
    return Markup((files("mlm.tracking.page") / "assets" / name).read_text("utf-8"))


def page(
    title: str, sections: Sequence[tuple[str, str, Markup]], *, data: Mapping[str, Any] | None = None
) -> bytes:
    """Return a page of sections: anchor, heading and content of each; those without content are left out.

    `data` are the curves of a section, from `curves_of`; the scripts that draw them come with it. With
    `reload` in it a browser loads the page again after that many seconds.
    """
    shown = [section for section in sections if section[2]]
    template = environment().get_template("page.html")
    # content-security policy: the browser is forbidden to load anything
    policy = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
    mark = Markup(HTML_MARK)
    content = template.render(title=title, sections=shown, data=data, mark=mark, policy=policy, asset=asset)
    return content.encode()


def curves_of(runs: Sequence[RunRecords]) -> tuple[Markup, dict[str, Any]]:
    """Return the charts of some runs for a section of a page, and the page's `data` that they are drawn from.

    A page has one such section. It is empty if no run has logged a number.
    """
    titled = {(kind, name): (kind, name, title, unit) for kind, name, title, unit in CHARTS}
    for run in runs:
        for kind, columns in run.tables.items():
            part = kind.partition("/")[2] or ("validation" if kind == "validation" else "training")
            for name in (name for name in columns if name not in NOT_CURVES):
                label = name.removeprefix("validation/").replace("_", " ")
                titled.setdefault((kind, name), (kind, name, f"{label}, {part}", ""))
    charts = [chart for chart in titled.values() if any(len(run.column(*chart[:2])) for run in runs)][:40]
    present = sum(bool(len(run.column(kind, name))) for run in runs for kind, name, _, _ in charts)
    most = max(30_000 // max(present, 1), 25)  # points of a curve, about 36 bytes each
    curves, thinned = [dict[str, Any]() for _ in runs], dict[str, int]()
    for kind, name, _, _ in charts:
        for run, curves_of_run in zip(runs, curves, strict=True):
            if not len(run.column(kind, name)):
                continue
            columns = run.tables[kind]
            x = {axis: columns[axis] for axis in AXES if axis in columns}
            curve = thin(x, columns[name], most)
            curves_of_run[f"{kind}:{name}"] = curve
            if "bucket" in curve:
                thinned[run.name] = max(thinned.get(run.name, 0), curve["bucket"])
    units = {unit[:80] for run in runs if isinstance(unit := run.latest.get("loss_unit"), str)}
    loss_unit = units.pop() if len(units) == 1 else ""
    return macro("curves.html", "curves", thinned) if charts else Markup(), {
        "runs": [{"name": run.name, "curves": drawn} for run, drawn in zip(runs, curves, strict=True)],
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
    # of a bucket stay the first, last, lowest and highest point, and one that is not finite
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
    chosen, middle = np.array(sorted(keep)), np.array(middles)
    return {
        **rounded({name: column[chosen] for name, column in x.items()} | {"y": y[chosen]}),
        "bucket": round(len(y) / len(middles)),
        "mean": rounded({name: column[middle] for name, column in x.items()} | {"y": np.array(means)}),
    }


def rounded(columns: Mapping[str, Column]) -> dict[str, list[float | int | None]]:
    """Numbers for JSON: whole ones as such, others to some digits, null for NaN."""

    def round_value(value: float) -> float | int | None:
        if not math.isfinite(value):
            return None
        is_whole = value.is_integer() and abs(value) < LARGEST
        return int(value) if is_whole else float(f"{value:.7g}")

    return {name: list(map(round_value, column.tolist())) for name, column in columns.items()}
