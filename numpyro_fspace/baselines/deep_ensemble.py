"""``ensemble``: deep ensembles, modes of the model's density from independent starts."""

from __future__ import annotations

from typing import Any

import jax

from numpyro_fspace._checks import check_count, check_key, renamed_argument
from numpyro_fspace.baselines.mode import find_modes
from numpyro_fspace.model.initial_values import init_to_network
from numpyro_fspace.posterior.posterior import Posterior


@renamed_argument("optimiser", "optimizer")
def ensemble(
    model,
    key,
    *args: Any,
    num_members: int = 10,
    num_updates: int = 5000,
    optimizer=None,
    init_strategy=init_to_network,
    **kwargs: Any,
) -> Posterior:
    r"""A deep ensemble: E members, each a mode reached from its own random start.

    .. math:: w_e = \arg\max_w \big[\log p(y \mid f(\cdot\,; w)) + \log p_0(w)
              + \textstyle\sum_j \text{scale}_j \log P_0(f(X_M))\big] \text{ near } w_e^{(0)}

    The members are used as draws, but they have no target distribution. w are all latent values including the noise, in
    the unconstrained space of the samplers, and the last term is that of the functional priors, if the model has any.
    Minibatches and random measurement points are drawn anew at each update, so that log P0 enters through its mean. All
    members are optimized together in one compiled program.

    Fix the scale of the weights' prior, because the joint mode of a sampled scale and its weights is at zero.

    Args:
        model: a NumPyro model, with or without ``fs.functional_prior``.
        key: random key of the starts, the minibatches and the measurement points. Member e depends only on it and on e.
        *args: the model's arguments.
        num_members: E.
        num_updates: optimizer steps of each member.
        optimizer: an optax optimizer; None means Adam with a cosine decay of the learning rate from 0.01.
        init_strategy: a NumPyro init strategy for the starts; by default networks start from their own initializer.
        **kwargs: the model's keyword arguments.

    Returns:
        A :class:`~numpyro_fspace.Posterior` of E draws, for ``fs.predict`` and ``fs.to_arviz``.

    Raises:
        ValueError, TypeError: a count is not a positive integer, the optimizer is not one of optax, or the samplers
            refuse the model (no latent sites, discrete latent sites, ``param`` sites, no observations).
        RuntimeError: the optimization of a member diverged, or ended where the density is not finite.

    Example:
        >>> import flax.linen as nn, jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs
        >>> from numpyro_fspace.baselines import ensemble
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(10), nn.tanh, nn.Dense(1)])
        ...     f = fs.random_module("net", net, input_shape=1)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> y = x[:, 0] ** 2
        >>> posterior = ensemble(model, jax.random.key(0), x, y, num_members=3, num_updates=100)
        >>> fs.predict(posterior, jax.random.key(1), x)["net"].shape
        (3, 10, 1)

    Reference: B. Lakshminarayanan, A. Pritzel, C. Blundell (2017), *Simple and scalable predictive uncertainty
    estimation using deep ensembles*.
    """
    check_count(num_members, "num_members")
    check_count(num_updates, "num_updates")
    check_key(key, "key", single=True)
    keys = jax.vmap(lambda e: jax.random.fold_in(key, e))(jax.numpy.arange(num_members))
    settings = {"num_updates": num_updates, "optimizer": optimizer, "init_strategy": init_strategy}
    modes, _ = find_modes(model, keys, args, kwargs, **settings)
    return Posterior(model, modes, args=args, kwargs=kwargs)
