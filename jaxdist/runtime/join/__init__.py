"""Joining a job: its description in the environment, the roll call of its processes, JAX's service."""
