"""A text and a tokenizer of single characters, divided and numbered as by nanoGPT's prepare.py.

    python -m mlm.reproduce.nanogpt.characters SOURCE OUT

SOURCE is a text file, or a folder of JSON lines whose training documents are joined, as many as there are
characters in tiny-shakespeare. The first nine tenths become OUT/text/train.txt, the rest
OUT/text/validation.txt. OUT/tokenizer.json has the characters of tiny-shakespeare, numbered in their order,
and the end-of-document token that all tokenizers of mlm have and this text does not use. Other characters of
a text become these: accents are stripped, what then remains is left out.
"""

import argparse
import json
import string
import unicodedata
from pathlib import Path

from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as Backend

from mlm.data.tokenizer import EOD
from mlm.util.atomic import write_atomic

CHARACTERS = "".join(sorted("\n !$&',-.3:;?" + string.ascii_letters))
"""The 65 of tiny-shakespeare."""
LENGTH = 1_115_394
"""Characters of tiny-shakespeare."""
TRAINING = 0.9
SPELLED = str.maketrans({"’": "'", "‘": "'", "“": "'", "”": "'", "—": "--", "–": "-", "æ": "ae", "œ": "oe"})


def character_tokenizer() -> str:
    """Return a tokenizer.json with a token for each character, and the end-of-document token."""
    vocabulary = {name: id for id, name in enumerate([*CHARACTERS, EOD])}
    backend = Backend(models.BPE(vocabulary, []))
    backend.decoder = decoders.Fuse()
    backend.add_special_tokens([AddedToken(EOD, special=True, normalized=False)])
    return backend.to_str()


def text_of(source: Path) -> str:
    """Return the text of a file, or of documents with an empty line between them. Raises OSError."""
    if source.is_file():
        return in_characters(source.read_text(encoding="utf-8"))
    lines = (source / "train.jsonl").read_text(encoding="utf-8").splitlines()
    return in_characters("\n\n".join(json.loads(line)["text"] for line in lines))[:LENGTH]


def in_characters(text: str) -> str:
    """Return a text in the characters of tiny-shakespeare."""
    plain = unicodedata.normalize("NFD", text.translate(SPELLED))
    return plain.translate({ord(c): None for c in set(plain) - set(CHARACTERS)})


def write_texts(text: str, out: Path) -> None:
    """Write the two parts of a text and its tokenizer. Raises OSError."""
    (out / "text").mkdir(parents=True, exist_ok=True)
    border = int(len(text) * TRAINING)
    write_atomic(out / "text" / "train.txt", text[:border].encode())
    write_atomic(out / "text" / "validation.txt", text[border:].encode())
    write_atomic(out / "tokenizer.json", character_tokenizer().encode())


def main(arguments: list[str] | None = None) -> None:
    """Read, divide, number, write."""
    parser = argparse.ArgumentParser(prog="characters", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    options = parser.parse_args(arguments)
    text = text_of(options.source)
    write_texts(text, options.out)
    print(f"{len(text):,} characters, {len(set(text))} different ones")


if __name__ == "__main__":
    main()
