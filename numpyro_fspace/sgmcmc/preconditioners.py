"""Preconditioners: linear maps S that give the sampler coordinates u with w = S u.

A constant preconditioner changes how fast the chain moves, never the law it targets: Langevin dynamics
in u, read in w, is ``dw = -S Sᵀ ∇U dt + √2 S dB``, whose stationary law is exp(-U) for every invertible
S. In Hamiltonian terms the mass matrix is M = (S Sᵀ)⁻¹.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

__all__ = ["Diagonal", "Identity", "Preconditioner", "diagonal", "identity", "prior_scale", "rmsprop"]


class Identity(NamedTuple):
    """S = I."""

    def scale(self, u):
        """S u."""
        return u

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return gradient


class Diagonal(NamedTuple):
    """S = diag(s), with ``s`` a pytree of positive scales shaped like the position."""

    s: jax.Array

    def scale(self, u):
        """S u."""
        return jax.tree.map(jnp.multiply, self.s, u)

    def scale_gradient(self, gradient):
        """Sᵀ ∇U."""
        return jax.tree.map(jnp.multiply, self.s, gradient)


class Preconditioner:
    """How a NumPyro kernel makes its S: ``build(prior_scale, mean_square) -> Identity | Diagonal``.

    Attributes:
        adapts: whether S depends on ``mean_square``, which warm-up then estimates.
    """

    adapts = False

    def build(self, prior_scale, mean_square=None):
        """The linear map S.

        Args:
            prior_scale: prior standard deviations s of the unconstrained parameters, [P].
            mean_square: mean of (s ∂U/∂w)² over burn-in, [P]; zeros before there is any.
        """
        raise NotImplementedError

    def __repr__(self):
        return f"fs.preconditioners.{type(self).__name__.strip('_')}"


class _identity(Preconditioner):
    def build(self, prior_scale, mean_square=None):
        return Identity()


class _prior_scale(Preconditioner):
    def build(self, prior_scale, mean_square=None):
        return Diagonal(prior_scale)


class _rmsprop(Preconditioner):
    adapts = True

    def build(self, prior_scale, mean_square):
        return Diagonal(prior_scale * jnp.maximum(mean_square, 1.0) ** -0.25)


class _diagonal(Preconditioner):
    def __init__(self, values):
        self.values = values

    def build(self, prior_scale, mean_square=None):
        if self.values.ndim and self.values.shape != prior_scale.shape:
            raise ValueError(
                f"diagonal(scale): scale has shape {self.values.shape}, the model has {prior_scale.size} "
                "unconstrained parameters; give a number or a vector of that length."
            )
        return Diagonal(jnp.broadcast_to(self.values, prior_scale.shape).astype(prior_scale.dtype))


def identity() -> Preconditioner:
    """S = I: the samplers exactly as the papers write them."""
    return _identity()


def prior_scale() -> Preconditioner:
    """S = diag(prior standard deviations), the default for a given step size: standardised parameters.

    A parameter with prior N(μ, s²) moves as u = w/s, so one step size serves layers of every fan-in. A
    parameter whose prior has no standard deviation (``fs.flat()``) uses the scale of its initialiser.
    """
    return _prior_scale()


def rmsprop() -> Preconditioner:
    """S = diag(s · max(1, v)^(-1/4)), the default: prior scales s, shrunk where gradients are large.

    v is the mean of (s ∂U/∂w)² over burn-in, which estimates the diagonal of the Hessian in standardised
    parameters (E[∇U ∇Uᵀ] = E[∇²U] under exp(-U), plus the noise of the minibatch). Then S Sᵀ = s²/√v is the
    preconditioner of pSGLD, but estimated at two points of burn-in and frozen, so that the target stays exact without
    pSGLD's correction term.

    Reference: C. Li, C. Chen, D. Carlson, L. Carin (2016), *Preconditioned stochastic gradient Langevin dynamics for
    deep neural networks*.
    """
    return _rmsprop()


def diagonal(scale) -> Preconditioner:
    """S = diag(scale) for a positive number or a flat vector [P] (mass matrix M = diag(scale⁻²)).

    Raises:
        ValueError: if any scale is not a positive finite number.
    """
    values = jnp.asarray(scale, float)
    if values.ndim > 1 or not bool(jnp.all((values > 0) & jnp.isfinite(values))):
        raise ValueError(f"diagonal(scale): scale={scale} must be a positive finite number or a vector of them.")
    return _diagonal(values)
