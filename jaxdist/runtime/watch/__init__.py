"""Watching a job: hangs, lost ranks, replicas that differ, signals."""
