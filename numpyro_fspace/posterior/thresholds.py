"""The thresholds of a run that can be trusted: one set for tables, advice and warnings."""

from __future__ import annotations

#: Largest R-hat, and smallest bulk and tail effective sample size for each chain, of a run without a doubt. 50
#: effective draws give a mean to a seventh of a standard deviation.
RHAT_LIMIT, ESS_LIMIT = 1.05, 50
#: The share of the points of a function at which the estimate of its effective sample size may be small by chance.
CHANCE_SHARE = 0.05
#: Draws in a row in which a chain may stand still, as a share of all, and at least ``ESS_LIMIT``.
STANDSTILL_SHARE = 0.1
#: Draws of each chain that have to be kept before a warning is given. With fewer, chance alone exceeds the limits.
MIN_DRAWS = 100
#: Draws of each chain from which a run is judged at its end; a shorter run is a trial.
MIN_RUN = 200
#: Mean acceptance probability of a chain with a Metropolis test.
MIN_ACCEPT_PROB = 0.1
#: Kinetic temperature of a chain relative to the sampler's, beyond ``kinetic_margin``.
KINETIC_LIMIT = 1.1
#: Configurational temperatures relative to the sampler's, in the mean and in the leading direction (where a standard
#: deviation is too large by a tenth and a fifth), and how many standard errors tell them from chance.
MEAN_LIMIT, LEADING_LIMIT, NUM_ERRORS = 1.2, 1.44, 3.5
#: Least acceptance probability that a Metropolis test should have in a run without one.
ACCEPTANCE_LIMIT = 0.3
#: Limits of ``Report.noise_share`` and ``Report.weighted_noise_share``.
NOISE_LIMIT, WEIGHTED_NOISE_LIMIT = 0.1, 1.0
#: Growth of the mean square of the weights over the run.
DRIFT_LIMIT = 1.2
#: Standard deviations of the log likelihood by which a chain may be below the best one.
SHORTFALL_LIMIT = 10.0
#: Least share of a Gaussian process's variance at the measurement points in its product with the prior of the weights.
LEAST_PRODUCT_SHARE = 0.5


def kinetic_margin(size: int, num_draws: int = 1) -> float:
    """Four standard deviations of the mean kinetic temperature, relative to the sampler's.

    The temperature of one draw is the mean square of ``size`` standard normal momenta, whose variance is 2 / size.

    Args:
        size: the number of parameters.
        num_draws: over how many independent draws the mean is taken.
    """
    return 4.0 * (2.0 / (size * num_draws)) ** 0.5
