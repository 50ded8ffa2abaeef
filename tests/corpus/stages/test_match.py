"""Stage `match`: memory for the keys of a pass."""

import tracemalloc
from pathlib import Path
from unittest.mock import Mock

import numpy as np

from mlm.corpus.config import DedupConfig
from mlm.corpus.stages.match import match
from mlm.corpus.stages.plan import BuildStage
from tests.corpus.texts import plain

SHARDS, KEYS = 4, 50_000
"""Tasks of `clean`, and documents of each."""


def test_memory_holds_keys_and_documents_of_a_pass_once(tmp_path: Path) -> None:
    """Documents, keys and the sort of the keys: 32 bytes a document, 48 with the arrays of the shards."""
    dedup = DedupConfig()
    clean = BuildStage("clean", SHARDS, tmp_path / "clean")
    stage = BuildStage("match", dedup.bands, tmp_path / "match")
    for folder in (clean.folder, stage.folder):
        folder.mkdir()
    rng = np.random.default_rng(1)
    for shard in range(SHARDS):
        keys = rng.integers(0, 1 << 63, (dedup.bands, KEYS), dtype=np.uint64)
        np.save(clean.folder / f"{shard:05d}.keys.npy", keys)
        clean.finish(shard, {"kept/documents": KEYS})
    config = plain(tmp_path / "text", dedup=dedup)
    plan = Mock(stages={"clean": clean, "match": stage}, config=config)
    match(plan, 0)  # imports and caches
    tracemalloc.start()
    try:
        match(plan, 1)
        assert tracemalloc.get_traced_memory()[1] < 40 * SHARDS * KEYS
    finally:
        tracemalloc.stop()
