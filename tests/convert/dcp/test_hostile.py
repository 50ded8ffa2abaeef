"""Folders of DCP made by an adversary: one line each, and nothing of them is run."""

import errno
import io
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex

from mlm.checkpoint.native.slices import Region
from mlm.convert.dcp import unpickled
from mlm.convert.dcp.metadata import MAX_METADATA_BYTES, read_metadata
from mlm.convert.dcp.storage import DCPReader
from mlm.convert.dcp.unpickled import (
    DAMAGES,
    REBUILD,
    STORAGE,
    Name,
    PickleError,
    PickleNode,
    SavedFile,
    read_pickle,
)
from mlm.util.errors import UserError
from tests.slow import thinned

TENSORS = {"a": torch.arange(12.0).view(4, 3), "b": torch.ones(5)}
RAN = "ran"
"""File that hostile code would make in the working directory."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    dcp.save(TENSORS, checkpoint_id=tmp_path / "ckpt", no_dist=True)
    return tmp_path / "ckpt"


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    tensors = read_metadata(folder, lambda name: True)
    reader = DCPReader(folder, tensors)
    found = {name: reader.read(name, Region.full(tensor.shape)) for name, tensor in tensors.items()}
    reader.verify()
    return found


def test_folder_of_torch_is_read_bit_equal(folder: Path) -> None:
    found = read_all(folder)
    assert found.keys() == TENSORS.keys()
    assert all(torch.equal(found[name], value) for name, value in TENSORS.items())


class Call:
    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


TOUCH = f"touch {RAN}"


def nested(depth: int) -> bytes:
    return b"\x80\x02)" + b"\x85" * depth + b"."


DOUBLING = b"".join(b"](h%ch%ceq%c" % (n, n, n + 1) for n in range(100))
"""Lists of two references to the list before: 2^100 leaves."""
PICKLES: dict[str, bytes] = {
    "os.system": pickle.dumps(Call(os.system, TOUCH)),
    "builtins.eval": pickle.dumps(Call(eval, f"open('{RAN}', 'w')")),
    "builtins.getattr": b"\x80\x02cbuiltins\ngetattr\n.",
    "a class of torch that loads": b"\x80\x02ctorch.storage\n_load_from_bytes\n(X\x01\x00\x00\x00attR.",
    "an object of subprocess": b"\x80\x02csubprocess\nPopen\n(X\x02\x00\x00\x00idt\x81.",
    "a module hidden in a name": b"\x80\x02ctorch.distributed.checkpoint.metadata.os\nsystem x\n.",
    "INST": b"(S'touch ran'\nios\nsystem\n.",
    "OBJ": b"(cos\nsystem\nS'touch ran'\no.",
    "EXT1": b"\x80\x02\x82\x01.",
    "PERSID": b"Pid\n.",
    "a call of a string": b"\x80\x02X\x01\x00\x00\x00a)R.",
    "BUILD on a list": b"\x80\x02]}b.",
    "nested a million deep": nested(1_000_000),
    "a million deep as a key": b"\x80\x02}" + nested(1_000_000)[2:-1] + b"Ns.",
    "doubled a hundred times": b"\x80\x02]q\x00" + DOUBLING + b".",
    "a number of 255 bytes": b"\x80\x02\x8a\xff" + b"\x01" * 255 + b".",
    "entry 2^31 of the memo": b"\x80\x02Nr\xff\xff\xff\x7f.",
    "a text of 2^60 bytes": b"\x80\x04\x8d" + (1 << 60).to_bytes(8, "little") + b"a.",
    "no mark": b"\x80\x02t.",
    "an empty stack": b".",
    "nothing": b"",
    "no pickle": b"PK\x03\x04" * 100,
}


def assert_one_line(folder: Path, match: str) -> None:
    with pytest.raises(UserError, match=match) as refusal:
        read_all(folder)
    assert str(refusal.value).isprintable()
    assert len(str(refusal.value)) < 500
    assert not Path(RAN).exists()


@pytest.mark.parametrize("name", thinned(PICKLES, 2))
def test_pickle_that_is_no_metadata_runs_nothing(folder: Path, name: str) -> None:
    (folder / ".metadata").write_bytes(PICKLES[name])
    assert_one_line(folder, "nothing was executed")


def test_instructions_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file of empty lists would take 64 times its size."""
    monkeypatch.setattr(unpickled, "MAX_INSTRUCTIONS", 100)
    assert read_pickle(pickle.dumps([1] * 90, 2)) == [1] * 90
    with pytest.raises(PickleError, match="more than 100 instructions"):
        read_pickle(b"]" * 1000 + b".")


def test_entries_whose_keys_are_no_text_are_left_out() -> None:
    """An adversary knows the hashes of numbers, and makes them equal: a dict of them takes quadratic time."""
    equal = {n * ((1 << 61) - 1): n for n in range(3)}
    assert read_pickle(pickle.dumps({"a": 1, **equal, (1, 2): 3}, 2)) == {"a": 1}


def metadata(folder: Path) -> Any:
    return pickle.loads((folder / ".metadata").read_bytes())


def set_info(found: Any, name: str, **fields: Any) -> None:
    info = next(info for index, info in found.storage_data.items() if index.fqn == name)
    for field, value in fields.items():
        object.__setattr__(info, field, value)


def set_chunks(found: Any, *chunks: tuple[tuple[int, ...], tuple[int, ...]]) -> None:
    """Give tensor a these chunks, each stored where its first one is."""
    made = [ChunkStorageMetadata(torch.Size(offset), torch.Size(size)) for offset, size in chunks]
    found.state_dict_metadata["a"].chunks[:] = made
    info = next(info for index, info in found.storage_data.items() if index.fqn == "a")
    for chunk in made:
        found.storage_data[MetadataIndex("a", chunk.offsets)] = info


def rename(found: Any, name: str) -> None:
    found.state_dict_metadata[name] = found.state_dict_metadata.pop("a")


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "path upwards": (lambda m: set_info(m, "a", relative_path="../x.distcp"), "file name"),
    "path of no distcp": (lambda m: set_info(m, "a", relative_path=".metadata"), "file name"),
    "file that is missing": (lambda m: set_info(m, "a", relative_path="__9_9.distcp"), "No such file"),
    "offset beyond the end": (lambda m: set_info(m, "a", offset=1 << 40), "ends at byte"),
    "offset below 0": (lambda m: set_info(m, "a", offset=-1), "whole number"),
    "offset of another item": (lambda m: set_info(m, "a", offset=1), "ends at byte|overlaps|no plain"),
    "length of 2^70": (lambda m: set_info(m, "a", length=1 << 70), "whole number"),
    "length too small": (lambda m: set_info(m, "a", length=10), "10 bytes are stored"),
    "a transform": (lambda m: set_info(m, "a", transform_descriptors=["zstd"]), "extension"),
    "hole": (lambda m: set_chunks(m, ((0, 0), (3, 3))), "hole"),
    "overlap": (lambda m: set_chunks(m, ((0, 0), (3, 3)), ((2, 0), (2, 3))), "overlap"),
    "outside": (lambda m: set_chunks(m, ((0, 0), (5, 3))), "not inside"),
    "other dims": (lambda m: set_chunks(m, ((0,), (12,))), "other dims"),
    "no chunk": (lambda m: set_chunks(m), "hole"),
    "huge shape": (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size((1 << 61, 3))), "hole"),
    "twelve dims": (lambda m: setattr(m.state_dict_metadata["a"], "size", torch.Size((1,) * 99)), "numbers"),
    "not stored": (lambda m: m.storage_data.clear(), "is not stored|more than are stored"),
    "other dtype": (
        lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", torch.bfloat16),
        "is not of torch.bfloat16",
    ),
    "odd dtype": (
        lambda m: setattr(m.state_dict_metadata["a"].properties, "dtype", torch.complex64),
        "not supported",
    ),
    "control characters": (lambda m: rename(m, "a\x1b[2J\nall is well"), "not allowed"),
    "no tensors": (lambda m: setattr(m, "state_dict_metadata", None), "is no Metadata"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_metadata_that_does_not_fit_is_named_in_one_line(folder: Path, name: str) -> None:
    change, match = CHANGES[name]
    found = metadata(folder)
    change(found)
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    assert_one_line(folder, match)


def deep() -> tuple[Any, ...]:
    """Tuples nested so deep that to hash them overflows the stack."""
    value: tuple[Any, ...] = ()
    for _ in range(1_000_000):
        value = (value,)
    return value


def tensor_in(*storage: Any) -> PickleNode:
    """A tensor of four numbers in a storage of this class and key."""
    return PickleNode(Name(REBUILD), (PickleNode(STORAGE, ("storage", *storage, "cpu", 4)), 0, (4,), (1,)))


FLOATS = PickleNode(STORAGE, ("storage", Name("torch.FloatStorage"), "0", "cpu", 4))
TENSORS_OF_AN_ADVERSARY: dict[str, Callable[[], Any]] = {
    "a key that overflows the stack": lambda: tensor_in(Name("torch.FloatStorage"), deep()),
    "a class that overflows the stack": lambda: tensor_in(deep(), "0"),
    "a million dims": lambda: PickleNode(Name(REBUILD), (FLOATS, 0, (1,) * 1_000_000, (1,) * 1_000_000)),
    "more than is stored": lambda: PickleNode(Name(REBUILD), (FLOATS, 1, (4,), (1,))),
    "a first element below 0": lambda: PickleNode(Name(REBUILD), (FLOATS, -1, (4,), (1,))),
    "a type without a name": lambda: PickleNode(Name("torch._tensor._rebuild_from_type_v2"), (1, 2, (3,), 4)),
    "no arguments": lambda: PickleNode(Name(REBUILD), ()),
}


@pytest.mark.parametrize("name", thinned(TENSORS_OF_AN_ADVERSARY, 2))
def test_tensor_of_an_adversary_is_not_found(name: str) -> None:
    with pytest.raises(DAMAGES):
        SavedFile(None, {"0": (100, 16)}).find(TENSORS_OF_AN_ADVERSARY[name]())


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def flipped() -> bytes:
    content = bytearray(saved(TENSORS["a"]))
    content[bytes(content).index(TENSORS["a"].numpy().tobytes()) + 5] ^= 1
    return bytes(content)


ITEMS: dict[str, Callable[[], bytes]] = {
    "a call": lambda: saved(Call(os.system, TOUCH)),
    "strides of 0": lambda: saved(torch.zeros(1).expand(4, 3)),
    "a transposed tensor": lambda: saved(torch.zeros(3, 4).t()),
    "another shape": lambda: saved(torch.zeros(2, 6)),
    "a list": lambda: saved([TENSORS["a"]]),
    "a flipped bit": flipped,
    "no archive": lambda: bytes(2000),
    "half an archive": lambda: saved(TENSORS["a"])[:700],
}


@pytest.mark.parametrize("name", ITEMS)
def test_item_that_holds_no_plain_tensor_is_rejected(folder: Path, name: str) -> None:
    content, found = ITEMS[name](), metadata(folder)
    (folder / "__9_0.distcp").write_bytes(content)
    set_info(found, "a", relative_path="__9_0.distcp", offset=0, length=len(content))
    (folder / ".metadata").write_bytes(pickle.dumps(found))
    assert_one_line(folder, "__9_0.distcp")


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_link_out_of_the_folder_is_not_followed(folder: Path, name: str) -> None:
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to(folder.parent / "elsewhere")
    assert_one_line(folder, "is a link")


def test_metadata_beyond_the_limit_is_not_read(folder: Path) -> None:
    with open(folder / ".metadata", "r+b") as f:
        f.truncate(MAX_METADATA_BYTES + 1)
    assert_one_line(folder, "is the limit")


class FailingDisk(io.BytesIO):
    def __init__(self, path: Path, reads: int) -> None:
        super().__init__(path.read_bytes())
        self.name, self.reads = str(path), reads

    def readinto(self, buffer: Any) -> int:
        self.reads -= 1
        if self.reads < 0:
            raise OSError(errno.EIO, "Input/output error")
        return super().readinto(buffer)


@pytest.mark.parametrize("reads", [None, 0, 7])
def test_file_that_cannot_be_read_is_not_called_damaged(folder: Path, reads: int | None) -> None:
    """It is gone, or the disk fails at its archive, or at the numbers of a tensor."""
    reader = DCPReader(folder, read_metadata(folder, lambda name: name == "a"))
    (file,) = reader.files
    if reads is None:
        (folder / file).unlink()
    else:
        reader._open[file] = FailingDisk(folder / file, reads)
    for call in (lambda: reader.read("a", Region.full((4, 3))), reader.verify):
        with pytest.raises(UserError, match=rf"{file}: cannot be read: .*Copy the whole") as raised:
            call()
        assert type(raised.value) is UserError
