"""Wrappers of a strategy: each takes a `Strategy` and returns one with something added."""
