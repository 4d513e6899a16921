"""``fit_svgp``: stochastic variational Gaussian process regression."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import solve_triangular

from numpyro_fspace._checks import check_count, check_positive, one_line
from numpyro_fspace._xla import matmul
from numpyro_fspace.priors.base import as_inputs, as_positive
from numpyro_fspace.priors.fit import NOISE_FLOOR, as_data
from numpyro_fspace.priors.gp_prior import check_columns, on_rows
from numpyro_fspace.priors.kernel_params import kernel_and_params, spreads

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, ArrayLike, Float, Key

#: Variance added to the inducing values, relative to their mean variance.
JITTER = 1e-8
#: Number of rows of the data evaluated together.
CHUNK = 4096


@dataclass(frozen=True, eq=False, repr=False)
class SVGPFit:
    """A sparse Gaussian process trained by ``fit_svgp``.

    Attributes:
        kernel: the trained tinygp kernel.
        noise_variance: trained variance of the noise.
        inducing: trained inducing inputs Z [M, D].
        mean, root: q(v) = N(mean, root rootᵀ) for whitened inducing values v, [M, K] and [M, M].
        bound: final lower bound on the log marginal likelihood of all data.
        losses: the negative bound per entry of y, estimated from the minibatch of each step, [num_steps].
        params: the trained positive kernel parameters, named as in ``fs.priors.GPFit``.
        num_outputs: K; None if y was [N] or [N, 1].
    """

    kernel: Callable = field(repr=False)
    noise_variance: float
    inducing: np.ndarray = field(repr=False)
    mean: np.ndarray = field(repr=False)
    root: np.ndarray = field(repr=False)
    bound: float
    losses: np.ndarray = field(repr=False)
    params: dict[str, np.ndarray] = field(repr=False)
    num_outputs: int | None = None

    __repr__ = one_line

    def predict(self, x: Float[ArrayLike, "T D"]) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of f (without noise) at x [T, D]: two arrays [T], or [T, K] for y [N, K]."""
        x = as_inputs(x)
        if x.shape[1] != self.inducing.shape[1]:
            raise ValueError(f"x has {x.shape[1]} columns but the process was trained on {self.inducing.shape[1]}.")
        with jax.enable_x64(True):
            factor = _factor(self.kernel, jnp.asarray(self.inducing))
            q = (self.mean, self.root)
            marginals = jax.jit(lambda x: _marginals(self.kernel, factor, self.inducing, q, x))
            rows = np.asarray(x, np.float64)
            parts = [jax.device_get(marginals(rows[i : i + CHUNK])) for i in range(0, len(rows), CHUNK)]
        mean, variance = (np.concatenate(part) for part in zip(*parts, strict=True))
        variance = np.maximum(variance, 0.0)
        if self.num_outputs is None:
            return mean[:, 0], variance
        return mean, np.broadcast_to(variance[:, None], mean.shape)


def fit_svgp(
    kernel: Callable | None,
    x: Float[ArrayLike, "N D"],
    y: Float[ArrayLike, "N K"],
    *,
    key: Key[Array, ""],
    num_inducing: int = 100,
    num_steps: int = 2000,
    batch_size: int = 256,
    params: dict[str, Float[ArrayLike, "*shape"]] | None = None,
    noise_variance: float = 0.1,
    learning_rate: float = 0.02,
) -> SVGPFit:
    r"""Train a zero-mean Gaussian process on large data with inducing values u = f(Z) and minibatches.

    .. math::
        \log p(y) &\ge E \tfrac{N}{B} \sum_b \Big[\log N(y_b; \mu_b, \sigma^2)
        - \tfrac{1}{2\sigma^2} \operatorname{var}_q f(x_b)\Big] - \mathrm{KL}(q(v) \,\|\, N(0, I)), \\
        u &= L v, \quad L L^\top = k(Z, Z)

    with q(v) = N(m, R Rᵀ), μ_b = E_q f(x_b), the noise variance σ², and the mean E over minibatches of B rows. Adam
    maximizes the bound over the logarithms of kernel parameters and noise, over Z, m and R, in float64 whatever JAX's
    setting. At the start and at the end q takes a natural gradient step of length one on all data, which gives the
    optimal q for Gaussian noise. Several outputs share kernel, noise and R. Standardize x and y first.

    Args:
        kernel: None means the squared exponential with one lengthscale per input, which starts at median distances and
            the variance of y. A tinygp kernel starts at its own (positive) parameters. A function takes a dict of
            positive parameters, with initial values ``params``, and returns a tinygp kernel.
        x: inputs [N, D].
        y: targets, [N] or [N, K].
        key: random key of the initial inducing inputs, which are rows of x, and of the minibatches.
        num_inducing: M; all rows of x are used if N is smaller.
        num_steps: Adam steps.
        batch_size: B, the rows of a minibatch, drawn with replacement; all rows are used at each step if N ≤ B.
        params: initial values of the parameters of a kernel function.
        noise_variance: initial noise variance, which stays above 1e-6 times the variance of y.
        learning_rate: initial learning rate of Adam, decayed to a hundredth by a cosine.

    Returns:
        The trained process; ``predict(x_new)`` gives mean and variance of f.

    Raises:
        TypeError, ValueError: shapes are wrong, values are NaN, counts or parameters are not positive, or the bound is
            not finite; with ``kernel=None`` also if single precision cannot represent the scale of the data.

    Example:
        >>> import jax, numpy as np
        >>> from numpyro_fspace.baselines import fit_svgp
        >>> x = np.linspace(-1, 1, 200)[:, None]
        >>> y = np.sin(3 * x[:, 0])
        >>> fit = fit_svgp(None, x, y, key=jax.random.key(0), num_inducing=10, num_steps=100)
        >>> mean, variance = fit.predict(x)
        >>> bool(np.abs(mean - y).max() < 0.1)
        True

    Reference: J. Hensman, N. Fusi, N. D. Lawrence (2013), *Gaussian processes for big data*.
    """
    import tinygp

    x, y, num_outputs = as_data(x, y, "fit_svgp")
    for name, value in {"num_inducing": num_inducing, "num_steps": num_steps, "batch_size": batch_size}.items():
        check_count(value, name)
    check_positive(learning_rate, "learning_rate")
    key_start, key_steps = jax.random.split(key)
    rows = np.asarray(jax.random.permutation(key_start, len(x))[: min(num_inducing, len(x))])
    given_fn, params, _ = kernel_and_params(kernel, params, x, y)
    start = given_fn(params)
    if not isinstance(start, tinygp.kernels.Kernel):
        raise TypeError(f"fit_svgp: kernel must be, or return, a tinygp kernel, got {type(start).__name__}.")
    check_columns(start, x.shape[1])

    def kernel_fn(values):
        return on_rows(given_fn(values))

    spread = spreads(x)
    bound = _Bound(kernel_fn, NOISE_FLOOR * float(spreads(y.ravel()) ** 2), spread)
    logs = {"kernel": params, "noise": as_positive(noise_variance, "noise_variance")}
    with jax.enable_x64(True):
        state = {
            "logs": jax.tree.map(lambda value: jnp.log(jnp.asarray(value, float)), logs),
            "inducing": jnp.asarray(x[rows] / spread, float),
            "mean": jnp.zeros((len(rows), y.shape[1])),
            "root": jnp.eye(len(rows)),
        }
        x, y = jnp.asarray(x, float), jnp.asarray(y, float)
        settings = {"num_steps": num_steps, "batch_size": batch_size, "learning_rate": learning_rate}
        state, losses = _train(bound, bound.best(state, x, y), x, y, key_steps, **settings)
        state = bound.best(state, x, y)
        evidence = float(bound.whole(state, x, y))
        if not np.isfinite(evidence):
            raise ValueError(
                "fit_svgp: the bound is not finite: pass a smaller learning_rate or a larger noise_variance."
            )
        kernel, noise, inducing, _ = jax.device_get(bound.unpack(state))
        trained = jax.device_get(jax.tree.map(jnp.exp, state["logs"]["kernel"]))
        mean, root = np.asarray(state["mean"]), np.asarray(state["root"])
    return SVGPFit(kernel, float(noise), inducing, mean, root, evidence, np.asarray(losses), trained, num_outputs)


@dataclass(frozen=True, eq=False)
class _Bound:
    """The lower bound as a function of the optimizer's state: logs, scaled inducing inputs and q(v)."""

    kernel_fn: Callable
    noise_floor: float
    spread: np.ndarray

    def unpack(self, state):
        """Kernel, noise variance, inducing inputs and the factor of their covariance."""
        values = jax.tree.map(jnp.exp, state["logs"])
        kernel, inducing = self.kernel_fn(values["kernel"]), state["inducing"] * self.spread
        return kernel, values["noise"] + self.noise_floor, inducing, _factor(kernel, inducing)

    def expected(self, state, x, y):
        """E_q[log p(y | f)] of the given rows."""
        kernel, noise, inducing, factor = self.unpack(state)
        mean, variance = _marginals(kernel, factor, inducing, (state["mean"], jnp.tril(state["root"])), x)
        residual = jnp.sum((y - mean) ** 2) + y.shape[1] * variance.sum()
        return -0.5 * (residual / noise + y.size * jnp.log(2 * math.pi * noise))

    def divergence(self, state):
        """KL(q(v) ‖ N(0, I)) over all outputs."""
        mean, root = state["mean"], jnp.tril(state["root"])
        log_det = 2 * jnp.log(jnp.abs(jnp.diagonal(root))).sum()
        return 0.5 * (jnp.sum(mean**2) + mean.shape[1] * (jnp.sum(root**2) - len(root) - log_det))

    def best(self, state, x, y):
        """``state`` with the q(v) that maximizes the bound on all data."""
        kernel, noise, inducing, factor = self.unpack(state)

        @jax.jit
        def part(x, y):
            weights = solve_triangular(factor, kernel(inducing, x), lower=True)
            return matmul(weights, weights.T) / noise, matmul(weights, y) / noise

        parts = [part(x[i : i + CHUNK], y[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
        precision = jnp.eye(len(factor)) + sum(gram for gram, _ in parts)
        covariance = jnp.linalg.inv(precision)
        mean = jnp.linalg.solve(precision, sum(shift for _, shift in parts))
        return state | {"mean": mean, "root": jnp.linalg.cholesky(0.5 * (covariance + covariance.T))}

    def whole(self, state, x, y):
        """The bound on all data."""
        expected = jax.jit(lambda x, y: self.expected(state, x, y))
        parts = [expected(x[i : i + CHUNK], y[i : i + CHUNK]) for i in range(0, len(x), CHUNK)]
        return sum(parts) - self.divergence(state)


def _train(bound, state, x, y, key, *, num_steps, batch_size, learning_rate):
    """Run Adam on minibatches; returns the final state and the losses [num_steps]."""
    import optax

    optimizer = optax.adam(optax.cosine_decay_schedule(learning_rate, num_steps, alpha=0.01))
    num_data = len(x)

    def loss(state, x, y):
        return (bound.divergence(state) - num_data / len(x) * bound.expected(state, x, y)) / (num_data * y.shape[1])

    @jax.jit
    def train(state, x, y):
        def step(carry, key):
            state, moments = carry
            rows = jnp.arange(num_data)
            if batch_size < num_data:
                rows = jax.random.randint(key, (batch_size,), 0, num_data)
            value, gradient = jax.value_and_grad(loss)(state, x[rows], y[rows])
            change, moments = optimizer.update(gradient, moments)
            return (optax.apply_updates(state, change), moments), value

        (state, _), losses = jax.lax.scan(step, (state, optimizer.init(state)), jax.random.split(key, num_steps))
        return state, losses

    return train(state, x, y)


def _factor(kernel, inducing):
    covariance = kernel(inducing, inducing)
    return jnp.linalg.cholesky(covariance + JITTER * jnp.diagonal(covariance).mean() * jnp.eye(len(inducing)))


def _marginals(kernel, factor, inducing, q, x):
    """Mean [B, K] and variance [B] of f(x) under q = (mean, root)."""
    mean, root = q
    weights = solve_triangular(factor, kernel(inducing, x), lower=True)
    variance = kernel(x) - jnp.sum(weights**2, 0) + jnp.sum(matmul(root.T, weights) ** 2, 0)
    return matmul(weights.T, mean), variance
