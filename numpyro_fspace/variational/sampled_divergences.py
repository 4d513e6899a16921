"""Divergences estimated from draws, between the network itself and its prior, at measurement points.

Such a divergence is a callable ``(pushforward, prior, x) -> D`` with the attribute ``linearized = False``.
``pushforward`` is then a ``SampledPushforward``: ``sample(x, num_draws)`` [S, M, K] draws the function, ``key`` is for
any other random numbers, ``sample_prior(x, num_draws)`` draws the function under the prior of the weights, and
``weights_kl(num_draws)`` estimates the KL of the weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp

from numpyro_fspace._checks import check_count, check_not_negative, check_positive
from numpyro_fspace._xla import matmul

if TYPE_CHECKING:
    from jaxtyping import Array, Float, Key


#: Weight of the penalty on gradients of the critic longer than one; learning rate of its Adam optimizer.
CRITIC_PENALTY, CRITIC_RATE = 10.0, 0.005


@dataclass(frozen=True)
class Wasserstein1:
    r"""fVI's divergence: the 1-Wasserstein distance at X_M, estimated by a critic, plus a difference of variances.

    .. math:: D = \sup_{\|\varphi\|_{Lip} \le 1} E_{f \sim Q}[\varphi(f(X_M))] - E_{g \sim P_0}[\varphi(g(X_M))]
              + v \sum_m |\mathrm{var}_Q f(x_m) - \mathrm{var}_{P_0} f(x_m)|

    In many dimensions the distance alone depends little on the spread. The second term, also summed over outputs, adds
    it.
    The prior needs a sampler. The guide may be any continuous guide if all latent values are weights. The maximizer of
    the bound is a posterior of generalized variational inference and not the Bayesian posterior.

    The critic φ is the sum of a linear function, a radial function and a small network. The first two are optimal for
    distributions that differ by a shift and a scale. The network is trained anew at every step, since its problem
    changes with X_M, on half of the draws and with a penalty on gradients longer than one. It is evaluated on the other
    half, so that the estimate is at most the distance, up to noise. With few draws in many dimensions, long training
    overfits the draws and makes the estimate worse.

    Args:
        num_draws: S, the number of functions drawn from each of Q and P0 at each step, even and at least 4.
        variance_weight: v ≥ 0.
        num_critic_steps: Adam steps for the critic's network. With 0 only the linear and the radial part are used.
        width: hidden units of the critic's network.

    Raises:
        ValueError, TypeError: an argument is out of range.

    Reference: M. Wu, J. Xuan, J. Lu (2025), *Bridging the gap between variational inference and stochastic gradient
    MCMC in function space*, section 3; B.-H. Tran et al. (2022), *All you need is a good functional prior for
    Bayesian deep learning*.
    """

    num_draws: int = 64
    variance_weight: float = 1.0
    num_critic_steps: int = 20
    width: int = 32
    linearized = False

    def __post_init__(self):
        check_count(self.num_draws, "num_draws", 4)
        if self.num_draws % 2:
            raise ValueError(f"num_draws={self.num_draws} must be even: half of the draws train the critic.")
        check_count(self.num_critic_steps, "num_critic_steps", 0)
        check_count(self.width, "width")
        check_not_negative(self.variance_weight, "variance_weight")

    def __call__(self, pushforward, prior, x) -> Float[Array, ""]:
        key = jax.random.fold_in(pushforward.key, self.num_draws)  # no draw uses this key
        return self.between(pushforward.sample(x, self.num_draws), prior, x, key)

    def between(self, f: Float[Array, "S M K"], prior, x, key) -> Float[Array, ""]:
        """D between the distribution of the draws f and the prior."""
        key_prior, key_critic = jax.random.split(key)
        g = jnp.asarray(prior.sample(key_prior, x, (len(f),)), f.dtype).reshape(f.shape)
        distance = wasserstein1(
            f.reshape(len(f), -1), g.reshape(len(g), -1), key_critic, self.num_critic_steps, self.width
        )
        return distance + self.variance_weight * jnp.abs(jnp.var(f, 0) - jnp.var(g, 0)).sum()


@dataclass(frozen=True)
class BridgeWasserstein:
    r"""IFBNN's divergence: a prior of the weights as a bridge between the guide and the functional prior.

    .. math:: D = \mathrm{KL}(q(w) \,\|\, p_b(w)) + s \, D_W\big(p_b(f) \,\|\, P_0\big) \text{ at } X_M

    The bridge p_b is the prior of the weights in the model. Its parameters are learned together with the guide's: make
    them ``numpyro.param`` sites, ``fs.random_module(..., prior=fs.fan_in(numpyro.param("scale", 1.0, ...)))``. Without
    such parameters D is the KL divergence of the usual bound (``Trace_ELBO``), up to a constant.

    Args:
        distance: D_W, estimated from draws of functions; ``Wasserstein1()`` by default.
        strength: s > 0.
        num_draws: number of draws of the weights for KL(q ‖ p_b); the entropy of q is exact if q is normal.

    Raises:
        ValueError, TypeError: an argument is out of range; at the first step, if there are several functional priors
            or one with a ``scale``, because D includes the KL of the weights, which must count once.

    Reference: M. Wu, J. Xuan, J. Lu (2023), *Indirect functional Bayesian neural networks*.
    """

    distance: Wasserstein1 = field(default_factory=Wasserstein1)
    strength: float = 1.0
    num_draws: int = 4
    linearized = False
    holds_weights = True  # D includes the KL of all weights

    def __post_init__(self):
        if not hasattr(self.distance, "between"):
            raise TypeError(f"distance must be an object such as fs.variational.Wasserstein1(), got {self.distance!r}.")
        check_positive(self.strength, "strength")
        check_count(self.num_draws, "num_draws")

    def __call__(self, pushforward, prior, x) -> Float[Array, ""]:
        bridge = pushforward.sample_prior(x, self.distance.num_draws)
        distance = self.distance.between(bridge, prior, x, jax.random.fold_in(pushforward.key, 2))
        return pushforward.weights_kl(self.num_draws) + self.strength * distance


def wasserstein1(
    f: Float[Array, "S D"], g: Float[Array, "S D"], key: Key[Array, ""], num_steps: int = 200, width: int = 32
) -> Float[Array, ""]:
    """Estimate of the 1-Wasserstein distance between the distributions of f and g, differentiable in f and g.

    The critic's network is trained on rows 0, 2, … and evaluated on rows 1, 3, …; see ``Wasserstein1``.

    Args:
        f, g: S draws from each distribution.
        key: random key of the critic.
        num_steps: Adam steps for the critic's network.
        width: hidden units of this network.

    Reference: I. Gulrajani et al. (2017), *Improved training of Wasserstein GANs*.
    """
    import optax

    fixed_f, fixed_g = jax.lax.stop_gradient((f, g))
    center = jnp.mean(fixed_g, 0)
    size = jnp.sqrt(jnp.mean((fixed_f - center) ** 2) + jnp.mean((fixed_g - center) ** 2)) + jnp.finfo(f.dtype).tiny
    train_f, train_g = (fixed_f[::2] - center) / size, (fixed_g[::2] - center) / size
    # The initial critic φ(u) = a·u + b|u| is optimal for two distributions that differ by a shift and a scale.
    shift, scale = train_f.mean(0) - train_g.mean(0), _length(train_f).mean() - _length(train_g).mean()
    whole = _length(jnp.append(shift, scale))
    params = {
        "slope": shift / whole,
        "radius": scale / whole,
        "hidden": jax.random.normal(key, (f.shape[1], width), f.dtype) / jnp.sqrt(f.shape[1]),
        "bias": jnp.linspace(-2.0, 2.0, width, dtype=f.dtype),
        "out": jnp.zeros(width, f.dtype),
    }

    def critic(params, u):
        line = u @ params["slope"] + _length(u) * params["radius"]
        return line + jax.nn.softplus(u @ params["hidden"] + params["bias"]) @ params["out"]

    def excess(params, u):
        """The excess of the norm of the critic's gradient over one."""
        steepness = _length(jax.vmap(jax.grad(critic, 1), (None, 0))(params, u))
        return jnp.maximum(steepness - 1.0, 0.0)

    def loss(params, key):
        share = jax.random.uniform(key, (len(train_f), 1), f.dtype)
        between = share * train_f + (1.0 - share) * train_g
        apart = critic(params, train_f).mean() - critic(params, train_g).mean()
        return CRITIC_PENALTY * jnp.mean(excess(params, between) ** 2) - apart

    optimizer = optax.adam(CRITIC_RATE)

    def step(carry, key):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, key), state)
        return (optax.apply_updates(params, updates), state), None

    keys = jax.random.split(jax.random.fold_in(key, 1), num_steps)
    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), keys)
    params = jax.lax.stop_gradient(params)
    test_f, test_g = (f[1::2] - center) / size, (g[1::2] - center) / size
    both = jax.lax.stop_gradient(jnp.concatenate([test_f, test_g]))
    too_steep = 1.0 + jnp.max(excess(params, both))
    return size * (critic(params, test_f).mean() - critic(params, test_g).mean()) / too_steep


def _length(u):
    """Euclidean norm over the last axis, smooth at zero."""
    return jnp.sqrt(jnp.sum(u**2, -1) + jnp.finfo(u.dtype).eps)


@dataclass(frozen=True)
class SpectralSteinKL:
    r"""FBNN's divergence: KL(Q‖P0) at X_M from draws of the function, with the spectral Stein estimate of Q's score.

    .. math:: \nabla \mathrm{KL} = E_{f \sim Q}\big[\nabla f(X_M)^\top
              \big(\nabla_f \log q(f) - \nabla_f \log p_0(f)\big)\big]

    Only the gradient is an estimate of the KL's. The *value* is E[-log p0(f)]; Q's entropy, by which it differs from
    the KL, is not estimated. The prior needs a differentiable log density. The guide may be any continuous guide if all
    latent values are weights.

    Args:
        num_draws: S, the number of functions drawn at each step, at least 2.
        noise: variance of the white noise added to the drawn values so that Q has a density, for example part of the
            prior's nugget.
        explained: share of the sum of the kernel matrix's eigenvalues that the estimate keeps, in (0, 1].

    Raises:
        ValueError, TypeError: an argument is out of range.

    Reference: S. Sun, G. Zhang, J. Shi, R. Grosse (2019), *Functional variational Bayesian neural networks*.
    """

    num_draws: int = 100
    noise: float = 1e-2
    explained: float = 0.99
    linearized = False

    def __post_init__(self):
        check_count(self.num_draws, "num_draws", 2)
        check_positive(self.noise, "noise")
        check_positive(self.explained, "explained")
        if self.explained > 1.0:
            raise ValueError(f"explained={self.explained} must be at most 1.")

    def __call__(self, pushforward, prior, x) -> Float[Array, ""]:
        f = pushforward.sample(x, self.num_draws)
        noise = jax.random.normal(jax.random.fold_in(pushforward.key, self.num_draws), f.shape, f.dtype)
        f = f + jnp.sqrt(self.noise) * noise
        score = spectral_stein_score(jax.lax.stop_gradient(f).reshape(len(f), -1), self.explained).reshape(f.shape)
        entropy_term = jnp.sum(score * (f - jax.lax.stop_gradient(f)))  # its value is 0, its gradient that of -H
        log_prior = jax.vmap(lambda v: prior.log_prob(x, v[:, 0] if pushforward.flat else v))(f)
        return (entropy_term - log_prior.sum()) / len(f)


def spectral_stein_score(
    draws: Float[Array, "S D"], explained: float = 0.99, at: Float[Array, "A D"] | None = None
) -> Float[Array, "A D"]:
    """∇ log q [A, D] from S draws from q: the spectral Stein estimate with a squared exponential kernel.

    The kernel's lengthscale is the median distance between draws. Eigenfunctions are kept until they explain the share
    ``explained`` of the kernel matrix's trace. Nyström's formula extends them from the draws to other points, and the
    estimate tends to zero far from all draws.

    Args:
        draws: S draws from q.
        explained: share of the trace, in (0, 1].
        at: where the score is estimated; None means at the draws.

    Reference: J. Shi, S. Sun, J. Zhu (2018), *A spectral approach to gradient estimation for implicit distributions*.
    """
    num = len(draws)
    squares = jnp.sum((draws[:, None] - draws[None]) ** 2, -1)
    width = jnp.median(squares[jnp.triu_indices(num, 1)])
    kernel = jnp.exp(-0.5 * squares / width)
    values, vectors = jnp.linalg.eigh(kernel)
    values, vectors = values[::-1], vectors[:, ::-1]
    before = (jnp.cumsum(values) - values) / jnp.sum(values)
    kept = (before < explained) & (values > num * jnp.finfo(draws.dtype).eps)
    # With ψ_j = √S Σ_i u_ij k(·, x_i) / λ_j, the mean over draws of ∇ψ_j is -β_j, and √S u_j are the ψ_j at the draws.
    slopes = -(matmul(kernel, draws) - kernel.sum(1)[:, None] * draws) / width
    beta = -matmul(vectors.T, slopes) / (jnp.where(kept, values, 1.0)[:, None] * jnp.sqrt(num))
    if at is None:
        return jnp.sqrt(num) * matmul(vectors * kept, beta)
    extended = jnp.exp(-0.5 * jnp.sum((at[:, None] - draws[None]) ** 2, -1) / width)
    return jnp.sqrt(num) * matmul(matmul(extended, vectors * kept / values), beta)
