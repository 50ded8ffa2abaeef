"""`mlm reshard` rejected, interrupted and killed."""

import os
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlm.models import stage
from mlm.parallel.mesh import shape_context
from mlm.util.errors import CorruptFileError, UserError
from tests.checkpoint.native.helpers import edit_manifest
from tests.checkpoint.native.kill_saves import kill_at_operation
from tests.convert.reshard_runs import LAYERS, STEP, content, make_source, spec, to, trained


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

    @pytest.mark.parametrize(
        "edit",
        [
            lambda body: [entry.update(split=None) for entry in body["tensors"].values()],
            lambda body: body["tensors"]["model.final_norm.weight"]["split"].update(stage=LAYERS),
            lambda body: body["state"].update(reshard={"layout": {"tp": 1, "pp": 1, "vp": 1}}),
        ],
        ids=["split", "layer", "origin"],
    )
    def test_manifest_that_makes_no_sense(self, tmp_path: Path, edit: object) -> None:
        trained(shape_context(), tmp_path / "run", spec())
        edit_manifest(tmp_path / "run" / "checkpoints" / STEP, edit)  # type: ignore[arg-type]
        with pytest.raises(UserError, match="Restore it from a copy"):
            to(tmp_path / "run", tmp_path / "out", 2)

    @pytest.mark.parametrize("edit", [{"num_layers": 2**20}, {"hidden_size": 2**20}], ids=str)
    def test_model_other_than_the_tensors(
        self, tmp_path: Path, edit: dict[str, int], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Compared as loading does, before a table of its layers is made."""
        trained(shape_context(), tmp_path / "run", spec())
        path = tmp_path / "run" / "checkpoints" / STEP
        edit_manifest(path, lambda body: body["state"]["config"]["model"].update(edit))
        monkeypatch.setattr(stage, "assign_stages", lambda *sizes: pytest.fail("made a table of layers"))
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

    @pytest.mark.parametrize("held", ["tokenizer.json", "checkpoints"])
    def test_folder_that_is_not_empty(self, tmp_path: Path, source: Path, held: str) -> None:
        (tmp_path / held).write_text("mine")
        with pytest.raises(UserError, match="is there already"):
            to(source, tmp_path, 2)
        assert (tmp_path / held).read_text() == "mine"

    def test_its_own_source(self, source: Path) -> None:
        with pytest.raises(UserError, match="is there already"):
            to(source, source, 2)


@pytest.mark.slow
def test_a_kill_at_any_file_operation_leaves_nothing_or_the_whole(tmp_path: Path) -> None:
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
        found = out / "checkpoints" / STEP if out.exists() else to(tmp_path / "run", out, 1, 2)
        assert content(found) == straight
        assert sorted(path.name for path in (out / "checkpoints").iterdir()) == ["latest", STEP]
    assert number > 30
