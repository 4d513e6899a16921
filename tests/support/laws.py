"""Exact laws of the samplers on quadratic potentials, and tests of draws against them.

On a quadratic potential U_i(w) = wᵀ H_i w / 2 - g_iᵀ w a transition of a kernel is affine in its state x and its
noise ξ for every outcome i of the minibatch and the measurement points: x' = A_i x + B_i ξ + c_i. A, B and c are
read off the real kernel by differentiation, with noise and outcomes put in by hand, so its stationary mean and
covariance follow by linear algebra, without Monte Carlo.
"""

from __future__ import annotations

import functools
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import scipy.linalg
import scipy.stats
from jax.flatten_util import ravel_pytree

from numpyro_fspace.sgmcmc import sghmc, sgld, shared
from numpyro_fspace.sgmcmc.preconditioners import Diagonal
from support.broken import HEALTHY, broken
from support.compilation import quick_jit


class Unstable(ArithmeticError):
    """The chain has no stationary law."""


class Settings(NamedTuple):
    """The numbers of a kernel, all traceable; ``scale`` is the diagonal of the preconditioner, [P] or a number."""

    epsilon: float
    temperature: float = 1.0
    friction: float = 1.0
    scale: float = 1.0
    resample: bool = False


@contextmanager
def given_noise(noise, refresh):
    """The kernels traced inside use the rows of ``noise`` [R, P] for their steps, ``refresh`` [P] for momenta."""

    def normals(key, like, num, part=0):
        return lambda j: ravel_pytree(like)[1](noise[part * num + j])

    def normal_like(key, tree):
        return ravel_pytree(tree)[1](refresh)

    with mock.patch.object(shared, "normals", normals), mock.patch.object(sghmc, "normal_like", normal_like):
        yield


def quadratic(position, draw):
    """U(w) = wᵀ H w / 2 - gᵀ w of the flat position, for the draw (H, g)."""
    w, (h, g) = ravel_pytree(position)[0], draw
    return jnp.sum(w * (0.5 * jnp.sum(h * w, -1) - g))  # elementwise, which compiles faster than products


def _call(name, settings, num_steps, refresh_every, unravel, size):
    """``kernel(potential_fn, state) -> state`` on flat states, with the key 0."""
    metric = Diagonal(unravel(jnp.broadcast_to(jnp.asarray(settings.scale, float), (size,))))
    key, count = jax.random.key(0), jnp.zeros((), int)
    epsilon, temperature, friction = settings[:3]

    def call(potential_fn, state):
        position = unravel(state[:size])
        if name == "sgld":
            start = sgld.SGLDState(position, count)
            options = {"num_steps": num_steps, "temperature": temperature, "metric": metric}
            out, _ = sgld.build_kernel()(key, start, potential_fn, epsilon, **options)
            return ravel_pytree(out.position)[0]
        kernel = sghmc.build_kernel(integrator=name)
        start = sghmc.SGHMCState(position, unravel(state[size:]), count)
        options = {"num_steps": num_steps, "friction": friction, "temperature": temperature, "metric": metric}
        options |= {"resample_momentum": settings.resample, "refresh_every": refresh_every}
        out, _ = kernel(key, start, potential_fn, epsilon, **options)
        return jnp.concatenate([ravel_pytree(out.position)[0], ravel_pytree(out.momentum)[0]])

    return call, metric


class Transition:
    """A transition of the real kernel as a function of flat vectors.

    Args:
        name: ``"sgld"``, ``"baoab"`` or ``"euler"``.
        potential_fn: U(position, draw).
        like: a position.
        num_steps: inner steps L.
        refresh_every: steps between refreshes of the momentum.
        num_draws: L if each inner step has a draw of its own, 1 if all share one.

    Attributes:
        num_state: P for SGLD, whose state is w; 2P for SGHMC, (w, p).
        num_noise: numbers of noise; the last P are those of a refreshed momentum (SGHMC).
    """

    def __init__(self, name, potential_fn, like, num_steps=1, refresh_every=1, num_draws=1):
        flat, self._unravel = ravel_pytree(like)
        self.size, self.num_rows = flat.size, num_steps // refresh_every
        self.num_state = self.size * (1 if name == "sgld" else 2)
        self.num_noise = self.size * (self.num_rows + (name != "sgld"))
        self._arguments = (num_steps, refresh_every, self._unravel, self.size)
        self._name, self._potential_fn = name, potential_fn
        self._keys = self._record_keys() if num_draws > 1 else None

    def _record_keys(self):
        """The keys that the potential gets at the L inner steps, by which the steps are told apart."""
        keys = []

        def potential_fn(position, key):
            jax.debug.callback(lambda data: keys.append(np.asarray(data)), jax.random.key_data(key), ordered=True)
            return 0.0 * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(position))

        call, _ = _call(self._name, Settings(0.1), *self._arguments)
        quick_jit(functools.partial(call, potential_fn))(jnp.zeros(self.num_state))
        jax.effects_barrier()
        assert len({tuple(k) for k in keys}) == len(keys), "every inner step must have a key of its own"
        return np.stack(keys)

    def __call__(self, state, noise, draws, settings, faults=HEALTHY):
        """The next state; ``draws`` lists, along leading axes [num_draws], what the potential gets."""

        def potential_fn(position, key):
            step = 0
            if self._keys is not None:
                step = jnp.argmax(jnp.all(jax.random.key_data(key) == self._keys, -1))
            return self._potential_fn(position, jax.tree.map(lambda d: d[step], draws))

        call, metric = _call(self._name, settings, *self._arguments)
        rows = noise[: self.num_rows * self.size].reshape(self.num_rows, self.size)
        with broken(faults, metric), given_noise(rows, noise[-self.size :]):
            return call(potential_fn, state)


class AffineMap:
    """The terms of a transition on a quadratic potential, compiled once for all settings and faults.

    Takes the arguments of ``Transition`` but the potential.
    """

    def __init__(self, name, like, num_steps=1, refresh_every=1, num_draws=1):
        self.run = Transition(name, quadratic, like, num_steps, refresh_every, num_draws)
        self._terms = quick_jit(jax.vmap(self._one, (0, 0, None, None, None, None)))

    def _one(self, h, g, state, noise, settings, faults):
        a, b = jax.jacfwd(self.run, (0, 1))(state, noise, (h, g), settings, faults)
        return a, b, self.run(state, noise, (h, g), settings, faults)

    def __call__(self, quadratics, settings, faults=HEALTHY, *, state=None, noise=None):
        """A, B and the next state, at (0, 0) unless said otherwise; each with a leading axis n.

        Args:
            quadratics: the draws h [n, num_draws, P, P], g [n, num_draws, P].
            settings, faults: numbers.
            state, noise: where to linearize.
        """
        state = jnp.zeros(self.run.num_state) if state is None else state
        noise = jnp.zeros(self.run.num_noise) if noise is None else noise
        settings = Settings(*(float(v) for v in settings[:3]), jnp.asarray(settings.scale), bool(settings.resample))
        return tuple(np.asarray(v) for v in self._terms(*quadratics, state, noise, settings, faults))


def stationary(a, b, c):
    """Mean and covariance of the stationary law of x' = A_i x + B_i ξ + c_i, i uniform over the leading axis.

    With m the mean and d_i = A_i m + c_i - m, the covariance solves S = E[A S Aᵀ] + E[d dᵀ] + E[B Bᵀ].

    Raises:
        Unstable: the spectral radius of E[A ⊗ A] is not below 1, or a term is not finite.
    """
    a, b, c = (np.asarray(v, np.float64) for v in (a, b, c))
    if not all(np.isfinite(v).all() for v in (a, b, c)):
        raise Unstable("non-finite terms")
    size = a.shape[1]
    second = np.einsum("nij,nkl->ikjl", a, a).reshape(size**2, size**2) / len(a)
    radius = np.abs(np.linalg.eigvals(second)).max() ** 0.5
    if radius >= 1 - 1e-12:
        raise Unstable(f"spectral radius {radius:.6f}")
    mean = np.linalg.solve(np.eye(size) - a.mean(0), c.mean(0))
    d = a @ mean + c - mean
    q = (np.einsum("ni,nj->ij", d, d) + np.einsum("nik,njk->ij", b, b)) / len(a)
    if len(a) == 1:
        return mean, scipy.linalg.solve_discrete_lyapunov(a[0], q)
    return mean, np.linalg.solve(np.eye(size**2) - second, q.ravel()).reshape(size, size)


def extrapolate(values):
    """The limit ε → 0 of values at ε, ε/2, ε/4, …, by Richardson's scheme for a power series in ε."""
    values, order = np.asarray(values), 1
    while len(values) > 1:
        values = (2**order * values[1:] - values[:-1]) / (2**order - 1)
        order += 1
    return values[0]


def relative_error(value, exact):
    """Largest singular value (or length) of the difference, relative to that of ``exact``."""
    ord_ = 2
    return np.linalg.norm(np.asarray(value) - exact, ord_) / np.linalg.norm(exact, ord_)


def slope(errors):
    """Observed order from errors at step sizes that halve: that of the two smallest."""
    return float(np.log2(errors[-2] / errors[-1]))


def gaussian_p_values(draws, mean, covariance):
    """p-values of independent draws [n, d] under N(mean, covariance): χ² of mean, variances, correlations.

    Draws are whitened first. Draws that are not finite have p = 0.
    """
    draws = np.asarray(draws, np.float64)
    n, d = draws.shape
    if not np.isfinite(draws).all():
        return dict.fromkeys(("mean", "variance", "correlation"), 0.0)
    z = scipy.linalg.solve_triangular(np.linalg.cholesky(covariance), (draws - mean).T, lower=True).T
    second = z.T @ z / n
    above = second[np.triu_indices(d, 1)]
    chi2 = scipy.stats.chi2
    return {
        "mean": chi2.sf(n * np.sum(z.mean(0) ** 2), d),
        "variance": chi2.sf(n / 2 * np.sum((np.diag(second) - 1) ** 2), d),
        "correlation": chi2.sf(n * np.sum(above**2), len(above)),
    }
