"""The command `jaxdist`: a table of subcommands, and a module for each; `scripts/*.py` call the same functions."""
