"""Checks of a model, its sites and its arguments before long computations."""
