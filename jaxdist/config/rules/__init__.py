"""Constraints between options, one file a topic. Nothing here imports jax."""
