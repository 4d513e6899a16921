"""Convergence of functions, judged by their values and not by the weights.

The hidden units of a network are exchangeable within a layer, so chains that agree on the function may disagree on its
weights, and R-hat of weights says nothing. :func:`function_diagnostics` judges draws of ``f`` at probe inputs instead.
The estimators are in :mod:`numpyro_fspace.posterior.rhat_ess`.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.posterior.rhat_ess import convergence
from numpyro_fspace.posterior.stacking import Stacking, stack_chains
from numpyro_fspace.posterior.thresholds import ESS_LIMIT, RHAT_LIMIT

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Bool, Float

__all__ = ["FunctionDiagnostics", "Stacking", "diagnose", "function_diagnostics", "stack_chains"]

ONE_CHAIN = "one chain; R-hat compares its two halves and cannot see other modes."


@dataclass(frozen=True, repr=False)
class FunctionDiagnostics:
    """Posterior moments and convergence of ``f`` at each of P probe points; ``print`` it for a summary.

    Attributes:
        names: the points' labels.
        num_chains: C, the number of chains.
        num_draws: S, draws per chain.
        mean: posterior means, ``[P]``.
        sd: posterior standard deviations, ``[P]``.
        rhat: rank-normalized split R-hat, the larger of bulk and tail, ``[P]``; NaN where undefined.
        ess_bulk: effective sample size for the center of the distribution, ``[P]``.
        ess_tail: the smaller of the effective sample sizes for the 5 % and 95 % quantiles, ``[P]``.
        mcse_mean: Monte Carlo standard error of ``mean``, ``[P]``.
        notes: problems, in words.
    """

    names: tuple[str, ...]
    num_chains: int
    num_draws: int
    mean: Float[np.ndarray, " P"]
    sd: Float[np.ndarray, " P"]
    rhat: Float[np.ndarray, " P"]
    ess_bulk: Float[np.ndarray, " P"]
    ess_tail: Float[np.ndarray, " P"]
    mcse_mean: Float[np.ndarray, " P"]
    notes: tuple[str, ...] = ()

    @property
    def max_rhat(self) -> float:
        """The largest R-hat; NaN if R-hat is NaN at any point, so that a comparison with a limit is false."""
        return float(self.rhat.max())

    @property
    def min_ess(self) -> float:
        """The smallest bulk or tail effective sample size; NaN if it is NaN at any point."""
        return float(np.minimum(self.ess_bulk, self.ess_tail).min())

    @property
    def converged(self) -> Bool[np.ndarray, " P"]:
        """Where R-hat is at most 1.05 and both effective sample sizes are at least 50 per chain, ``[P]``.

        These are the limits of ``fs.report`` and of the warnings of ``fs.MCMC``. For results to publish, Vehtari et al.
        (2021) recommend 1.01, and 100 per chain.
        """
        ess = np.minimum(self.ess_bulk, self.ess_tail)
        return (self.rhat <= RHAT_LIMIT) & (ess >= ESS_LIMIT * self.num_chains)

    def __str__(self) -> str:
        chains = "1 chain" if self.num_chains == 1 else f"{self.num_chains} chains"
        points = "1 point" if len(self.names) == 1 else f"{len(self.names)} points"
        with np.errstate(invalid="ignore", divide="ignore"):
            error = self.mcse_mean / self.sd
        lines = [
            f"Functions: {chains} of {self.num_draws} draws at {points}",
            f"{'':<12}{'median':>10}{'worst':>10}  at",
            self._row("R-hat", self.rhat, "{:.3f}", largest=True),
            self._row("ESS bulk", self.ess_bulk, "{:.0f}", largest=False),
            self._row("ESS tail", self.ess_tail, "{:.0f}", largest=False),
            self._row("MCSE / sd", error, "{:.3f}", largest=True),
            f"{self.converged.sum()} of {points}: R-hat ≤ {RHAT_LIMIT} and ESS ≥ {ESS_LIMIT} per chain.",
        ]
        return "\n".join(lines + [f"Note: {note}" for note in self.notes])

    def __repr__(self) -> str:
        sizes = f"num_chains={self.num_chains}, num_draws={self.num_draws}, num_points={len(self.names)}"
        return f"FunctionDiagnostics({sizes}, max_rhat={self.max_rhat:.3f}, min_ess={self.min_ess:.0f})"

    def _repr_pretty_(self, printer, cycle):
        """What notebooks show: the table."""
        printer.text(str(self))

    def _row(self, label: str, values: np.ndarray, form: str, *, largest: bool) -> str:
        if np.isnan(values).all():
            return f"{label:<12}{'nan':>10}{'nan':>10}"
        worst = np.nanargmax(values) if largest else np.nanargmin(values)
        median, extreme = form.format(np.nanmedian(values)), form.format(values[worst])
        return f"{label:<12}{median:>10}{extreme:>10}  {self.names[worst]}"


def function_diagnostics(
    f: Float[ArrayLike, "C S *P"] | Mapping[str, Float[ArrayLike, "C S *P"]],
    *,
    names: Sequence[str] | None = None,
) -> FunctionDiagnostics:
    r"""R-hat, effective sample sizes and moments of function draws at probe inputs.

    Each chain is split in half, into n draws each. R-hat is :math:`\sqrt{\hat V / W}` of the draws' normal scores, with
    :math:`W` the mean variance within half-chains, :math:`B/n` the variance of their means and
    :math:`\hat V = W (n-1)/n + B/n`; or the same of the scores of :math:`|f - \mathrm{median}|` if that is larger. One
    chain is enough for the computation, but it cannot show that other chains would have gone elsewhere.

    Args:
        f: draws with chains and draws first, ``[C, S, ...]``, or a dict of such arrays. Every entry of the other axes
            is a point, in C order: ``[C, S, M, K]`` gives ``M * K`` points.
        names: a label for each point (array only); ``f[i]`` or ``key[i]`` by default.

    Returns:
        A :class:`FunctionDiagnostics`. At points where ``f`` has NaN or infinite draws everything is NaN. Where ``f``
        is the same in every draw, R-hat, effective sample sizes and the standard error are NaN. ``notes`` and a
        ``UserWarning`` name such points, and chains that never move. Another warns of more chains than draws, as if
        the chains' draws stood one after another.

    Raises:
        TypeError: an array does not hold real numbers.
        ValueError: an array lacks the axes of chains and draws or has fewer than 4 draws per chain, or the arrays of a
            dict or the names do not fit together.

    Example:
        >>> draws = np.random.default_rng(0).normal(size=(4, 500, 3))
        >>> bool(function_diagnostics(draws).max_rhat < 1.01)
        True

    Reference:
        Vehtari et al. (2021), Rank-normalization, folding, and localization: an improved R-hat.
    """
    if isinstance(f, Mapping):
        if names is not None:
            raise ValueError("names labels the points of an array; a dict of draws is labeled by its keys.")
        if not f:
            raise ValueError("f is an empty dict; give at least one array of draws.")
        parts = {str(key): _as_draws(value, f"f[{key!r}]") for key, value in f.items()}
        if len({part.shape[:2] for part in parts.values()}) > 1:
            shapes = {key: part.shape[:2] for key, part in parts.items()}
            raise ValueError(f"The arrays of f must agree in chains and draws, got {shapes}.")
    else:
        parts = {"f": _as_draws(f, "f")}
    labels = [label for key, part in parts.items() for label in _labels(key, part.shape[2:])]
    draws = np.concatenate([part.reshape(*part.shape[:2], -1) for part in parts.values()], axis=2)
    if names is not None:
        if len(names) != len(labels):
            raise ValueError(f"names has {len(names)} labels, f has {len(labels)} points; they must agree.")
        labels = [str(name) for name in names]
    if draws.shape[0] > draws.shape[1]:
        text = (
            f"f has {draws.shape[0]} chains of {draws.shape[1]} draws, more chains than draws. If its first axis is "
            "that of the draws of all chains, as fs.predict returns them, pass f.reshape(num_chains, -1, *f.shape[1:])."
        )
        warnings.warn(text, UserWarning, stacklevel=2)
    found = diagnose(draws, tuple(labels))
    for note in found.notes:
        if note != ONE_CHAIN:
            warnings.warn(note, UserWarning, stacklevel=2)
    return found


def _as_draws(value: ArrayLike, name: str) -> np.ndarray:
    array = np.asarray(value)
    if array.dtype.kind not in "fiu":
        raise TypeError(f"{name} must hold real numbers, got dtype {array.dtype}.")
    if array.ndim < 2 or array.size == 0:
        raise ValueError(
            f"{name} must have shape [chains, draws, ...] and not be empty, got {array.shape}; for one "
            f"chain write f[None], and call get_samples(group_by_chain=True) to keep chains apart."
        )
    if array.shape[1] < 4:
        raise ValueError(
            f"{name} has {array.shape[1]} draws per chain (axis 1 of shape {array.shape}), R-hat needs 4 "
            f"or more; are the chain and draw axes swapped?"
        )
    return array


def _labels(key: str, shape: tuple[int, ...]) -> list[str]:
    if not shape:
        return [key]
    return [f"{key}[{', '.join(map(str, index))}]" for index in np.ndindex(*shape)]


def diagnose(draws: Float[np.ndarray, "C S P"], names: tuple[str, ...]) -> FunctionDiagnostics:
    """``function_diagnostics`` of numbers under their names, without warnings."""
    eps = np.finfo(draws.dtype).eps if draws.dtype.kind == "f" else 0.0
    draws = np.moveaxis(draws, 2, 0)
    finite = np.isfinite(draws).all(axis=(1, 2))
    x = np.where(finite[:, None, None], draws, 0).astype(np.float64)
    rounding = 4 * eps * np.abs(x).max(axis=(1, 2))
    varies = np.ptp(x, axis=(1, 2)) > rounding
    moves = np.ptp(x, axis=2) > rounding[:, None]  # [P, C]
    stats = np.full((6, len(x)), np.nan)
    stats[0, finite] = x[finite].mean(axis=(1, 2))
    stats[1, finite] = x[finite].std(axis=(1, 2), ddof=1)
    num_blocks = 1 + varies.sum() * x[0].size // 2**20  # about 2^20 numbers in each, which bounds the memory
    for block in np.array_split(np.flatnonzero(varies), num_blocks):
        if block.size:
            stats[2:, block] = convergence(x[block])
    notes = _notes(names, finite, varies, moves)
    if x.shape[1] == 1:
        notes += (ONE_CHAIN,)
    _, num_chains, num_draws = x.shape
    mean, sd, rhat, ess_bulk, ess_tail, mcse_mean = stats
    return FunctionDiagnostics(names, num_chains, num_draws, mean, sd, rhat, ess_bulk, ess_tail, mcse_mean, notes)


def _notes(names: tuple[str, ...], finite: np.ndarray, varies: np.ndarray, moves: np.ndarray) -> tuple[str, ...]:
    notes = []
    if not finite.all():
        notes.append(
            f"f is NaN or infinite in some draw at {np.sum(~finite)} of {len(names)} points (first "
            f"{names[finite.argmin()]}), which get NaN: a chain diverged; lower its step size."
        )
    fixed = finite & ~varies
    if fixed.any():
        notes.append(
            f"f is the same in every draw at {fixed.sum()} of {len(names)} points (first "
            f"{names[fixed.argmax()]}), where R-hat is NaN: the chains collapsed or never moved; check the "
            f"step size and the prior."
        )
    stuck = np.flatnonzero(~moves[varies].any(axis=0)) if varies.any() else np.empty(0, int)
    if stuck.size:
        notes.append(f"f never moves in chain {', '.join(map(str, stuck))} though other chains differ from it.")
    return tuple(notes)
