"""Text that experiments train on: prose of HTML pages, and nanoGPT's characters."""

from pathlib import Path

from reproduce import debian, nanogpt

from mlm.data.tokenizer import Tokenizer

SENTENCE = "The program reads a line of the file and writes it to the screen"
PAGE = f"""<html><head><title>Menu</title></head><body>
<div class="navheader"><p>{SENTENCE} as a header.</p></div>
<h2>Reading <code>files</code></h2>
<p>{SENTENCE} with <b>care</b>.<pre>x = {{1: 2}}</pre>
<p>x = y[0] + z[1] ; foo(bar)</p>
<p><a href="a">{SENTENCE}</a></p>
<ul><li>{SENTENCE} twice.</ul></body></html>"""


def test_prose_is_kept_with_its_heading_and_code_and_menus_are_not() -> None:
    assert debian.prose(PAGE) == [f"Reading files\n\n{SENTENCE} with care.", f"{SENTENCE} twice."]


def test_held_out_documents_depend_on_their_name_alone() -> None:
    parts = [debian.part_of(f"git-doc/{n}") for n in range(1000)]
    assert 10 < parts.count("validation") < 30
    assert 10 < parts.count("test") < 30
    assert debian.part_of("git-doc/giteveryday") == "train"


def test_characters_are_numbered_as_by_nanogpt(tmp_path: Path) -> None:
    text = nanogpt.CHARACTERS * 2
    (tmp_path / nanogpt.INPUT).parent.mkdir(parents=True)
    (tmp_path / nanogpt.INPUT).write_text(text)
    nanogpt.write_text(tmp_path, tmp_path / "out")
    parts = [(tmp_path / "out/text" / f"{part}.txt").read_text() for part in ("train", "validation")]
    assert "".join(parts) == text
    assert len(parts[0]) == int(0.9 * len(text))
    tokenizer = Tokenizer.load(tmp_path / "out/tokenizer.json")
    assert tokenizer.encode(nanogpt.CHARACTERS) == list(range(65))
