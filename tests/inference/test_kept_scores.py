"""Scores that a stopped run leaves on disk, and those that the next run reads."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from mlm.inference import scoring
from mlm.inference.scoring import Request, Score, score
from mlm.parallel.mesh import ParallelContext
from tests.inference.scored_texts import (
    ALONE,
    Reference,
    assert_close,
    by_transformers,
    load,
    make_reference,
    random_requests,
)
from tests.ranks import run_on_ranks
from tests.slow import thinned


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return make_reference(tmp_path_factory.mktemp("scoring"))


def stop_after(count: int) -> Callable[[int], None]:
    """Ctrl-C when that many requests are done."""
    done = 0

    def advance(more: int) -> None:
        nonlocal done
        done += more
        if done >= count:
            raise KeyboardInterrupt

    return advance


@pytest.fixture
def stopped(reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Scores of a run stopped after about half of the requests, one text per micro-batch."""
    monkeypatch.setattr(scoring, "CPU_TOKENS", 1)
    kept = tmp_path / "kept.jsonl"
    with pytest.raises(KeyboardInterrupt):
        score(
            load(reference[1]),
            random_requests(reference[0]),
            batch_size=1,
            ctx=ALONE,
            kept=kept,
            identity="one",
            advance=stop_after(15),
        )
    return kept


def go_on(reference: Reference, kept: Path, **changes: Any) -> list[int]:
    """Score again; what `advance` was told. The scores must be right, and all kept."""
    model, run = reference
    told: list[int] = []
    requests = changes.pop("requests", None) or random_requests(model)
    found = score(
        load(run),
        requests,
        batch_size=1,
        ctx=ALONE,
        kept=kept,
        advance=told.append,
        **({"identity": "one"} | changes),
    )
    assert_close(found, by_transformers(model, requests))
    assert sum(told) == len(requests)
    assert len(kept.read_bytes().splitlines()) == 1 + len(requests)
    return told


def test_a_stopped_run_continues_where_it_was(reference: Reference, stopped: Path) -> None:
    assert go_on(reference, stopped)[0] == 18  # four texts at a time; three requests read the longest
    assert go_on(reference, stopped) == [29]


def test_a_torn_last_line_is_scored_again(reference: Reference, stopped: Path) -> None:
    stopped.write_bytes(stopped.read_bytes()[:-5])
    assert go_on(reference, stopped)[0] == 17


def test_another_identity_starts_anew(reference: Reference, stopped: Path) -> None:
    assert go_on(reference, stopped, identity="two")[0] == 6


DAMAGE: dict[str, Callable[[list[bytes]], list[bytes]]] = {
    "no JSON": lambda lines: [*lines[:3], b"\xff{", *lines[3:]],
    "no row": lambda lines: [*lines, b"7"],
    "no header": lambda lines: lines[1:],
    "empty": lambda lines: [],
}


@pytest.mark.parametrize("damage", thinned(DAMAGE, 2))
def test_a_damaged_file_is_written_anew(reference: Reference, stopped: Path, damage: str) -> None:
    lines = DAMAGE[damage](stopped.read_bytes().splitlines())
    stopped.write_bytes(b"".join(line + b"\n" for line in lines))
    assert go_on(reference, stopped)[0] == 6


def kept_on_rank(
    ctx: ParallelContext, run: Path, requests: Sequence[Request], kept: Path
) -> tuple[list[Score], list[int]]:
    told: list[int] = []
    found = score(
        load(run, ctx),
        requests,
        batch_size=1,
        ctx=ctx,
        kept=kept,
        identity="one",
        advance=told.append,
    )
    return found, told


@pytest.mark.slow
def test_every_rank_continues_from_what_the_first_one_reads(reference: Reference, stopped: Path) -> None:
    """At another layout than it was stopped at."""
    model, run = reference
    requests = random_requests(model)
    results = run_on_ranks(kept_on_rank, run, requests, stopped, tp=2, dp=2)
    assert all(result == results[0] for result in results)
    assert results[0][1][0] == 18
    assert_close(results[0][0], by_transformers(model, requests))
