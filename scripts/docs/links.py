"""Links between pages that live all over the repository.

The guides stay next to their code, with links that work on a code host. On the site each has a page,
and its links are rewritten: to a page where the target has one, to its path in the repository (or below
`repo_url`, once mkdocs.yml has one) where it has none.
"""

import os
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
OWN = "scripts/docs/pages/"
"""Pages in here have the same path on the site."""
GATHERED = {
    "README.md": "index.md",
    "scripts/reproduce/README.md": "guides/reproduce.md",
    "scripts/slurm/README.md": "guides/slurm.md",
    "scripts/docker/README.md": "guides/docker.md",
    "scripts/docs/design.md": "explanation/design.md",
    "scripts/docs/what-holds.md": "explanation/what-holds.md",
    "scripts/docs/measurements.md": "explanation/measurements.md",
    "scripts/results/README.md": "explanation/results.md",
    "scripts/results/reproduce/README.md": "explanation/papers.md",
    "CONTRIBUTING.md": "project/contributing.md",
    "CHANGELOG.md": "project/changelog.md",
}
"""Path in the repository → path on the site."""
REPRODUCED = "scripts/results/reproduce/"
REPORTS = {
    str(report.relative_to(ROOT)): f"papers/{report.parent.name}.md"
    for report in sorted(ROOT.glob(f"{REPRODUCED}*/report.md"))
}
RECORDS = {
    path: f"records/{'-'.join(Path(path).relative_to('scripts/results').with_suffix('').parts)}.md"
    for path in (str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("scripts/results/**/*.md")))
    if path not in GATHERED and not path.startswith(REPRODUCED)
}
ROOMS = {
    path: f"rooms/{Path(path).parent.name}.md"
    for path in (str(page.relative_to(ROOT)) for page in sorted(ROOT.glob("mlm/*/README.md")))
    if path not in GATHERED
}
GATHERED |= REPORTS | RECORDS | ROOMS
PAPERS = [
    {"As they came out": GATHERED[f"{REPRODUCED}README.md"]},
    *({Path(page).stem: page} for page in REPORTS.values()),
]
"""Navigation: the index of the papers' reports, then each."""
NAV_ROOMS = [{Path(page).stem: page} for page in ROOMS.values()]
"""Navigation: the rooms of the package."""
NAV_RECORDS = list(RECORDS.values())
"""Navigation: pages that scripts keep in folders of scripts/results, each under its own title."""
MODULES = {
    "mlm/parallel/layers.py": "api/layers.md",
    "mlm/parallel/collectives.py": "api/mesh.md",
    "mlm/parallel/pipeline/schedules.py": "api/pipeline.md",
    "mlm/parallel/pipeline/lower.py": "api/pipeline.md",
    "mlm/parallel/pipeline/engine.py": "api/pipeline.md",
    "mlm/convert/huggingface/llama_variants.py": "reference/families.md",
    "mlm/models/backbone.py": "api/models.md",
    "mlm/models/gpt2/model.py": "api/models.md",
    "mlm/models/gpt2/family.py": "api/models.md",
    "mlm/models/bert/model.py": "api/models.md",
    "mlm/models/bert/family.py": "api/models.md",
    "configs": "reference/groups/index.md",
}
"""Source files and folders that a page of the site describes."""
PICTURES = (".png", ".svg")
FENCE = re.compile(r"(^```.*?^```$)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"^(Shapes\b[^\n]*):\n((?:[ ]{4}[^\n]*\n?)+)", re.MULTILINE)
"""Shapes in a docstring: the title, and lines that shapes.py shows as code."""
LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?!https?:|#)(?P<path>[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")
PICTURE = re.compile(r"!\[(?P<text>[^\]]*)\]\((?!https?:)(?P<path>[^)#\s]+)\)")


def sources() -> list[str]:
    own = sorted((ROOT / OWN).rglob("*.md"))
    return [*GATHERED, *(page.relative_to(ROOT).as_posix() for page in own)]


def source_of(uri: str) -> str:
    return {page: path for path, page in GATHERED.items()}.get(uri, OWN + uri)


def page_of(path: str) -> str | None:
    """Page of the site for a path of the repository; None if it has none."""
    if path.startswith(OWN):
        return path.removeprefix(OWN)
    readme = f"{path}/README.md" if path != "." else "README.md"
    return GATHERED.get(path) or GATHERED.get(readme) or MODULES.get(path)


def pictures(page: str) -> list[str]:
    text = (ROOT / page).read_text("utf-8")
    found = [target(page, match["path"]) for match in PICTURE.finditer(text)]
    return [path for path in found if path.endswith(PICTURES)]


def picture_uri(path: str) -> str:
    """Path of a picture on the site; reports of papers share names such as `time.png`."""
    folder = f"{Path(path).parent.name}/" if path.startswith(REPRODUCED) else ""
    return f"assets/{folder}{Path(path).name}"


def target(page: str, link: str) -> str:
    return os.path.normpath(os.path.join(os.path.dirname(page), link)).replace(os.sep, "/")


def rewrite(markdown: str, page: str, repo_url: str | None = None) -> str:
    """Markdown of the page at a repository path with the site's links; code blocks stay as they are."""
    here = os.path.dirname(GATHERED.get(page) or page.removeprefix(OWN))

    def link(match: re.Match[str]) -> str:
        path, text = target(page, match["path"]), match["text"]
        uri = page_of(path)
        if uri:
            return f"[{text}]({os.path.relpath(uri, here or '.')}{match['anchor'] or ''})"
        if repo_url:
            return f"[{text}]({repo_url.rstrip('/')}/blob/main/{path})"
        bare = text.strip("`")
        return f"`{path}`" if path.endswith(bare) else f"{text} (`{path}`)"

    def picture(match: re.Match[str]) -> str:
        uri = os.path.relpath(picture_uri(target(page, match["path"])), here or ".")
        return f"![{match['text']}]({uri})"

    parts = FENCE.split(markdown)
    parts[::2] = [PICTURE.sub(picture, LINK.sub(link, part)) for part in parts[::2]]
    return "".join(parts)
