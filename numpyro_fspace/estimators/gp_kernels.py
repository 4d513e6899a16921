"""The kernels of the estimators by name: as tinygp kernels, and by matrix products for their training."""

from __future__ import annotations

import jax.numpy as jnp

#: Kernels by name; inputs are in units of their lengthscales.
KERNELS = ("squared_exponential", "matern52")


def ard_kernel(name: str, params: dict):
    """A tinygp kernel with a lengthscale per input; ``params`` has ``"variance"`` and ``"lengthscale"`` [D]."""
    from tinygp import kernels, transforms

    unit = {
        "squared_exponential": kernels.ExpSquared(),
        "matern52": kernels.Matern52(distance=kernels.distance.L2Distance()),
    }[name]
    return params["variance"] * transforms.Linear(1.0 / params["lengthscale"], unit)


def by_products(name: str, params: dict):
    """The kernel of ``ard_kernel`` by matrix products, which take a fraction of the time where there are many inputs.

    Differences of squares lose digits that float64, in which a process is trained, has to spare.
    """

    def kernel(a, b):
        a, b = a / params["lengthscale"], b / params["lengthscale"]
        square = jnp.sum(a**2, -1)[:, None] + jnp.sum(b**2, -1) - 2 * a @ b.T
        square = jnp.maximum(square, 1e-14)
        if name == "squared_exponential":
            return params["variance"] * jnp.exp(-0.5 * square)
        distance = jnp.sqrt(5.0 * square)
        return params["variance"] * (1.0 + distance + distance**2 / 3.0) * jnp.exp(-distance)

    return kernel
