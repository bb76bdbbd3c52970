"""Matrix products: with fp32 accumulation, in float8, or overlapped with a collective."""
