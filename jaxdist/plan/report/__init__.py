"""Texts and pictures of a plan."""
