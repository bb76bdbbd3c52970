"""Pipelines: tables of ticks, stages, and the loop that runs a table."""
