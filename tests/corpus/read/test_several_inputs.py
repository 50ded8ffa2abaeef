"""A list of inputs, and the folders that other programs leave."""

import gzip
import json
from pathlib import Path

import pytest

from mlm.cli import main
from mlm.corpus.read.finding import search
from mlm.util.errors import UserError
from tests.corpus.reading import read, write
from tests.corpus.texts import build, documents, plain, small_tokenizer

END = "<|endoftext|>"


def jsonl_gz(path: Path, *texts: str) -> Path:
    rows = [{"id": str(n), "text": text, "metadata": {"url": "x"}} for n, text in enumerate(texts)]
    return write(path, gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def test_several_inputs_are_read_in_their_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "z.txt", b"one")
    write(tmp_path / "b/a.txt", b"two")
    write(tmp_path / "b/z.txt", b"three")
    monkeypatch.chdir(tmp_path)
    tokenizer = small_tokenizer(tmp_path)
    words = ["input=[z.txt,b/]", f"tokenizer={tokenizer}", "out=out", "split=1/0/0", "recipe=plain"]
    assert main(["data", "build", *words]) == 0
    assert documents(tmp_path / "out/train") == [f"one{END}", f"two{END}", f"three{END}"]
    names = [json.loads(line)["name"] for line in (tmp_path / "out/corpus-inputs.jsonl").open()]
    assert names == ["0/z.txt", "1/a.txt", "1/z.txt"]
    assert main(["data", "tokenizer", "input=[z.txt,b/]", "vocab_size=300", "out=learned.json"]) == 0


def test_file_that_two_inputs_name_is_read_by_neither(tmp_path: Path) -> None:
    path = write(tmp_path / "b/a.txt", b"one")
    with pytest.raises(UserError, match=r"names .*a\.txt twice: remove one of the two"):
        search((str(path), str(tmp_path / "b")))


def test_parts_and_files_of_no_part_are_not_mixed(tmp_path: Path) -> None:
    write(tmp_path / "parts/train.txt", b"one")
    write(tmp_path / "more/train.txt", b"two")
    other = write(tmp_path / "a.txt", b"three")
    assert [item.split for item in search((str(tmp_path / "parts"), str(tmp_path / "more"))).inputs] == [
        "train",
        "train",
    ]
    with pytest.raises(UserError, match=r"train\.txt is the part train, and others are of no part"):
        search((str(tmp_path / "parts"), str(other)))


def test_output_of_datatrove_is_read_as_it_is(tmp_path: Path) -> None:
    """As its writer and executor leave it: packed lines, logs and counts."""
    pytest.importorskip(
        "orjson", reason="orjson, which datatrove's writer needs, is absent: pip install 'mlm[dev]'"
    )
    from datatrove.data import Document
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.writers import JsonlWriter

    texts = [f"text {number}" for number in range(7)]
    pipeline = [
        [Document(text=text, id=str(number), metadata={"url": "x"}) for number, text in enumerate(texts)],
        JsonlWriter(str(tmp_path / "out")),
    ]
    LocalPipelineExecutor(pipeline, logging_dir=str(tmp_path / "out/logs"), skip_completed=False).run()
    assert list((tmp_path / "out").glob("*.jsonl.gz"))
    outcome = read(tmp_path / "out")
    assert (outcome.texts, outcome.rejected) == (texts, [])


def test_documents_of_dolma_are_read_without_their_attributes(tmp_path: Path) -> None:
    jsonl_gz(tmp_path / "dolma/documents/00.jsonl.gz", "one", "two")
    line = json.dumps({"id": "0", "attributes": {"toxic": [[0, 3, 0.1]]}})
    write(tmp_path / "dolma/attributes/toxic/00.jsonl.gz", gzip.compress(line.encode()))
    assert read(tmp_path / "dolma").texts == ["one", "two"]
    assert "attributes of documents (Dolma)" in search(str(tmp_path / "dolma")).account()


def test_readme_of_a_dataset_is_no_document(tmp_path: Path) -> None:
    jsonl_gz(tmp_path / "set/data/00.jsonl.gz", "one")
    write(tmp_path / "set/README.md", b"# Card")
    receipt = build(plain(tmp_path / "set"))
    assert documents(tmp_path / "out/train") == [f"one{END}"]
    assert receipt["not_read"]["description of a dataset"]["count"] == 1
    write(tmp_path / "notes/README.md", b"# Mine")
    assert read(tmp_path / "notes").texts == ["# Mine"]
