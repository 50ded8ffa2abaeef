"""Checkpoints in a store, written by runs that go on, are killed, or lose their keys; and runs from them."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mlm.checkpoint.native.save_load import latest_checkpoint
from mlm.cli import main
from mlm.runs.config import CheckpointConfig
from mlm.training import mirror
from mlm.training.mirror import Mirror
from mlm.training.trainer import Trainer
from mlm.util import object_store
from mlm.util.errors import UserError
from mlm.util.object_store import list_objects, open_store
from tests.cli.pretrain.test_blended_command import TINY
from tests.slow import slow
from tests.stores import BUCKET, KEY, SECRET, Store, serve

WORDS = [*TINY, "data=synthetic", "checkpoint.save_every=2"]
SHARD = re.compile(r"step-(\d+)-\w+/rank")


@pytest.fixture(scope="module")
def server() -> Iterator[Store]:
    with serve() as store:
        yield store


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 3)


def pretrain(*words: str) -> int:
    return main(["pretrain", *words])


def listed(url: str) -> list[int]:
    """Steps that the mirror lists as whole."""
    return [step_of_folder(name) for name in Mirror(url).checkpoints]


def step_of_folder(name: str) -> int:
    return int(name.split("-")[1])


def copied(source: str, name: str) -> str:
    url, s3 = f"{BUCKET}/{name}", open_store(source)
    for each in list_objects(source):
        s3.copy(each.url, url + each.url.removeprefix(source))
    return url


def folders(url: str) -> set[str]:
    names = {each.url.removeprefix(f"{url}/").partition("/")[0] for each in list_objects(url)}
    return {name for name in names if name.startswith("step-")}


def tensors(out: Path) -> dict[str, torch.Tensor]:
    path = latest_checkpoint(out / "checkpoints")
    assert path is not None
    assert path.name == "step-00000008"
    return {name: x for file in path.glob("rank-*") for name, x in load_file(file).items()}


def step_of_put(path: str) -> int:
    """The step whose shard is put; 0 of another object."""
    found = SHARD.search(path)
    return int(found[1]) if found else 0


@pytest.mark.slow
def test_a_run_from_its_mirror_is_the_run_from_its_folder_to_the_bit(
    store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Through errors 500 and truncated bodies. The mirror keeps what the folder keeps."""
    url, puts = f"{BUCKET}/equal", []

    def put(path: str) -> bytes | str | None:
        puts.append(path)
        errors = {1: b"500 InternalError", 4: b"503 SlowDown"}
        is_first = step_of_put(path) == 4 and sum(step_of_put(each) == 4 for each in puts) == 1
        return "truncate" if is_first else errors.get(len(puts))

    store.put, store.fail = put, lambda number: "truncate" if number % 3 == 1 else None
    mirrored = [*WORDS, f"checkpoint.mirror={url}"]
    assert pretrain(*mirrored, f"out={tmp_path / 'a'}", "train.steps=4", "checkpoint.keep_last=1") == 0
    assert listed(url) == [4]
    assert pretrain(f"resume={url}", f"out={tmp_path / 'b'}", "train.steps=8", "checkpoint.keep_every=4") == 0
    assert listed(url) == [4, 8]
    assert folders(url) == set(Mirror(url).checkpoints)
    assert pretrain(f"resume={url}", f"out={tmp_path / 'c'}", "train.steps=9", "checkpoint.keep_every=4") == 0
    assert listed(url) == [4, 8, 9]
    assert pretrain(f"resume={tmp_path / 'a'}", "train.steps=8", "checkpoint.mirror=null") == 0
    here, there = tensors(tmp_path / "a"), tensors(tmp_path / "b")
    assert here.keys() == there.keys()
    assert all(torch.equal(here[name], there[name]) for name in here)
    printed = "".join(capfd.readouterr())
    assert f"resuming from {tmp_path / 'b'}/checkpoints/step-00000004" in printed
    assert KEY not in printed
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(key.encode() in path.read_bytes() for path in files for key in (KEY, SECRET))


def test_training_does_not_wait_for_an_upload_and_the_newest_is_finished(
    store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The upload of step 2 goes on until the run has saved its last step, and deleted the others."""
    url, out, reached, puts = f"{BUCKET}/slow", tmp_path / "out", [], []
    kept, deleted = (out / "checkpoints" / f"step-{step:08}" for step in (8, 4))

    def put(path: str) -> None:
        puts.append(path)
        deadline = time.monotonic() + 20
        while step_of_put(path) == 2 and time.monotonic() < deadline:
            if kept.exists() and not deleted.exists():
                reached.append(path)
                return
            time.sleep(0.02)

    store.put = put
    words = [f"out={out}", f"checkpoint.mirror={url}", "train.steps=8", "checkpoint.keep_last=1"]
    assert pretrain(*WORDS, *words) == 0
    assert len(reached) == 1
    assert sum("step-00000002" in path for path in puts) == 2  # its shard, and its manifest
    assert listed(url) == [8]
    reasons = "(step-00000006 is complete|it was deleted) before its turn"  # saves are reported late, too
    assert re.search(f"step-00000004 is not mirrored: {reasons}", caplog.text)


@pytest.mark.slow
def test_ctrl_c_leaves_out_the_last_upload(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Exit code 0 of a finished run means that its last checkpoint is in the mirror."""
    url, interrupted = f"{BUCKET}/interrupted", threading.Event()
    bar = mirror.progress_bar

    def interrupt(*arguments: Any, **options: Any) -> Any:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        threading.Timer(2.0, interrupted.set).start()
        return bar(*arguments, **options)

    monkeypatch.setattr(mirror, "progress_bar", interrupt)
    store.put = lambda path: interrupted.wait(20) and None if step_of_put(path) == 2 else None
    assert pretrain(*WORDS, f"out={tmp_path}", f"checkpoint.mirror={url}", "train.steps=2") == 1
    assert not interrupted.is_set()
    line = f"the upload is left out (Ctrl-C); mlm pretrain resume={tmp_path} uploads it"
    assert line in capfd.readouterr().err
    assert listed(url) == []
    assert interrupted.wait(20)


@pytest.mark.parametrize(
    ("action", "line"),
    [
        (b"403 InvalidAccessKeyId", "access denied (InvalidAccessKeyId); give credentials that may write it"),
        slow(("truncate", "truncated in each of 3 uploads; check the network")),
    ],
)
def test_a_last_upload_that_fails_is_one_line_and_exit_code_1(
    store: Store,
    tmp_path: Path,
    action: bytes | str,
    line: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(object_store, "ATTEMPTS", 2)
    url = f"{BUCKET}/failing-{action[-5:]!s}".replace("'", "")
    store.put = lambda path: action if step_of_put(path) == 4 else None
    out, before = f"out={tmp_path}", open_store(url)
    assert pretrain(*WORDS, out, f"checkpoint.mirror={url}", "train.steps=4") == 1
    assert (open_store(url) is before) == ("denied" not in line)  # new keys in ~/.aws are found
    assert listed(url) == [2]
    (printed,) = [line for line in capfd.readouterr().err.splitlines() if "not mirrored" in line]
    assert printed.startswith("mlm pretrain: step-00000004 is not mirrored: s3://")
    assert line in printed
    assert printed.endswith(f"; mlm pretrain resume={tmp_path} uploads it")
    assert KEY not in printed
    store.reset()
    assert pretrain(f"resume={tmp_path}") == 0  # nothing left to train
    assert listed(url) == [2, 4]


@pytest.mark.slow
def test_a_kill_in_an_upload_leaves_the_checkpoint_before(
    store: Store, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """kill -9 of two ranks while a second shard is sent; the same command continues elsewhere."""
    url, begun, release = f"{BUCKET}/killed", threading.Event(), threading.Event()

    def put(path: str) -> None:
        if step_of_put(path) > 2 and "rank-00001" in path:
            begun.set()
            release.wait(60)

    store.put = put
    words = [*WORDS, f"checkpoint.mirror={url}", "checkpoint.from_mirror=true", "dist.device=cpu"]
    command = [sys.executable, "-m", "mlm", "pretrain", *words, f"out={tmp_path / 'a'}", "tp=2"]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, process_group=0)
    try:
        assert begun.wait(60), process.communicate(timeout=10)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        release.set()
    assert listed(url) == [2]
    assert len(folders(url)) == 2
    assert pretrain(*words, f"out={tmp_path / 'b'}", "train.steps=3") == 0
    assert "resuming from" in (printed := "".join(capfd.readouterr()))
    assert "step-00000002 (step 2)" in printed
    assert listed(url) == [2, 3]
    assert folders(url) == set(Mirror(url).checkpoints)


@pytest.fixture(scope="module")
def mirrored(server: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    """The mirror of a run to step 4, and its folder."""
    server.reset()
    url, out = f"{BUCKET}/made", tmp_path_factory.mktemp("runs") / "made"
    assert pretrain(*WORDS, f"checkpoint.mirror={url}", f"out={out}", "train.steps=4") == 0
    assert listed(url) == [2, 4]
    return url, out


def test_a_second_run_is_rejected_unless_it_resumes(
    store: Store, mirrored: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url, out = mirrored
    told = []
    for flags in (["--check"], []):
        assert pretrain(*WORDS, f"checkpoint.mirror={url}", f"out={tmp_path / 'b'}", *flags) == 2
        told.append([x for x in capfd.readouterr().err.splitlines() if "checkpoint.mirror" in x])
    (line,) = told[0]
    assert told[1] == told[0]
    assert not (tmp_path / "b").exists()
    assert re.search(r"holds step-00000004-\w+ of another run, .*; continue it by resume=", line)
    assert pretrain(*WORDS, f"checkpoint.mirror={url}", f"out={out}", "train.steps=4") == 0
    first = Mirror(url)
    first.write()
    Mirror(url).write()
    newest = latest_checkpoint(out / "checkpoints")
    assert newest is not None
    with pytest.raises(UserError, match="another run writes there now; name another prefix"):
        first.upload(newest, CheckpointConfig())


@pytest.mark.slow
@pytest.mark.parametrize("key", ["ckpt", "resume"])
def test_a_mirrored_run_continues_without_what_it_has_begun_with(
    store: Store, tmp_path: Path, key: str
) -> None:
    """Weights of another run, or its state, that the next machine does not have."""
    url, first = f"{BUCKET}/without-{key}", tmp_path / "first"
    assert pretrain(*WORDS, f"out={first}", "train.steps=2") == 0
    words = [*(WORDS if key == "ckpt" else []), f"{key}={first}", f"checkpoint.mirror={url}"]
    assert pretrain(*words, f"out={tmp_path / 'b'}", "train.steps=4") == 0
    shutil.rmtree(first)
    for flags in (["--check"], []):
        assert pretrain(f"resume={url}", f"out={tmp_path / 'c'}", "train.steps=6", *flags) == 0
    assert listed(url)[-1] == 6


def test_a_folder_of_another_run_is_rejected(
    store: Store, mirrored: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(*WORDS, f"out={tmp_path}", "train.steps=2") == 0
    for flags in (["--check"], []):
        assert pretrain(f"resume={mirrored[0]}", f"out={tmp_path}", *flags) == 2
        assert f"out={tmp_path}: holds another run than {mirrored[0]}; set out=" in capfd.readouterr().err
    kept = sorted(path.name for path in (tmp_path / "checkpoints").glob("[!.]*"))
    assert kept == ["latest", "step-00000002"]


def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    store: Store, mirrored: tuple[str, Path], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = copied(mirrored[0], "flipped")
    shard = next(each.url for each in list_objects(url) if step_of_put(each.url) == 4)
    content = bytearray(open_store(url).cat_file(shard))
    content[-5] ^= 1
    open_store(url).pipe_file(shard, bytes(content))
    Mirror(url).download(tmp_path, None)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["latest", "step-00000002"]
    assert "rank-00000.safetensors" in caplog.text
    assert "taking the checkpoint before it" in caplog.text


@pytest.mark.parametrize(
    ("resume", "line"),
    [
        ("s3://nowhere/run", "resume=s3://nowhere/run/config.yaml: no such bucket; correct the URL"),
        (f"{BUCKET}/empty", f"resume={BUCKET}/empty: holds no config.yaml of a run; name a prefix"),
        ("s3:/bucket/made", "resume=s3:/bucket/made: no URL of an object store; write resume=s3://BUCKET"),
        (f"s3://{KEY}:x@bucket/made", "resume: the URL holds credentials; put them into the environment"),
        (f"{BUCKET}/made checkpoint.mirror={BUCKET}/b", "a run continues in the mirror that it is resumed"),
    ],
)
def test_what_is_no_mirror_is_one_line(
    store: Store, resume: str, line: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert pretrain(*f"resume={resume}".split()) == 2
    (printed,) = capfd.readouterr().err.splitlines()
    assert line in printed
    assert KEY not in printed


@pytest.fixture(scope="module")
def ruined(mirrored: tuple[str, Path], server: Store, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A mirror of steps 2, 4 and 5, whose weights are 10^31 times too large."""
    server.reset()
    url, out = copied(mirrored[0], "ruined"), tmp_path_factory.mktemp("runs") / "ruined"
    words = ["checkpoint.from_mirror=true", "train.steps=5", "optimizer.lr=1e30"]
    pretrain(*WORDS, f"checkpoint.mirror={url}", f"out={out}", *words)
    assert listed(url) == [2, 4, 5]
    return url


def test_the_newest_good_checkpoint_is_downloaded_unless_a_step_is_named(
    store: Store, ruined: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url, out = copied(ruined, "good"), tmp_path / "out"
    Mirror(url).download(tmp_path / "good", None)
    assert [path.name for path in sorted((tmp_path / "good").iterdir())] == ["latest", "step-00000004"]
    assert "step-00000005 is passed over: the run has gone wrong since step 6" in caplog.text
    assert pretrain(f"resume={url}@2", f"out={out}", "train.steps=3", "optimizer.lr=1e-2") == 0
    assert listed(url) == [2, 3]
    assert "from_step: null" in (out / "config.yaml").read_text()


def test_keep_last_never_deletes_the_only_good_checkpoint_of_a_mirror(
    store: Store, ruined: str, tmp_path: Path
) -> None:
    """Uploaded from a folder that holds the doubtful checkpoint alone."""
    url = copied(ruined, "only")
    mirror = Mirror(url)
    mirror.download(tmp_path / "checkpoints", None, 5)
    (path,) = (tmp_path / "checkpoints").glob("step-*")
    mirror.upload(path, CheckpointConfig(keep_last=1))
    assert listed(url) == [4, 5]


@pytest.mark.slow
def test_a_mirror_is_rolled_back_and_forward(store: Store, ruined: str, tmp_path: Path) -> None:
    url = copied(ruined, "rolled")
    assert main(["ckpt", "rollback", url]) == 0
    assert listed(url) == [2, 4]
    assert main(["ckpt", "rollback", f"{url}@2"]) == 0
    assert listed(url) == [2]
    assert main(["ckpt", "rollback", url, "5"]) == 0
    assert listed(url) == [2, 4, 5]
    assert folders(url) == set(Mirror(url).checkpoints)


def test_a_folder_goes_back_with_its_mirror_and_stays_where_it_is_ahead(
    store: Store, mirrored: tuple[str, Path], tmp_path: Path
) -> None:
    url, root = copied(mirrored[0], "followed"), tmp_path / "checkpoints"
    shutil.copytree(mirrored[1] / "checkpoints", root)
    assert main(["ckpt", "rollback", url, "2"]) == 0
    Mirror(url).download(root, latest_checkpoint(root))
    assert latest_checkpoint(root) == root / "step-00000002"
    assert (root / "aside-step-00000004").is_dir()
    # its last upload was cut off
    url, root = copied(mirrored[0], "behind"), tmp_path / "ahead"
    shutil.copytree(mirrored[1] / "checkpoints", root)
    open_store(url).rm(f"{url}/{next(name for name in folders(url) if '-00000004-' in name)}", recursive=True)
    Mirror(url).download(root, latest_checkpoint(root))
    assert latest_checkpoint(root) == root / "step-00000004"


@pytest.mark.parametrize(
    "content",
    [
        *(None, b'{"writer": "a", "checkpo', b"[" * 100_000),
        b'{"writer": "a", "checkpoints": ["step-00000004-none"], "aside": []}',
    ],
)
def test_a_list_that_is_damaged_is_rebuilt_from_whole_folders(
    store: Store, mirrored: tuple[str, Path], content: bytes | None, caplog: pytest.LogCaptureFixture
) -> None:
    url = copied(mirrored[0], "rebuilt")
    before = Mirror(url).checkpoints
    if content is None:
        open_store(url).rm(f"{url}/mirror.json")
    else:
        open_store(url).pipe_file(f"{url}/mirror.json", content)
    assert Mirror(url).checkpoints == before
    assert "rebuilt from whole folders" in caplog.text


def test_an_upload_that_was_not_listed_counts_if_it_is_whole(
    store: Store, mirrored: tuple[str, Path]
) -> None:
    """A kill between the last object and mirror.json, and one before it."""
    url = copied(mirrored[0], "unlisted")
    body = {"writer": "", "checkpoints": Mirror(url).checkpoints[:1], "aside": []}
    open_store(url).pipe_file(f"{url}/mirror.json", json.dumps(body).encode())
    assert listed(url) == [2, 4]
    shard = next(each.url for each in list_objects(url) if step_of_put(each.url) == 4)
    open_store(url).rm([f"{url}/mirror.json", shard])
    assert listed(url) == [2]


def test_a_run_is_not_begun_anew_where_its_mirror_lost_all_checkpoints(
    store: Store, mirrored: tuple[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    url = f"{BUCKET}/lost"
    open_store(url).copy(f"{mirrored[0]}/config.yaml", f"{url}/config.yaml")
    assert pretrain(f"resume={url}", f"out={tmp_path}") == 1
    assert f"{url}: holds no whole checkpoint; restore one" in capfd.readouterr().err


def test_old_checkpoints_that_may_not_be_deleted_are_a_warning(
    store: Store,
    mirrored: tuple[str, Path],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    def deny(url: str) -> None:
        raise UserError(f"{url}: access denied")

    url = copied(mirrored[0], "denied")
    mirror = Mirror(url)
    shutil.rmtree(mirror.root / "step-00000002")
    monkeypatch.setattr(object_store, "delete_folder", deny)
    mirror.write()
    assert re.search(r"old checkpoints are not deleted: s3://\S+step-00000002\S+: access denied", caplog.text)
    monkeypatch.undo()
    mirror.write()
    assert [step_of_folder(name) for name in folders(url)] == [4]


def test_a_list_of_another_program_is_rejected(store: Store) -> None:
    url = f"{BUCKET}/forged"
    for checkpoints in (["../../x-1"], [3], 3, "step-00000001-a"):
        body = {"writer": "", "checkpoints": checkpoints, "aside": []}
        open_store(url).pipe_file(f"{url}/mirror.json", json.dumps(body).encode())
        with pytest.raises(UserError, match=r"mirror\.json: no list of checkpoints"):
            Mirror(url)


@pytest.mark.parametrize("ruin", ["lr=1e30", slow("90"), slow("0")])
def test_a_ruin_costs_no_good_checkpoint_of_folder_or_mirror(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ruin: str
) -> None:
    """The factor is of all weights after step 10, the rate of step 9 on; an empty `out` continues from 8."""
    url, out, update = f"{BUCKET}/ruin-{ruin}", tmp_path / "out", Trainer.clip_and_update
    words = [*WORDS, f"checkpoint.mirror={url}", "checkpoint.keep_last=1", "incident.patience=3"]
    assert pretrain(*words, f"out={out}", "train.steps=8") == 0

    def spoil(self: Any, parts: torch.Tensor) -> Any:
        outcome = update(self, parts)
        for shard in self.shards if self.step == 10 else ():
            shard.parameter.data.mul_(float(ruin))
        return outcome

    if not ruin.startswith("lr"):
        monkeypatch.setattr(Trainer, "clip_and_update", spoil)
    rate = [f"optimizer.{ruin}"] if ruin.startswith("lr") else []
    code = pretrain(*words, *rate, f"out={out}", "train.steps=14")
    monkeypatch.setattr(Trainer, "clip_and_update", update)
    assert code == (ruin != "0")  # zeroed weights have the loss of a model that has learned nothing
    assert 8 in listed(url)
    assert (out / "checkpoints" / "step-00000008").is_dir()
    again = [f"resume={url}", f"out={tmp_path / 'new'}", "optimizer.lr=1e-2", "train.steps=9"]
    assert pretrain(*again) == 0
    assert "step-00000008" in next(
        record["resumed_from"]
        for record in map(json.loads, (tmp_path / "new" / "metrics.jsonl").read_text().splitlines())
        if record["kind"] == "run"
    )
