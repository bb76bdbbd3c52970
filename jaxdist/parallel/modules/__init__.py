"""Losses of modules that hold parameters, state and random streams, for steps that take functions."""
