"""The page of an experiment, of the same parts as that of `mlm report`."""

import shlex
from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup as Html

from mlm.reproduce.conclusion import Cell, Conclusion
from mlm.reproduce.experiment import Experiment
from mlm.reproduce.results import Results
from mlm.tracking.page.html import block, curves_of, details, page, paragraph, table, text
from mlm.tracking.page.html import name_with_line as named

join = Html().join

MOST_CURVES = 20


def page_of(
    experiment: Experiment,
    conclusion: Conclusion,
    results: Results,
    facts: Mapping[str, str],
    pictures: Mapping[str, bytes],
) -> bytes:
    """Return the page; `pictures` are SVG by name."""
    titles = {chart.name: chart.title for chart in conclusion.charts}
    titles |= {drawing.name: drawing.title for drawing in conclusion.drawings}
    sections = [
        ("result", "Result", summary(experiment, conclusion)),
        ("pictures", "Pictures", join(picture(titles[name], svg) for name, svg in pictures.items())),
        ("tables", "Numbers", tables(conclusion)),
    ]
    drawn, data = curves(conclusion, results)
    sections += [
        ("curves", "Curves", drawn),
        ("limits", "What this cannot show", bullets(conclusion.limits)),
        ("commands", "Commands", commands(conclusion, results)),
        ("machine", "Measured with", table(["what", "with"], facts.items())),
    ]
    return page(f"{experiment.name}: {experiment.title}", sections, data=data)


def summary(experiment: Experiment, conclusion: Conclusion) -> Html:
    """Return what the paper says, what is seen here, and whether they agree."""
    return join(
        [
            paragraph(Html(f"<b>{text(experiment.source)}.</b> "), experiment.claim),
            paragraph(Html("<b>Seen here.</b> "), conclusion.seen),
            paragraph(Html("<b>Verdict:</b> "), f"{conclusion.verdict.value}."),
        ]
    )


def picture(title: str, svg: bytes) -> Html:
    """Return a picture inside the page."""
    address = "data:image/svg+xml;base64," + b64encode(svg).decode()
    return Html(f'<div class="wide"><img class="drawn" src="{address}" alt="{text(title)}"></div>\n')


def tables(conclusion: Conclusion) -> Html:
    """Return the tables, each with its note."""
    parts = list[str]()
    for each in conclusion.tables:
        parts.append(table(each.headings, [[shown(cell) for cell in row] for row in each.rows], each.title))
        parts.append(paragraph(each.note) if each.note else "")
    return join(parts)


def curves(conclusion: Conclusion, results: Results) -> tuple[Html, dict[str, Any] | None]:
    """Return the curves of the training runs that an experiment names, and their data."""
    names = [name for name in conclusion.curves if not results.failed(name)][:MOST_CURVES]
    if not names:
        return Html(), None
    runs = [results.run(name) for name in names]
    drawn, data = curves_of(runs)
    listed = join(
        [Html("<ul>"), *(Html(f"<li>{named(n, run)}</li>") for n, run in enumerate(runs)), Html("</ul>")]
    )
    return join([listed, drawn]), data


def commands(conclusion: Conclusion, results: Results) -> Html:
    """Return the commands for a cluster, and those that ran here."""
    parts = [join([paragraph(what), block(line)]) for what, line in conclusion.commands]
    if results.steps:
        lines = "\n".join(shlex.join(step.words) for step in results.steps.values())
        parts.append(
            details(f"The {len(results.steps)} steps that ran, in the folder of all", block(lines, 100_000))
        )
    return join(parts)


def bullets(lines: Sequence[str]) -> Html:
    """Return a list of sentences."""
    return (
        Html(f"<ul>{join(Html(f'<li>{text(line, 4000)}</li>') for line in lines)}</ul>") if lines else Html()
    )


def shown(value: Cell) -> str:
    """Return a cell as text: numbers with four significant digits."""
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e5 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) else value
