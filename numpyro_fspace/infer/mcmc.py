"""``MCMC``: NumPyro's driver, ending with a warning when the run should not be trusted."""

from __future__ import annotations

import warnings

import jax
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace.infer.chain import KernelState
from numpyro_fspace.infer.kernels import SGHMC

__all__ = ["MCMC", "warn_of_trouble"]


class MCMC(NumPyroMCMC):
    """NumPyro's ``MCMC`` with a check at the end of ``run``.

    Everything else is NumPyro's; ``numpyro.infer.MCMC`` runs the same kernels to the same draws, and then
    ``fs.predict`` and ``fs.to_arviz`` give the warning. A run that goes on from ``post_warmup_state`` may be given
    other data: the full gradient of the control variates is then computed anew (NumPyro's class does so only when
    their centre is next renewed).

    Example:
        >>> import numpyro_fspace as fs
        >>> issubclass(fs.MCMC, __import__("numpyro").infer.MCMC)
        True
    """

    def run(self, rng_key, *args, extra_fields=(), init_params=None, **kwargs):
        state = self.post_warmup_state
        if isinstance(state, KernelState) and state.control.centre.size:
            self.post_warmup_state = self.sampler.refresh(state, args, kwargs)
        super().run(rng_key, *args, extra_fields=extra_fields, init_params=init_params, **kwargs)
        warn_of_trouble(self)


def warn_of_trouble(mcmc):
    """Warn when draws diverged, or the chain ran hot, in the sampling phase of ``mcmc``."""
    state = mcmc.last_state
    if not isinstance(state, KernelState) or isinstance(state.num_diverging, jax.core.Tracer):
        return
    num = int(np.sum(state.num_diverging))
    total = mcmc.num_samples * mcmc.num_chains
    if num:
        warnings.warn(
            f"{num} of {total} draws diverged: a non-finite potential or position; each kept the last good state. "
            "Use a smaller step_size (or a decaying schedule), a longer warm-up, or a larger nugget in the "
            "functional prior.",
            RuntimeWarning,
            stacklevel=3,
        )
    temperature = np.asarray(state.mean_temperature) / mcmc.sampler.temperature
    size = state.scale.shape[-1]
    tolerance = 0.1 + 4.0 * np.sqrt(2.0 / (size * max(1, mcmc.num_samples)))
    if isinstance(mcmc.sampler, SGHMC) and np.any(temperature > 1.0 + tolerance):
        warnings.warn(
            f"The chain runs hot: mean kinetic temperature {np.max(temperature):.2f} instead of 1, so the draws are "
            "wider than the posterior. Use a smaller step_size, a larger friction, or larger minibatches.",
            RuntimeWarning,
            stacklevel=3,
        )
