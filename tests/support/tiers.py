"""The tiers of parametrized tests."""

import pytest

__all__ = ["some"]


def some(values, number):
    """The first ``number`` values as parameters of default tests; the others are slow."""
    return [value if i < number else pytest.param(value, marks=pytest.mark.slow) for i, value in enumerate(values)]
