"""Preconditioners: linear maps S that give the sampler coordinates u with w = S u.

A constant preconditioner changes how fast the chain moves, but not its target. Langevin dynamics in u is
``dw = -S Sᵀ ∇U dt + √2 S dB`` in terms of w (at temperature 1), and its stationary distribution is exp(-U) for every
invertible S. In Hamiltonian dynamics the mass matrix is M = (S Sᵀ)⁻¹.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.sgmcmc.linear_maps import MAX_WIDTH, Dense, Diagonal, Identity, PartlyDense, take, whitened

__all__ = [
    "Dense",
    "Diagonal",
    "Identity",
    "Learned",
    "Parameters",
    "PartlyDense",
    "Preconditioner",
    "automatic",
    "dense",
    "diagonal",
    "identity",
    "prior_scale",
    "rmsprop",
]


#: Parameters up to which ``automatic`` is dense.
MAX_DENSE = 64
#: Whitened values of processes up to which ``automatic`` is dense in them.
MAX_VALUES = 1000


class Learned(NamedTuple):
    """What warm-up learns for a preconditioner.

    Attributes:
        mean_square: mean of (s ∂U/∂w)² over burn-in, for prior scales s, [P]; zeros before there is any, [0] if unused.
        factor: the dense block [B, B] in units of the prior scales, [P, P] if all is dense; [0, 0] if unused.
    """

    mean_square: jax.Array
    factor: jax.Array


class Parameters(NamedTuple):
    """What a preconditioner may know of the unconstrained parameters of a model, a flat position [P].

    Attributes:
        size: P.
        is_plain: whether the model has neither networks nor functional priors, and U is known exactly.
        sites: ``(start, stop)`` of each latent site, by name.
        process_values: the names of those that are whitened values of Gaussian processes (of ``gp_network``).
    """

    size: int
    is_plain: bool = False
    sites: Mapping[str, tuple[int, int]] = MappingProxyType({})
    process_values: tuple[str, ...] = ()


class Preconditioner:
    """How a NumPyro kernel makes its S: ``build(prior_scale, learned)`` gives one of the maps of this module.

    Attributes:
        adapts: whether S depends on the mean squared gradient or, where it is dense, on Hessians, which warm-up then
            estimates.
        is_dense: whether S is a matrix [P, P].
        ranges: the ranges ``(start, stop)`` of the parameters in a dense block, if only a part of S is dense.
    """

    adapts = False
    is_dense = False
    ranges: tuple[tuple[int, int], ...] = ()

    def chosen(self, parameters: Parameters) -> Preconditioner:
        """The preconditioner for a model of these parameters."""
        return self

    def build(self, prior_scale, learned: Learned | None = None):
        """The linear map S.

        Args:
            prior_scale: prior standard deviations s of the unconstrained parameters, [P].
            learned: what warm-up has learned; None if the preconditioner learns nothing.
        """
        raise NotImplementedError

    def start(self, position) -> Learned:
        """The state of learning before warm-up, for flat ``position`` [P]."""
        size, dtype = position.size, position.dtype
        mean_square = jnp.zeros(size if self.adapts and not self.is_dense else 0, dtype)
        block = size if self.is_dense else sum(stop - start for start, stop in self.ranges)
        return Learned(mean_square, jnp.eye(block, dtype=dtype))

    def renewed(self, learned: Learned, mean) -> Learned:
        """``learned`` with a new mean over the draws of warm-up since the last renewal.

        Args:
            learned: the state before.
            mean: mean of (s ∂U/∂w)² [P] or, for a dense preconditioner, of Sᵀ ∇²U S [P, P].
        """
        return learned._replace(mean_square=mean)

    def __repr__(self):
        return f"fs.preconditioners.{type(self).__name__}"


class identity(Preconditioner):
    """S = I: no preconditioner."""

    def build(self, prior_scale, learned=None):
        return Identity()


class prior_scale(Preconditioner):
    """S = diag(s) for the prior standard deviations s, the default if the step size is given.

    A parameter with prior N(μ, s²) moves as u = w/s, so that one step size suits layers of every fan-in. For network
    weights whose prior is not normal, or has a sampled scale, s is 1/√fan-in. For other sites s is the standard
    deviation of a normal prior, or the interquartile range of unconstrained prior draws divided by 1.349 (1 if the
    prior cannot be sampled).
    """

    def build(self, prior_scale, learned=None):
        return Diagonal(prior_scale)


class rmsprop(Preconditioner):
    """S = diag(s · max(1, v)^(-1/4)), the default for networks: prior scales s, shrunk where gradients are large.

    v is the mean of (s ∂U/∂w)² over the draws of a quarter of burn-in, the part of warm-up after the warm start. It
    estimates the diagonal of the Hessian in standardized parameters, plus the minibatch noise, because E[∇U ∇Uᵀ] =
    E[∇²U] under exp(-U). For v > 1, S Sᵀ = s²/√v is the preconditioner of pSGLD. Here v is estimated twice, over the
    first and the second quarter of burn-in, and then frozen, so that the target needs no correction term as in pSGLD.

    Reference: C. Li, C. Chen, D. Carlson, L. Carin (2016), *Preconditioned stochastic gradient Langevin dynamics for
    deep neural networks*.
    """

    adapts = True

    def build(self, prior_scale, learned):
        return Diagonal(prior_scale * jnp.maximum(learned.mean_square, 1.0) ** -0.25)


class dense(Preconditioner):
    """S with S Sᵀ = H⁻¹, where H is the mean Hessian of the potential at draws of burn-in, [P, P]: for few parameters.

    In its coordinates a Gaussian posterior is isotropic, whatever its units and correlations. The warm start uses it
    too (see ``fs.Warmup``) and makes the first estimate. H is estimated again over the first and the second quarter of
    burn-in, each time in the coordinates of the previous S, so that float32 suffices for condition numbers up to about
    10¹². Then S is frozen. Eigenvalues enter by their absolute values, and no direction is taken to be wider than 10⁸
    prior scales. A Hessian costs P products with vectors; for P > 16 it is computed at no more than 16/P of the draws.

    With names of sites, S is dense for their parameters alone, as with NumPyro's ``dense_mass=[("site",)]``, and that
    of ``rmsprop`` for all others. The warm start is Adam's. The Hessian of these parameters is computed three times: at
    the end of the warm start, and of the first and the second quarter of burn-in.

    Args:
        sites: names of latent sites; none means all.

    Raises:
        TypeError: a name is no string.
        ValueError: at ``run``, the model has no such latent site.

    Example:
        >>> import numpyro_fspace as fs
        >>> fs.preconditioners.dense("f.values", "sigma")
        fs.preconditioners.dense('f.values', 'sigma')
    """

    adapts = True
    is_dense = True

    def __init__(self, *sites: str):
        for site in sites:
            if not isinstance(site, str):
                raise TypeError(f"dense({site!r}): give names of latent sites, such as dense('f.values').")
        self.sites = sites

    def chosen(self, parameters):
        return _partly_dense(parameters, self.sites) if self.sites else self

    def build(self, prior_scale, learned):
        return Dense(prior_scale[:, None] * learned.factor)

    def renewed(self, learned, mean):
        return learned._replace(factor=whitened(learned.factor, mean))

    def __repr__(self):
        return f"{super().__repr__()}({', '.join(map(repr, self.sites))})" if self.sites else super().__repr__()


class _partly_dense(rmsprop):
    """``rmsprop`` that is dense for the parameters of some sites.

    Args:
        parameters: those of the model.
        sites: names of latent sites.
        max_width: largest width, in prior scales, that a direction in the block gets.

    Raises:
        ValueError: the model has no such latent site.
    """

    def __init__(self, parameters: Parameters, sites, max_width: float = MAX_WIDTH):
        for site in sites:
            if site not in parameters.sites:
                known = ", ".join(map(repr, parameters.sites))
                raise ValueError(f"dense({site!r}): the model has no such latent site; it has {known}.")
        self.sites, self.max_width = sites, max_width
        self.ranges = tuple(sorted({parameters.sites[site] for site in sites}))

    def build(self, prior_scale, learned):
        factor = take(prior_scale, self.ranges)[:, None] * learned.factor
        return PartlyDense(super().build(prior_scale, learned).s, factor, self.ranges)

    def __repr__(self):
        return repr(dense(*self.sites))


class automatic(rmsprop):
    """The default if warm-up chooses the step size.

    It is ``dense()`` for models of up to 64 parameters without networks, functional priors, minibatches and random
    numbers of their own. For others it is ``rmsprop()``, but where the last layer of a ``gp_network`` "f" is sampled it
    is ``dense("f.values")``, if there are up to 1000 such values. The data determine the values of the process,
    whatever the hidden weights are, and some combinations of them much better than others. No direction gets a
    scale above its prior standard deviation.
    """

    def chosen(self, parameters):
        if parameters.is_plain and parameters.size <= MAX_DENSE:
            return dense()
        values = parameters.process_values
        is_few = sum(stop - start for start, stop in map(parameters.sites.__getitem__, values)) <= MAX_VALUES
        return _partly_dense(parameters, values, max_width=1.0) if values and is_few else rmsprop()


class diagonal(Preconditioner):
    """S = diag(scale), so that the mass matrix is diag(scale⁻²).

    Args:
        scale: a positive number, or a vector [P] of the unconstrained parameters, whose sites are sorted by name.

    Raises:
        TypeError: scale is neither a number nor an array.
        ValueError: a scale is not positive and finite; at ``run``, the vector has another length.
    """

    def __init__(self, scale):
        if not isinstance(scale, int | float | np.number | np.ndarray | jax.Array | list | tuple):
            raise TypeError(f"diagonal(scale): scale must be a positive number or a vector [P], got {scale!r}.")
        self.values = jnp.asarray(scale, float)
        if self.values.ndim > 1 or not bool(jnp.all((self.values > 0) & jnp.isfinite(self.values))):
            raise ValueError(f"diagonal(scale): scale={scale} must be a positive finite number or a vector of them.")

    def build(self, prior_scale, learned=None):
        if self.values.ndim and self.values.shape != prior_scale.shape:
            raise ValueError(
                f"diagonal(scale): scale has shape {self.values.shape}, the model has {prior_scale.size} "
                "unconstrained parameters (without last layers that are integrated out; marginalize=False samples "
                "them): give a number or a vector of that length."
            )
        return Diagonal(jnp.broadcast_to(self.values, prior_scale.shape).astype(prior_scale.dtype))

    def __repr__(self):
        digest = hashlib.sha256(np.asarray(self.values).tobytes()).hexdigest()[:16]
        return f"{super().__repr__()}({self.values if self.values.ndim == 0 else digest})"


def low_rank(rank: int = 50) -> Preconditioner:
    """Removed in 0.2: a diagonal with leading directions of curvature, which turn as a network's chain moves.

    Raises:
        NotImplementedError: always.
    """
    raise NotImplementedError(
        f"fs.preconditioners.low_rank({rank}) was removed in 0.2, because the directions of curvature turn while the "
        "chain moves. Use rmsprop(), the default for networks, or dense() for up to some hundred parameters."
    )
