"""Web pages and Markdown as text."""

import gzip
import sys
from pathlib import Path

import pytest

from mlm.util.errors import UserError
from tests.corpus.reading import read, write

SENTENCE = "The miller's daughter could spin straw into gold, and so the story of the dwarf began."
PAGE = f"""<!DOCTYPE html><html><head><meta charset="iso-8859-1"><title>Tale</title>
<script>var hidden = 1</script>
<style>p {{ color: red }}</style></head><body><nav><a href="/">Home</a> <a href="/about">Imprint</a></nav>
<main><h1>Märchen</h1><p>{SENTENCE}</p><p>{SENTENCE} &lt;3 &amp; more.</p></main>
<footer>Cookies and imprint</footer></body></html>"""


def test_page_gives_its_main_text(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    write(tmp_path / "pages/a.html", PAGE.encode())
    write(tmp_path / "pages/b.htm.gz", gzip.compress(PAGE.encode()))
    outcome = read(tmp_path / "pages")
    assert outcome.texts == [f"Märchen\n\n{SENTENCE}\n\n{SENTENCE} <3 & more."] * 2
    assert outcome.documents[0].num_bytes == len(outcome.texts[0].encode())


def test_auto_reads_a_page_in_the_encoding_that_it_declares(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    page = PAGE.replace("iso-8859-1", "iso-8859-5").replace("Märchen", "Сказка")
    outcome = read(write(tmp_path / "a.html", page.encode("iso-8859-5")), encoding="auto")
    assert outcome.texts[0].startswith("Сказка\n\n")


def test_page_that_is_no_utf8_or_too_long_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("resiliparse")
    page = write(tmp_path / "a.html", PAGE.encode("latin-1"))
    assert read(page).problems == [("a.html:4", "not_utf8")]
    assert read(page, max_bytes=100, encoding="latin-1").problems == [("a.html:1", "too_long")]


def test_missing_library_is_named_with_its_extra(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "resiliparse.extract.html2text", None)
    with pytest.raises(UserError, match=r"a\.html needs the package resiliparse: pip install 'mlm\[data\]'"):
        read(write(tmp_path / "a.html", PAGE.encode()))


def test_markdown_is_read_as_it_is(tmp_path: Path) -> None:
    write(tmp_path / "notes/a.md", b"# Title\n\n- *one*\n")
    write(tmp_path / "notes/b.markdown", b"two\n<|endoftext|>\nthree\n")
    assert read(tmp_path / "notes").texts == ["# Title\n\n- *one*\n", "two\n", "three\n"]
