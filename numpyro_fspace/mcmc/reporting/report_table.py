"""``Report``: the numbers of a run's report, printed as a table with a line of advice for each doubt."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np

from numpyro_fspace.posterior.configurational_temperature import ConfigurationalTemperature
from numpyro_fspace.posterior.diagnostics import FunctionDiagnostics


@dataclass(frozen=True, repr=False)
class Report:
    """The numbers of a run's report and its advice; ``print`` it for a table.

    Attributes:
        functions: R-hat, effective sample sizes and moments of f at the inputs; None if no function is judged.
        sites: the same for the latent sites that are not weights, and for the parameters of a likelihood that depends
            on several networks; None if there are none.
        left_out: descriptions of the parts of the model that are not judged.
        num_diverging: draws of the sampling phase that diverged (our kernels undo them), in all chains; None if the
            run did not keep it.
        temperature: mean kinetic temperature of each chain relative to the sampler's, [C]; NaN for SGLD, which has
            no momentum, and always 1 for MCLMC.
        configurational: the configurational temperature of the draws relative to the sampler's, on average
            (``.mean``) and in the direction that the data determine best (``.leading``), with relative standard errors
            (``.mean_error``, ``.leading_error``): 1 for a distribution that is sampled correctly. None if a fifth of
            the run's gradients does not pay for eight draws, fewer than eight were kept, the draws of a latent site
            were not kept, more than a tenth of the gradients are not finite, or the model draws random numbers of its
            own.
        acceptance: the mean acceptance probability of the Metropolis test; for MCLMC without a test, what it would be.
            For other runs without a test: that of testing one draw (SGLD: one step) from the last state of each chain,
            with minibatch and points fixed.
        noise_share: variance of the stochastic gradient's noise relative to the sampler's own noise, per unit of
            time: the relative excess of temperature that minibatches and random points cause, to leading order, as a
            mean over all directions.
        weighted_noise_share: the same excess as a mean over directions weighted by the variance of this noise. It is
            large where the temperature is too high in a few of many directions, which ``temperature`` and
            ``noise_share`` do not show.
        drift: mean square of the networks' weights (of all sites without a network) in units of their prior scales, in
            the last quarter of each chain over that in the first, [C].
        shortfall: by how much the log likelihood of the data at the last state of each chain is lower than that of the
            chain where it is highest, [C]; of all data, even where the run used minibatches.
        product_shares: for each ``functional_prior`` of a Gaussian process, by name, the approximate share of the
            process's variance at the measurement points that remains in its product with the prior of the weights.
        advice: one line for each doubt; empty if there is none.

    Of runs by NumPyro's NUTS and other kernels, what they do not tell is NaN, None or empty.
    """

    functions: FunctionDiagnostics | None
    sites: FunctionDiagnostics | None
    left_out: tuple[str, ...]
    num_diverging: int | None
    temperature: np.ndarray
    configurational: ConfigurationalTemperature | None
    acceptance: float
    noise_share: float
    weighted_noise_share: float
    drift: np.ndarray
    shortfall: np.ndarray
    product_shares: dict[str, float]
    advice: tuple[str, ...]

    @property
    def noise_heat(self) -> float:
        """The former name of ``weighted_noise_share``."""
        warnings.warn(
            "Report.noise_heat is now Report.weighted_noise_share; the old name goes in 0.3.",
            DeprecationWarning,
            stacklevel=2,
        )
        return self.weighted_noise_share

    def __str__(self) -> str:
        lines = [] if self.functions is None else [str(self.functions)]
        lines += [] if self.sites is None else [str(self.sites).replace("Functions", "Sites", 1)]
        lines += [f"Left out: {'; '.join(self.left_out)}."] if self.left_out else []
        if self.product_shares:
            shares = ", ".join(f"{100 * share:.0f} % under {name}" for name, share in self.product_shares.items())
            lines.append(f"Prior: of the process's variance the product with the weights' prior has {shares}.")
        if sampler := ", ".join(self._of_sampler()):
            lines.append(f"Sampler: {sampler}")
        return "\n".join(lines + [f"Look: {line}" for line in self.advice] + ([] if self.advice else ["No doubts."]))

    def _of_sampler(self):
        """What is known of the sampler, part by part."""
        is_ours = not (np.isnan(self.noise_share) and np.isnan(self.drift).all())  # whose NaN is shown
        if not np.isnan(self.temperature).all():
            yield f"temperature {self._range(self.temperature)}"
        if self.configurational is not None:
            yield f"configurational {self.configurational}"
        if is_ours or not np.isnan(self.acceptance):
            yield f"acceptance {self.acceptance:.2f}"
        if is_ours:
            yield f"gradient-noise share {self.noise_share:.3f} (where it acts {self.weighted_noise_share:.2f})"
        if self.num_diverging is not None:
            yield f"{self.num_diverging} diverging"
        if is_ours:
            yield f"weight drift × {self._range(self.drift)}"

    def __repr__(self) -> str:
        return f"Report({self.functions!r}, num_doubts={len(self.advice)})"

    def _repr_pretty_(self, printer, cycle):
        """What notebooks show: the table."""
        printer.text(str(self))

    @staticmethod
    def _range(values):
        low, high = np.min(values), np.max(values)
        return f"{low:.2f}" if high - low < 0.005 else f"{low:.2f}-{high:.2f}"
