"""`mlm data build` from end to end: kept and removed documents, decided by the input alone."""

import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.config import DedupConfig
from mlm.corpus.stages import plan
from mlm.corpus.stages.group import BYTES
from mlm.data.indexed import IndexedDataset
from mlm.util.errors import CorruptFileError, UserError
from tests.corpus.texts import (
    documents,
    keep_work,
    output,
    plain,
    quiet,
    thorough,
    with_changes,
    words,
    write_jsonl,
)
from tests.slow import slow_but

STAGES = ("clean", "match", "link", "group", "verify", "gather", "tokenise", "merge")


@pytest.fixture(autouse=True)
def a_task_for_each_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files here are so small that one task would take all of them."""
    monkeypatch.setattr("mlm.corpus.read.shards.SHARED_PART", 1 << 60)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder of two files: 60 documents, near-duplicates within and across the files, a leaked passage."""
    rng = random.Random(1)
    originals = [words(rng, 60) for _ in range(30)]
    evaluation = words(rng, 40)
    texts = [" ".join(text) for text in originals]
    texts += [" ".join(with_changes(text, 50)) for text in originals[:10]]  # J about 0.85
    texts += [" ".join(with_changes(text, 6)) for text in originals[10:20]]  # J about 0
    texts += [" ".join([*words(rng, 40), *evaluation[10:30], *words(rng, 40)]) for _ in range(3)]
    texts += ["too short"] * 7
    (tmp_path / "evaluation.txt").write_text(" ".join(evaluation) + "\n")
    write_jsonl(tmp_path / "text/a.jsonl", texts[:35])
    (tmp_path / "text/b.jsonl.gz").write_bytes(
        gzip.compress("".join(json.dumps({"text": text}) + "\n" for text in texts[35:]).encode())
    )
    return tmp_path / "text"


def test_rules_remove_what_they_should_and_stages_leave_no_work(source: Path) -> None:
    receipt = run_build(thorough(source), quiet())
    removed = {rule: count["documents"] for rule, count in receipt["removed"].items()}
    assert removed == {"min_tokens": 7, "near_duplicate": 10}
    assert receipt["read"]["documents"] == 60
    assert receipt["contamination"]["documents_cut"] == 3
    # a cut leaves two pieces
    assert sum(count["documents"] for count in receipt["splits"].values()) == 60 - 7 - 10 + 3
    assert not (source.parent / "out/work").exists()


def test_workers_and_shards_do_not_change_a_byte(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_build(thorough(source), quiet())
    run_build(thorough(source, out=str(source.parent / "two"), workers=2), quiet())
    monkeypatch.setattr("mlm.corpus.build.shard_bytes", lambda total: 700)
    keep_work(monkeypatch)
    run_build(thorough(source, out=str(source.parent / "cut")), quiet())
    for name in ("two", "cut"):
        assert output(source.parent / "out") == output(source.parent / name)
    assert len(list((source.parent / "cut/work").glob("clean-*/*.done.json"))) > 2


def test_memory_and_parts_of_bands_do_not_change_a_byte(
    source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys, links and documents are read a few at a time, and nothing falls between them."""
    texts = [words(random.Random(100 + i), 60) for i in range(40)]
    texts += [with_changes(text, 50) for text in texts[:8]]
    config = thorough(write_jsonl(source.parent / "c.jsonl", [" ".join(text) for text in texts]))
    receipt = run_build(config, quiet())
    monkeypatch.setattr(plan, "PART_BYTES", 1)
    monkeypatch.setattr(plan, "MOST_PARTS", 2)
    run_build(replace(config, out=str(source / "sliced"), memory_gb=5 * BYTES / 1e9), quiet())
    assert output(Path(config.out)) == output(source / "sliced")
    assert receipt["removed"]["near_duplicate"]["documents"] == 8


KILL = """
import os, signal, sys
from mlm.corpus.stages.plan import BuildStage
finish = BuildStage.finish
def kill(self, task, *rest):
    if self.name == "{stage}" and task == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    finish(self, task, *rest)
BuildStage.finish = kill
import mlm.corpus.read.shards as shards
shards.SHARED_PART = 1 << 60
from tests.corpus.texts import quiet, thorough
from mlm.corpus.build import run_build
from pathlib import Path
run_build(thorough(Path(sys.argv[1])), quiet())
"""


@pytest.mark.parametrize("stage", slow_but({0}, ["clean", "verify", "merge"]))
def test_kill_in_a_stage_changes_nothing_and_loses_no_finished_task(
    source: Path, stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = KILL.format(stage=stage)
    done = subprocess.run(
        [sys.executable, "-c", code, str(source)], check=False, env=os.environ | {"PYTHONPATH": "."}
    )
    assert done.returncode == -signal.SIGKILL
    work = source.parent / "out/work"
    before = {path: path.stat().st_mtime_ns for path in work.glob("*/*.done.json")}
    assert before
    keep_work(monkeypatch)
    kept = run_build(thorough(source), quiet())
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert run_build(thorough(source, out=str(source.parent / "calm")), quiet()) == kept
    assert output(source.parent / "out") == output(source.parent / "calm")


def test_truncated_work_is_done_again(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        keep_work(patch)
        run_build(thorough(source, out=str(source.parent / "first")), quiet())
    work = source.parent / "first/work"
    victim = next(work.glob("clean-*/00000.bin"))
    victim.write_bytes(victim.read_bytes()[1:])
    (source.parent / "first/corpus.json").unlink()
    (source.parent / "first/.building").touch()
    run_build(thorough(source, out=str(source.parent / "first")), quiet())
    run_build(thorough(source), quiet())
    assert output(source.parent / "first") == output(source.parent / "out")


@pytest.mark.slow
def test_a_build_with_other_settings_starts_anew(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        keep_work(patch)
        run_build(thorough(source), quiet())
    out = source.parent / "out"
    for name in output(out).keys() - {".mlm.json"}:
        (out / name).unlink()
    other = thorough(source, dedup=DedupConfig(threshold=0.95))
    run_build(other, quiet())
    run_build(replace(other, out=str(source.parent / "calm")), quiet())
    assert output(out) == output(source.parent / "calm")


def test_bad_input_stops_the_build_and_keeps_what_is_done(source: Path) -> None:
    (source / "c.jsonl").write_text('{"body": "x"}\n')
    with pytest.raises(UserError, match=r'c\.jsonl:1: no key "text".*bad_input=skip'):
        run_build(thorough(source), quiet())
    done = list((source.parent / "out/work").glob("clean-*/*.done.json"))
    assert len(done) == 2
    assert not (source.parent / "out/train.bin").exists()


def test_bad_input_is_counted_and_listed_where_it_is_skipped(source: Path) -> None:
    (source / "c.jsonl").write_bytes(b'{"body": "x"}\n{"text": "\xff"}\n')
    receipt = run_build(thorough(source, bad_input="skip"), quiet())
    assert sum(receipt["rejected"].values()) == 2
    rejected = [json.loads(line) for line in (source.parent / "out/rejected.jsonl").read_text().splitlines()]
    assert [line["place"].rpartition("/")[2] for line in rejected] == ["c.jsonl:1", "c.jsonl:2"]
    assert "rejected.jsonl" in receipt["files"]


def test_all_rejected_is_said_with_the_first_place_and_reason(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a.jsonl").write_bytes('{"text": "x"}\n{"text": "y"}\n'.encode("utf-16"))
    first = re.escape(
        f"{tmp_path}/text/a.jsonl:1: not UTF-8 but UTF-16 (convert it: iconv -f UTF-16 -t UTF-8)"
    )
    problem = (
        rf"no document for train \(removed: none; rejected: 3, first {first}\); repair the input, or name"
    )
    with pytest.raises(UserError, match=problem):
        run_build(plain(tmp_path / "text", bad_input="skip"), quiet())


def test_damaged_input_ends_with_1(source: Path) -> None:
    """As every damaged file does; a record that is wrong is the user's mistake."""
    path = source / "b.jsonl.gz"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(
        CorruptFileError, match=r"b\.jsonl\.gz:\d+: the file is damaged.*bad_input=skip"
    ) as caught:
        run_build(thorough(source, workers=2), quiet())
    assert caught.value.exit_code == 1


def test_sentences_become_sequences(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "t.jsonl", ["It rains. The sun is gone. Nobody cares.", "One only."])
    run_build(plain(source, sentences=True), quiet())
    corpus = IndexedDataset(tmp_path / "out/train")
    assert corpus.document_indices.tolist() == [0, 3, 4]
    first = documents(tmp_path / "out/train")[0].removesuffix("<|endoftext|>")
    assert first.replace(" ", "") == "Itrains.Thesunisgone.Nobodycares."
