"""A long text in pieces gives the result of the whole, whatever the pieces."""

import json
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.corpus import decontaminate, fix_text, sentences
from mlm.corpus.benchmarks import EvaluationText
from mlm.corpus.build import run_build
from mlm.corpus.decontaminate import Contaminants
from mlm.corpus.duplicates import jaccard
from mlm.corpus.filter import LongMeasures, Measures
from mlm.corpus.fix_text import fix_pieces, fixed
from mlm.corpus.minhash import Signer, SpilledHashes, flat_shingles, long_shingles, shingles
from mlm.corpus.read import long_text, read, records
from mlm.corpus.read.long_text import JsonText, Letters, Scratch
from mlm.corpus.read.read import LongLine
from mlm.corpus.read.records import BadRecordError
from mlm.corpus.sections import DecontaminateConfig, DedupConfig, FilterConfig
from mlm.corpus.sentences import long_sentences, split_sentences
from mlm.corpus.stages import clean as clean_stage
from mlm.corpus.stages import tokenise as tokenise_stage
from mlm.data.tokenizer import Tokenizer
from tests.corpus.texts import output, quiet, small_tokenizer, thorough, words, write_jsonl

ODD = [
    " ",
    " ",
    " ",
    "\n",
    "\n\n",
    "\r\n",
    ". ",
    "... ",
    "…",
    "# ",
    "\n- ",
    "\n• ",
    " “q” ",
    " &amp; ",
    "Ã©",
    "\t",
]
ODD += ["<b>", "İ", "ß", "e\u0301", "😀", "\u00ad", "x" * 90, "   \n  ", "\u2028", "中文", "\x0b", "...."]


def odd_text(seed: int, count: int) -> str:
    rng = random.Random(seed)
    return "".join(word + rng.choice(ODD) for word in words(rng, count))


@pytest.fixture(params=[200, 451])
def small(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    make_small(request.param, monkeypatch)
    return int(request.param)


def make_small(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat texts as long from 150 bytes on, in small pieces."""
    for module in (long_text, read, records, clean_stage, tokenise_stage):
        monkeypatch.setattr(module, "LONG", 150)
    for module in (long_text, decontaminate):
        monkeypatch.setattr(module, "PIECE", size)
    monkeypatch.setattr(long_text.at_breaks, "__defaults__", (size,))
    monkeypatch.setattr(read, "HELD", 20)
    monkeypatch.setattr(long_text, "AROUND", 12)
    monkeypatch.setattr(long_text, "WINDOW", size - 13)
    monkeypatch.setattr(fix_text, "PIECE", 30)
    monkeypatch.setattr(fix_text, "HELD", 50)
    monkeypatch.setattr(sentences, "HELD", 3 * sentences.BLOCK)


def cut_up(text: str, size: int) -> Iterator[str]:
    return (text[i : i + size] for i in range(0, len(text), size))


def on_disk(text: str, folder: Path) -> Scratch:
    scratch = Scratch(folder)
    scratch.add(text)
    return scratch


@pytest.mark.parametrize("seed", range(8))
def test_fixes_rules_and_shingles_of_pieces_are_those_of_the_whole(seed: int, small: int) -> None:
    text = odd_text(seed, 120).replace("x" * 90, "x" * 30)
    assert "".join(fix_pieces(lambda: cut_up(text, small))) == fixed(text)
    whole, pieces = Measures(text), LongMeasures(lambda: cut_up(text, small))
    assert len(pieces.words) == len(whole.words)
    for name in ("mean_word_length", "symbol_ratio", "alphabetic_words", "stop_words", "bullet_lines"):
        assert getattr(pieces, name) == getattr(whole, name), name
    assert pieces.ellipsis_lines == whole.ellipsis_lines
    assert pieces.duplicate_lines == whole.duplicate_lines
    for unit in ("word", "character"):
        found = np.concatenate(list(long_shingles(cut_up(text, small), ngram=5, unit=unit)))
        np.testing.assert_array_equal(np.unique(found), shingles(text, ngram=5, unit=unit))
        signer = Signer(DedupConfig(unit=unit))
        np.testing.assert_array_equal(signer.long_keys(cut_up(text, small)), signer.keys([text]))


def test_short_texts_have_the_shingles_of_short_texts(small: int) -> None:
    for text in ("", "  ", "one", "one two", "one two three four five"):
        expected, _ = flat_shingles([text], ngram=5, unit="word")
        found = [np.empty(0, np.uint64), *long_shingles(cut_up(text, 2), ngram=5, unit="word")]
        np.testing.assert_array_equal(np.concatenate(found), expected)


@pytest.mark.parametrize("ascii", [True, False])
def test_long_line_is_the_object_that_json_reads(small: int, ascii: bool) -> None:
    for seed in range(6):
        record = {
            "id": 7,
            "other": '"\\' * 30,
            "text": odd_text(seed, 60) + '\\"\\\\n',
            "list": ["a" * 50, {}],
        }
        line = json.dumps(record, ensure_ascii=ascii).encode()
        found = LongLine(line)
        text = found.value("text")
        assert isinstance(text, JsonText)
        assert "".join(text.pieces()) == record["text"]
        assert found.value("other") == record["other"]
        assert found.value("id") == 7
    twice = b'{"text": "%s", "text": "%s"}' % (b"a" * 200, b"b" * 200)
    assert "".join(LongLine(twice).value("text").pieces()) == "b" * 200


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        (b'{"text": "' + b"a" * 200, "not_json"),
        (b'{"text": "' + b"a" * 200 + b'\\q"}', "not_json"),
        (b'{"text": "' + b"a" * 200 + b'\x01"}', "not_json"),
        (b'{"text": "' + b"a" * 200 + b'"', "not_json"),
        (b'{"text": "' + b"a" * 200 + b'\xff"}', "not_utf8"),
        (b'{"other": "' + b"a" * 200 + b'\\x", "text": "b"}', "not_json"),
    ],
)
def test_long_line_that_is_no_json_is_bad_input(small: int, line: bytes, rule: str) -> None:
    with pytest.raises(BadRecordError) as problem:
        LongLine(line)
    assert problem.value.rule == rule


def test_tokens_and_sentences_of_pieces_are_those_of_the_whole(tmp_path: Path, small: int) -> None:
    tokenizer = Tokenizer.load(small_tokenizer(tmp_path))
    for seed in range(6):
        text = " ".join(words(random.Random(seed), 300)) + odd_text(seed, 20)
        found = [id for ids in long_text.long_tokens(tokenizer, cut_up(text, small)) for id in ids]
        assert found == tokenizer.encode(text)
        prose = ". ".join(map(str.capitalize, cut_up(text, 33))) + "\n\nNew. " * (seed % 3)
        prose = prose * 12 + "\n \n" + prose
        got = [s for some in long_sentences(cut_up(prose, small)) for s in some]
        assert got == split_sentences(prose)


def test_decontamination_of_pieces_is_that_of_the_whole(tmp_path: Path, small: int) -> None:
    rng = random.Random(5)
    leaks = [" ".join(words(rng, 30)) for _ in range(3)]
    texts = [EvaluationText("set", str(i), leak) for i, leak in enumerate(leaks)]
    for seed in range(12):
        rng = random.Random(seed)
        parts = [odd_text(100 * seed + i, 40) for i in range(5)]
        parts += [" ".join(leak.split()[rng.randrange(8) : rng.randrange(18, 30)]) for leak in leaks]
        rng.shuffle(parts)
        text = "\u00ad ".join(parts)
        config = DecontaminateConfig(margin=rng.choice([0, 15]), min_piece=5, max_matches=rng.choice([1, 10]))
        contaminants = Contaminants(config, texts)
        whole = contaminants.clean(text)
        with on_disk(text, tmp_path) as scratch:
            found = contaminants.clean_long(scratch.text)
            assert [
                piece if isinstance(piece, str) else piece.read() for piece in found.pieces
            ] == whole.pieces
        assert found.letters_removed == whole.letters_removed
        assert [m.text for m in found.matches] == [m.text for m in whole.matches]
        assert whole.fate != "kept"


def test_similarity_on_disk_is_that_in_memory(tmp_path: Path) -> None:
    a, b = (
        np.unique(np.random.default_rng(i).integers(0, 2**63, 3000).astype(np.uint64) * 2) for i in (0, 1)
    )
    b = np.union1d(b, a[:2000])
    spilled = SpilledHashes([a[1000:], a[:1500]], tmp_path)
    assert len(spilled) == len(a)
    assert jaccard(spilled, b) == jaccard(b, spilled) == jaccard(a, b)
    assert jaccard(spilled, SpilledHashes([b], tmp_path)) == jaccard(a, b)


def test_letters_of_a_stored_text_are_found_by_number(tmp_path: Path, small: int) -> None:
    text = odd_text(1, 80)
    with on_disk(text, tmp_path) as scratch:
        letters = Letters(scratch.text)
        assert len(letters) == len(text)
        for begin in range(0, len(text), 7):
            assert letters.between(begin, begin + 50) == text[begin : begin + 50]
            assert letters.part(begin, len(text)).read() == text[begin:]


@pytest.mark.parametrize(
    "changes", [{}, {"sentences": True}, {"filter": FilterConfig(min_words=9, min_stop_words=0)}]
)
def test_long_documents_give_the_same_corpus(
    tmp_path: Path, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = random.Random(9)
    evaluation = words(rng, 40)
    texts = [" ".join(words(rng, 60)) + ". " + odd_text(i, 15) for i in range(20)]
    texts += [text + " added at the end" for text in texts[:5]]
    texts += [" ".join([*words(rng, 40), *evaluation[10:30], *words(rng, 40)]) for _ in range(3)]
    (tmp_path / "evaluation.txt").write_text(" ".join(evaluation) + "\n")
    write_jsonl(tmp_path / "text/a.jsonl", texts[:15])
    (tmp_path / "text/b.txt").write_text("\n<|endoftext|>\n".join(texts[15:]))
    config = thorough(tmp_path / "text", keep_ids=True, **changes)
    before = run_build(config, quiet())
    make_small(200, monkeypatch)
    assert run_build(replace(config, out=str(tmp_path / "pieces")), quiet()) == before
    assert output(tmp_path / "out") == output(tmp_path / "pieces")


MEMORY = """
import resource, sys
from pathlib import Path
from mlm.corpus.sections import DedupConfig, FilterConfig, NormaliseConfig
from tests.corpus.texts import plain, quiet, write_jsonl
from mlm.corpus.build import run_build
text = plain(Path(sys.argv[1]), dedup=DedupConfig(), normalise=NormaliseConfig(), filter=FilterConfig())
run_build(plain(Path(sys.argv[2]), dedup=DedupConfig()), quiet())
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
run_build(text, quiet())
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_memory_does_not_grow_with_a_document(tmp_path: Path) -> None:
    """A 4 MB document takes less than 100 MB beside what a small one takes; it took some 450."""
    text = " ".join(words(random.Random(0), 4000)) + "\n"
    long = write_jsonl(tmp_path / "long/a.jsonl", [text * (4_000_000 // len(text))])
    short = write_jsonl(tmp_path / "short/a.jsonl", [text])
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(long), str(short)], check=True, capture_output=True, text=True
    )
    assert int(done.stdout.split()[-1]) < 100_000
