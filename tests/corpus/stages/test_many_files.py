"""The work of a build grows with the bytes of its input, not with the square of its files or tasks."""

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlm.corpus.build import run_build
from mlm.corpus.read.records import Input
from mlm.corpus.read.shards import group, split_inputs
from mlm.corpus.stages import plan
from tests.corpus.texts import quiet, thorough, words, write_jsonl


def many_files(folder: Path, count: int) -> Path:

    for i in range(count):
        rng = random.Random(i % (count - 2))  # the last two repeat the first two
        write_jsonl(folder / f"{i:03d}.jsonl", [" ".join(words(rng, 40))])
    return folder


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Files of earlier stages that are opened, by what opens them."""
    counts = Counter[str]()

    def count(name: str, owner: Any, attribute: str) -> None:
        call = getattr(owner, attribute)

        def counted(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return call(*args, **kwargs)

        monkeypatch.setattr(owner, attribute, counted)

    count("markers", plan.BuildStage, "marker")
    count("arrays", np, "load")
    return counts


@pytest.mark.slow
def test_files_opened_grow_with_the_number_of_tasks(
    tmp_path: Path, calls: Counter[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task for each file, so that what each task opens shows."""
    monkeypatch.setattr("mlm.corpus.read.shards.SHARED_PART", 1 << 60)
    (tmp_path / "evaluation.txt").write_text("none of this is in the text " * 3)
    found = []
    for count in (8, 32):
        calls.clear()
        source = many_files(tmp_path / f"text{count}", count)
        receipt = run_build(thorough(source, split="1,0,0", out=str(tmp_path / f"out{count}")), quiet())
        assert receipt["removed"]["near_duplicate"]["documents"] == 2
        found.append(dict(calls))
    for name in ("markers", "arrays"):
        assert found[1][name] <= 4.5 * found[0][name], found


def test_small_files_share_tasks() -> None:
    files = [Input(f"{i}.txt", f"{i}.txt", 100, "", None) for i in range(20_000)]
    bounds = group(split_inputs(files, 1 << 23), 1 << 23)
    assert len(bounds) - 1 == 40  # 20,000 files at 4 KiB each in tasks of 2 MiB
    assert (bounds[0], bounds[-1]) == (0, 20_000)
