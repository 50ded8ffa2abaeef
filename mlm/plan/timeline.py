"""A pipeline schedule as SVG inside a page."""

from collections.abc import Sequence

from markupsafe import Markup, escape

from mlm.parallel.pipeline.actions import Plan, Span
from mlm.plan.terminal import op_names

WIDTH, ROW = 1000, 24
"""Width of a drawing and height of a stage, in units of its own."""


def timeline(plan: Plan) -> Markup:
    """Draw who computes what when, with a legend."""
    lines = plan.timeline
    return Markup(drawing(lines, plan.num_stages // len(lines), plan.makespan, "schedule") + legend(lines))


def drawing(lines: Sequence[Sequence[Span]], chunks: int, whole: float, name: str) -> Markup:
    """Draw a line of computations for each stage, over a time of `whole`; `name` is read aloud."""
    scale, height, parts = WIDTH / whole, ROW * len(lines), []
    for rank, spans in enumerate(lines):
        parts.append(f'<rect class="idle" x="0" y="{rank * ROW + 1}" width="{WIDTH}" height="{ROW - 2}"/>')
        for span in spans:
            action, x, y = span.action, span.start * scale, rank * ROW
            width, paler = (span.end - span.start) * scale, 1 - 0.5 * action.chunk / max(chunks - 1, 1)
            inner = max(width - 0.6, 0.4)
            label = f"{action.op.value}{action.micro_batch}" if width > 22 else str(action.micro_batch)
            parts.append(
                f'<rect class="op{action.op.value}" x="{x:.4g}" y="{y + 1}" width="{inner:.4g}"'
                f' height="{ROW - 2}" fill-opacity="{paler:.2g}"/>'
            )
            if width > 7 * len(label):
                parts.append(f'<text x="{x + width / 2:.4g}" y="{y + 16}">{label}</text>')
    return Markup(
        f'<div class="wide" tabindex="0" role="region" aria-label="{escape(name)}"><svg class="schedule" '
        f'role="img" viewBox="0 0 {WIDTH} {height}" aria-label="a line per stage, time to the right">'
        f"{''.join(parts)}</svg></div>"
    )


def legend(lines: Sequence[Sequence[Span]]) -> Markup:
    """Name the colours of a drawing."""
    names = ((op.value, name) for op, name in op_names(lines).items())
    keys = "".join(f'<span class="key op{letter}">{letter}</span> {name} ' for letter, name in names)
    return Markup(f'<p class="legend">{keys}<span class="key idle"> </span> idle</p>\n')
