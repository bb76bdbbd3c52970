"""The commands behind `scripts/explain.py`, `scripts/checkpoint.py` and `scripts/doctor.py`."""
