"""Published runs: rows are valid layouts of the models that their tables name."""

from pathlib import Path

import pytest
from plan_published import CHECKED, TABLES, naive_errors, own_h200


@pytest.mark.parametrize("name", TABLES)
def test_rows_fill_their_gpus_and_the_naive_forecast_is_exact_for_the_best(name: str) -> None:
    rows = TABLES[name][1]()
    for row in rows:
        layout = row.layout
        assert layout.micro_batches * layout.micro_batch * layout.dp == layout.global_batch
        assert row.run.model.num_layers >= layout.pp * layout.vp
    assert max(naive_errors(rows)) == 0.0


def test_the_record_of_another_card_is_rejected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Constants and attention are an H200's."""
    (tmp_path / "check.json").write_text(CHECKED.read_text("utf-8").replace("NVIDIA H200", "NVIDIA L40S"))
    monkeypatch.setattr("plan_published.CHECKED", tmp_path / "check.json")
    with pytest.raises(SystemExit, match="measured on NVIDIA L40S, which is not dgx_h200; check out an H200"):
        own_h200()
