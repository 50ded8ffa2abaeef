"""`mlm data merge` and `mlm data split`, compared with megatron-core."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.cli import main
from mlm.corpus.recombine import merge_corpora, split_bounds, split_corpus
from mlm.data.indexed import IndexedDataset, IndexedWriter
from mlm.data.receipt import MARKER, read_receipt
from mlm.data.tokenizer import Tokenizer
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.ownership import claim_folder
from tests.corpus.texts import build, documents, interrupted, plain, small_tokenizer, write_jsonl
from tests.megatron_core import megatron_core

U16, I32 = np.dtype("<u2"), np.dtype("<i4")


def write_pair(prefix: Path, documents: Sequence[Sequence[int]], dtype: np.dtype[Any] = U16) -> Path:
    """A corpus of documents of sequences of so many tokens."""
    prefix.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(len(prefix.name) + len(documents))
    with IndexedWriter(prefix, dtype) as writer:
        for lengths in documents:
            writer.add_document(rng.integers(0, 400, sum(lengths)), lengths)
    return prefix


def files(prefix: Path) -> tuple[bytes, bytes]:
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes()


def merged_by_megatron(prefixes: Sequence[Path], out: Path, dtype: np.dtype[Any]) -> tuple[bytes, bytes]:
    builder = megatron_core("datasets.indexed_dataset").IndexedDatasetBuilder(f"{out}.bin", dtype=dtype.type)
    for prefix in prefixes:
        builder.add_index(str(prefix))
    builder.finalize(f"{out}.idx")
    return files(out)


GPT, BERT, NO_TOKENS = [[3], [5], [1]], [[1, 2], [4], [2, 2, 7]], [[0], [2]]


@pytest.mark.parametrize("dtype", [U16, I32])
def test_merge_has_the_bytes_of_megatrons(tmp_path: Path, dtype: np.dtype[Any]) -> None:
    pairs = [
        write_pair(tmp_path / f"{name}_text_document", documents, dtype)
        for name, documents in (("z", GPT), ("a", BERT), ("m", NO_TOKENS))
    ]
    assert main(["data", "merge", *map(str, pairs), f"out={tmp_path / 'out'}"]) == 0
    assert files(tmp_path / "out/train") == merged_by_megatron(pairs, tmp_path / "theirs", dtype)
    assert read_receipt(tmp_path / "out") is None
    # a folder of pairs, as merge_datasets.py takes it: in the order of their names
    folder = tmp_path / "pairs"
    named = [write_pair(folder / name, documents, dtype) for name, documents in (("b", GPT), ("a", BERT))]
    merge_corpora([str(folder), str(pairs[0])], str(tmp_path / "more"))
    ordered = [named[1], named[0], pairs[0]]
    assert files(tmp_path / "more/train") == merged_by_megatron(ordered, tmp_path / "theirs", dtype)


@pytest.mark.parametrize("split", ["969/30/1", "98/2", "1/1/1", "0.5/0/0.5", "1"])
@pytest.mark.parametrize("count", [3, 7, 1000])
def test_split_has_the_bounds_of_megatrons(split: str, count: int) -> None:
    module = megatron_core("datasets.blended_megatron_dataset_config")
    shares = module.parse_and_normalize_split(split.replace("/", ","))
    theirs = [
        None if bounds is None else tuple(round(bound * float(count)) for bound in bounds)
        for bounds in module.convert_split_vector_to_split_matrix(shares)
    ]
    ours = {part: (begin, end) for part, begin, end in split_bounds(split, count)}
    assert [ours.get(part) for part in ("train", "validation", "test")] == theirs


def test_split_divides_by_documents_and_merge_joins_them_again(tmp_path: Path) -> None:
    pair = write_pair(tmp_path / "my_text_document", [*BERT, *GPT, *NO_TOKENS, *BERT])
    whole, out = IndexedDataset(pair), tmp_path / "out"
    assert main(["data", "split", f"{pair}", f"out={out}", "split=8/2/1"]) == 0
    parts = [IndexedDataset(out / part) for part in ("train", "validation", "test")]
    assert [part.num_documents for part in parts] == [8, 2, 1]
    kept = [part.document(number).tolist() for part in parts for number in range(part.num_documents)]
    assert kept == [whole.document(number).tolist() for number in range(11)]
    assert np.concatenate([part.lengths for part in parts]).tolist() == whole.lengths.tolist()
    merge_corpora([str(part.prefix) for part in parts], str(tmp_path / "again"))
    assert files(tmp_path / "again/train") == files(pair)


def test_built_corpora_keep_receipt_tokenizer_and_counts(tmp_path: Path) -> None:
    for name in ("a", "b"):
        texts = [f"{name} document {number}" for number in range(40)]
        build(
            plain(
                write_jsonl(tmp_path / f"{name}.jsonl", texts), split="0.8,0.1,0.1", out=str(tmp_path / name)
            )
        )
    out = tmp_path / "out"
    assert main(["data", "merge", f"{tmp_path / 'a'}", f"{tmp_path / 'b'}", f"out={out}"]) == 0
    for part in ("train", "validation", "test"):
        assert documents(out / part) == documents(tmp_path / "a" / part) + documents(tmp_path / "b" / part)
    receipts = [
        json.loads((folder / "corpus.json").read_text()) for folder in (tmp_path / "a", tmp_path / "b", out)
    ]
    for part, counts in receipts[2]["splits"].items():
        assert counts == {
            key: sum(receipt["splits"][part][key] for receipt in receipts[:2]) for key in counts
        }
        assert set(counts) == {"documents", "sequences", "tokens", "bytes", "end_tokens"}
    assert receipts[2]["tokenizer"] == Tokenizer.load(out).digest
    assert main(["data", "verify", str(out)]) == 0
    split = tmp_path / "split"
    assert main(["data", "split", f"{out / 'train'}", f"out={split}", "split=1/1"]) == 0
    assert main(["data", "verify", str(split)]) == 0
    assert sorted(path.name for path in split.glob("*.bin")) == ["train.bin", "validation.bin"]


def test_corpora_that_do_not_belong_together_are_rejected(tmp_path: Path) -> None:
    one, other = write_pair(tmp_path / "a", GPT), write_pair(tmp_path / "b", GPT, I32)
    with pytest.raises(UserError, match=r"a\.idx holds uint16 tokens and .*b\.idx int32"):
        merge_corpora([str(one), str(other)], str(tmp_path / "out"))
    source = write_jsonl(tmp_path / "t.jsonl", ["one", "two"])
    build(plain(source, out=str(tmp_path / "with")))
    build(plain(source, out=str(tmp_path / "without"), append_eod=False))
    with pytest.raises(UserError, match=r"with and .*without differ in append_eod"):
        merge_corpora([str(tmp_path / "with"), str(tmp_path / "without")], str(tmp_path / "out"))
    write_pair(tmp_path / "without/extra", GPT)
    with pytest.raises(UserError, match="holds extra next to its parts"):
        merge_corpora([str(tmp_path / "without")] * 2, str(tmp_path / "out"))
    with open(tmp_path / "with/train.bin", "r+b") as f:
        f.write(b"\x01")
    with pytest.raises(CorruptFileError, match="altered since it was written"):
        merge_corpora([str(tmp_path / "with"), str(tmp_path / "with")], str(tmp_path / "out"))
    assert not list(tmp_path.glob("out/*.bin"))


def test_corpus_that_is_there_is_not_replaced_and_a_killed_merge_is_written_again(tmp_path: Path) -> None:
    pair, out = str(write_pair(tmp_path / "a", GPT)), str(tmp_path / "out")
    with interrupted("mlm.corpus.recombine.add_row"):
        merge_corpora([pair, pair], out)
    split_corpus(pair, out, "1")
    assert files(tmp_path / "out/train") == files(Path(pair))
    with pytest.raises(UserError, match="holds a corpus: set another out="):
        merge_corpora([pair, pair], out)


def test_what_a_killed_command_wrote_is_deleted_and_nothing_else(tmp_path: Path) -> None:
    """Whether it was killed while it wrote or between the parts that it published."""
    pair, out = str(write_pair(tmp_path / "a", GPT)), tmp_path / "out"
    claim_folder(out, "corpus")
    (out / MARKER).touch()
    left = [".train.bin.12.partial", ".test.idx.7.partial", "validation.bin", "validation.idx", "corpus.json"]
    mine = [".notes.12.partial", ".train.bin.copy.partial", "train.txt"]
    for name in (*left, *mine):
        (out / name).write_text("x")
    split_corpus(pair, str(out), "1")
    assert sorted(path.name for path in out.iterdir()) == sorted(
        [*mine, ".mlm.json", "train.bin", "train.idx"]
    )


def test_an_interrupted_build_is_not_written_over_and_an_incomplete_corpus_not_read(tmp_path: Path) -> None:
    pair = str(write_pair(tmp_path / "a/train", GPT))
    config = plain(write_jsonl(tmp_path / "t.jsonl", ["one"]))
    with interrupted("mlm.corpus.build.publish"):
        build(config)
    with pytest.raises(UserError, match="holds an interrupted `mlm data build`: finish it"):
        split_corpus(pair, config.out, "1")
    (tmp_path / "a" / MARKER).touch()
    with pytest.raises(UserError, match="a is incomplete: run the command again that was interrupted"):
        merge_corpora([pair, pair], str(tmp_path / "merged"))


def test_parts_of_a_build_killed_while_it_published_do_not_stay(tmp_path: Path) -> None:
    """Nor does its marker, where it was killed after the receipt."""
    config = plain(write_jsonl(tmp_path / "t.jsonl", [f"text {i}" for i in range(40)]))
    three, out = replace(config, split="0.6/0.2/0.2"), Path(config.out)
    with interrupted("mlm.corpus.build.write_receipt"):
        build(three)
    assert (out / "test.idx").exists()
    with interrupted("mlm.corpus.build.summary"):
        build(config)
    build(config)
    assert sorted(path.name for path in out.glob("*.idx")) == ["train.idx"]
    assert not (out / MARKER).exists()


@pytest.mark.parametrize(
    "words, line",
    [
        (["split", "a", "split=a/b"], "split=a/b is not weights of train, validation and test"),
        (["split", "a", "split=0/1/1"], "is not weights"),
        (["split", "a", "split=1000/1/0"], "split=1000/1/0 gives validation none of 3 documents of"),
        (["merge", "a"], "paths names fewer than two corpora"),
        (["merge", "a", "absent"], "no corpus at path=absent"),
    ],
)
def test_mistakes_are_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    line: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    small_tokenizer(tmp_path)
    write_pair(tmp_path / "a", GPT)
    assert main(["data", *words, "out=out"]) == 2
    error = capsys.readouterr().err
    assert line in error
    assert "Traceback" not in error
