"""Kernels as functions of positive parameters, and the initial values of these parameters."""

from __future__ import annotations

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.priors.base import as_positive

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinygp.kernels import Kernel

#: A variance or lengthscale below this number, or above its inverse, is near the limits of single precision.
SMALLEST = 1e-30
#: Maximum number of inputs whose distances determine the initial lengthscale.
MAX_POINTS = 500
#: Names that tinygp gives to real-valued parameters. They are trained even if they are integers: 2 * ExpSquared(1).
REAL = ("value", "scale", "gamma", "alpha", "sigma", "factor")
#: Names of which this holds in tinygp's own kernels (SHO, Celerite) alone.
REAL_IN_TINYGP = ("omega", "quality", "a", "b", "c", "d")


def kernel_and_params(kernel, params, x, y) -> tuple[Callable[[dict], Callable], dict, dict]:
    """The kernel as a function of positive parameters, their initial values, and the parameters that are held fixed."""
    import tinygp

    if params and (kernel is None or isinstance(kernel, tinygp.kernels.Kernel)):
        raise ValueError(
            "params are initial values for a kernel *function* (from a dict to a kernel). A tinygp kernel starts at "
            "its own parameters, and kernel=None at median distances: leave params out."
        )
    if kernel is None:
        return _squared_exponential, median_start(x, y), {}
    if isinstance(kernel, tinygp.kernels.Kernel):
        leaves, structure = jax.tree_util.tree_flatten_with_path(kernel)
        held = {str(i): leaf for i, (path, leaf) in enumerate(leaves) if _is_held(kernel, path, leaf)}
        if any(np.iscomplexobj(leaf) for _, leaf in leaves):
            raise TypeError(
                f"The kernel, a {type(kernel).__name__}, has complex parameters computed from its arguments, through "
                "which JAX has no finite gradient, so that it cannot be trained. Train a real one, such as "
                "quasisep.SHO(omega, quality), or choose the parameters: fs.GPPrior(kernel)."
            )
        params = {
            str(i): as_positive(leaf, _name(kernel, path, i), ndim=2)
            for i, (path, leaf) in enumerate(leaves)
            if str(i) not in held
        }

        def with_values(values):
            values = values | held
            return jax.tree.unflatten(structure, [values[str(i)] for i in range(len(leaves))])

        return with_values, params, held
    if isinstance(kernel, type) or not callable(kernel):
        raise TypeError(f"kernel must be None, a tinygp kernel or a function of a dict, got {kernel!r}.")
    if not params:
        raise ValueError("params must give a kernel function its initial values: a dict of positive numbers or arrays.")
    return kernel, {name: as_positive(value, f"params[{name!r}]", ndim=2) for name, value in params.items()}, {}


def _name(kernel, path, number: int) -> str:
    """A description of a kernel's parameter for error messages, which says how to hold it fixed."""
    kernel, last = _owner(kernel, path), getattr(path[-1], "name", None) if path else None
    name = f"kernel parameter {number}" if None in (kernel, last) else f"{last} of the kernel {type(kernel).__name__}"
    return f"{name} (fit_gp trains its logarithm; to hold it fixed, write a kernel function and pass params=)"


def _owner(kernel, path):
    """The part of a kernel that has the parameter at a path; None if that cannot be told."""
    for key in path[:-1]:
        kernel = getattr(kernel, getattr(key, "name", ""), None)
    return kernel


def _is_held(kernel, path, leaf) -> bool:
    """Whether a kernel's parameter is held fixed: an order, no number, or an integer that is no real parameter."""
    name, array = jax.tree_util.keystr(path[-1:]).lstrip("."), leaf if hasattr(leaf, "dtype") else np.asarray(leaf)
    if not jnp.issubdtype(array.dtype, jnp.number) or name == "order":
        return True
    is_of_tinygp = type(_owner(kernel, path)).__module__.startswith("tinygp.")
    is_real = name in REAL or (is_of_tinygp and name in REAL_IN_TINYGP)
    return jnp.issubdtype(array.dtype, jnp.integer) and not is_real


def _squared_exponential(params: dict) -> Kernel:
    import tinygp

    unit = tinygp.transforms.Linear(1.0 / params["lengthscale"], tinygp.kernels.ExpSquared(scale=1.0))
    return params["variance"] * unit


def spreads(columns) -> np.ndarray:
    """Standard deviations of columns [N, ...]; 1 for constant ones, whose computed value may be a rounding error."""
    return np.where(np.ptp(columns, 0) > 0, np.std(columns, 0), 1.0)


def median_start(x: np.ndarray, y: np.ndarray) -> dict[str, np.ndarray]:
    """Initial parameters of ``fit_gp``: ``"variance"``, that of the targets y, and ``"lengthscale"`` [D].

    A lengthscale is the standard deviation of its input times the median distance between rows of x [N, D] (at most 500
    of them) whose columns are divided by their standard deviations. A ``ValueError`` is raised if a parameter is close
    to the limits of single precision.
    """
    spread = spreads(x)
    scaled = (x / spread)[:: -(-len(x) // MAX_POINTS)]
    squares = np.sum(scaled**2, axis=1)
    distances = squares[:, None] + squares - 2 * scaled @ scaled.T
    apart = distances[np.triu_indices(len(scaled), 1)]
    median = np.sqrt(max(np.median(apart), 0.0)) if len(apart) else 0.0
    start = {"variance": spreads(y.ravel()) ** 2, "lengthscale": spread * (median or 1.0)}
    for data, (name, value) in zip("yx", start.items(), strict=True):
        if np.min(value) < SMALLEST or np.max(value) > 1.0 / SMALLEST:
            raise ValueError(
                f"{data} gives the kernel a {name} of {np.min(value):.2g} to {np.max(value):.2g}, which is close to "
                f"the limits of single precision: standardize {data}."
            )
    return start
