"""Sections of the configuration: their keys, with description and allowed values. Imports no jax."""
