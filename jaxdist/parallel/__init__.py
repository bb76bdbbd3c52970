"""Strategies (how parameters are stored, meet the computation and come back) and schedules (in which order microbatches
run)."""
