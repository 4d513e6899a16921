"""The user's settings of the warm-up, and its schedule: which draws are preceded by which part of it."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from numpyro_fspace._checks import check_positive


class Schedule(NamedTuple):
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


class Warmup(NamedTuple):
    """Settings of the warm-up.

    Warm-up begins with an optimizer, Adam, which does not move positive sites, such as a noise, and what determines
    only the noise. Then the sampler runs while step size, preconditioner and friction are chosen. All of them are
    frozen when warm-up ends.

    Attributes:
        warm_start: fraction of the warm-up draws spent on the optimizer, between 0 and 1; 0 skips it. A step size is
            chosen in the other draws. The other settings are for Adam; with a dense preconditioner, Newton's method
            takes its place and moves all sites.
        learning_rate: Adam's learning rate, in units of the preconditioner's scale (a prior standard deviation). It
            decays to a hundredth of this value.
        anchored: whether the prior p0 pulls the optimizer toward the start w* of the chain instead of the mode of p0.
            ∇(-log p0)(w) is then replaced by its difference from that at w*, or by 0 where that would push away from
            w*. Toward the mode, weights shrink; with a sampled scale a deep network may stay at f near zero with a
            large noise. (For a linear model with noise added to the targets the anchored optimum would be a draw from
            the posterior: "sample then optimize".)

    Example:
        >>> import numpyro_fspace as fs
        >>> fs.Warmup(warm_start=0.5).schedule(80).calibrations
        (40, 50, 60, 70)

    Reference: A. G. de G. Matthews, J. Hron, R. E. Turner, Z. Ghahramani (2017), *Sample-then-optimize posterior
    sampling for Bayesian linear models*.
    """

    warm_start: float = 0.3
    learning_rate: float = 0.01
    anchored: bool = True

    def check(self):
        """Raise an error for invalid settings."""
        if not isinstance(self.warm_start, int | float | np.number) or not 0.0 <= self.warm_start <= 1.0:
            raise ValueError(
                f"warm_start={self.warm_start!r} must be a fraction of the warm-up draws, between 0 and 1 (0.3: 30 %)."
            )
        check_positive(self.learning_rate, "learning_rate")
        if not isinstance(self.anchored, bool):
            raise TypeError(f"anchored={self.anchored!r} must be True or False.")

    def schedule(self, num_warmup: int) -> Schedule:
        """The schedule of a warm-up of ``num_warmup`` draws."""
        num_optimizing = round(self.warm_start * num_warmup)
        rest = num_warmup - num_optimizing
        if not rest:
            return Schedule(num_optimizing, (), (), num_warmup)
        draws = tuple(num_optimizing + (rest * quarter) // 4 for quarter in range(4))
        half = num_warmup - draws[2]
        eighths = {draws[2] + (half * part) // 8 for part in (1, 2, 3, 5, 6, 7)}
        return Schedule(num_optimizing, draws, tuple(sorted(eighths - set(draws))), (draws[2] + draws[3]) // 2)
