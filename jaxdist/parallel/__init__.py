"""Strategies (how parameters rest, meet the computation and come back) and schedules (in which order microbatches
run)."""
