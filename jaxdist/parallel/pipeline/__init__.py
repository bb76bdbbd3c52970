"""Pipelines: schedule tables, the assignment of blocks to stages, and the loop that runs a table."""
