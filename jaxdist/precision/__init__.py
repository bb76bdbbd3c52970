"""Number types: policies, casts operation by operation, loss scaling, rounding that repeats."""
