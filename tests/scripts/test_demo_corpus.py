"""scripts/demo_corpus.py and the plays it writes. The snippets are ours, in the same markup."""

import sys
from pathlib import Path

import demo_corpus
import pytest

PLAY = """# The Tin King

## ACT I

### PROLOGUE

**Chorus**
Here sits a king of tin.

## ACT II

### SCENE I. A kitchen; pots, pans, & c.

_Enter TIN KING and
a Cook_

**TIN KING**  
Is supper laid?  
_\\[Aside]_  
I smell no soup\\--none at all.

*[He sniffs.]*

**First Cook & BOY**  
__\\[Within]_  
The soup, my lord, is _\\[ ]_  
cold, and the bread &amp; c. too.

THE TIN KING

_Exeunt_

**Scene II**  
The same.

**BOY**  
1\\. More bread.
"""


def test_scenes_are_plain_dialogue() -> None:
    assert list(demo_corpus.scenes(PLAY)) == [
        "ACT I\n\nPROLOGUE\n\nCHORUS.\nHere sits a king of tin.",
        "ACT II\n\nSCENE I. A kitchen; pots, pans, &c.\n\n[Enter TIN KING and a Cook]\n\n"
        "TIN KING.\nIs supper laid?\n[Aside]\nI smell no soup--none at all.\n\n[He sniffs.]\n\n"
        "FIRST COOK & BOY.\n[Within]\nThe soup, my lord, is\ncold, and the bread &c. too.\n\n[Exeunt]",
        "ACT II\n\nSCENE II. The same.\n\nBOY.\n1. More bread.",
    ]


def run(monkeypatch: pytest.MonkeyPatch, out: Path, names: list[str]) -> None:
    monkeypatch.setattr(demo_corpus, "read_plays", lambda: dict.fromkeys(names, PLAY))
    monkeypatch.setattr(sys, "argv", ["demo_corpus.py", str(out)])
    demo_corpus.main()


def test_held_out_plays_are_kept_out_of_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run(monkeypatch, tmp_path, ["tin-king", *demo_corpus.HELD_OUT])
    lines = {split: (tmp_path / f"{split}.jsonl").read_text() for split in ("train", "validation", "test")}
    assert lines["train"].count('"tin-king"') == 3
    for play, split in demo_corpus.HELD_OUT.items():
        assert [name for name, text in lines.items() if f'"{play}"' in text] == [split]
