"""The walks of the guide: short, downwards, and what a run really does."""

import re
import sys
import threading
from pathlib import Path
from types import FrameType

import pytest

import mlm
from mlm.cli import main

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "scripts/docs/pages/guides/walks.md"
STOP = re.compile(r"^(\d+)\. \[([\w/.]+)\]\((?:\.\./){4}([\w/.]+)\) `(\w+)`: ", re.M)
Stop = tuple[str, str]
"""File and function, or class."""


def walks() -> dict[str, list[Stop]]:
    """Each walk's stops, by its title."""
    _, *parts = PAGE.read_text(encoding="utf-8").split("\n## ")
    found = {}
    for part in parts:
        stops = STOP.findall(part)
        assert [int(number) for number, *_ in stops] == list(range(1, len(stops) + 1))
        assert all(shown == linked for _, shown, linked, _ in stops)
        found[part.partition("\n")[0]] = [(file, name) for _, _, file, name in stops]
    return found


def test_five_walks_are_short_and_enter_no_file_twice() -> None:
    assert len(walks()) == 5
    for title, stops in walks().items():
        files = [file for file, _ in stops]
        assert 5 < len(files) <= 12, title
        assert len(set(files)) == len(files), title


@pytest.fixture(scope="module")
def reached(tmp_path_factory: pytest.TempPathFactory) -> set[Stop]:
    """Functions, and classes that were made, of a small run that saves twice and is loaded."""
    seen: set[Stop] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(str(ROOT / "mlm")):
            file = str(Path(frame.f_code.co_filename).relative_to(ROOT))
            made = type(frame.f_locals.get("self")).__name__
            seen.add((file, made if frame.f_code.co_name == "__init__" else frame.f_code.co_name))

    out = tmp_path_factory.mktemp("walk") / "run"
    words = ["pretrain", "model=gpt2_tiny", "data=synthetic", "data.seq_length=16", "dist.device=cpu"]
    words += ["train.steps=2", "train.global_batch_size=2", "train.micro_batch_size=1", f"out={out}"]
    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        assert main([*words, "checkpoint.save_every=1", "dist.peak_tflops=1"]) == 0
        mlm.load(out)
    finally:
        sys.setprofile(before)
        threading.setprofile(None)  # type: ignore[arg-type]
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("title", walks())
def test_a_run_reaches_every_stop(title: str, reached: set[Stop]) -> None:
    start = ("mlm/__main__.py", "main")  # of the command, which this process is not
    missing = [stop for stop in walks()[title] if stop not in reached and stop != start]
    assert not missing
    assert all((ROOT / file).is_file() for file, _ in walks()[title])
