"""The launcher: starts the processes of a job on one host or several, ends them, and restarts them."""
