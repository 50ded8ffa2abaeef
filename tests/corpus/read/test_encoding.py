"""Text in other encodings than UTF-8, and of web pages and Markdown."""

import bz2
import gzip
import json
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.corpus.build import run_build
from mlm.util.errors import UserError
from tests.corpus.reading import read, write
from tests.corpus.texts import documents, plain, quiet, small_tokenizer

SAMPLES = {
    "latin-1": "Il était une fois, à l'orée d'une forêt, un bûcheron dont les garçons étaient affamés.\n",
    "cp1251": "В некотором царстве, в некотором государстве жил-был царь, и было у него три сына.\n",
    "iso8859-2": "Zażółć gęślą jaźń. Była sobie raz dziewczynka, którą wszyscy lubili.\n",
    "shift_jis": "むかしむかし、あるところに、おじいさんとおばあさんが住んでいました。\n",
    "gb18030": "从前有一个国王，他有三个儿子。他们住在一座很大的城堡里，每天都很快乐。\n",
    "utf-16": "むかしむかし, à l'orée.\n",
    "utf-32": "むかしむかし, à l'orée.\n",
    "utf-8": "むかしむかし, à l'orée.\n",
}


@pytest.mark.parametrize("encoding", ["latin-1", "shift_jis", "utf-16"])
def test_text_of_a_named_encoding_is_read(tmp_path: Path, encoding: str) -> None:
    """In lines and as one text, plain and packed, though letters lie across the blocks of a file."""
    text = SAMPLES[encoding] * 8000
    outcome = read(write(tmp_path / "a.txt", text.encode(encoding)), max_bytes=1 << 22, encoding=encoding)
    assert (outcome.texts, outcome.rejected) == ([text], [])
    assert outcome.documents[0].num_bytes == len(text.encode())
    rows = "".join(json.dumps({"text": line}, ensure_ascii=False) + "\n" for line in [text[:99]] * 50)
    for name, content in (
        ("b.jsonl", rows.encode(encoding)),
        ("c.jsonl.bz2", bz2.compress(rows.encode(encoding))),
    ):
        outcome = read(write(tmp_path / name, content), shard_bytes=100, encoding=encoding)
        assert (outcome.texts, outcome.rejected) == ([text[:99]] * 50, [])


@pytest.mark.parametrize("encoding", [*SAMPLES])
def test_auto_detects_the_encoding_of_each_file(tmp_path: Path, encoding: str) -> None:
    if encoding not in ("utf-8", "utf-16", "utf-32"):  # these need no guess
        pytest.importorskip("resiliparse")
    text = "Plain words of ASCII before it.\n" * 10_000 + SAMPLES[encoding] * 20
    write(tmp_path / "texts/a.txt", text.encode(encoding))
    write(tmp_path / "texts/b.md", "Ünïcode".encode())
    assert read(tmp_path / "texts", encoding="auto").texts == [text, "Ünïcode"]


def test_file_that_is_no_utf8_says_how_to_read_it(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\n" + "né".encode("latin-1"))
    with pytest.raises(
        UserError, match=r"a\.txt:2: not UTF-8 .*: set encoding=auto, .* or convert it by iconv"
    ):
        run_build(plain(path), quiet())
    run_build(plain(path, encoding="latin-1"), quiet())
    assert documents(tmp_path / "out/train") == ["one\nné<|endoftext|>"]
    assert json.loads((tmp_path / "out/corpus-inputs.jsonl").read_text())["encoding"] == "iso8859-1"
    with pytest.raises(UserError, match=r"made with other inputs.*another out="):
        run_build(plain(path, encoding="cp1252"), quiet())


@pytest.mark.parametrize("encoding", ["latin-2x", "rot13"])
def test_unknown_encoding_is_a_users_mistake(
    tmp_path: Path, encoding: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path, tokenizer = write(tmp_path / "a.txt", b"text"), small_tokenizer(tmp_path)
    words = [f"input={path}", f"encoding={encoding}", f"out={tmp_path / 'out'}"]
    assert main(["data", "build", f"tokenizer={tokenizer}", *words]) == 2
    assert f"encoding={encoding}: is no encoding of text" in capsys.readouterr().err
    assert main(["data", "tokenizer", *words]) == 2


@pytest.mark.parametrize(
    "content",
    [bytes(range(128, 256)) * 4, ("むかし" * 100).encode() + b"\xe9" + ("むかし" * 100).encode()],
    ids=["binary", "one bad byte"],
)
def test_text_in_bytes_of_no_encoding_is_not_guessed_at(tmp_path: Path, content: bytes) -> None:
    pytest.importorskip("resiliparse")
    path = write(tmp_path / "a.txt", content)
    with pytest.raises(UserError, match=r"a\.txt: no encoding is likely; name it, such as encoding=latin-1"):
        read(path, encoding="auto")


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
