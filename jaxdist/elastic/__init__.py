"""Asynchronous and elastic training: servers that hold the parameters, and workers that come and go, on Ray."""
