"""A run that returns to one checkpoint again and again."""

import json
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import ArrayLike, NDArray

from tests.training.incidents.bad_data import BAD, Constant
from tests.training.incidents.runs import STEP, losses, pretrain
from tests.training.records import records


class Bad(Constant):
    """Three bad samples, each of the batch that takes the place of the one before when that is left out."""

    def gather(self, sample_ids: ArrayLike) -> NDArray[np.int64]:
        ids = np.asarray(sample_ids, dtype=np.int64)
        return super().gather(np.where(np.isin(ids, (BAD + 4, BAD + 8)), BAD, ids))


def build(data: object, *, vocab_size: int, num_samples: int, seed: int, validation: bool) -> Bad:
    """The samples that data.kind=tests.training.incidents.test_rewinds:build names."""
    return Bad(vocab_size, 8, num_samples)


def test_rewinds_to_a_checkpoint_from_before_them_are_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The checkpoint knows of none of them, yet the third of incident.rewinds=2 ends the run."""
    monkeypatch.setenv("MLM_TRUST", "tests")
    out, kind = tmp_path / "run", f"data.kind={__name__}:build"
    assert pretrain(out, kind, "incident.action=rewind", "incident.rewinds=2") == 1
    assert [record["left_out"] for record in records(out, "rewound")] == [[40, 4], [44, 4]]
    assert max(losses(out)) == STEP - 1


@pytest.mark.slow
def test_each_rewind_leaves_out_the_samples_of_those_before_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What earlier ones left out is not in the checkpoint that the run returns to."""
    monkeypatch.setenv("MLM_TRUST", "tests")
    out, kind = tmp_path / "run", f"data.kind={__name__}:build"
    often = ("checkpoint.save_every=2", "checkpoint.keep_last=4")  # each rewind goes one further back
    assert pretrain(out, kind, "incident.action=rewind", *often) == 0
    state = json.loads((out / "checkpoints" / "step-00000014" / "manifest.json").read_text())["state"]
    assert state["incidents"]["left_out_samples"] == [[40, 4], [44, 4], [48, 4]]
    assert state["consumed_samples"] == 14 * 4 + 3 * 4
