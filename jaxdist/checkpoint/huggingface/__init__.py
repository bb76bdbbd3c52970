"""Hugging Face checkpoints: their names of parameters, their files, conversion both ways."""
