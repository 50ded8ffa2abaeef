"""Text that an experiment trains on: nanoGPT's characters."""

from pathlib import Path

from reproduce import nanogpt

from mlm.data.tokenizer import Tokenizer


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
