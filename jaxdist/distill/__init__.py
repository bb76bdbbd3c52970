"""Distillation (Hinton et al. 2015): a model learns from the probabilities that a larger, trained one gives."""
