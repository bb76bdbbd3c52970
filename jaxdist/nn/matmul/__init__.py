"""Matrix products: fp32 accumulation, float8, and products that overlap with their collective."""
