"""Packages of Debian to JSON lines: what is read, what is held out, and archives that are rejected."""

import gzip
import hashlib
import json
import re
import tarfile
from itertools import chain
from pathlib import Path

import pytest

from mlm.reproduce import deb, debian_text
from mlm.reproduce.debian_text import part_of, source_of, write_text
from mlm.util.errors import UserError
from tests.reproduce.made_debs import NEEDS_DPKG, make_deb, make_hostile_deb, regular

pytestmark = NEEDS_DPKG

SENTENCE = (
    "The handle number {} is given back to the system that it was taken from, and it is free for all of us. "
)
POD = "usr/share/perl/5.36.0/pod"
NOTICE = (
    "Format: x\n\nFiles: *\nCopyright: 1987 Larry Wall\nLicense: Artistic\n\nFiles: b\nCopyright: someone\n"
)


def pod(*numbers: int) -> str:
    return "=pod\n\n" + "\n\n".join(SENTENCE.format(number) * 6 for number in numbers)


def lines(out: Path) -> dict[str, list[dict[str, str]]]:
    return {
        part: [json.loads(line) for line in (out / f"{part}.jsonl").read_text().splitlines()]
        for part in ("train", "validation", "test")
    }


def perl_doc(folder: Path) -> Path:
    """A package of 120 documents, and files that are none."""
    files = {f"{POD}/perl{n:03}.pod": pod(n) for n in range(118)}
    files |= {f"{POD}/perltoc.pod": pod(900), f"{POD}/perljp.pod": pod(901), "usr/bin/perldoc": "#!/bin/sh\n"}
    packed = {f"{POD}/perl118.pod.gz": gzip.compress(pod(118).encode())}
    short = {f"{POD}/perlshort.pod": "=pod\n\nA document of too few words to keep.\n"}
    foreign = {
        f"{POD}/perlpt.pod": "=pod\n\n" + "O arquivo que foi aberto antes precisa ser fechado depois. " * 30
    }
    notice = {"usr/share/doc/perl-doc/copyright": NOTICE}
    return make_deb(folder, "perl-doc", files | packed | short | foreign | notice, "5.36.0-7")


def test_documents_are_english_prose_and_whole_ones_are_held_out(tmp_path: Path) -> None:
    told = list(write_text([perl_doc(tmp_path)], tmp_path / "out"))
    parts = lines(tmp_path / "out")
    names = {part: [line["source"] for line in found] for part, found in parts.items()}
    assert sorted(chain.from_iterable(names.values())) == [f"perl-doc/perl{n:03}" for n in range(119)]
    for part, found in names.items():
        assert found == sorted(found)
        assert {part_of(source) for source in found} <= {part}
    assert names["validation"]
    assert names["test"]
    assert parts["train"][0]["text"] == (SENTENCE.format(int(names["train"][0][-3:])) * 6).strip()
    assert told[0].startswith("perl-doc: 119 documents")
    assert len(told) == 4


def test_a_document_is_held_out_by_the_digest_of_its_name() -> None:
    names = [f"perl-doc/{n}" for n in range(20_000)]
    for part, number in {"validation": 0, "test": 1}.items():
        digests = {name: int(hashlib.sha256(name.encode()).hexdigest()[:16], 16) for name in names}
        assert [name for name in names if part_of(name) == part] == [
            name for name in names if digests[name] % 50 == number
        ]


def test_the_same_packages_give_the_same_bytes(tmp_path: Path) -> None:
    package = perl_doc(tmp_path)
    for name in ("a", "b"):
        list(write_text([package], tmp_path / name))
    for file in (tmp_path / "a").iterdir():
        assert file.read_bytes() == (tmp_path / "b" / file.name).read_bytes()


def test_paragraphs_that_many_documents_share_are_left_out(tmp_path: Path) -> None:
    files = {f"{POD}/perl{n}.pod": pod(n) + "\n\nThis page was written by all of us." for n in range(4)}
    list(write_text([make_deb(tmp_path, "perl-doc", files)], tmp_path / "out"))
    texts = [line["text"] for found in lines(tmp_path / "out").values() for line in found]
    assert len(texts) == 4
    assert not any("all of us." in text.splitlines()[-1][-40:] and "written" in text for text in texts)


def test_licences_state_package_version_and_copyright(tmp_path: Path) -> None:
    list(write_text([perl_doc(tmp_path)], tmp_path / "out"))
    licences = (tmp_path / "out/LICENCES").read_text()
    assert "perl-doc 5.36.0-7\nLicence of the documentation: GPL-1.0-or-later OR Artistic" in licences
    assert "    Copyright: 1987 Larry Wall\n    License: Artistic\n" in licences
    assert "someone" not in licences


@pytest.mark.parametrize(
    "package,source",
    [("linux-doc-6.12", "linux-doc"), ("python3.13-doc", "python-doc"), ("git-doc", "git-doc")],
)
def test_a_source_is_found_in_each_release(package: str, source: str) -> None:
    assert source_of(package) == source


def link(name: str, target: str) -> tuple[tarfile.TarInfo, bytes]:
    member = tarfile.TarInfo(name)
    member.type, member.linkname = tarfile.SYMTYPE, target
    return member, b""


def file(name: str, content: bytes) -> tuple[tarfile.TarInfo, bytes]:
    return regular(name, content), content


def test_links_are_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret.pod"
    secret.write_text(pod(77))
    members = [link(f"./{POD}/perlsecret.pod", str(secret)), file(f"./{POD}/perl1.pod", pod(1).encode())]
    list(write_text([make_hostile_deb(tmp_path, "perl-doc", members)], tmp_path / "out"))
    assert [line["source"] for line in chain.from_iterable(lines(tmp_path / "out").values())] == [
        "perl-doc/perl1"
    ]


@pytest.mark.parametrize(
    "members,line",
    [
        ([file(f"../../{POD}/perl1.pod", b"")], "a file's name leaves the archive"),
        ([file(f"/{POD}/perl1.pod", b"")], "a file's name leaves the archive"),
        ([file(f"./{POD}/perl1.pod", b"x" * 2000)], "perl1.pod has 2000 bytes, more than 1000"),
        ([file(f"./{POD}/perl1.pod.gz", gzip.compress(b"x" * 2000))], "unpacks to more than 1000 bytes"),
        ([file(f"./{POD}/perl1.pod.gz", b"x")], "is not gzip"),
        ([file(f"./{n}", b"") for n in range(9)], "more than 8 files"),
        ([file("./big", b"x" * 50_000)], "unpacks to more than 40000 bytes"),
        ([file("./a", b"")], "no English text where perl-doc keeps it"),
    ],
    ids=["dots", "absolute", "large", "bomb", "not gzip", "many", "all large", "none"],
)
def test_a_hostile_archive_is_rejected_and_nothing_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[tuple[tarfile.TarInfo, bytes]], line: str
) -> None:
    for name, bound in {"MAX_FILE": 1000, "MAX_ARCHIVE": 40_000, "MAX_MEMBERS": 8}.items():
        monkeypatch.setattr(deb, name, bound)
    hostile = make_hostile_deb(tmp_path, "perl-doc", members)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(UserError, match=line):
        list(write_text([hostile], tmp_path / "out"))
    assert sorted(tmp_path.rglob("*")) == before


def test_a_truncated_archive_is_rejected(tmp_path: Path) -> None:
    package = perl_doc(tmp_path)
    package.write_bytes(package.read_bytes()[:-20_000])
    with pytest.raises(UserError, match=r"debs=.*perl-doc_.*delete it and download it again"):
        list(write_text([package], tmp_path / "out"))


@pytest.mark.parametrize(
    "words,line",
    [
        (["--packages", "git-doc"], r"no \.deb of git-doc; run in it: apt-get download git-doc"),
        ([], r"packages=mine: not known here; choose among apache2-doc,"),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, words: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    make_deb(tmp_path, "mine", {})
    with pytest.raises(SystemExit, match=r"^2$"):
        debian_text.main(["--debs", str(tmp_path), "--out", str(tmp_path / "out"), *words])
    assert re.search(line, capsys.readouterr().err)
    assert not (tmp_path / "out").exists()
