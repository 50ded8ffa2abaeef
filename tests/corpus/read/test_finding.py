"""Files of an input are read, stop the build, or are listed with a reason; files of builds are not read."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlm.corpus.build import run_build
from mlm.corpus.read.finding import Listing, search
from mlm.util.errors import UserError
from tests.corpus.texts import keep_work, plain, quiet, write_jsonl
from tests.util.as_nobody import NOBODY, as_nobody, open_folder


@pytest.fixture
def unprivileged() -> Iterator[Path]:
    """A folder, and permissions that hold in it: nothing stops root from reading."""
    with open_folder() as folder:
        if os.geteuid() == 0:
            os.chown(folder, NOBODY, NOBODY)
        with as_nobody():
            yield folder


def reasons(found: Listing) -> dict[str, str]:
    return {entry.path.name: entry.reason for entry in found.unread}


def check_stops(path: Path | str, name: str, reason: str) -> None:
    with pytest.raises(UserError, match=rf"{name}/?\.?:? {reason}: make it readable") as problem:
        search(str(path))
    assert "\n" not in str(problem.value)


def test_folder_that_cannot_be_listed_stops_the_build(unprivileged: Path) -> None:
    put(unprivileged, "a.jsonl", "shut/b.jsonl")
    (unprivileged / "shut").chmod(0)
    for path in (unprivileged, unprivileged / "shut"):
        check_stops(path, "shut", "Permission denied")


@pytest.mark.parametrize("pattern", ["**/*.jsonl", "*/a.jsonl", "[d-s]*/*/*.jsonl"])
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


def test_input_that_the_build_would_replace_or_did_not_write_is_rejected(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "text/rejected.jsonl", ["mine"])
    with pytest.raises(UserError, match=r"would replace the input .*rejected\.jsonl"):
        run_build(plain(source, out=str(source.parent)), quiet())
    write_jsonl(tmp_path / "text/out/notes.jsonl", ["mine"])
    with pytest.raises(UserError, match=r"out=.*notes\.jsonl, which no build wrote"):
        run_build(plain(source.parent, out=str(source.parent / "out")), quiet())


def put(root: Path, *names: str) -> Path:
    for name in names:
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("{}")
    return root


def names(path: Path | str) -> list[tuple[str, str | None]]:
    return [(item.name, item.split) for item in search(str(path)).inputs]


def test_folder_is_read_to_its_depth_sorted_by_path(tmp_path: Path) -> None:
    put(tmp_path, "b.jsonl", "a/z.txt.gz", "a/b/c.parquet", "a.JSONL.zst", "c.txt")
    found = [name for name, _ in names(tmp_path)]
    assert found == ["a/b/c.parquet", "a/z.txt.gz", "a.JSONL.zst", "b.jsonl", "c.txt"]


def test_linked_folders_are_followed_once(tmp_path: Path) -> None:
    put(tmp_path / "far", "a.jsonl")
    put(tmp_path / "near", "b.jsonl")
    os.symlink(tmp_path / "far", tmp_path / "near/far")
    os.symlink(tmp_path / "near", tmp_path / "near/loop")
    assert names(tmp_path / "near") == [("b.jsonl", None), ("far/a.jsonl", None)]


def test_folder_gives_its_parts_in_order(tmp_path: Path) -> None:
    put(tmp_path, "test.txt", "train.jsonl.gz", "validation.parquet", "other.jsonl", "sub/train.jsonl")
    assert names(tmp_path) == [
        ("train.jsonl.gz", "train"),
        ("validation.parquet", "validation"),
        ("test.txt", "test"),
    ]
    assert "not read: other.jsonl (" in str(search(str(tmp_path)).notes())


@pytest.mark.parametrize(
    ("files", "path", "message"),
    [
        (["test.jsonl"], "", r"holds test\.jsonl but no train\.jsonl"),
        (["train.jsonl", "train.txt.gz"], "", r"train\.jsonl and train\.txt\.gz, all for the part train"),
        (["a.csv"], "a.csv", "holds no .* rename"),
        (["a.json"], "a.json", "one object per line"),
        ([], "absent.jsonl", "does not exist"),
        ([], "*.jsonl", "matches no file"),
    ],
)
def test_input_that_cannot_be_read_says_why(
    tmp_path: Path, files: list[str], path: str, message: str
) -> None:
    put(tmp_path, *files)
    with pytest.raises(UserError, match=message) as problem:
        search(str(tmp_path / path))
    assert "\n" not in str(problem.value)
