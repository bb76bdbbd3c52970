"""Calibration: what the model's own blocks and the links of these devices take, measured, for plans."""
