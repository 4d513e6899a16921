"""SGLD, SGHMC, fSGLD and fSGHMC as NumPyro kernels.

The functional kernels are the same algorithms; they require that the model declares a prior over functions, by
``functional_prior`` or ``gp_network``. Random measurement points, like the minibatch of every ``plate``, are redrawn at
each gradient step. Each draw takes ``num_steps`` gradient steps inside one compiled loop.
"""

from __future__ import annotations

from collections.abc import Callable

from numpyro_fspace._checks import check_choice, check_count, check_positive
from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.sampler_adapters import Hamiltonian, Langevin
from numpyro_fspace.mcmc.warmup import Warmup
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.sgmcmc.preconditioners import Preconditioner
from numpyro_fspace.sgmcmc.sghmc import INTEGRATORS
from numpyro_fspace.sgmcmc.shared import check_refreshes


class SGLD(SGMCMCKernel):
    r"""Stochastic-gradient Langevin dynamics for a NumPyro model.

    .. math:: w \leftarrow w - \varepsilon\, S S^\top \nabla \tilde U(w) + \sqrt{2 \varepsilon T}\, S \xi,
              \qquad \xi \sim N(0, I)

    **Target.** exp(-U/T), where U is minus the log joint density of the model in its unconstrained parameters w, and Ũ
    is U or an estimate of it. A Metropolis test, the default where U is known exactly, makes this target exact. Without
    a test it is reached only as ε → 0: in a direction of curvature λ in u = S⁻¹w the standard deviation is too large by
    the factor 1/√(1 - ελ/2). At the step size that warm-up chooses, this factor is at most about 1.05 (1.01 if S is
    dense) and close to 1 in most directions. The minibatch noise that the control variate does not remove
    widens the draws further. Minibatches come from ``numpyro.plate(..., subsample_size=B)`` and are redrawn at every
    step.

    Args:
        model: a NumPyro model whose latent sites are continuous, and outside of plates with minibatches.
        step_size: ε, a number or an optax schedule of the gradient step. If None, warm-up takes
            0.2/λ for the largest curvature λ of U as a function of u = S⁻¹w (a quarter of that if S is dense). With a
            Metropolis test it tunes ε to an acceptance of 0.9, up to 0.4/λ.
        num_steps: gradient steps per draw. The default, 40, is twice that of ``SGHMC``: SGLD has no momentum.
        temperature: T > 0.
        preconditioner: S, from ``fs.preconditioners``; the step size is that of u = S⁻¹w. None is ``prior_scale()`` if
            the step size is given. If warm-up chooses it, None is ``automatic()``: ``dense()`` for up to 64 parameters
            without networks and minibatches, else ``rmsprop()``, with a dense block for the values of a ``gp_network``
            whose last layer is sampled.
        control_variates: with minibatches, correct each gradient by the minibatch's error at a center where the
            gradient of all N rows is known (``fs.sgmcmc.control_variates``). True renews the center every
            ⌈N/(B·num_steps)⌉ draws, so that a step costs at most three gradients of a minibatch of B rows. An integer
            is the number of draws between renewals. False, or a model that draws random numbers of its own, means no
            control variate.
        metropolis: whether a Metropolis test accepts or rejects each gradient step (MALA), which makes exp(-U/T) the
            exact target. None tests if U is known exactly (no minibatches, no random measurement points, no random
            numbers in the model) and the step size is not a schedule. True raises an error otherwise.
        marginalize: whether the last layers of networks are integrated out. The chain then samples the marginal
            density of all other sites, and each draw that is kept gets an exact draw of the last layers. None does so
            where it can: no minibatches, no random points, Normal likelihoods whose means are affine in the last layer
            and whose scales do not depend on it, functional priors that are Gaussian processes or calibrated, T = 1,
            and R ≤ 512 last-layer weights with Normal priors, R · N ≤ 2²² for N observations and values at measurement
            points. Of several networks it takes those for which this holds. The layer of a network that is no
            ``fs.gp_network`` must also be cheap: no GPU, on which small factorizations are slow, and at most five times
            the operations of a gradient. True ignores the cost, and raises an error if no layer can be integrated out.
            ``init_params`` may leave the sites of these layers out.
        warmup: ``fs.Warmup`` settings; ``fs.Warmup(warm_start=0.0)`` starts sampling at the initial values.
        init_strategy: where chains start; by default networks at their own initial values, other sites at prior
            medians.

    Raises:
        TypeError, ValueError: for arguments of the wrong kind or range; at ``run`` also for models and data that cannot
            be sampled.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs
        >>> def model(y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("data", 100, subsample_size=10):
        ...         yb = numpyro.subsample(y, event_dim=0)
        ...         numpyro.sample("y", dist.Normal(mu, 1.0), obs=yb)
        >>> mcmc = fs.MCMC(fs.SGLD(model), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y=jnp.ones(100))
        >>> mcmc.get_samples()["mu"].shape
        (50,)

    Reference: M. Welling, Y. W. Teh (2011), *Bayesian learning via stochastic gradient Langevin dynamics*.
    """

    sampler_type = Langevin


class SGHMC(SGMCMCKernel):
    r"""Stochastic-gradient Hamiltonian Monte Carlo for a NumPyro model.

    Underdamped Langevin dynamics dw = S p dt, dp = -Sᵀ∇U dt - γ p dt + √(2γT) dB, by the BAOAB splitting
    (one gradient per step), with a persistent momentum or one redrawn at every draw.

    **Target.** exp(-U/T), where U is minus the log joint density of the model in its unconstrained parameters w. A
    Metropolis test, the default where U is known exactly, makes this target exact. Without a test it is reached as
    ε → 0 for every ``num_steps``, and second moments are off by O(ε²). The minibatch noise that the control variate
    does not remove adds O(ε). ``integrator="euler"`` is w ← w + εSp, p ← (1 - εγ)p - εSᵀ∇Ũ + √(2γεT) ξ, the update of
    Wu et al. (2024); with ``resample_momentum`` the variance of w tends to L/(L-1) times the target's as ε → 0, for
    L = ``num_steps``.

    Args:
        model: a NumPyro model whose latent sites are continuous, and outside of plates with minibatches.
        step_size: ε, a number or an optax schedule of the gradient step. None lets warm-up choose it:
            with the default ``refresh_every``, 2, it is 1/√λ for the largest curvature λ of U as a function of u = S⁻¹w
            (half of that if S is dense), or, with a Metropolis test, tuned to an acceptance of 0.9, up to 1.22/√λ.
            Steps from 2/√λ on are unstable.
        num_steps: gradient steps per draw.
        friction: γ > 0, per unit of time. None is 1 if the step size is given. If warm-up chooses the step size, None
            is 0.3 for gradients without noise, and 1 or more for noisy ones. With ``integrator="baoab"`` up to eight of
            the noisiest directions then get more friction and less noise from the thermostat, so that their temperature
            stays near T. The friction of all others is raised until the noise should add at most 0.3 T to their
            temperature, in a mean over directions that is weighted by their noise.
        temperature: T > 0.
        preconditioner: S, from ``fs.preconditioners``; the step size is that of u = S⁻¹w. The mass matrix is
            (S Sᵀ)⁻¹. None is ``prior_scale()`` if the step size is given. If warm-up chooses it, None is
            ``automatic()``: ``dense()`` for models of up to 64 parameters without networks, functional priors and
            minibatches, else ``rmsprop()``, with a dense block for the values of a ``gp_network`` whose last layer is
            sampled.
        resample_momentum: whether the momentum p is redrawn from N(0, T I) at every draw.
        refresh_every: k, the steps between the partial refreshes of the momentum (BAOAB); divides ``num_steps``. None
            is 2, or 1 if ``num_steps`` is odd. A larger k draws fewer random numbers; the order of the error stays.
            A direction that turns by π between two refreshes, at ε√λ = 2 sin(π/2k), is hardly damped. Steps from
            warm-up turn it by at most 5π/6 (without a test 2π/3).
        integrator: ``"baoab"`` or ``"euler"``.
        control_variates: with minibatches, correct each gradient by the minibatch's error at a center where the
            gradient of all N rows is known (``fs.sgmcmc.control_variates``). True renews the center every
            ⌈N/(B·num_steps)⌉ draws, so that a step costs at most three gradients of a minibatch of B rows. An integer
            is the number of draws between renewals. False, or a model that draws random numbers of its own, means no
            control variate.
        metropolis: whether a Metropolis test accepts or rejects each draw (generalized HMC), which makes exp(-U/T) the
            exact target. None tests if U is known exactly (no minibatches, no random measurement points, no random
            numbers in the model), the step size is not a schedule and the integrator is ``"baoab"``. True raises an
            error otherwise.
        marginalize: whether the last layers of networks are integrated out, as for ``SGLD``.
        warmup: ``fs.Warmup`` settings; ``fs.Warmup(warm_start=0.0)`` starts sampling at the initial values.
        init_strategy: where chains start; by default networks at their own initial values, other sites at prior
            medians.

    Raises:
        TypeError, ValueError: as for ``SGLD``.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs
        >>> def model(y=None):
        ...     mu = numpyro.sample("mu", dist.Normal(0.0, 1.0))
        ...     with numpyro.plate("data", 100):
        ...         numpyro.sample("y", dist.Normal(mu, 1.0), obs=y)
        >>> mcmc = fs.MCMC(fs.SGHMC(model), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), y=jnp.ones(100))
        >>> mcmc.get_samples()["mu"].shape
        (50,)

    References: T. Chen, E. Fox, C. Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo*;
    B. Leimkuhler, C. Matthews (2013), *Rational construction of stochastic numerical methods for molecular sampling*.
    """

    sampler_type = Hamiltonian

    def __init__(
        self,
        model: Callable,
        *,
        step_size: float | Callable | None = None,
        num_steps: int = 20,
        friction: float | None = None,
        temperature: float = 1.0,
        preconditioner: Preconditioner | None = None,
        control_variates: bool | int = True,
        metropolis: bool | None = None,
        marginalize: bool | None = None,
        resample_momentum: bool = False,
        refresh_every: int | None = None,
        integrator: str = "baoab",
        warmup: Warmup | None = None,
        init_strategy: Callable = init_to_network,
    ):
        self.friction = friction
        self.resample_momentum = resample_momentum
        self.refresh_every = refresh_every
        self.integrator = integrator
        super().__init__(
            model,
            step_size=step_size,
            num_steps=num_steps,
            temperature=temperature,
            preconditioner=preconditioner,
            control_variates=control_variates,
            metropolis=metropolis,
            marginalize=marginalize,
            warmup=warmup,
            init_strategy=init_strategy,
        )

    @property
    def friction(self) -> float | None:
        """The friction that was given, or else 1; None if warm-up chooses it."""
        return 1.0 if self._friction is None and self.step_size is not None else self._friction

    @friction.setter
    def friction(self, friction):
        self._friction = friction

    @property
    def refresh_every(self) -> int:
        """The steps between refreshes that were given, or else the default for this number of steps."""
        return (1 if self.num_steps % 2 else 2) if self._refresh_every is None else self._refresh_every

    @refresh_every.setter
    def refresh_every(self, refresh_every):
        self._refresh_every = refresh_every

    def _check_settings(self):
        super()._check_settings()
        if self.friction is not None:
            check_positive(self.friction, "friction")
        check_choice(self.integrator, "integrator", INTEGRATORS)
        if not isinstance(self.resample_momentum, bool):
            raise TypeError(f"resample_momentum must be True or False, got {self.resample_momentum!r}.")
        check_count(self.refresh_every, "refresh_every")
        if self.integrator == "baoab":
            check_refreshes(self.num_steps, self.refresh_every)
        elif self.resample_momentum and self.num_steps == 1:
            raise ValueError(
                "num_steps=1 with integrator='euler' and resample_momentum=True: the momentum is drawn anew before the "
                "gradient has moved anything, so that the draws would not depend on the data. Take more steps."
            )

    def _why_untested(self):
        return "integrator='euler' is not reversible" if self.integrator == "euler" else super()._why_untested()


class fSGLD(SGLD):
    r"""Functional SGLD: ``SGLD`` on a model with a prior over functions.

    With S = I, without control variates and without a test, a step is

    .. math:: w \leftarrow w - \varepsilon \nabla_w\big[-\tfrac{N}{B}\textstyle\sum_b \log p(y_b \mid f(x_b; w))
              - \log P_0(f(X_M; w)) - \log p_0(w)\big] + \sqrt{2\varepsilon T}\, \xi

    **Target.** exp(-U/T) with -U = log-likelihood + log p0(w) + scale · E[log P0(f(X_M))], approached or exact as for
    ``SGLD``. The weights keep the prior p0 that the model gives them, and E is the mean over random measurement points
    X_M. (A ``gp_network`` has no factor P0: its prior is that of its latent sites.) Arguments and errors are those of
    ``SGLD``; in addition a model with neither ``gp_network`` nor ``functional_prior`` raises a ValueError at ``run``.

    Example: as for ``fSGHMC``, with ``fs.fSGLD(model)``.

    Reference: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural networks*,
    eq. 6, algorithm 1.
    """

    needs_functional_prior = True


class fSGHMC(SGHMC):
    r"""Functional SGHMC: ``SGHMC`` on a model with a prior over functions.

    **Target.** exp(-U/T) with -U = log-likelihood + log p0(w) + scale · E[log P0(f(X_M))], approached or exact as for
    ``SGHMC``. The weights keep the prior p0 that the model gives them, and E is the mean over random measurement points
    X_M, which are redrawn at every gradient step. (A ``gp_network`` has no factor P0: its prior is that of its latent
    sites.) Arguments and errors are those of ``SGHMC``; in addition a model with neither ``gp_network``
    nor ``functional_prior`` raises a ValueError at ``run``.

    The algorithm of the reference is ``fSGHMC(model, integrator="euler", resample_momentum=True, step_size=schedule,
    control_variates=False, preconditioner=fs.preconditioners.identity(), warmup=fs.Warmup(warm_start=0.0))`` for a
    model whose weights have the prior ``fs.model.flat()``.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, numpyro, tinygp
        >>> import numpyro.distributions as dist, numpyro_fspace as fs
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5))
        >>> points = fs.measurement.space_filling(-1.0, 1.0, 8)
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(30), nn.tanh, nn.Dense(1)])
        ...     f = fs.gp_network("f", net, gp, points)
        ...     numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)
        >>> x = jnp.linspace(-1.0, 1.0, 20)[:, None]
        >>> mcmc = fs.MCMC(fs.fSGHMC(model), num_warmup=50, num_samples=50, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, jnp.sin(4 * x[:, 0]))
        >>> fs.predict(mcmc, jax.random.key(1), x)["f"].shape
        (50, 20, 1)

    Reference: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural networks*,
    eq. 9, algorithm 2.
    """

    needs_functional_prior = True
