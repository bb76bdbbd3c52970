"""Facts of traced programs: collectives, activations, FLOPs, rounds of messages, sharding."""
