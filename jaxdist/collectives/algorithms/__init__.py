"""Collective algorithms, one a file. The file's name is the name of the algorithm."""
