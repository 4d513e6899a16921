"""R-hat and effective sample size of many quantities at once.

The numbers are ArviZ's (equal to rounding for two chains or more), but whole arrays go through each sort
and each Fourier transform: a thousand points take seconds, and nothing heavy is imported.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from jaxtyping import Float


def convergence(x: Float[np.ndarray, "P C S"]) -> Float[np.ndarray, "4 P"]:
    """R-hat, bulk and tail effective sample size, and the mean's standard error, of each point's chains.

    Args:
        x: finite draws that vary, points first, ``[P, C, S]`` with S at least 4.

    Returns:
        The four statistics, ``[4, P]``.

    Example:
        >>> convergence(np.random.default_rng(0).normal(size=(7, 2, 100))).shape
        (4, 7)

    Reference:
        Vehtari et al. (2021), Rank-normalization, folding, and localization: an improved R-hat.
    """
    half = x.shape[2] // 2
    split = np.concatenate([x[..., :half], x[..., -half:]], axis=1)
    median = np.median(split, axis=(1, 2), keepdims=True)
    scores = _normal_scores(split)
    rhat = np.maximum(_rhat(scores), _rhat(_normal_scores(np.abs(split - median))))
    low, high = np.quantile(x, [0.05, 0.95], axis=(1, 2), keepdims=True)
    ess_tail = np.minimum(_ess(split <= low), _ess(split <= high))
    mcse_mean = x.std(axis=(1, 2), ddof=1) / np.sqrt(_ess(split))
    return np.stack([rhat, _ess(scores), ess_tail, mcse_mean])


def standstill(x: Float[np.ndarray, "P C S"]) -> np.ndarray:
    """The longest run of draws in which nothing moves, in each chain, ``[C]``.

    Example:
        >>> standstill(np.array([[[0.0, 1.0, 1.0, 1.0, 2.0]]]))
        array([3])
    """
    stays = (x[..., 1:] == x[..., :-1]).all(axis=0)  # [C, S - 1]
    longest = run = np.ones(stays.shape[0], int)
    for stay in stays.T:
        run = np.where(stay, run + 1, 1)
        longest = np.maximum(longest, run)
    return longest


def _normal_scores(x: Float[np.ndarray, "P C n"]) -> Float[np.ndarray, "P C n"]:
    from scipy.special import ndtri
    from scipy.stats import rankdata

    ranks = rankdata(x.reshape(len(x), -1), axis=1)
    return ndtri((ranks - 0.375) / (ranks.shape[1] + 0.25)).reshape(x.shape)  # Blom's offsets


def _rhat(x: Float[np.ndarray, "P C n"]) -> Float[np.ndarray, " P"]:
    n = x.shape[2]
    within = x.var(axis=2, ddof=1).mean(axis=1)
    between = n * x.mean(axis=2).var(axis=1, ddof=1)
    with np.errstate(divide="ignore", invalid="ignore"):  # chains that differ but do not move: infinite
        return np.sqrt((between / within + n - 1) / n)


def _ess(x: Float[np.ndarray, "P C n"]) -> Float[np.ndarray, " P"]:
    """Number of draws over the autocorrelation time, cut by Geyer's initial monotone sequence."""
    from scipy import fft

    _, num_chains, n = x.shape
    centered = x - x.mean(axis=2, keepdims=True)
    length = fft.next_fast_len(2 * n, real=True)
    power = np.abs(fft.rfft(centered, length, axis=2)) ** 2
    autocov = fft.irfft(power.mean(axis=1), length, axis=1)[:, :n] / n  # [P, n], mean over chains
    within = autocov[:, :1] * n / (n - 1)
    pooled = autocov[:, :1] + x.mean(axis=2).var(axis=1, ddof=1)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):  # an indicator that is constant: caught at the end
        rho = 1 - (within - autocov) / pooled
    rho[:, 0] = 1.0
    num_pairs = max((n - 3) // 2, 0) + 1
    even, odd = rho[:, 0 : 2 * num_pairs : 2], rho[:, 1 : 2 * num_pairs : 2]
    pairs = even + odd
    # Sum the pairs before the first non-positive (or the last) one, each at most its predecessor, then
    # add that one's even term.
    cut = np.where((pairs <= 0).any(axis=1), (pairs <= 0).argmax(axis=1), num_pairs - 1)
    kept = np.where(np.arange(num_pairs) < cut[:, None], np.minimum.accumulate(pairs, axis=1), 0.0)
    at_cut = np.arange(len(x)), cut
    last = np.where(pairs[at_cut] > 0, even[at_cut], np.maximum(even[at_cut], 0.0))
    size = num_chains * n
    time = np.maximum(-1 + 2 * kept.sum(axis=1) + last, 1 / np.log10(size))
    return np.where(pooled[:, 0] > 0, size / time, size)
