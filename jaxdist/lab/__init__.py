"""The laboratory for slow networks: a job on virtual hosts with shaped links."""
