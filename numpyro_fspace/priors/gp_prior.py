"""``GPPrior``: Gaussian-process priors over functions, from tinygp kernels."""

from __future__ import annotations

import dataclasses
import itertools
from functools import partial
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.priors.base import as_real
from numpyro_fspace.priors.cholesky import checked_variances
from numpyro_fspace.priors.gaussian_base import GaussianProcess
from numpyro_fspace.priors.tracing import at_compile_time, is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import ArrayLike, Float
    from tinygp.kernels import Kernel


#: Kernels multiply matrices too, which a GPU does in reduced precision by default.
full_precision = jax.default_matmul_precision("highest")
#: A summand with a smaller share of the variance is ignored.
NO_SHARE = 1e-6


def _as_jax(leaf):
    """A parameter as JAX's array, known even if a program is being traced, so that the prior is not random there."""
    with jax.ensure_compile_time_eval():
        return jnp.asarray(leaf) if isinstance(leaf, np.ndarray | np.generic) else leaf


def on_rows(kernel):
    """The kernel as a function of inputs [M, D]; tinygp's quasiseparable kernels take numbers instead of rows [1]."""
    import tinygp

    quasisep = tinygp.kernels.quasisep.Quasisep

    def of_row(node):
        return tinygp.kernels.Custom(partial(_of_one_input, node)) if isinstance(node, quasisep) else node

    return jax.tree.map(of_row, kernel, is_leaf=lambda node: isinstance(node, quasisep))


class ManyInputsError(ValueError):
    """A kernel of one input was called with several inputs."""


def _of_one_input(kernel, a, b):
    if jnp.size(a) != 1:
        name = type(kernel).__name__
        raise ManyInputsError(
            f"tinygp.kernels.quasisep.{name} is a kernel of one input, but x has {jnp.size(a)}: use a kernel from "
            "tinygp.kernels, or select one column of x by tinygp.transforms.Subspace(0, kernel)."
        )
    return kernel.evaluate(jnp.reshape(a, ()), jnp.reshape(b, ()))


def _summands(kernel) -> list:
    """The summands of a kernel; products of sums and transformed sums are expanded."""
    from tinygp import kernels, transforms
    from tinygp.kernels import quasisep

    if isinstance(kernel, kernels.Sum | quasisep.Sum):
        return _summands(kernel.kernel1) + _summands(kernel.kernel2)
    if isinstance(kernel, kernels.Product | quasisep.Product):
        pairs = itertools.product(_summands(kernel.kernel1), _summands(kernel.kernel2))
        return [dataclasses.replace(kernel, kernel1=one, kernel2=other) for one, other in pairs]
    around = transforms.Transform, transforms.Linear, transforms.Cholesky, transforms.Subspace, quasisep.Scale
    if isinstance(kernel, around):
        return [dataclasses.replace(kernel, kernel=part) for part in _summands(kernel.kernel)]
    return [kernel]


def check_columns(kernel, num_columns: int) -> None:
    """The kernel's lengthscales, and the columns that it selects, must agree with the columns of x.

    Otherwise a single column would be broadcast, and JAX would replace a column that does not exist by the last one.
    """
    from tinygp import kernels, transforms

    if isinstance(kernel, transforms.Linear | transforms.Cholesky):
        scale = jnp.shape(kernel.scale if isinstance(kernel, transforms.Linear) else kernel.factor)
        if len(scale) == 1 and scale[0] not in (1, num_columns):
            raise ValueError(
                f"the kernel has scales of {scale[0]} inputs (tinygp.transforms.{type(kernel).__name__}), but x has "
                f"{num_columns}: pass x with {scale[0]} columns, or a kernel of {num_columns} inputs."
            )
        num_columns = scale[0] if len(scale) == 2 else num_columns
    elif isinstance(kernel, transforms.Subspace):
        try:
            num_columns = np.size(np.empty(num_columns)[kernel.axis])
        except IndexError:
            if isinstance(kernel.axis, tuple):
                raise ValueError(
                    f"tinygp.transforms.Subspace cannot take the inputs {kernel.axis}, a tuple: write "
                    f"np.array({list(kernel.axis)})."
                ) from None
            raise ValueError(
                f"the kernel uses input {kernel.axis} of x (tinygp.transforms.Subspace, counted from 0), but x has "
                f"{num_columns} inputs."
            ) from None
    elif isinstance(kernel, kernels.Polynomial) and jnp.shape(kernel.scale) not in ((), (1,), (num_columns,)):
        num = jnp.size(kernel.scale)
        raise ValueError(
            f"the kernel has scales of {num} inputs (tinygp.kernels.Polynomial), but x has {num_columns}: pass x with "
            f"{num} columns, or a kernel of {num_columns} inputs."
        )
    elif not isinstance(kernel, kernels.Sum | kernels.Product):
        return
    parts = (kernel.kernel1, kernel.kernel2) if hasattr(kernel, "kernel1") else (kernel.kernel,)
    for part in parts:
        check_columns(part, num_columns)


def _called(name: str, fn, x, *others, cure: str):
    """``fn(x, *others)``, a function of the user's, as an array, or an error that explains its failure."""
    try:
        value = fn(x, *others)
    except ManyInputsError:
        raise
    except (jax.errors.JAXTypeError, jax.errors.JAXIndexError) as error:  # of a function that reads traced arrays
        reason = str(error).partition("\n")[0]
        raise TypeError(
            f"the {name} is traced by JAX, so that it must be written with jax.numpy and without conditions on values "
            f"({type(error).__name__}: {reason})"
        ) from error
    except Exception as error:
        reason = str(error).partition("\n")[0]
        kind = type(error) if isinstance(error, TypeError) else ValueError
        raise kind(
            f"the {name} fails at x with {x.shape[1]} inputs ({type(error).__name__}: {reason}). {cure}"
        ) from error
    if not jnp.issubdtype((value if hasattr(value, "dtype") else np.asarray(value)).dtype, np.number):
        raise TypeError(f"the {name} must return an array of numbers, got {value!r}.")
    array = jnp.asarray(value)
    if jnp.iscomplexobj(array):
        raise TypeError(f"the {name} returns complex numbers: it must be real, and so must its parameters.")
    return array


@full_precision
def _block(kernel, x1, x2):
    """The values of a kernel."""
    cure = (
        "Its parameters must be numbers, and so must the values of functions that it calls. For one lengthscale per "
        "input write tinygp.transforms.Linear(1 / lengthscale, kernel)."
    )
    return _called("kernel", kernel, x1, x2, cure=cure)


class GPPrior(GaussianProcess):
    """The Gaussian-process prior f ~ GP(m, k), with independent outputs (one kernel or K) or dependent outputs.

    At measurement points, f(x) ~ N(m(x), k(x, x) + nugget · I). ``log_prob``, ``sample`` and ``marginal`` use this
    distribution; ``moments`` and ``condition`` describe the function itself, without nugget. The nugget bounds the
    stiffness of the prior for a sampler: the curvature of -log_prob in f is at most 1 / nugget.

    If x, the kernel's parameters and the nugget are concrete (not traced by JAX), the covariance is factorized once per
    x in float64, and ``log_prob`` costs one product with a constant matrix. Kernel, mean and nugget may also hold
    traced values (kernel parameters sampled in a NumPyro model). The factorization is then part of the program and has
    the program's precision, and a covariance that is not positive definite gives NaN. Create a prior with fixed
    parameters outside of the model, because jit may trace parameters that are created inside.

    tinygp's stationary kernels use the *L1* distance by default, except ``ExpSquared``. Pass
    ``distance=tinygp.kernels.distance.L2Distance()`` for the usual isotropic kernel. With several inputs, Matérn 3/2
    and 5/2 and ``RationalQuadratic`` are covariances only with L2; ``Cosine`` and ``ExpSineSquared`` are covariances
    with neither: use a product of ``tinygp.transforms.Subspace(i, kernel)``. Kernels of ``tinygp.kernels.quasisep``
    take one input.

    Args:
        kernel: a tinygp kernel (or any callable of x1 [M, D], x2 [L, D] that returns [M, L]), or a list of K kernels,
            one per output. A matrix-valued kernel, a callable that returns [M, K, L, K] such as
            ``fs.priors.Helmholtz``, makes the outputs dependent.
        mean: a number, an array [K], or a function of x [M, D] that returns [M] or [M, K].
        nugget: variance added to the diagonal of the covariance at the points, a number. None means 1e-2 times the mean
            variance of f there (of the smallest summand, if the kernel is a sum), but at least 1e-4 times that of f.
        num_outputs: K, for values [M, K]; None for a single output with values [M], or for a list of K kernels.

    Raises:
        TypeError: the kernel is not callable, or it is a class.
        ValueError: the nugget is not positive, or K disagrees with the kernels or the mean.

    Example:
        >>> import jax.numpy as jnp, tinygp
        >>> prior = GPPrior(2.0 * tinygp.kernels.ExpSquared(scale=0.5), nugget=0.1)
        >>> print(round(float(prior.log_prob(jnp.zeros((1, 1)), jnp.zeros(1))), 4))
        -1.2899

    Reference: C. E. Rasmussen, C. K. I. Williams (2006), *Gaussian processes for machine learning*.
    """

    def __init__(
        self,
        kernel: Kernel | Callable | Sequence[Kernel],
        *,
        mean: Float[ArrayLike, "*K"] | Callable = 0.0,
        nugget: ArrayLike | None = None,
        num_outputs: int | None = None,
    ):
        kernels = tuple(kernel) if isinstance(kernel, list | tuple) else (kernel,)
        for one in kernels:
            if isinstance(one, type) or not callable(one):
                raise TypeError(f"kernel must be a tinygp kernel instance or a list of them, got {one!r}.")
        if num_outputs is None and isinstance(kernel, list | tuple):
            num_outputs = len(kernels)
        if num_outputs is not None and (not isinstance(num_outputs, int | np.integer) or num_outputs < 1):
            raise ValueError(f"num_outputs must be a positive integer or None, got {num_outputs!r}.")
        if isinstance(kernel, list | tuple) and len(kernels) != num_outputs:
            raise ValueError(
                f"kernel is a list of {len(kernels)} kernels but num_outputs={num_outputs}: give one kernel per output."
            )
        if not callable(mean):
            mean = as_real(mean, "mean")
            if mean.shape not in [(), (num_outputs,)]:
                raise ValueError(
                    f"mean has shape {list(mean.shape)} but num_outputs={num_outputs}: pass a number, an "
                    "array [num_outputs], or a function of x."
                )
        super().__init__(num_outputs, nugget)
        self.kernel, self.mean = kernel, mean
        self.has_zero_mean = not (callable(mean) or is_traced(mean)) and not np.any(mean)
        # JAX arrays, because jit may embed NumPy parameters with the precision of its first call.
        self._kernels = tuple(on_rows(jax.tree.map(_as_jax, one)) for one in kernels)
        self._summands = tuple([on_rows(jax.tree.map(_as_jax, part)) for part in _summands(one)] for one in kernels)

    def smallest_share(self, x):
        if all(len(parts) == 1 for parts in self._summands):
            return np.ones(1)

        @full_precision
        def share(x):
            variances = [
                jnp.stack([part(x).mean() for part in parts]) if parts[1:] else jnp.ones(1) for parts in self._summands
            ]
            shares = [one / jnp.where(one.sum() > 0, one.sum(), 1.0) for one in variances]
            return jnp.stack([jnp.where(one > NO_SHARE, one, 1.0).min() for one in shares])

        return at_compile_time(share, x, exact=self.exact)

    def summands(self):
        if isinstance(self.kernel, list | tuple):
            return [[GPPrior(part) for part in _summands(one)] for one in self.kernel]
        if len(self._summands[0]) == 1:
            return [[self]]
        return [[GPPrior(part, num_outputs=self.num_outputs) for part in _summands(self.kernel)]]

    def mean_function(self, x):
        shape = (len(x), self.num_outputs or 1)
        if not callable(self.mean):
            return jnp.broadcast_to(self.mean, shape)
        cure = "It takes x [M, D], one row per point, and returns [M] or [M, K]."
        mean = _called("mean function", self.mean, x, cure=cure)
        if mean.shape not in [(len(x),), shape]:
            raise ValueError(f"mean must return shape [{len(x)}] or {list(shape)}, got {list(mean.shape)}.")
        return jnp.broadcast_to(mean.reshape(len(x), -1), shape)

    def _covariance(self, x):
        covariance = super()._covariance(x)
        return checked_variances(covariance, covariance)

    def covariance_function(self, x1, x2):
        for one in self.kernel if isinstance(self.kernel, list | tuple) else [self.kernel]:
            check_columns(one, x1.shape[1])
        blocks, num_outputs = [_block(kernel, x1, x2) for kernel in self._kernels], self.num_outputs
        if len(blocks) == 1 and blocks[0].shape == (len(x1), num_outputs, len(x2), num_outputs):
            return blocks[0].reshape(1, len(x1) * num_outputs, len(x2) * num_outputs)
        for block in blocks:
            if block.ndim == 4:
                raise ValueError(
                    f"a matrix-valued kernel must return shape [{len(x1)}, K, {len(x2)}, K] for num_outputs=K, got "
                    f"{list(block.shape)} with num_outputs={num_outputs}."
                )
            if block.shape != (len(x1), len(x2)):
                raise ValueError(
                    f"kernel must return shape {[len(x1), len(x2)]}, got {list(block.shape)}: check the "
                    f"shapes of its parameters against the {x1.shape[1]} inputs of x."
                )
        return jnp.stack(blocks)
