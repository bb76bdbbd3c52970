"""One training step of a GPT, measured beside those of other libraries: `scripts/bench/train.py`."""
