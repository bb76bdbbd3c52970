"""Algorithms for collectives, one a file; the file's name is the algorithm's."""
