"""Reasons to doubt the convergence of chains, in words."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np

from numpyro_fspace.posterior.diagnostics import FunctionDiagnostics
from numpyro_fspace.posterior.thresholds import CHANCE_SHARE, ESS_LIMIT, RHAT_LIMIT, STANDSTILL_SHARE


class Doubt(NamedTuple):
    """A reason to doubt the draws.

    Attributes:
        about: what it is about: values that are not finite, chains that do not move, R-hat or effective sample sizes.
        text: the reason and the cure, in words.
    """

    about: Literal["values", "movement", "R-hat", "ESS"]
    text: str


def convergence_doubts(found: Sequence[FunctionDiagnostics], still: np.ndarray) -> list[Doubt]:
    """The reasons to doubt the chains, the most severe first.

    Args:
        found: diagnostics of the same draws.
        still: the longest run of draws in which nothing moved, in each chain, [C].
    """
    names = [name for part in found for name in part.names]
    mean, rhat = (np.concatenate([getattr(part, field) for part in found]) for field in ("mean", "rhat"))
    ess = np.concatenate([np.minimum(part.ess_bulk, part.ess_tail) for part in found])
    num_chains, num_draws = found[0].num_chains, found[0].num_draws
    lines = []
    broken, frozen = np.isnan(mean), np.flatnonzero(still >= max(ESS_LIMIT, int(STANDSTILL_SHARE * num_draws)))
    same = np.isnan(rhat) & ~broken
    if broken.any():
        text = f"{_label(names[broken.argmax()])} is not finite in some draws: a chain diverged. Shorten step_size."
        lines.append(Doubt("values", text))
    if frozen.size:
        text = (
            f"{_chains(frozen, num_chains)} stood still for {still.max()} of {num_draws} draws in a row: the step is "
            "too long to be accepted or too short to be felt, or the chain starts where it cannot move. Let warm-up "
            "find the step size, or start elsewhere."
        )
        lines.append(Doubt("movement", text))
    elif same.any():
        text = (
            f"{_label(names[same.argmax()])} is the same in every draw up to rounding: the chains collapsed or never "
            "moved. Check step_size and the prior."
        )
        lines.append(Doubt("movement", text))
    if np.nanmax(rhat, initial=0.0) > RHAT_LIMIT:
        why = "the chains have not converged" if num_chains > 1 else "the chain has not settled, as its halves differ"
        text = (
            f"R-hat of {_label(names[np.nanargmax(rhat)])} reaches {_above_limit(np.nanmax(rhat))}: "
            f"{why}. Run longer (num_samples, or num_steps for more steps per draw), discard more "
            "(num_warmup), and do not read its spread."
        )
        lines.append(Doubt("R-hat", text))
    elif (lowest := _lowest(names, ess))[1] < ESS_LIMIT * num_chains:
        text = (
            f"the effective sample size of {lowest[0]} falls to {lowest[1]:.0f}, where {ESS_LIMIT * num_chains} are "
            f"wanted ({ESS_LIMIT} per chain): means are rough and quantiles rougher. Run longer, or raise num_steps."
        )
        lines.append(Doubt("ESS", text))
    return lines


def _lowest(names, ess) -> tuple[str, float]:
    """What has the smallest effective sample size, and this size, but for one point in twenty of a function.

    The estimate is noisy, that of the tails most, so that chance alone makes one of many points small.
    """
    groups: dict[str, list[float]] = {}
    for name, size in zip(names, ess, strict=True):
        if not np.isnan(size):
            groups.setdefault(_label(name), []).append(size)
    found = {name: sorted(sizes)[int(CHANCE_SHARE * (len(sizes) - 1))] for name, sizes in groups.items()}
    return min(found.items(), key=lambda item: item[1], default=("", np.inf))


def _above_limit(rhat: float) -> str:
    """An R-hat in as many digits as tell it from the limit."""
    return f"{rhat:.3f}" if f"{rhat:.2f}" == f"{RHAT_LIMIT:.2f}" else f"{rhat:.2f}"


def _label(name: str) -> str:
    """The label of a point without its index."""
    return re.sub(r"\[[\d, ]*\]$", "", name)


def _chains(numbers: np.ndarray, num_chains: int) -> str:
    if num_chains == 1:
        return "the chain"
    listed = ", ".join(map(str, numbers[:10])) + (", …" if len(numbers) > 10 else "")
    return f"chain{'s' if len(numbers) > 1 else ''} {listed} (the first being 0)"
