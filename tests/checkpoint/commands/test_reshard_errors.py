"""`mlm reshard` rejected, interrupted, killed, and called again."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm.checkpoint.commands import reshard
from mlm.checkpoint.native.folders import latest_checkpoint
from mlm.parallel.mesh import shape_context
from mlm.util.errors import CorruptFileError, UserError
from mlm.util.lock import single_writer
from tests.checkpoint.commands.reshard_runs import LAYERS, STEP, content, make_source, spec, to, trained
from tests.checkpoint.native.helpers import edit_manifest
from tests.checkpoint.native.kill_saves import kill_at_operation


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_source(tmp_path_factory.mktemp("source"))


class TestRefusals:
    """One line, and nothing published."""

    @pytest.mark.parametrize("place", [9, -5], ids=["header", "tensor"])
    def test_flipped_byte_in_the_source(self, tmp_path: Path, place: int) -> None:
        trained(shape_context(), tmp_path / "run", spec())
        file = tmp_path / "run" / "checkpoints" / STEP / "rank-00000.safetensors"
        damaged = bytearray(file.read_bytes())
        damaged[place] ^= 1
        file.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match="damaged"):
            to(tmp_path / "run", tmp_path / "out", 2)
        assert not [path for path in (tmp_path / "out").rglob("*") if "step-" in path.name]

    def test_layout_that_the_model_cannot_have(self, tmp_path: Path, source: Path) -> None:
        with pytest.raises(UserError, match=r"tp=3 does not divide the checkpoint's num_heads=4; use tp=2"):
            to(source, tmp_path, 3)

    def test_checkpoint_that_does_not_say_how_it_is_split(self, tmp_path: Path) -> None:
        trained(shape_context(), tmp_path / "run", spec())
        path = tmp_path / "run" / "checkpoints" / STEP
        edit_manifest(path, lambda body: [entry.update(split=None) for entry in body["tensors"].values()])
        with pytest.raises(UserError, match=r"does not record how") as told:
            to(tmp_path / "run", tmp_path / "out", 2)
        assert "\n" not in str(told.value)

    @pytest.mark.parametrize(
        "edit",
        [
            lambda body: body["tensors"]["model.final_norm.weight"]["split"].update(stage=LAYERS),
            lambda body: body["state"].update(reshard={"layout": {"tp": 1, "pp": 1, "vp": 1}}),
            lambda body: body["state"].update(reshard={"origin": "x", "layout": None}),
        ],
        ids=["layer", "origin", "layout"],
    )
    def test_manifest_that_makes_no_sense(self, tmp_path: Path, edit: object) -> None:
        trained(shape_context(), tmp_path / "run", spec())
        edit_manifest(tmp_path / "run" / "checkpoints" / STEP, edit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="Restore it from a copy"):
            to(tmp_path / "run", tmp_path / "out", 2)

    @pytest.mark.parametrize("edit", [{"num_layers": 10**9}, {"hidden_size": 4194304}], ids=str)
    def test_model_other_than_the_tensors(
        self, tmp_path: Path, edit: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compared as loading does, before a table of its layers is made."""
        trained(shape_context(), tmp_path / "run", spec())
        path = tmp_path / "run" / "checkpoints" / STEP
        edit_manifest(path, lambda body: body["state"]["config"]["model"].update(edit))
        monkeypatch.setattr(reshard, "stage_ranks_of", lambda *sizes: pytest.fail("made a table of layers"))
        with pytest.raises(UserError, match=r"other than the [\d,]+ stored"):
            to(tmp_path / "run", tmp_path / "out", 2)
        assert not (tmp_path / "out").exists()

    def test_disk_too_small_before_a_byte_is_written(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(os, "statvfs", lambda path: SimpleNamespace(f_bavail=1, f_frsize=1000))
        with pytest.raises(UserError, match=r"out=.*needs 0\.\d+ GB, 0\.00 GB are free"):
            to(source, tmp_path / "out", 2)
        assert not list((tmp_path / "out").rglob("*.safetensors"))

    @pytest.mark.parametrize("how", [{"tp": 4}, {"tp": 2, "weights_only": True}], ids=str)
    def test_place_where_another_checkpoint_is(
        self, tmp_path: Path, source: Path, how: dict[str, int]
    ) -> None:
        before = content(to(source, tmp_path, 2))
        with pytest.raises(UserError, match="none is overwritten"):
            to(source, tmp_path, **how)  # type: ignore[arg-type]
        assert content(tmp_path / "checkpoints" / STEP) == before

    def test_its_own_source(self, source: Path) -> None:
        with pytest.raises(UserError, match="holds the input"):
            to(source, source, 2)

    def test_place_where_another_tokenizer_is(self, tmp_path: Path, source: Path) -> None:
        (tmp_path / "tokenizer.json").write_text("another")
        with pytest.raises(UserError, match=r"holds tokenizer\.json, which mlm did not write"):
            to(source, tmp_path, 2)
        assert (tmp_path / "tokenizer.json").read_text() == "another"

    def test_place_that_another_process_writes_to(
        self, tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("mlm.util.lock.WAIT_S", 0.0)
        monkeypatch.setattr(reshard, "single_writer", lambda folder: single_writer(folder, wait_s=0.0))
        with single_writer(tmp_path / "checkpoints"), pytest.raises(UserError, match="in use by process"):
            to(source, tmp_path, 2)


class TestSecondTry:
    """The same command again."""

    def test_after_completion_says_so_and_changes_nothing(
        self, tmp_path: Path, source: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        path = to(source, tmp_path, 2)
        before = {file: file.stat().st_mtime_ns for file in path.iterdir()}
        capsys.readouterr()
        to(source, tmp_path, 2)
        assert capsys.readouterr().out == f"{path}: there already, as this command writes it\n"
        assert {file: file.stat().st_mtime_ns for file in path.iterdir()} == before

    @pytest.mark.slow
    def test_after_a_kill_at_any_file_operation_ends_with_the_same_bytes(self, tmp_path: Path) -> None:
        small = replace(spec(), model=replace(spec().model, num_layers=2))
        trained(shape_context(), tmp_path / "run", small)
        straight, number, killed = content(to(tmp_path / "run", tmp_path / "straight", 1, 2)), 0, True
        while killed:
            number += 1
            out = tmp_path / str(number)
            child = os.fork()
            if child == 0:
                kill_at_operation(number)
                to(tmp_path / "run", out, 1, 2)
                os._exit(0)
            killed = os.WIFSIGNALED(os.waitpid(child, 0)[1])
            found = latest_checkpoint(out / "checkpoints")
            assert found is None or content(found) == straight
            assert content(to(tmp_path / "run", out, 1, 2)) == straight
            left = sorted(path.name for path in (out / "checkpoints").iterdir())
            assert left == [".lock", "latest", STEP]
        assert number > 30
