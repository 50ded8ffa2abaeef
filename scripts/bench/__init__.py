"""Parts of the training benchmark, `scripts/bench_train.py`."""
