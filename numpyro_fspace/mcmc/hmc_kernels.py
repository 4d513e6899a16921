"""fHMC and fMALA: NumPyro's HMC on a functional posterior, with a Metropolis test, as references without bias."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from numpyro.infer import HMC
from numpyro.util import is_prng_key

from numpyro_fspace._checks import check_count, check_is_model, check_positive
from numpyro_fspace.model.checks.arguments import checked_arguments
from numpyro_fspace.model.checks.model import checked_model
from numpyro_fspace.model.data.arguments import with_rows
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.model.potential import ModelPotential
from numpyro_fspace.model.sites import subsampled_plates


class fHMC(HMC):
    r"""Hamiltonian Monte Carlo on a functional posterior, with all rows of the data and fixed measurement points.

    NumPyro's ``HMC`` (leapfrog, step size by dual averaging, diagonal mass from the warm-up's draws) with chains that
    start from the network's own initializer, a check that the model declares a ``functional_prior``, and, for more than
    one step, trajectories of random length: uniform up to twice ``num_steps`` steps, because fixed lengths resonate
    with the periods of the target.

    **Target.** p(y | w) p0(w) P0(f(X_M))^scale. The Metropolis test makes it exact at every step size. On small
    problems ``fHMC`` is the reference for ``fSGHMC``, beside ``NUTS``, which runs the same model and chooses its own
    number of steps. (For a ``gp_network`` the references are NumPyro's ``HMC`` and ``NUTS``.)

    Args:
        model: a NumPyro model with a ``functional_prior`` at fixed points and no minibatches.
        num_steps: mean number of leapfrog steps per draw, approximately.
        target_accept_prob: acceptance probability that warm-up aims at, between 0 and 1.
        init_strategy: where chains start; by default networks at their own initial values, other sites at prior
            medians.
        **settings: further settings of ``numpyro.infer.HMC``, except ``trajectory_length``.

    Raises:
        TypeError, ValueError: for arguments of the wrong kind or range; and a ValueError at ``run`` for a model without
            a ``functional_prior``, with random points, or with minibatches.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs
        >>> from flax import linen as nn
        >>> from tinygp import kernels
        >>> x = jnp.linspace(-1, 1, 8)[:, None]
        >>> gp, points = fs.GPPrior(kernels.ExpSquared(1.0)), fs.measurement.fixed(x)
        >>> def model(x, y=None):
        ...     f = fs.random_module("net", nn.Dense(1), input_shape=1)
        ...     f = fs.functional_prior("f", f, gp, points)
        ...     numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.3), obs=y)
        >>> mcmc = fs.MCMC(fs.fHMC(model), num_warmup=100, num_samples=100, progress_bar=False)
        >>> mcmc.run(jax.random.key(0), x, x[:, 0])
        >>> mcmc.get_samples()["net.bias"].shape
        (100, 1)

    Reference: R. M. Neal (2011), *MCMC using Hamiltonian dynamics*.
    """

    def __init__(
        self,
        model: Callable,
        *,
        num_steps: int = 20,
        target_accept_prob: float = 0.8,
        init_strategy: Callable = init_to_network,
        **settings: Any,
    ):
        check_is_model(model)
        check_count(num_steps, "num_steps")
        check_positive(target_accept_prob, "target_accept_prob")
        if target_accept_prob >= 1:
            raise ValueError(f"target_accept_prob={target_accept_prob} must be between 0 and 1.")
        check_positive(settings.get("step_size", 1.0), "step_size")
        super().__init__(
            model,
            num_steps=1 if num_steps == 1 else None,
            trajectory_length=None if num_steps == 1 else float(num_steps),  # renewed at every draw
            target_accept_prob=target_accept_prob,
            init_strategy=init_strategy,
            **settings,
        )
        self.mean_num_steps = num_steps

    def __repr__(self) -> str:
        settings = f"num_steps={self.mean_num_steps}, target_accept_prob={self._target_accept_prob}"
        return f"{type(self).__name__}(model={getattr(self.model, '__name__', type(self.model).__name__)}, {settings})"

    def init(self, rng_key, num_warmup, init_params=None, model_args=(), model_kwargs=None):
        model_kwargs = {} if model_kwargs is None else model_kwargs
        settings = {"key": jax.random.key(0), "init_strategy": self._init_strategy}
        with checked_model(self.model, model_args, model_kwargs, self._init_strategy):
            self._check(ModelPotential(self.model, model_args, model_kwargs, **settings))
        with checked_arguments(model_args, model_kwargs, model=self.model):
            return super().init(rng_key, num_warmup, init_params, *with_rows((model_args, model_kwargs)))

    def _check(self, potential):
        """Refuse a model without a functional prior, or with minibatches."""
        name = type(self).__name__
        if not potential.functional_priors:
            raise ValueError(
                f"{name} needs a model that declares fs.functional_prior(...); this one has none. Add it, or sample "
                "with numpyro.infer.HMC."
            )
        for plate, (_, batch) in subsampled_plates(potential.trace).items():
            raise ValueError(
                f"{name} needs the full data, but plate {plate!r} has subsample_size={batch}: remove it, or sample "
                "with fs.fSGHMC."
            )
        potential.check_data()

    def sample(self, state, model_args, model_kwargs):
        if self.mean_num_steps > 1:
            state = self._random_length(state) if is_prng_key(state.rng_key) else jax.vmap(self._random_length)(state)
        return super().sample(state, *with_rows((model_args, model_kwargs)))

    def postprocess_fn(self, args, kwargs):
        return super().postprocess_fn(*with_rows((args, kwargs)))

    def _random_length(self, state):
        rng_key, key = jax.random.split(state.rng_key)
        step_size = state.adapt_state.step_size
        length = 2.0 * self.mean_num_steps * step_size * jax.random.uniform(key, dtype=step_size.dtype)
        return state._replace(rng_key=rng_key, trajectory_length=length)


class fMALA(fHMC):
    r"""The Metropolis-adjusted Langevin algorithm on a functional posterior: ``fHMC`` with one step per draw.

    A leapfrog step of length h from a fresh momentum is the Langevin proposal
    :math:`w - \tfrac{h^2}{2} M^{-1} \nabla U + h\, M^{-1/2} \xi` with mass matrix M and ξ ~ N(0, I), fSGLD's step with
    ε = h²/2. Target, arguments and errors are those of ``fHMC``, without ``num_steps``. Warm-up aims by
    default at an acceptance of 0.574.

    Example: as for ``fHMC``, with ``fs.fMALA(model)``.

    References: G. O. Roberts, J. S. Rosenthal (1998), *Optimal scaling of discrete approximations to Langevin
    diffusions*; Z. Wang et al. (2022), who use it in weight and function space.
    """

    def __init__(
        self,
        model: Callable,
        *,
        target_accept_prob: float = 0.574,
        init_strategy: Callable = init_to_network,
        **settings: Any,
    ):
        if "num_steps" in settings:
            raise TypeError("fMALA takes one step per draw; use fHMC(model, num_steps=...) for more.")
        super().__init__(
            model, num_steps=1, target_accept_prob=target_accept_prob, init_strategy=init_strategy, **settings
        )
