"""Reading Megatron-LM's files: hostile ones run nothing, and what is missing or damaged is named."""

import io
import os
import pickle
import shutil
import sys
import tarfile
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
from mlm.util.errors import CorruptFileError
from tests.convert.megatron.written import (
    FILE,
    Change,
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


def put(where: str, bomb: Any) -> Change:
    """A change that puts a bomb somewhere in a rank file."""

    def change(content: dict[str, Any]) -> None:
        tensors = language_model(content)["encoder"]
        name = "layers.0.mlp.dense_4h_to_h.weight"
        match where:
            case "beside":
                content["note"] = bomb
            case "args":
                content["args"] = bomb
            case "in args":
                content["args"].note = bomb
            case "iteration":
                content["iteration"] = bomb
            case "for a tensor":
                tensors[name] = bomb
            case "on a tensor":
                tensors[name].note = bomb
            case "for the model":
                content["model"] = bomb
            case "as a key":
                content[bomb] = 1
            case "in the optimizer":
                content["optimizer"]["exp_avg"][0] = bomb
            case "in numpy's state":
                content["rng_state"][0]["np_rng_state"] = (*content["rng_state"][0]["np_rng_state"], bomb)
            case "in a state":
                content["note"] = Built(bomb)

    return change


PLACES = [
    *("beside", "args", "in args", "iteration", "for a tensor", "on a tensor", "for the model", "as a key"),
    *("in the optimizer", "in numpy's state", "in a state"),
]


@pytest.mark.parametrize("where", PLACES)
def test_pickle_that_calls_is_rejected_and_calls_nothing(tmp_path: Path, where: str) -> None:
    marker = tmp_path / "marker"
    content = rank_content(same_gpt2(), Layout(), 0, 0, 1000)
    put(where, Call(os.mkdir, str(marker)))(content)
    path = tmp_path / "theirs" / "mp_rank_00" / FILE
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


@pytest.mark.parametrize(
    "function, args",
    [
        (eval, ("__import__('os').mkdir('marker')",)),
        (getattr, (os, "mkdir")),
        (__import__, ("os",)),
        (torch.hub.load, ("x", "y")),
        (pickle.loads, (b"x",)),
        (sys.exit, ()),
        (shutil.rmtree, ("marker",)),
    ],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_any_function_is_rejected_by_name(tmp_path: Path, function: Callable[..., Any], args: Any) -> None:
    path = tmp_path / FILE
    torch.save({"args": Call(function, *args) if function is not getattr else Loose()}, path)
    with pytest.raises(CorruptFileError, match=r"refers to \S*" + function.__name__):
        TorchFile(path)


class Loose:
    """A pickle of it looks up an attribute of a string."""

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, ("", "upper")


@pytest.mark.parametrize("protocol", [2, 3, 4])
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
        found = file.tensor(file.parts["model"][name])
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        assert torch.equal(found.view(torch.uint8), value.detach().clone().view(torch.uint8))
    fields = vars(args) | {"params_dtype": "torch.bfloat16"}
    assert file.parts["args"].fields("argparse.Namespace") == fields


def test_file_older_than_pytorch_1_6_is_told_to_be_saved_again(tmp_path: Path) -> None:
    save(tmp_path / FILE, rank_content(same_gpt2(), Layout(), 0, 0, 1000), zipped=False)
    with pytest.raises(CorruptFileError, match=r"PyTorch 1\.6 or later .* save it again with a current"):
        TorchFile(tmp_path / FILE)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_bare_pickle_is_rejected_and_runs_nothing(tmp_path: Path, protocol: int) -> None:
    """No torch.save around it: what an attacker may put in the file's place."""
    path, marker = tmp_path / FILE, tmp_path / "marker"
    path.write_bytes(pickle.dumps(Call(os.mkdir, str(marker)), protocol))
    with pytest.raises(CorruptFileError):
        TorchFile(path)
    assert not marker.exists()


def test_tar_format_is_rejected_and_runs_nothing(tmp_path: Path) -> None:
    """torch's first format, of 2016: three pickles in a tar."""
    path, marker = tmp_path / FILE, tmp_path / "marker"
    bomb = pickle.dumps(Call(os.mkdir, str(marker)), 2)
    with tarfile.open(path, "w") as tar:
        for name in ("storages", "tensors", "pickle"):
            entry = tarfile.TarInfo(name)
            entry.size = len(bomb)
            tar.addfile(entry, io.BytesIO(bomb))
    with pytest.raises(CorruptFileError, match="damaged, or not written by torch"):
        TorchFile(path)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_program_in_torchscript_is_rejected(tmp_path: Path) -> None:
    torch.jit.script(torch.nn.Linear(2, 2)).save(tmp_path / FILE)
    with pytest.raises(CorruptFileError):
        TorchFile(tmp_path / FILE)


def test_classes_that_other_libraries_allow_are_not_built(tmp_path: Path) -> None:
    """torch's list of allowed classes is no concern of ours."""
    path = tmp_path / FILE
    torch.save({"args": Call(Extra)}, path)
    with (
        torch.serialization.safe_globals([Extra]),
        pytest.raises(CorruptFileError, match=r"refers to \S*Extra"),
    ):
        TorchFile(path)
    assert not Extra.built


class Extra:
    built = False

    def __init__(self) -> None:
        Extra.built = True


def test_no_class_is_built(tmp_path: Path) -> None:
    """numpy's state, a loss scaler, an enumeration and a path are records of names and plain values."""
    content = TorchFile(written(tmp_path) / "mp_rank_00" / FILE).value
    kinds: set[type] = set()

    def walk(node: Any) -> None:
        kinds.add(type(node))
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
    assert kinds - plain == {Name, Record}


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.999])
def test_truncated_file_is_rejected(tmp_path: Path, share: float) -> None:
    path = written(tmp_path) / "mp_rank_00" / FILE
    os.truncate(path, int(share * path.stat().st_size))
    with pytest.raises(CorruptFileError, match="damaged, or not written by torch") as refusal:
        TorchFile(find_files(path.parent.parent).files[0, 0])
    assert "\n" not in str(refusal.value)


def test_compressed_records_are_rejected(tmp_path: Path) -> None:
    """They could unpack to any size, and mapped into memory they would be read as weights."""
    path = written(tmp_path) / "mp_rank_00" / FILE
    with zipfile.ZipFile(path) as records:
        contents = {info.filename: records.read(info) for info in records.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as records:
        for name, content in contents.items():
            records.writestr(name, content)
    with pytest.raises(CorruptFileError, match="is compressed"):
        TorchFile(path)


def test_every_class_that_megatron_itself_allows_is_data() -> None:
    """Megatron-LM loads such files by a list of its own (megatron/core/safe_globals.py)."""
    allowed = megatron_core("safe_globals").SAFE_GLOBALS
    for each in allowed:
        assert DATA.fullmatch(f"{each.__module__}.{each.__qualname__}")
