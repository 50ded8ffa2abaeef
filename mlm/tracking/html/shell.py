"""Shell of a page: one file that opens from disk, loads nothing and reads in light and dark, wide and narrow.

```python
curves, data = curves_of(read_runs(["runs/a", "runs/b"]))
content = page("Two runs", [("runs", "Runs", table(…)), ("curves", "Curves", curves)], data=data)
write_result("two.html", content)
```

Text in a section is escaped by the functions of `mlm.tracking.html.elements`, which return what is HTML
already.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any

from mlm.tracking.html.elements import Html, embedded, join, section, text
from mlm.util.results import HTML_MARK

POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:"
"""Content-security policy: the browser is forbidden to load anything."""


@cache
def asset(name: str) -> str:
    """Return a file of this package, for use inside a page."""
    return (files("mlm.tracking.html") / "assets" / name).read_text("utf-8")


def page(
    title: str, sections: Sequence[tuple[str, str, Html]], *, data: Mapping[str, Any] | None = None
) -> bytes:
    """Return a page of sections: anchor, heading and content of each; those without content are left out.

    `data` is that of the curves in a section, from `curves_of`; the scripts that draw them come with it. With
    `reload` in it a browser loads the page again after that many seconds.
    """
    styles, licence, scripts = asset("page.css"), "", ""
    if data is not None:
        styles = f"{asset('uPlot.min.css')}\n{styles}"
        licence = f"<!-- uPlot, in this page:\n{asset('uPlot.LICENSE')}-->\n"
        drawn_by = (asset("uPlot.iife.min.js"), asset("curves.js"))
        scripts = embedded("data", data) + "\n".join(f"<script>{script}</script>" for script in drawn_by)
    shown = [each for each in sections if each[2]]
    content = join(section(*each) for each in shown)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{HTML_MARK}\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>{text(title)}</title>\n{licence}<style>{styles}</style></head>\n"
        f'<body><a class="skip" href="#main">Skip to the content</a>\n<header><h1>{text(title)}</h1>'
        f'{navigation([name for name, _, _ in shown])}</header>\n<main id="main">\n{content}</main>\n'
        f"{scripts}</body></html>\n"
    ).encode()


def navigation(names: Sequence[str]) -> Html:
    """Return links to the sections of a page that has several."""
    links = [f'<a href="#{name}">{text(name.replace("-", " ").capitalize())}</a>' for name in names]
    return Html(f'<nav aria-label="sections">{" ".join(links)}</nav>') if len(links) > 1 else Html()
