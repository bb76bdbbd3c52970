"""How the blocks of a model run: as a loop, with recomputation, with prefetching, in two halves."""
