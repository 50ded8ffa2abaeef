"""Published runs: rows are valid layouts of the models that their tables name."""

import pytest
from plan_published import TABLES, naive_errors


@pytest.mark.parametrize("name", TABLES)
def test_rows_fill_their_gpus_and_the_naive_forecast_is_exact_for_the_best(name: str) -> None:
    rows = TABLES[name][1]()
    for row in rows:
        layout = row.layout
        assert layout.micro_batches * layout.micro_batch * layout.dp == layout.global_batch
        assert row.run.model.num_layers >= layout.pp * layout.vp
    assert max(naive_errors(rows)) == 0.0
