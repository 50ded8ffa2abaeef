"""MkDocs hook: pages from all over the repository, and those generated from the code, become one site."""

import re
from typing import Any

from links import (
    GATHERED,
    NAV_RECORDS,
    NAV_ROOMS,
    PAPERS,
    ROOT,
    picture_uri,
    pictures,
    rewrite,
    source_of,
    sources,
)
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page
from reference import NAV, pages


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Fill the navigation: Reference with generated pages, The papers, Records and Rooms."""
    assert config.nav is not None
    filled = {"Reference": NAV, "The papers": PAPERS, "Records": NAV_RECORDS, "Rooms": NAV_ROOMS}
    for entry in config.nav:
        entry.update({title: filled[title] for title in entry if title in filled})
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add gathered and generated pages, and the pictures that pages show."""
    for path, uri in GATHERED.items():
        files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    for uri, text in pages().items():
        files.append(File.generated(config, uri, content=text))
    for path in sorted({picture for page in sources() for picture in pictures(page)}):
        files.append(File.generated(config, picture_uri(path), abs_src_path=str(ROOT / path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, **_: Any) -> str:
    """Rewrite the links of a page that is a file of the repository; the home page lists no neighbours."""
    if page.is_homepage:
        page.meta["hide"] = ["navigation"]
    if page.file.src_uri in pages():
        return markdown
    if page.file.src_uri == "api/mlm.md":  # its names are below headings of the second level
        markdown = re.sub(
            r"^::: .*", "\\g<0>\n    options: { heading_level: 3 }", markdown, flags=re.MULTILINE
        )
    return rewrite(markdown, source_of(page.file.src_uri), config.repo_url)
