"""The phases of a run: which update of ``chain_updates.py`` makes which draws."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from numpyro_fspace.mcmc import chain_updates
from numpyro_fspace.mcmc.plan import Plan
from numpyro_fspace.mcmc.warmup.updates import calibrate, warm_start

__all__ = ["Phase", "phases"]


class Phase(NamedTuple):
    """A part of a run that one program makes.

    Attributes:
        update: a function of ``chain_updates``.
        start, stop: its draws; a calibration makes none, and precedes draw ``start``.
        keeps: whether the program is that of the sampling phase, whose draws are kept.
    """

    update: Callable
    start: int
    stop: int
    keeps: bool

    @property
    def num_updates(self) -> int:
        """Number of updates."""
        return max(1, self.stop - self.start)


def phases(plan: Plan, start: int, stop: int) -> Iterator[Phase]:
    """The phases of the draws ``start`` to ``stop`` - 1, in their order.

    Burn-in that needs no measurements of its own is made by the program of the sampling phase.
    """
    warm, end = plan.schedule.num_optimizing, plan.num_warmup
    if start < min(stop, warm):
        yield Phase(warm_start, start, min(stop, warm), keeps=False)
    start = max(start, warm)
    limits = {*plan.interruptions, end, stop}
    for limit in sorted(draw for draw in limits if start <= draw <= stop):
        if start < limit:
            update = chain_updates.sample if start >= end and plan.measures else chain_updates.draw_and_learn
            yield Phase(update, start, limit, keeps=start >= end or not plan.measures)
        if limit in plan.interruptions and limit < stop:
            yield Phase(calibrate, limit, limit, keeps=False)
        start = limit
