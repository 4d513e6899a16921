"""``fit_gp``: training of kernel parameters and noise by marginal likelihood."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import check_count, check_key, check_positive, one_line, warn
from numpyro_fspace._xla import matmul
from numpyro_fspace.priors.base import as_inputs, as_positive, as_real, as_values
from numpyro_fspace.priors.cholesky import KERNEL_CURE, as_columns, warn_of_indefinite
from numpyro_fspace.priors.gp_prior import GPPrior
from numpyro_fspace.priors.kernel_params import kernel_and_params, spreads
from numpyro_fspace.priors.tracing import is_traced

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from jaxtyping import Array, ArrayLike, Float, Key
    from tinygp.kernels import Kernel

    from numpyro_fspace.priors.cholesky import AnyArray

NOISE_FLOOR = 1e-6
STEPS_PER_UPDATE = 20
#: A mean of y larger than this number of standard deviations does not fit a process with mean zero.
FAR_FROM_ZERO = 3.0


@dataclass(frozen=True, eq=False, repr=False)
class GPFit:
    """A Gaussian process trained by ``fit_gp``.

    Attributes:
        prior: the zero-mean prior with the trained kernel (not conditioned on the data).
        noise_variance: trained variance of the noise, or the given variances, [N] or [N, K].
        losses: negative log marginal likelihood per entry of y, before each step, [num_steps].
        params: the trained positive parameters: ``"variance"`` and ``"lengthscale"`` [D] for ``kernel=None``, those of
            a kernel function by its names, and those of a tinygp kernel by their numbers in it (``"0"``, ``"1"``, …),
            with the parameters that were held fixed.
    """

    prior: GPPrior
    noise_variance: float | np.ndarray
    losses: np.ndarray = field(repr=False)
    params: dict[str, np.ndarray]

    __repr__ = one_line

    def predict(
        self, x_train: Float[ArrayLike, "N D"], y_train: Float[ArrayLike, "N K"], x_test: Float[ArrayLike, "M D"]
    ) -> tuple[np.ndarray, np.ndarray]:
        """Mean and variance of y, noise included, at x_test given the training data: [M], or [M, K] of K outputs.

        Raises:
            ValueError: ``fit_gp`` was given the noise of each target, so the noise of new targets is unknown.
        """
        if np.ndim(self.noise_variance):
            raise ValueError(
                "predict: fit_gp was given the noise of each target, so the noise of new targets is unknown. Use "
                "prior.condition(x_train, y_train, noise_variance).moments(x_test), the moments of f."
            )
        mean, covariance = self.prior.condition(x_train, y_train, self.noise_variance).moments(x_test)
        variance = np.diagonal(covariance, axis1=-2, axis2=-1)
        variance = variance.reshape(mean.shape) if covariance.ndim == 2 else variance.T
        return np.asarray(mean), variance + self.noise_variance


def fit_gp(
    kernel: Callable[[dict], Callable] | Kernel | None,
    x: Float[ArrayLike, "N D"],
    y: Float[ArrayLike, "N K"],
    *,
    params: Mapping[str, Float[ArrayLike, "*shape"]] | None = None,
    noise_variance: Float[ArrayLike, "*N"] | None = None,
    num_steps: int = 500,
    learning_rate: float = 0.05,
    max_points: int = 1000,
    key: Key[Array, ""] | None = None,
    progress: bool | None = None,
) -> GPFit:
    """Train a zero-mean Gaussian process: maximize log N(y; 0, k(x, x) + noise · I) by Adam.

    Adam optimizes the logarithms of the parameters and of the noise variance in float64, whatever JAX's setting, and
    the best iterate is returned. The noise variance stays above 1e-6 times that of y. Subtract the mean from y first. A
    ``RuntimeWarning`` says if that mean is far from zero, if the kernel is not a covariance, or if training fails.

    Args:
        kernel: None means the squared exponential with one lengthscale per input, which starts at median distances and
            the variance of y. A tinygp kernel starts at its own (positive) parameters; a polynomial's order, and
            integers that are not parameters such as scales, are held fixed. A function takes a dict of positive
            parameters, all of which are trained from their initial values ``params``, and returns a kernel for
            ``GPPrior``.
        x: inputs [N, D].
        y: targets [N], or [N, K] for K outputs that share kernel and noise.
        params: initial values of the parameters of a kernel function, positive numbers or arrays.
        noise_variance: a number is the initial noise variance, and None means a tenth of the variance of y. An array of
            variances [N] or [N, K], such as that of ``dirichlet_targets``, is taken as known and not trained.
        num_steps: Adam steps.
        learning_rate: learning rate of Adam, in log space.
        max_points: if N is larger, a random subset of this size is used instead of the data.
        key: key for the random subset; not needed otherwise.
        progress: whether to show a progress bar; None shows it for long fits in a terminal.

    Returns:
        The trained prior, noise variance, losses and parameters.

    Raises:
        TypeError, ValueError: shapes are wrong, values are NaN or traced, parameters are not positive, key or params
            are missing, or the marginal likelihood is never finite; with ``kernel=None`` also if single precision
            cannot represent the scale of the data.

    Example:
        >>> import numpy as np
        >>> x = np.linspace(-1, 1, 20)[:, None]
        >>> fit = fit_gp(None, x, np.sin(3 * x[:, 0]), num_steps=100)
        >>> bool(fit.losses[-1] < fit.losses[0])
        True

    Reference: C. E. Rasmussen, C. K. I. Williams (2006), *Gaussian processes for machine learning*, chapter 5.
    """
    x, y, num_outputs = as_data(x, y, "fit_gp")
    for number, name in ((num_steps, "num_steps"), (max_points, "max_points")):
        check_count(number, name)
    check_positive(learning_rate, "learning_rate")
    varies, sd = np.ptp(y, 0) > 0, spreads(y)
    far = np.abs(y.mean(0)) / sd
    if far.max() > FAR_FROM_ZERO:
        worst = int(np.argmax(far))
        column = f"column {worst} of y" if len(far) > 1 else "y"
        warn(
            f"fit_gp: {column} has mean {y[:, worst].mean():.3g} and standard deviation "
            f"{varies[worst] * sd[worst]:.3g}, but the process has mean zero: subtract the mean."
        )
    if noise_variance is None:
        noise_variance = 0.1 * float(np.mean(sd[varies] ** 2) if varies.any() else 1.0)
    noise = np.asarray(as_positive(noise_variance, "noise_variance", ndim=2), float)
    is_known = noise.ndim > 0
    if is_known:
        if noise.shape not in ((len(x),), y.shape):
            raise ValueError(
                f"noise_variance must be a number, or variances [N] or [N, K] of y {list(y.shape)}, got "
                f"{list(noise.shape)}."
            )
        noise = np.broadcast_to(noise if noise.ndim == 2 else noise[:, None], y.shape)
    if len(x) > max_points:
        if key is None:
            raise ValueError(f"x holds {len(x)} > max_points={max_points} points: pass a key to draw a subset.")
        check_key(key, "key", single=True)
        rows = np.asarray(jax.random.permutation(key, len(x))[:max_points])
        x, y = x[rows], y[rows]
        noise = noise[rows] if is_known else noise

    kernel_fn, params, held = kernel_and_params(kernel, params, x, y)
    start = {"kernel": params} if is_known else {"kernel": params, "noise": noise}
    floor = NOISE_FLOOR * float(spreads(y.ravel()) ** 2)

    def loss(logs):
        values = jax.tree.map(jnp.exp, logs)
        covariance = GPPrior(kernel_fn(values["kernel"]), num_outputs=y.shape[1]).covariance_function(x, x)
        if is_known:
            diagonals = noise.T if covariance.shape[-1] == len(x) else noise.reshape(1, -1)
            covariance = covariance + jax.vmap(jnp.diag)(jnp.asarray(diagonals))
        else:
            covariance = covariance + (values["noise"] + floor) * jnp.eye(covariance.shape[-1])
        return _negative_evidence(covariance, jnp.asarray(as_columns(y, covariance.shape))) / y.size

    if progress is None:
        progress = num_steps * len(x) ** 3 > 1e10 and sys.stderr.isatty()
    with jax.enable_x64(True):
        logs = jax.tree.map(lambda value: jnp.log(jnp.asarray(value, float)), start)
        losses, path = _adam(loss, logs, num_steps, learning_rate, progress)
    if not np.isfinite(losses).any():
        raise ValueError(
            f"the marginal likelihood is not finite at the start: {KERNEL_CURE}. Or pass a kernel that is "
            "differentiable in all its parameters, or a larger noise_variance."
        )
    best = int(np.nanargmin(losses))
    if not np.isfinite(losses[-1]):
        warn(
            f"fit_gp: the marginal likelihood is not finite from step {int(np.argmin(np.isfinite(losses)))} of "
            f"{num_steps} on, and the kernel is hardly trained: {KERNEL_CURE}. Or pass a kernel that is differentiable "
            "in all its parameters, a larger noise_variance or a smaller learning_rate."
        )
    values = jax.tree.map(lambda steps: np.exp(steps[best]), path)
    prior = GPPrior(kernel_fn(values["kernel"]), num_outputs=num_outputs)
    if np.isfinite(losses[-1]):
        warn_of_indefinite(prior._covariance(x))
    trained = np.asarray(noise_variance, float) if is_known else float(values["noise"] + floor)
    return GPFit(prior, trained, losses, values["kernel"] | held)


def as_data(x, y, caller: str) -> tuple[AnyArray, AnyArray, int | None]:
    """``(x [N, D], y [N, K], num_outputs)``: inputs and targets that are known, num_outputs None for a single output.

    Raises:
        TypeError: x or y is traced, in the function ``caller``, or not real.
        ValueError: the shapes are wrong, or values are not finite.
    """
    x, y = as_inputs(x), as_real(y, "y")
    if np.ndim(y) not in (1, 2) or not np.size(y):
        raise ValueError(f"y must hold at least one target, as [N] or [N, K], got shape {list(np.shape(y))}.")
    if is_traced((x, y)):
        raise TypeError(f"{caller} needs concrete x and y: call it outside jit, grad and vmap.")
    num_outputs = None if y.ndim == 1 or y.shape[1] == 1 else y.shape[1]
    return x, as_values(y, len(x), num_outputs, "y"), num_outputs


@jax.custom_vjp
def _negative_evidence(covariance: Float[ArrayLike, "B N N"], y: Float[ArrayLike, "B N R"]) -> Float[Array, ""]:
    """-log N(y; 0, Σ), with the gradient (Σ⁻¹ - α αᵀ) / 2, α = Σ⁻¹ y, which is cheaper than that of the factor."""
    return _evidence_and_gradient(covariance, y)[0]


def _evidence_and_gradient(covariance, y):
    cholesky = jnp.linalg.cholesky(covariance)
    identity = jnp.broadcast_to(jnp.eye(covariance.shape[-1]), covariance.shape)
    inverse = jax.scipy.linalg.cho_solve((cholesky, True), identity)
    alpha = matmul(inverse, y)
    half_log_det = jnp.log(jnp.diagonal(cholesky, axis1=-2, axis2=-1)).sum() * y.shape[-1]
    value = 0.5 * jnp.sum(y * alpha) + half_log_det + 0.5 * y.size * math.log(2 * math.pi)
    return value, (0.5 * (y.shape[-1] * inverse - matmul(alpha, alpha.mT)), alpha)


_negative_evidence.defvjp(_evidence_and_gradient, lambda saved, cotangent: tuple(cotangent * g for g in saved))


def _adam(loss: Callable, start, num_steps: int, learning_rate: float, progress: bool) -> tuple:
    """Losses [num_steps] and parameters [num_steps, ...] before each step, as NumPy arrays."""
    import optax
    from tqdm import tqdm

    optimizer = optax.adam(learning_rate)

    def step(carry, _):
        logs, state = carry
        value, gradient = jax.value_and_grad(loss)(logs)
        updates, state = optimizer.update(gradient, state)
        return (optax.apply_updates(logs, updates), state), (value, logs)

    @jax.jit
    def several(carry):
        return jax.lax.scan(step, carry, length=STEPS_PER_UPDATE)

    carry, pieces = (start, optimizer.init(start)), []
    with tqdm(total=num_steps, desc="fit_gp", leave=False, disable=not progress) as bar:
        for done in range(0, num_steps, STEPS_PER_UPDATE):
            carry, piece = several(carry)
            pieces.append(jax.device_get(piece))
            bar.update(min(STEPS_PER_UPDATE, num_steps - done))
            bar.set_postfix(loss=f"{pieces[-1][0][-1]:.3f}")
    return jax.tree.map(lambda *parts: np.concatenate(parts)[:num_steps], *pieces)
