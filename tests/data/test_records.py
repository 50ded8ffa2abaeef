"""Records of tables: a file of a few kilobytes cannot fill the memory."""

import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from mlm.data.records import SUFFIXES, read_records
from mlm.finetune.splits import read_file
from mlm.util.errors import UserError
from tests.util.special_files import put

MEMORY = """
import resource, sys
from pathlib import Path
import pyarrow.parquet
from mlm.data.records import SUFFIXES, read_records
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
before, letters = peak(), 0
for _, record in read_records(Path(sys.argv[1])):
    letters += len(record["messages"][0]["content"])
print(letters >> 20, peak() - before)
"""


def test_one_message_said_many_times_is_held_once(tmp_path: Path) -> None:
    """24 rows, a batch, that say the same 16 MB: 384 MB of text."""
    path = tmp_path / "a.parquet"
    message = [{"role": "user", "content": "x" * (1 << 24)}]
    pq.write_table(pa.table({"messages": [message] * 24}), path, compression="zstd")
    assert path.stat().st_size < 1 << 16
    done = subprocess.run([sys.executable, "-c", MEMORY, path], capture_output=True, text=True, check=True)
    letters, grown = map(int, done.stdout.split())
    assert letters == 384
    assert grown < 300


def test_utf_16_is_named_with_the_command_that_converts_it(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "é"}\n', encoding="utf-16")
    with pytest.raises(UserError, match=r"a\.jsonl:1: not UTF-8 but UTF-16 \(convert it: iconv -f UTF-16"):
        list(read_records(path))


@pytest.mark.timeout(20)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        *((kind, f"is a {kind}") for kind in ("FIFO", "socket", "device", "folder")),
        ("loop", "Too many levels of symbolic links"),
    ],
)
@pytest.mark.parametrize("suffix", [*SUFFIXES, ".json", ".txt"])
def test_what_is_no_file_is_named_and_not_waited_for(
    tmp_path: Path, suffix: str, kind: str, problem: str
) -> None:
    path = put(kind, tmp_path / f"train{suffix}")
    with pytest.raises(UserError, match=f"train{suffix}: cannot be read: {problem}"):
        list(read_file(path))
