"""Entries of somebody else's: tests name them by dotted paths. Each has an option of its own, and prints it."""
