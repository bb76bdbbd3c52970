"""Runners of a model's blocks: a loop, with rematerialisation, with prefetch, with a split backward pass."""
