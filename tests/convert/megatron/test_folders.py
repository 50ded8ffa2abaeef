"""Finding Megatron-LM's rank files: which iteration is taken, and what is missing is named."""

from pathlib import Path

import pytest

from mlm.convert.megatron.files import find_files
from mlm.util.errors import CorruptFileError, UserError
from tests.convert.megatron.written import FILE, written


@pytest.mark.parametrize(
    "said, name", [("1000", "iter_0001000"), ("release", "release"), (" 20\n", "iter_0000020")]
)
def test_latest_names_the_folder(tmp_path: Path, said: str, name: str) -> None:
    for other in ("iter_0000020", "iter_0001000", "iter_0002000", "release"):
        rank = tmp_path / other / "mp_rank_00"
        rank.mkdir(parents=True)
        (rank / FILE).touch()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(said)
    assert find_files(tmp_path).path.name == name


def test_only_iteration_needs_no_latest(tmp_path: Path) -> None:
    folder = written(tmp_path)
    (folder.parent / "latest_checkpointed_iteration.txt").unlink()
    assert find_files(folder.parent).path == folder


def test_model_of_a_distributed_optimizer_is_found(tmp_path: Path) -> None:
    """model_rng.pt, and beside it mp_rank_00_000/optim.pt of each data-parallel rank."""
    folder = written(tmp_path)
    (folder / "mp_rank_00" / FILE).rename(folder / "mp_rank_00" / "model_rng.pt")
    for rank in ("000", "001"):
        (folder / f"mp_rank_00_{rank}").mkdir()
        (folder / f"mp_rank_00_{rank}" / "optim.pt").touch()
    assert find_files(folder).files[0, 0].name == "model_rng.pt"


def ranks(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / FILE).touch()


@pytest.mark.parametrize(
    "names, message",
    [
        (["mp_rank_00", "mp_rank_02"], r"mp_rank_01/model_optim_rng\.pt is missing"),
        (["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_001"], r"mp_rank_01_000/\S+ is missing"),
        (["mp_rank_00", "mp_rank_00_000"], "of two layouts"),
        (["mp_rank_00_000_000"], "of one expert-parallel rank"),
        (["iter_0000001/mp_rank_00", "iter_0000002/mp_rank_00"], "iter_0000001, iter_0000002: name one"),
        (["other"], "is it a Megatron-LM checkpoint"),
    ],
)
def test_folder_that_is_not_whole_is_rejected(tmp_path: Path, names: list[str], message: str) -> None:
    ranks(tmp_path, *names)
    with pytest.raises(UserError, match=message):
        find_files(tmp_path)


@pytest.mark.parametrize("latest", ["4", "../../etc", "/etc"])
def test_latest_that_names_no_iteration_is_rejected(tmp_path: Path, latest: str) -> None:
    ranks(tmp_path / "iter_0000003", "mp_rank_00")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(CorruptFileError, match="latest_checkpointed_iteration"):
        find_files(tmp_path)


def test_problems_of_folders_name_the_remedy(tmp_path: Path) -> None:
    ranks(tmp_path / "iter_0000003", "mp_rank_00")
    with pytest.raises(UserError, match="one rank of a checkpoint: name its parent"):
        find_files(tmp_path / "iter_0000003" / "mp_rank_00")
    with pytest.raises(UserError, match="no such folder"):
        find_files(tmp_path / "b")
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "common.pt").touch()
    with pytest.raises(UserError, match="--ckpt-convert-format torch"):
        find_files(tmp_path / "new")
