"""One training step of a GPT, measured beside those of others: `scripts/bench_train.py`."""
