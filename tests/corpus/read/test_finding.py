"""Files of an input are read, stop the build, or are listed with a reason; files of builds are not read."""

import json
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm.corpus import build as build_module
from mlm.corpus.build import run_build
from mlm.corpus.read.finding import Listing, search
from mlm.util.errors import UserError
from tests.corpus.read.test_shards import names, put
from tests.corpus.texts import documents, keep_work, output, plain, quiet, write_jsonl

NOBODY = 65534


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, and permissions that hold in it: nothing stops root from reading."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    before = os.geteuid()
    try:
        if before == 0:
            os.chown(folder, NOBODY, NOBODY)
            os.seteuid(NOBODY)
        yield folder
    finally:
        os.seteuid(before)
        for path, _, _ in os.walk(folder):
            os.chmod(path, 0o700)
        shutil.rmtree(folder)


def reasons(found: Listing) -> dict[str, str]:
    return {entry.path.name: entry.reason for entry in found.unread}


def check_stops(path: Path | str, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{name}/?\.?:? {reason}: make it readable") as problem:
        search(str(path))
    assert "\n" not in str(problem.value)


def test_folder_that_cannot_be_listed_stops_the_build(unprivileged: Path) -> None:
    put(unprivileged, "a.jsonl", "shut/b.jsonl")
    (unprivileged / "shut").chmod(0)
    check_stops(unprivileged, "shut", "Permission denied")


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "**", "*/*.jsonl", "*/a.jsonl", "[d-s]*/*/*.jsonl"])
@pytest.mark.parametrize("mode", [0, 0o600])
def test_folder_that_a_glob_cannot_search_stops_the_build(
    unprivileged: Path, pattern: str, mode: int
) -> None:
    deep = pattern.count("/") - pattern.count("**")
    put(unprivileged, f"good{'/deep' * (deep > 1)}/a.jsonl", f"shut{'/deep' * (deep > 1)}/a.jsonl")
    (unprivileged / "shut").chmod(mode)
    check_stops(f"{unprivileged}/{pattern}", "shut", "Permission denied")


def test_folder_that_a_glob_does_not_list_may_be_shut(unprivileged: Path) -> None:
    put(unprivileged, "good/a.jsonl", "good/shut/b.jsonl", "home/corpus/b.jsonl")
    (unprivileged / "good/shut").chmod(0)
    (unprivileged / "home").chmod(0o100)
    for pattern in ("good/*", "g*/*.jsonl"):
        assert reasons(search(f"{unprivileged}/{pattern}")) == {}
    assert [item.name for item in search(f"{unprivileged}/*/corpus/b.jsonl").inputs] == [
        "home/corpus/b.jsonl"
    ]


def test_file_that_cannot_be_opened_stops_the_build(unprivileged: Path) -> None:
    put(unprivileged, "a.jsonl", "b.txt")
    (unprivileged / "b.txt").chmod(0)
    check_stops(unprivileged, "b.txt", "Permission denied")


def test_folder_beside_the_parts_may_be_shut(unprivileged: Path) -> None:
    put(unprivileged, "train.jsonl", "lost+found/b.jsonl")
    (unprivileged / "lost+found").chmod(0)
    assert [item.name for item in search(str(unprivileged)).inputs] == ["train.jsonl"]


@pytest.mark.parametrize("pattern", ["", "*"])
def test_broken_and_circular_links_stop_the_build(tmp_path: Path, pattern: str) -> None:
    for name, target in (("b.jsonl", "gone"), ("b.jsonl", "b.jsonl"), ("b", "gone")):
        put(root := tmp_path / f"{name} {target}", "a.jsonl")
        (root / name).symlink_to(root / target)
        check_stops(root / pattern, name, "is a loop of links" if target == name else "is a broken link")


def test_fifos_and_sockets_stop_the_build_unopened(tmp_path: Path) -> None:
    os.mkfifo(put(tmp_path / "f", "a.jsonl") / "b.jsonl")
    check_stops(tmp_path / "f", "b.jsonl", "is a FIFO")
    with socket.socket(socket.AF_UNIX) as s:
        s.bind(str(put(tmp_path / "s", "a.jsonl") / "b.txt"))
        check_stops(tmp_path / "s", "b.txt", "is a socket")
    check_stops(tmp_path / "f/b.jsonl", "b.jsonl", "is a FIFO")


def test_receipt_lists_all_that_is_not_read(tmp_path: Path) -> None:
    source = put(tmp_path / "text", *(f"image{i}.png" for i in range(150)), ".hidden.txt")
    write_jsonl(source / "a.jsonl", ["one"])
    (source / "again").symlink_to(source)
    receipt = run_build(plain(source), quiet())
    assert {reason: entry["count"] for reason, entry in receipt["not_read"].items()} == {
        "hidden": 1,
        "link to a folder that is read already": 1,
        "unknown format": 150,
    }
    assert receipt["not_read"]["hidden"]["files"] == [str(source / ".hidden.txt")]
    assert len(receipt["not_read"]["unknown format"]["files"]) == 100


def test_more_names_of_the_formats_are_read(tmp_path: Path) -> None:
    some = [
        f"{stem}{packing}" for stem in ("a.ndjson", "b.jsonl", "c.txt") for packing in ("", ".bz2", ".xz")
    ]
    put(tmp_path, *some, "d.json.gz", "e.ndjson.zst", "f.json", "g.json")
    (tmp_path / "f.json").write_text("[\n]")
    (tmp_path / "g.json").write_text('{"text": "a"}\n' * 2)
    assert [name for name, _ in names(tmp_path)] == sorted([*some, "d.json.gz", "e.ndjson.zst", "g.json"])
    assert names(put(tmp_path / "parts", "train.json.gz", "validation.ndjson")) == [
        ("train.json.gz", "train"),
        ("validation.ndjson", "validation"),
    ]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A folder with two documents and a bad one."""
    folder = write_jsonl(tmp_path / "text/a.jsonl", ["one", "two"]).parent
    (folder / "bad.jsonl").write_text("no JSON\n")
    return folder


def test_corpus_inside_its_input_is_not_read(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a second build nor by one of another corpus."""
    keep_work(monkeypatch)
    config = plain(source, out=str(source / "out"), bad_input="skip")
    receipt = run_build(config, quiet())
    assert (source / "out/rejected.jsonl").is_file()
    console = quiet()
    assert run_build(config, console) == receipt
    assert "up to date" in console.file.getvalue()  # type: ignore[attr-defined]
    for path in (source, f"{source}/**/*.jsonl"):
        assert [item.name for item in search(str(path)).inputs] == ["a.jsonl", "bad.jsonl"]


def test_killed_build_into_its_input_resumes(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = plain(source, out=str(source / "out"), bad_input="skip")

    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(build_module, "publish", stop)
        with pytest.raises(KeyboardInterrupt):
            run_build(config, quiet())
    assert run_build(config, quiet()) is not None
    assert documents(source / "out/train") == ["one<|endoftext|>", "two<|endoftext|>"]
    apart = plain(source, out=str(tmp_path / "apart"), bad_input="skip")
    run_build(apart, quiet())
    ours, theirs = output(source / "out"), output(tmp_path / "apart")
    assert ours.keys() == theirs.keys()
    assert all(ours[name] == theirs[name] for name in ours if name != "corpus.json")


def test_input_that_the_build_would_replace_is_rejected(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "text/rejected.jsonl", ["mine"])
    for path in (source, source.parent):
        with pytest.raises(UserError, match=r"out=.* would replace the input .*rejected\.jsonl"):
            run_build(plain(path, out=str(source.parent)), quiet())
    assert json.loads(source.read_text()) == {"text": "mine"}


def test_text_of_the_users_in_out_is_named_by_the_user(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "text/a.jsonl", ["one"])
    write_jsonl(tmp_path / "text/out/notes.jsonl", ["mine"])
    with pytest.raises(UserError, match=r"out=.*notes\.jsonl, which no build wrote"):
        run_build(plain(tmp_path / "text", out=str(tmp_path / "text/out")), quiet())
