"""Megatron-LM's files: which are found, and that hostile ones run nothing and damaged ones are named."""

import os
import pickle
import zipfile
from argparse import Namespace
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mlm.convert.dcp.unpickled import DATA, Name, Record
from mlm.convert.megatron.files import TorchFile, check_records, find_files
from mlm.util.errors import CorruptFileError, UserError
from tests.convert.megatron.written import (
    FILE,
    Layout,
    language_model,
    megatron_modules,
    rank_content,
    same_gpt2,
    save,
    written,
)
from tests.megatron_core import megatron_core


class Call:
    """A pickle of it calls a function when it is loaded."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.function, self.args


class Built:
    """A pickle of it makes an object of some class, then hands it a state that holds a call."""

    def __init__(self, call: Call) -> None:
        self.call = call

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (), {"x": self.call}


Content = dict[str, Any]
PUT: dict[str, Callable[[Content, Any], Any]] = {
    "beside": lambda content, bomb: content.update(note=bomb),
    "in args": lambda content, bomb: setattr(content["args"], "note", bomb),
    "for a tensor": lambda content, bomb: language_model(content)["encoder"].update(
        {"layers.0.mlp.dense_4h_to_h.weight": bomb}
    ),
    "as a key": lambda content, bomb: content.update({bomb: 1}),
    "in numpy's state": lambda content, bomb: content["rng_state"][0].update(np_rng_state=("MT19937", bomb)),
    "in a state": lambda content, bomb: content.update(note=Built(bomb)),
}


@pytest.mark.parametrize("where", PUT)
def test_pickle_that_calls_is_rejected_and_calls_nothing(tmp_path: Path, where: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "theirs" / "mp_rank_00" / FILE
    content = rank_content(same_gpt2(), Layout(), 0, 0, 1000)
    PUT[where](content, Call(os.mkdir, str(marker)))
    path.parent.mkdir(parents=True)
    save(path, content)
    with pytest.raises(CorruptFileError, match=r"refers to posix\.mkdir.*nothing was executed") as refusal:
        TorchFile(find_files(path.parent.parent).files[0, 0])
    assert not marker.exists()
    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
    with megatron_modules():
        torch.load(path, weights_only=False)
    assert marker.exists()  # the bomb was live


@pytest.mark.parametrize("protocol", [2, 4])
def test_tensors_of_torch_are_read_bit_equal(tmp_path: Path, protocol: int) -> None:
    """All dtypes; a part of a larger storage, a parameter, and one with attributes."""
    tensors: dict[str, torch.Tensor] = {
        str(dtype): (100 * torch.randn(3, 5)).to(dtype)
        for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int8, torch.bool)
    }
    tensors |= {"part": torch.randn(9)[2:6], "parameter": torch.nn.Parameter(torch.randn(4))}
    tensors["attributes"] = torch.randn(2)
    tensors["attributes"].partition_dim = 0  # type: ignore[attr-defined]
    args = Namespace(lr=1.5, betas=(0.9, 0.95), save=None, params_dtype=torch.bfloat16, big=1 << 70)
    torch.save({"args": args, "model": OrderedDict(tensors)}, tmp_path / FILE, pickle_protocol=protocol)
    file = TorchFile(tmp_path / FILE)
    check_records(tmp_path / FILE)
    for name, value in tensors.items():
        read = file.tensor(file.parts["model"][name])
        assert (read.dtype, read.shape) == (value.dtype, value.shape)
        assert torch.equal(read.view(torch.uint8), value.detach().clone().view(torch.uint8))
    fields = vars(args) | {"params_dtype": "torch.bfloat16"}
    assert file.parts["args"].fields("argparse.Namespace") == fields


def compress(path: Path) -> None:
    with zipfile.ZipFile(path) as records:
        contents = {info.filename: records.read(info) for info in records.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as records:
        for name, content in contents.items():
            records.writestr(name, content)


def swap_bytes(path: Path) -> None:
    with zipfile.ZipFile(path) as records:
        contents = {info.filename: records.read(info) for info in records.infolist()}
    with zipfile.ZipFile(path, "w") as records:
        for name, content in contents.items():
            records.writestr(name, b"big" if name.endswith("/byteorder") else content)


def save_as_before_1_6(path: Path) -> None:
    save(path, rank_content(same_gpt2(), Layout(), 0, 0, 1000), zipped=False)


DAMAGED: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (lambda path: os.truncate(path, 0), "damaged, or not written by torch"),
    "cut in the middle": (lambda path: os.truncate(path, path.stat().st_size // 2), "damaged, or not"),
    "cut at the end": (lambda path: os.truncate(path, path.stat().st_size - 20), "damaged, or not"),
    "a bare pickle": (lambda path: path.write_bytes(pickle.dumps(Call(os.mkdir, "marker"))), "damaged, or"),
    "of before PyTorch 1.6": (save_as_before_1_6, r"PyTorch 1\.6 or later .* save it again with a current"),
    # records could unpack to any size, and mapped into memory they would be read as weights
    "compressed": (compress, "is compressed"),
    "big-endian": (swap_bytes, "is big-endian"),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_damaged_file_is_rejected(tmp_path: Path, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    change, message = DAMAGED[case]
    path = written(tmp_path) / "mp_rank_00" / FILE
    change(path)
    with pytest.raises(CorruptFileError, match=message) as refusal:
        TorchFile(path)
    assert "\n" not in str(refusal.value)
    assert not Path("marker").exists()


def test_no_class_is_built(tmp_path: Path) -> None:
    """numpy's state, a loss scaler, an enumeration and a path are records of names and plain values."""
    content = TorchFile(written(tmp_path) / "mp_rank_00" / FILE).value
    types: set[type] = set()

    def walk(node: Any) -> None:
        types.add(type(node))
        match node:
            case dict():
                inner = [*node.keys(), *node.values()]
            case Record():
                inner = [node.args, node.state]
            case _:
                inner = node if isinstance(node, list | tuple) else []
        for value in inner:
            walk(value)

    walk(content)
    plain = {dict, list, tuple, str, bytes, int, float, bool, type(None)}
    assert types - plain == {Name, Record}


def test_every_class_that_megatron_itself_allows_is_data() -> None:
    """Megatron-LM loads such files by a list of its own (megatron/core/safe_globals.py)."""
    for allowed in megatron_core("safe_globals").SAFE_GLOBALS:
        assert DATA.fullmatch(f"{allowed.__module__}.{allowed.__qualname__}")


def ranks(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)
        (folder / name / FILE).touch()


@pytest.mark.parametrize(
    "iteration, name", [("1000", "iter_0001000"), ("release", "release"), (" 20\n", "iter_0000020")]
)
def test_latest_names_the_folder(tmp_path: Path, iteration: str, name: str) -> None:
    ranks(tmp_path, *(f"{step}/mp_rank_00" for step in ("iter_0000020", "iter_0001000", "release")))
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(iteration)
    assert find_files(tmp_path).path.name == name


def test_only_iteration_needs_no_latest(tmp_path: Path) -> None:
    ranks(tmp_path, "iter_0000003/mp_rank_00")
    assert find_files(tmp_path).path == tmp_path / "iter_0000003"


def test_model_of_a_distributed_optimizer_is_found(tmp_path: Path) -> None:
    """model_rng.pt, and beside it mp_rank_00_000/optim.pt of each data-parallel rank."""
    ranks(tmp_path, "mp_rank_00")
    (tmp_path / "mp_rank_00" / FILE).rename(tmp_path / "mp_rank_00" / "model_rng.pt")
    for rank in ("000", "001"):
        (tmp_path / f"mp_rank_00_{rank}").mkdir()
        (tmp_path / f"mp_rank_00_{rank}" / "optim.pt").touch()
    assert find_files(tmp_path).files[0, 0].name == "model_rng.pt"


@pytest.mark.parametrize(
    "names, message",
    [
        (["mp_rank_00", "mp_rank_02"], r"mp_rank_01/model_optim_rng\.pt is missing"),
        (["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_001"], r"mp_rank_01_000/\S+ is missing"),
        (["mp_rank_00", "mp_rank_00_000"], "of two layouts"),
        (["mp_rank_00_000_000"], "of one expert-parallel rank"),
        (["iter_0000001/mp_rank_00", "iter_0000002/mp_rank_00"], "iter_0000001, iter_0000002: name one"),
        (["other"], "is it a Megatron-LM checkpoint"),
        (["common.pt"], "--ckpt-convert-format torch"),
        ([], "no such folder"),
    ],
)
def test_folder_that_is_not_complete_is_rejected(tmp_path: Path, names: list[str], message: str) -> None:
    ranks(tmp_path / "a", *names)
    with pytest.raises(UserError, match=message):
        find_files(tmp_path / "a")


def test_folder_of_one_rank_is_rejected(tmp_path: Path) -> None:
    ranks(tmp_path, "mp_rank_00")
    with pytest.raises(UserError, match="one rank of a checkpoint: name its parent"):
        find_files(tmp_path / "mp_rank_00")


@pytest.mark.parametrize("latest", ["4", "../../etc", "/etc"])
def test_latest_that_names_no_iteration_is_rejected(tmp_path: Path, latest: str) -> None:
    ranks(tmp_path / "iter_0000003", "mp_rank_00")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(latest)
    with pytest.raises(CorruptFileError, match="latest_checkpointed_iteration"):
        find_files(tmp_path)
