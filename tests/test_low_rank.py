"""The low-rank preconditioner of version 0.1: what became of it."""

from __future__ import annotations

import pytest

import numpyro_fspace as fs


def test_it_names_what_to_use_in_its_place():
    with pytest.raises(NotImplementedError, match=r"low_rank\(20\) was removed.*rmsprop\(\).*dense\(\)"):
        fs.preconditioners.low_rank(20)
