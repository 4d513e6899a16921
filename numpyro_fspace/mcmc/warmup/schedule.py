"""The schedule of a warm-up: which draws are preceded by which part of it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Schedule"]


@dataclass(frozen=True)
class Schedule:
    """The schedule of a warm-up, by the numbers of its draws from 0.

    Attributes:
        num_optimizing: number of its first draws, which are updates of the optimizer.
        calibrations: the draws before which the step size is calibrated: where burn-in begins, at its quarter, half and
            three quarters. Empty without burn-in.
        shortenings: further draws before which the step size can be shortened if there is no Metropolis test. The
            curvature differs along the chain (that of a likelihood is proportional to the inverse square of its noise),
            and the step must suit the stiffest positions.
        directions_found: the draw before which the directions of the gradient noise are fixed; they are estimated with
            the final preconditioner.
    """

    num_optimizing: int
    calibrations: tuple[int, ...]
    shortenings: tuple[int, ...]
    directions_found: int

    @classmethod
    def of(cls, num_warmup: int, num_optimizing: int) -> Schedule:
        """The schedule of a warm-up whose first ``num_optimizing`` draws are updates of the optimizer."""
        rest = num_warmup - num_optimizing
        if not rest:
            return cls(num_optimizing, (), (), num_warmup)
        draws = tuple(num_optimizing + (rest * quarter) // 4 for quarter in range(4))
        half = num_warmup - draws[2]
        eighths = {draws[2] + (half * part) // 8 for part in (1, 2, 3, 5, 6, 7)}
        return cls(num_optimizing, draws, tuple(sorted(eighths - set(draws))), (draws[2] + draws[3]) // 2)
