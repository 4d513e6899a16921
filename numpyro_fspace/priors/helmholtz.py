"""``Helmholtz``: the kernel of plane vector fields with a random potential and a random stream function."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import one_line
from numpyro_fspace._xla import matmul
from numpyro_fspace.priors.gp_prior import check_columns
from numpyro_fspace.priors.tracing import at_compile_time

if TYPE_CHECKING:
    from collections.abc import Callable

    from jaxtyping import Array, Float

#: rot Ψ = ROTATION grad Ψ.
ROTATION = ((0.0, 1.0), (-1.0, 0.0))


class Helmholtz:
    r"""The matrix-valued kernel of a plane vector field with Gaussian-process potential and stream function.

    .. math:: f = \operatorname{grad} \Phi + \operatorname{rot} \Psi,\quad
              \operatorname{rot} \Psi = (\partial_2 \Psi, -\partial_1 \Psi),\quad
              \Phi \sim GP(0, k_\Phi),\; \Psi \sim GP(0, k_\Psi) \text{ independent}

    The covariance of f is as follows, where :math:`\nabla \nabla'^\top k = (\partial_{x_i} \partial_{x'_j} k)_{ij}` and
    :math:`R` is the rotation by a right angle, rot = R grad:

    .. math:: \operatorname{Cov}(f(x), f(x')) = \nabla \nabla'^\top k_\Phi(x, x')
              + R\, \nabla \nabla'^\top k_\Psi(x, x')\, R^\top.

    grad Φ has no curl and rot Ψ has no divergence, so the kernel of Φ determines the size and the lengthscale of the
    divergence of f, and the kernel of Ψ those of its curl. ``fs.GPPrior(Helmholtz(...), num_outputs=2)`` is the prior.
    ``fs.fit_gp`` trains a function of parameters that returns a ``Helmholtz``. JAX differentiates the kernels, which
    must therefore be twice differentiable as programs, as ``ExpSquared`` and ``Polynomial`` are. tinygp's ``Exp`` and
    Matérn kernels are functions of the distance itself, which has no derivative at 0, and are refused;
    ``RationalQuadratic`` is accepted only with ``L2Distance()``.

    Args:
        potential: the kernel of Φ, a tinygp kernel or a callable of x1 [M, 2], x2 [L, 2] that returns [M, L]. Its
            variance v is that of Φ; with a squared exponential, each component of grad Φ has variance v / lengthscale².
        stream: the kernel of Ψ, likewise.

    Raises:
        TypeError: a kernel is not callable, or it is a class.
        ValueError: a kernel is not one of two inputs, or its derivative jumps at equal inputs (not checked for traced
            parameters); or, at a call, inputs are not [M, 2].

    Example:
        >>> import jax, jax.numpy as jnp, numpyro_fspace as fs
        >>> from tinygp.kernels import ExpSquared
        >>> kernel = fs.priors.Helmholtz(0.1 * ExpSquared(1.0), ExpSquared(2.0))
        >>> prior = fs.GPPrior(kernel, num_outputs=2)
        >>> x = jnp.array([[0.0, 0.0], [1.0, 0.5]])
        >>> kernel(x, x).shape, prior.sample(jax.random.key(0), x).shape
        ((2, 2, 2, 2), (2, 2))

    Reference: R. Berlinghieri et al. (2023), *Gaussian processes at the Helm(holtz): a more fluid model for ocean
    currents*.
    """

    def __init__(self, potential: Callable, stream: Callable):
        for name, kernel in {"potential": potential, "stream": stream}.items():
            if isinstance(kernel, type) or not callable(kernel):
                raise TypeError(f"Helmholtz: {name} must be a tinygp kernel instance, got {kernel!r}.")
            check_columns(kernel, 2)
            _check_smooth(name, kernel)
        self.potential, self.stream = potential, stream

    __repr__ = one_line

    def __call__(self, x1: Float[Array, "M 2"], x2: Float[Array, "L 2"]) -> Float[Array, "M 2 L 2"]:
        """Cov(f(x1), f(x2)); the axis of components follows that of points."""
        x1, x2 = jnp.asarray(x1), jnp.asarray(x2)
        if x1.shape[-1] != 2 or x2.shape[-1] != 2:
            raise ValueError(f"Helmholtz is a kernel of the plane, got inputs {list(x1.shape)} and {list(x2.shape)}.")

        def covariance(a, b):
            rotation = jnp.array(ROTATION, a.dtype)
            return _mixed(self.potential, a, b) + matmul(matmul(rotation, _mixed(self.stream, a, b)), rotation.T)

        blocks = jax.vmap(jax.vmap(covariance, (None, 0)), (0, None))(x1, x2)
        return blocks.swapaxes(1, 2)


def _check_smooth(name, kernel):
    """Compare ∂²k/∂x∂x' at equal inputs and at two pairs 1e-8 apart, unless the kernel's parameters are traced."""
    places = np.array([0.3, -0.2]) + 1e-9 * np.array([[0, 0], [6, 8], [8, -6]])
    found = at_compile_time(lambda x: jax.vmap(lambda b: _mixed(kernel, x[0], b))(x), places)
    if isinstance(found, np.ndarray) and np.ptp(found, axis=0).max() > 1e-2 * np.abs(found).max():
        raise ValueError(
            f"Helmholtz: the derivative ∂²k/∂x∂x' of {name} jumps at x' = x, like that of any function of the distance "
            "itself (tinygp's Matern, Exp, and RationalQuadratic with its L1 distance). Use a function of the squared "
            f"distance, such as ExpSquared; got {kernel!r}."
        )


def _mixed(kernel, a, b) -> Float[Array, "2 2"]:
    """∂² k(a, b) / ∂a_i ∂b_j."""
    return jax.jacfwd(jax.grad(lambda a, b: kernel(a[None], b[None])[0, 0]), argnums=1)(a, b)


def _unflatten(_, kernels):
    kernel = object.__new__(Helmholtz)
    kernel.potential, kernel.stream = kernels
    return kernel


jax.tree_util.register_pytree_node(Helmholtz, lambda kernel: ((kernel.potential, kernel.stream), None), _unflatten)
