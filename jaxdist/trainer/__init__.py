"""One training run: loop, evaluation, saving, resuming, and what it prints."""
