"""The guide file-safety.md, sentence by sentence: folders, files, devices, pipes, links and inputs."""

import json
import os
import re
import shutil
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from mlm.checkpoint.native.folders import clear_up, discard
from mlm.checkpoint.native.retention import prune
from mlm.cli import main
from mlm.cli.commands import SPECS
from mlm.config.build import build, inputs_of, path_problems
from mlm.config.fields import Role
from mlm.config.tree import Leaf
from mlm.corpus.build import run_build
from mlm.util.errors import UserError
from mlm.util.ownership import KINDS, MARKER, claim_folder, claim_problems, delete_owned, read_marker
from mlm.util.results import write_result
from tests.checkpoints_on_disk import write_run
from tests.config.test_fields import PATHS, values_with
from tests.corpus.texts import keep_work, plain, quiet, write_jsonl

OURS = json.dumps({"task": "loss", "versions": {"mlm": "0.1"}}).encode()
KIND = {
    **dict.fromkeys(("pretrain", "finetune", "reshard", "import_hf", "convert"), "run"),
    **dict.fromkeys(("data_build", "data_merge", "data_split"), "corpus"),
    **{"export_hf": "exported-model", "verify_resume": "verify-resume"},
    **{"eval": "predictions", "parity": "verify-resume"},
}
"""Kind of the folder that a command's `out` becomes."""
FILES = [(n, leaf) for n, leaf in PATHS if leaf.role in (Role.RESULT, Role.PLACE)]
FOLDERS = [(n, leaf) for n, leaf in PATHS if leaf.role is Role.FOLDER]
INPUTS = [(n, leaf) for n, leaf in PATHS if leaf.role in (Role.INPUT, Role.BLEND)]


def ids(pairs: list[tuple[str, Leaf]]) -> list[str]:
    return [f"{name}-{leaf.key}" for name, leaf in pairs]


@pytest.fixture(autouse=True)
def cwd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return tmp_path / "cwd"


def state(root: Path) -> dict[str, Any]:
    """Everything below a folder: kind, permissions and bytes of each entry; links by what they name."""
    found: dict[str, Any] = {}
    for path in sorted(root.rglob("*")):
        mode = path.lstat().st_mode
        content: Any = os.readlink(path) if path.is_symlink() else None
        if stat.S_ISREG(mode):
            content = path.read_bytes()
        found[str(path.relative_to(root))] = (stat.S_IFMT(mode), content)
    return found


def without_marker(found: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if not name.endswith(MARKER)}


def write_where_told(name: str, leaf: Leaf, value: str) -> str | None:
    """Do what a command does with one path, from its checks to its writing; the error, None if there is none.

    A folder is claimed, filled with every name of its kind and cleared again; a file gets a result.
    """
    try:
        config = build(SPECS[name], values_with(name, leaf, value))
        if problems := path_problems(config):
            return problems[0]
        if leaf.role is Role.FOLDER:
            kind = {"predictions": "predictions"}.get(leaf.key, KIND[name])
            folder = claim_folder(value, kind, key=leaf.key, inputs=inputs_of(config))
            for pattern in KINDS[kind].writes:
                if "*" not in pattern:
                    (folder / pattern).write_text("ours")
            delete_owned(folder, kind)
        else:
            write_result(value, OURS, key=leaf.key, inputs=inputs_of(config))
    except UserError as error:
        return str(error)
    return None


def test_every_sentence_of_the_page_names_tests_of_this_file() -> None:
    text = (Path(__file__).parents[2] / "scripts/docs/pages/guides/file-safety.md").read_text()
    bullets = re.split(r"\n(?=- |## |\n)", text.partition("## Folders")[2])
    sentences = [" ".join(bullet.split()) for bullet in bullets if bullet.strip().startswith("- ")]
    assert len(sentences) >= 14
    for sentence in [*sentences, text.partition("## What mlm does take")[2]]:
        names = re.findall(r"`(test_\w+)`", sentence)
        assert names, f"no test: {sentence}"
        assert all(callable(globals().get(name)) for name in names), names


@pytest.mark.parametrize(("name", "leaf"), FOLDERS, ids=ids(FOLDERS))
def test_a_folder_of_the_users_is_unharmed(name: str, leaf: Leaf, tmp_path: Path) -> None:
    """A project that holds files of the names that mlm writes."""
    kind = {"predictions": "predictions"}.get(leaf.key, KIND[name])
    taken = [pattern for pattern in KINDS[kind].writes if "*" not in pattern] or ["results.json"]
    for file in ("README.md", "deep/thesis.tex", *(f"{name}" for name in taken)):
        (tmp_path / "proj" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "proj" / file).write_text("mine")
    before = state(tmp_path / "proj")
    write_where_told(name, leaf, str(tmp_path / "proj"))
    assert without_marker(state(tmp_path / "proj")) == before


@pytest.mark.parametrize(("name", "leaf"), FOLDERS, ids=ids(FOLDERS))
def test_other_files_in_a_folder_are_left_alone(name: str, leaf: Leaf, tmp_path: Path) -> None:
    (tmp_path / "proj" / "logs").mkdir(parents=True)
    (tmp_path / "proj" / "train.log").write_text("mine")
    (tmp_path / "proj" / "logs" / "slurm-1.out").write_text("mine")
    before = state(tmp_path / "proj")
    write_where_told(name, leaf, str(tmp_path / "proj"))
    after = state(tmp_path / "proj")
    assert {file: after[file] for file in before} == before


MAKE: dict[str, Callable[[Path], object]] = {
    "text": lambda p: p.write_text("my thesis"),
    "json": lambda p: p.write_text('{"task": "mine"}'),
    "folder": lambda p: (p.mkdir(), (p / "a.txt").write_text("mine")),
    "broken link": lambda p: p.symlink_to("gone"),
    "link to itself": lambda p: p.symlink_to(p.name),
}
TAKEN = [*((*key, "text") for key in FILES), *((*FILES[0], kind) for kind in MAKE if kind != "text")]
"""A text at every key, and everything else at one: all keys go through the same checks."""


@pytest.mark.parametrize(("name", "leaf", "kind"), TAKEN)
def test_a_file_of_the_users_is_unharmed(name: str, leaf: Leaf, kind: str, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    place = tmp_path / "d" / "mine.json"
    MAKE[kind](place)
    before = state(tmp_path / "d")
    error = write_where_told(name, leaf, str(place))
    assert error is not None
    assert error.startswith(f"{leaf.key}={place}: ")
    assert "\n" not in error
    assert state(tmp_path / "d") == before


@pytest.mark.parametrize(("name", "leaf"), [*FILES, *FOLDERS], ids=ids([*FILES, *FOLDERS]))
def test_a_device_is_unharmed(name: str, leaf: Leaf, tmp_path: Path) -> None:
    """A private copy of /dev/null; skipped where none can be made."""
    (tmp_path / "d").mkdir()
    try:
        os.mknod(tmp_path / "d" / "null", 0o666 | stat.S_IFCHR, os.makedev(1, 3))
        (tmp_path / "d" / "null").write_bytes(b"")
    except OSError as error:
        pytest.skip(f"no device can be made here: {error}")
    (tmp_path / "d" / "link").symlink_to("null")
    before = state(tmp_path / "d")
    for place in (tmp_path / "d" / "null", tmp_path / "d" / "link"):
        problem = write_where_told(name, leaf, str(place))
        assert (problem is None) == (leaf.role is not Role.FOLDER)
    assert state(tmp_path / "d") == before


@pytest.mark.parametrize(("name", "leaf"), [*FILES, *FOLDERS], ids=ids([*FILES, *FOLDERS]))
def test_a_pipe_is_unharmed(name: str, leaf: Leaf, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    pipe = tmp_path / "d" / "pipe"
    os.mkfifo(pipe)
    before = state(tmp_path / "d")
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    if leaf.role is not Role.FOLDER:
        reader.start()
    error = write_where_told(name, leaf, str(pipe))
    if leaf.role is Role.FOLDER:
        assert error is not None
        assert "a FIFO" in error
    else:
        reader.join(10)
        assert (error, read) == (None, [OURS])
    assert state(tmp_path / "d") == before


@pytest.mark.parametrize(("name", "leaf"), FILES, ids=ids(FILES))
def test_a_link_is_unharmed(name: str, leaf: Leaf, tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("my thesis")
    (tmp_path / "result").write_bytes(OURS + b"\n")
    for target in ("mine", "result"):
        (tmp_path / f"to-{target}").symlink_to(target)
    assert write_where_told(name, leaf, str(tmp_path / "to-mine")) is not None
    assert write_where_told(name, leaf, str(tmp_path / "to-result")) is None
    assert (tmp_path / "mine").read_text() == "my thesis"
    assert (tmp_path / "result").read_bytes() == OURS
    assert (tmp_path / "to-mine").is_symlink()
    assert (tmp_path / "to-result").is_symlink()


@pytest.mark.parametrize(("name", "leaf"), INPUTS, ids=ids(INPUTS))
def test_an_input_is_unharmed(name: str, leaf: Leaf, tmp_path: Path) -> None:
    """A command's input is neither replaced by its result, even if mlm wrote it, nor made its folder."""
    target = next((leaf for n, leaf in (*FILES, *FOLDERS) if n == name), None)
    if target is None:
        pytest.skip("writes nothing that a key names")
    (tmp_path / "in").mkdir()
    read = tmp_path / "in" / "read.json"
    read.write_bytes(OURS + b" ")
    before = state(tmp_path / "in")
    values = values_with(name, leaf, str(read))
    for place in (read, tmp_path / "in"):
        error = None
        values["out"] = str(place)
        config = build(SPECS[name], values)
        with suppress(UserError):
            error = next(iter(path_problems(config)), None)
            if error is None and target.role is Role.FOLDER:
                claim_folder(place, KIND[name], inputs=inputs_of(config))
            elif error is None:
                write_result(place, OURS, inputs=inputs_of(config))
                pytest.fail(f"wrote to {place}")
        assert without_marker(state(tmp_path / "in")) == before


def test_places_that_are_never_claimed(cwd: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    (tmp_path / "text" / "deep").mkdir(parents=True)
    inputs = [str(tmp_path / "text" / "deep")]
    for place in (".", str(cwd), "~", "/", inputs[0], str(tmp_path / "text")):
        path = str(Path(place).expanduser())
        assert claim_problems(path, "run", inputs=inputs) != [], place
    claim_folder(cwd / "run", "run")
    monkeypatch.chdir(cwd / "run")
    assert claim_problems(".", "run") == []


@pytest.mark.parametrize("kind", KINDS)
def test_folders_of_mlm_carry_its_marker(kind: str, tmp_path: Path) -> None:
    marker = read_marker(claim_folder(tmp_path / "new", kind))
    assert marker is not None
    assert marker["kind"] == kind
    others = set(KINDS) - {kind}
    assert all(claim_problems(tmp_path / "new", other) for other in others)


def test_work_keeps_what_is_not_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_jsonl(tmp_path / "text" / "train.jsonl", ["the cat sat", "on the mat"])
    config = plain(tmp_path / "text")
    with monkeypatch.context() as patch:
        keep_work(patch)
        run_build(config, quiet())
    mine = write_jsonl(tmp_path / "out" / "work" / "deep" / "mine.jsonl", ["mine"])
    run_build(config, quiet())  # finds the corpus up to date
    assert [path for path in (tmp_path / "out" / "work").rglob("*") if path.is_file()] == [mine]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Path:
    """Checkpoints of steps 1 to 4, and beside them folders of the user's that are named like ours."""
    root = write_run(tmp_path / "run", steps=range(1, 5)) / "checkpoints"
    shutil.rmtree(root / "step-00000001")
    mine = ("step-00000001", ".trash-x", ".saving-x", ".trash-step-00000009", ".replaced-step-00000004")
    for name in mine:
        (root / name).mkdir()
        (root / name / "notes.txt").write_text("mine")
    (root / "step-00000002" / "notes.txt").write_text("mine")
    (root / ".latest-x").write_text("mine")
    return root


def test_pruning_deletes_checkpoints_alone(checkpoints: Path) -> None:
    mine = {n: v for n, v in state(checkpoints).items() if n.endswith(("notes.txt", ".latest-x"))}
    prune(checkpoints, keep_last=1, keep_every=0)
    clear_up(checkpoints)
    assert main(["ckpt", "prune", str(checkpoints.parent), "keep_last=1"]) in (0, 1)
    after = state(checkpoints)
    assert {name: after.get(name) for name in mine} == mine
    assert not (checkpoints / "step-00000003").exists()
    assert (checkpoints / "step-00000004").exists()


def test_a_users_folder_named_like_rubbish_does_not_stop_pruning(checkpoints: Path) -> None:
    mine = checkpoints / ".trash-step-00000003"
    mine.mkdir(exist_ok=True)
    (mine / "notes.txt").write_text("mine")
    assert discard(checkpoints / "step-00000003")
    assert (mine / "notes.txt").read_text() == "mine"


def test_work_keeps_what_is_not_ours_in_its_stages(tmp_path: Path) -> None:
    work = claim_folder(tmp_path / "work", "corpus-work")
    stage = work / "clean-0123456789abcdef"
    (stage / "mine").mkdir(parents=True)
    for name in ("00000.bin", "00000.done.json", ".00000.progress", "mine/thesis.tex", "notes.txt"):
        (stage / name).write_text("x")
    assert "kept" in str(delete_owned(work, "corpus-work"))
    assert sorted(state(stage)) == ["mine", "mine/thesis.tex", "notes.txt"]


def test_parts_of_checkpoints_and_corpora_are_no_results(checkpoints: Path, tmp_path: Path) -> None:
    corpus = claim_folder(tmp_path / "corpus", "corpus")
    (corpus / "corpus.json").write_text('{"format": "mlm-corpus-2", "versions": {"mlm": "0.1"}}')
    copied = tmp_path / "copy.json"
    copied.write_bytes((checkpoints / "step-00000004" / "manifest.json").read_bytes())
    parts = (checkpoints / "step-00000004" / "manifest.json", checkpoints / "step-00000004" / "new.json")
    before = state(tmp_path)
    for path in (*parts, corpus / "corpus.json", corpus / "train.idx", copied):
        with pytest.raises(UserError):
            write_result(path, b"{}")
    assert state(tmp_path) == before


def test_deletions_follow_no_link(checkpoints: Path, tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    (checkpoints / "step-00000003").rename(archive)
    (checkpoints / "step-00000003").symlink_to(archive)
    before = state(archive)
    assert not discard(checkpoints / "step-00000003")
    prune(checkpoints, keep_last=1, keep_every=0)
    assert (checkpoints / "step-00000003").is_symlink()
    work = claim_folder(tmp_path / "work", "corpus-work")
    (work / "clean-0123456789abcdef").symlink_to(archive)
    assert "kept, as it holds clean-0123456789abcdef" in str(delete_owned(work, "corpus-work"))
    assert state(archive) == before


def test_minus_is_standard_output(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """A command as it is typed: a pipe, a device, `-` and a file of the user's."""
    words = ["plan", "schedule", "pp=2", "micro_batches=2"]
    assert main([*words, "out=-"]) == 0
    captured = capfd.readouterr()
    result = json.loads(captured.out)
    assert captured.err
    assert os.listdir() == []
    (tmp_path / "mine.json").write_text("my thesis")
    assert main([*words, f"out={tmp_path / 'mine.json'}"]) == 2
    assert "exists and was not written by mlm" in capfd.readouterr().err
    assert (tmp_path / "mine.json").read_text() == "my thesis"
    os.mkfifo(tmp_path / "pipe")
    read = list[bytes]()
    reader = threading.Thread(target=lambda: read.append((tmp_path / "pipe").read_bytes()), daemon=True)
    reader.start()
    assert main([*words, f"out={tmp_path / 'pipe'}"]) == 0
    reader.join(10)
    assert json.loads(read[0]).keys() == result.keys()
    assert stat.S_ISFIFO((tmp_path / "pipe").stat().st_mode)
    for _ in range(2):  # what mlm wrote is replaced
        assert main([*words, f"out={tmp_path / 'result.json'}"]) == 0


def test_results_are_whole_and_keep_permissions(tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    file.write_bytes(OURS)
    file.chmod(0o600)

    def fail(f: Any) -> None:
        f.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(UserError, match="No space left"):
        write_result(file, fail)
    assert file.read_bytes() == OURS
    write_result(file, OURS + b"\n")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(tmp_path / "cwd") == []


def test_tilde_and_the_empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    words = ["plan", "schedule", "pp=2", "micro_batches=2"]
    assert main([*words, "out=~/plan.json"]) == 0
    assert (tmp_path / "home" / "plan.json").exists()
    for command in (["pretrain"], ["data", "build"], ["ckpt", "verify", "x"]):
        assert main([*command, "out="]) == 2
    assert os.listdir() == []
