"""MCLMC and fMCLMC as NumPyro kernels."""

from __future__ import annotations

from collections.abc import Callable

from numpyro_fspace._checks import check_count, check_positive
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.sampler_adapters import Microcanonical
from numpyro_fspace.mcmc.warmup import Warmup
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.sgmcmc.preconditioners import Preconditioner
from numpyro_fspace.sgmcmc.shared import check_refreshes


class MCLMC(SGMCMCKernel):
    r"""Microcanonical Langevin Monte Carlo for a NumPyro model without minibatches and random measurement points.

    .. math:: dw = \sqrt P\, S u\, dt, \qquad
              du = -\frac{\sqrt P}{P - 1} (I - u u^\top) S^\top \nabla U / T\, dt + \text{noise}, \qquad |u| = 1

    Here P is the number of parameters w, and u is a unit vector. The momentum √P u only turns, so the chain keeps its
    speed. A Metropolis test would reverse it at each rejection. Without a test, chains of a ``gp_network`` had 1.6 and
    1.9 times as many effective draws of f per gradient as ``SGHMC`` on two tables (`figures <../performance.html>`_).

    **Target.** exp(-U/T) as ε → 0, where U is minus the log joint density of the model. It must be known exactly: no
    minibatches, no random points. Second moments are off by O(ε²). Warm-up tunes the step to the acceptance probability
    that a Metropolis test would have: 0.97 for a hundred parameters and 0.8 for 3700 or more (with a test: 0.9). In the
    models that were compared with exact results, standard deviations are then up to 3 % too large. ``fs.MCMC`` warns if
    they are too large by about 10 %, as they may be at a given step size. With ``metropolis=True`` the target is exact.

    Args:
        model: a NumPyro model whose latent sites are continuous, with at least two parameters.
        step_size: ε, a number; None lets warm-up choose it, at most 1.5√(T/λ) for the largest curvature λ (less if
            ``refresh_every`` > 1). The mean square of each momentum is 1, as for ``SGHMC`` at T = 1, so that step sizes
            are comparable.
        num_steps: gradient steps per draw.
        friction: γ > 0, per unit of time: the direction is forgotten within about 1/(γ ε) steps.
        temperature: T > 0.
        preconditioner: S, as for ``SGHMC``.
        metropolis: whether a Metropolis test accepts or rejects each draw, which makes exp(-U/T) the exact target.
        marginalize: whether the last layers of networks are integrated out, as for ``SGLD``.
        refresh_every: steps between partial refreshes of the direction; divides ``num_steps``.
        warmup: ``fs.Warmup`` settings.
        init_strategy: where chains start; by default networks at their own initial values, other sites at prior
            medians.

    Raises:
        TypeError, ValueError: as for ``SGHMC``; and at ``run`` if U is not known exactly, if the step size is a
            schedule, or if the model has a single parameter.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs
        >>> def model(y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        ...     with numpyro.plate("data", 100):
        ...         numpyro.sample("y", dist.Normal(mu, sigma), obs=y)
        >>> mcmc = fs.MCMC(fs.MCLMC(model), num_warmup=200, num_samples=200, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y=jnp.linspace(-1.0, 1.0, 100))
        >>> mcmc.get_samples()["mu"].shape
        (200,)

    References: J. Robnik, U. Seljak (2023), *Microcanonical Langevin Monte Carlo*; E. Sommer, J. Robnik, G. Nozadze,
    U. Seljak, D. Rügamer (2025), *Microcanonical Langevin ensembles*, who sample neural networks by it.
    """

    sampler_type = Microcanonical
    needs_exact_density = True
    min_parameters = 2  # because the momentum only turns

    def __init__(
        self,
        model: Callable,
        *,
        step_size: float | None = None,
        num_steps: int = 20,
        friction: float = 0.3,
        temperature: float = 1.0,
        preconditioner: Preconditioner | None = None,
        metropolis: bool = False,
        marginalize: bool | None = None,
        refresh_every: int = 1,
        warmup: Warmup | None = None,
        init_strategy: Callable = init_to_network,
    ):
        self.friction = friction
        self.refresh_every = refresh_every
        super().__init__(
            model,
            step_size=step_size,
            num_steps=num_steps,
            temperature=temperature,
            preconditioner=preconditioner,
            control_variates=False,
            metropolis=metropolis,
            marginalize=marginalize,
            warmup=warmup,
            init_strategy=init_strategy,
        )

    def _check_settings(self):
        super()._check_settings()
        check_positive(self.friction, "friction")
        check_count(self.refresh_every, "refresh_every")
        check_refreshes(self.num_steps, self.refresh_every)
        if not isinstance(self.metropolis, bool):
            raise TypeError(f"metropolis must be True or False, got {self.metropolis!r}.")


class fMCLMC(MCLMC):
    r"""Functional MCLMC: ``MCLMC`` on a model with a prior over functions.

    **Target.** exp(-U/T) with -U = log-likelihood + log p0(w) + scale · log P0(f(X_M)) as ε → 0, or exactly with
    ``metropolis=True``. (A ``gp_network`` has no factor P0: its prior is that of its latent sites.) Arguments and
    errors are those of ``MCLMC``; in addition a model with neither ``gp_network`` nor ``functional_prior`` raises a
    ValueError at ``run``.

    Example: as for ``fSGHMC``, with ``fs.fMCLMC(model)``.
    """

    needs_functional_prior = True
