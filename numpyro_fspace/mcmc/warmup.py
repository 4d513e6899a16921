"""Warm-up: find weights that fit the data and a stable step size, then freeze.

Three phases, counted in draws (each of ``num_steps`` gradient steps):

1. **Warm start** (the first ``warm_start`` of warm-up): Adam on the potential, in the preconditioner's
   coordinates, learning rate decayed by a cosine from ``learning_rate`` to a hundredth of it. Positive sites (noise
   and other scales) stay at their initial values: the joint mode of a wide network and its noise interpolates
   the data with hardly any noise, far from where the posterior is, and so stiff that the chain stays there.
   Weights that the data say nothing of stay where they begin (``anchored``) instead of going to their prior's mode.
   With a dense preconditioner, the default of models of few parameters without a network, a Gaussian is fitted to the
   posterior by Newton's method instead (``mcmc/newton.py``): its mean is the start, its covariance the first
   preconditioner, and nothing is held.
2. **Calibration** (when the rest begins, and at its quarter, half and three quarters): the largest curvature λ
   of the potential in the preconditioner's coordinates, by power iteration on Hessian-vector products. It gives
   the sampler's step size. A preconditioner that adapts is renewed from the gradients seen since the last
   calibration (a dense one from Hessians), at the second and third; the directions of a low-rank one at the first
   three. Once it is fixed the step size can only be shortened, by half at most (a low-rank one allows a longer step at
   last, judged elsewhere).
   Where no Metropolis test guards the step, the curvature is measured at six more places on the way, and the smallest
   step is kept. With a test, the step is tuned below what the curvature allows, for a mean acceptance of 0.9.
3. **Burn-in** in between: the sampler itself. A draw hotter than chance allows loses its heat. If it gained energy, the
   step is too long and is shortened by a tenth; a draw that diverges, or is more than twice as hot as chance allows and
   gained energy or was flung up the potential, is undone and halves it. A chain that is hot and gains nothing any more
   (the noise of minibatches, most often) shows in the mean over a quarter of the phase: after the third quarter, and
   after the last, a momentum's step is shortened for it.
4. **Friction**, all the while, where minibatches or random points make gradients noisy and the kernel gives none. The
   noise's leading directions are found in the third quarter of burn-in, its variance along them is measured there and
   in the last: they get a friction of their own that balances it (``sgmcmc.gradient_noise``), and the step is shortened
   if one kick's noise is too much for any friction. From the middle of burn-in on all others get what keeps those that
   the rest of the noise acts on from being more than 1.3 times as hot. More would slow down the whole chain.

All is frozen when warm-up ends, so the sampling phase is a homogeneous Markov chain.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace._checks import check_positive
from numpyro_fspace.sgmcmc.preconditioners import Learned

__all__ = ["Warmup", "WarmupState", "drawn_to", "largest_curvature", "leading_curvatures", "noise_variances"]

#: Kinetic temperature above 1, of a stretch of burn-in, for which the step is shortened.
MAX_HEAT = 0.05
#: What noise outside its leading directions may add to the temperature where it acts; friction is raised for it.
MAX_NOISE_HEAT = 0.3
#: Variance that the noise of one gradient may add to a momentum, over the temperature; the step is shortened for it.
MAX_KICK = 0.25
#: Gradients at the end of a draw of burn-in by which their noise is known.
NUM_GRADIENTS = 4
#: Acceptance probability for which a Metropolis-tested step is shortened.
TARGET_ACCEPT_PROB = 0.9
#: Directions of their noise that get a friction of their own.
NUM_DIRECTIONS = 8
NUM_POWER_ITERATIONS = 40
NUM_SUBSPACE_ITERATIONS = 3


class Noise(NamedTuple):
    """What warm-up knows of the covariance V of gradients, in the preconditioner's coordinates.

    Attributes:
        basis: leading directions of V, orthonormal rows Q [R, P]; while they are sought, rows Y with Yᵀ Y ≈ Σ V, and
            zeros before.
        variances: of the gradient along them, [R]; zeros before they are measured.
        rest: variance of what is left where it acts, tr V² / tr V (see ``noise_variances``) of (I - Qᵀ Q) V (I - Qᵀ Q).
        squares: sums of those variances since they were last renewed, [R].
        traces: the same of tr V and tr V² of what is left, [2].
        num: draws in these sums.
    """

    basis: jax.Array
    variances: jax.Array
    rest: jax.Array
    squares: jax.Array
    traces: jax.Array
    num: jax.Array

    @classmethod
    def start(cls, position, num_directions: int) -> Noise:
        """Nothing is known, at flat ``position`` [P]."""
        num = min(num_directions, position.size)
        basis, along, rest, traces = (jnp.zeros(n, position.dtype) for n in ((num, position.size), num, (), 2))
        return cls(basis, along, rest, along, traces, jnp.zeros((), int))

    def without_directions(self) -> Noise:
        """Directions sought anew."""
        return self._replace(basis=jnp.zeros_like(self.basis), variances=jnp.zeros_like(self.variances))

    def with_rows(self, rows) -> Noise:
        """Directions sought with more rows [G, P] of covariance V: the leading singular vectors of old and new."""
        both = jnp.concatenate([self.basis, rows])
        _, rotation = jnp.linalg.eigh(both @ both.T)
        return self._replace(basis=rotation[:, : len(rows) - 1 : -1].T @ both)  # largest first

    def with_directions(self) -> Noise:
        """Those that were found, and nothing measured along them."""
        cleared = jax.tree.map(jnp.zeros_like, (self.variances, self.squares, self.traces, self.num))
        variances, squares, traces, num = cleared
        return Noise(jnp.linalg.qr(self.basis.T)[0].T, variances, self.rest, squares, traces, num)

    def with_measured(self, differences) -> Noise:
        """Sums with those of one draw's rows [G, P] of covariance V."""
        along = differences @ self.basis.T
        trace, weighted = variances_of_differences(differences - along @ self.basis)
        return self._replace(
            squares=self.squares + jnp.mean(along**2, axis=0),
            traces=self.traces + jnp.stack([trace, trace * weighted]),
            num=self.num + 1,
        )

    def renewed(self, is_last) -> Noise:
        """Variances from the sums, which begin anew. At the last time that of the rest may rise alone."""
        trace, squared = self.traces
        rest = jnp.where(trace > 0, squared / jnp.where(trace > 0, trace, 1.0), self.rest)
        rest = jnp.where(is_last, jnp.maximum(rest, self.rest), rest)
        variances = jnp.where(self.num > 0, self.squares / jnp.maximum(self.num, 1), self.variances)
        squares, traces, num = jax.tree.map(jnp.zeros_like, (self.squares, self.traces, self.num))
        return Noise(self.basis, variances.astype(rest.dtype), rest, squares, traces, num)


class WarmupState(NamedTuple):
    """What warm-up carries from draw to draw.

    Attributes:
        scale: prior standard deviations [P].
        optimizer: state of Adam.
        direction: estimate of the direction of largest curvature [P].
        step_size: the current step size.
        longest_step: what it may grow to: the step size that the last calibration found.
        num_tuned: draws since then, by which tuning to the acceptance probability becomes finer.
        learned: what the preconditioner is built from.
        squares, num_squares: sum and number of the squared gradients since the last calibration.
        noise: of gradients.
        anchor: where the chain starts [P], which an anchored warm start is drawn to; empty [0] without one.
    """

    scale: jax.Array
    optimizer: tuple
    direction: jax.Array
    step_size: jax.Array
    longest_step: jax.Array
    num_tuned: jax.Array
    learned: Learned
    squares: jax.Array
    num_squares: jax.Array
    noise: Noise
    anchor: jax.Array


class Warmup(NamedTuple):
    """Settings of the warm-up.

    Attributes:
        warm_start: fraction of the warm-up draws spent on the optimizer, between 0 and 1; 0 skips it. The other
            settings are those of Adam, which a dense preconditioner has no use for.
        learning_rate: of Adam, in units of the preconditioner's scale (a prior standard deviation).
        anchored: whether the optimizer is drawn to where the chain starts, w*, in place of the mode of the prior p0:
            ∇(-log p0)(w) is replaced by its difference from that at w*, (w - w*)/σ² for N(0, σ²), and by 0 where that
            would push away from w*, as heavy tails do. A mode is much smaller than a typical draw where weights are
            many; if their scale is sampled with them, it follows them down, and a deep network may stay there, with f
            near zero and the noise large. (For a linear model, with the start drawn from the prior and targets with
            their noise, the optimum would be a draw from the posterior: "sample then optimize".)

    Reference: A. G. de G. Matthews, J. Hron, R. E. Turner, Z. Ghahramani (2017), *Sample-then-optimize posterior
    sampling for Bayesian linear models*.
    """

    warm_start: float = 0.3
    learning_rate: float = 0.01
    anchored: bool = True

    def check(self):
        """Refuses numbers that are no settings."""
        if not isinstance(self.warm_start, int | float | np.number) or not 0.0 <= self.warm_start <= 1.0:
            raise ValueError(
                f"warm_start={self.warm_start!r} must be a fraction of the warm-up draws, between 0 and 1 (0.3: 30 %)."
            )
        check_positive(self.learning_rate, "learning_rate")
        if not isinstance(self.anchored, bool):
            raise TypeError(f"anchored={self.anchored!r} must be True or False.")

    def num_optimizer_draws(self, num_warmup: int) -> int:
        """Draws of warm-up spent on the warm start."""
        return round(self.warm_start * num_warmup)

    def calibration_draws(self, num_warmup: int) -> list[int]:
        """Indices of the draws before which the step size is calibrated."""
        start = self.num_optimizer_draws(num_warmup)
        rest = num_warmup - start
        return [start + (rest * quarter) // 4 for quarter in range(4)] if rest else []

    def shortening_draws(self, num_warmup: int) -> list[int]:
        """Indices of further draws before which a step size that no Metropolis test guards can be shortened.

        The curvature differs along the chain (that of a likelihood goes with the inverse square of its noise), and the
        step must suit the stiffest of the places that the chain comes to, not one.
        """
        draws = self.calibration_draws(num_warmup)
        if not draws:
            return []
        rest = num_warmup - draws[2]
        return sorted({draws[2] + (rest * part) // 8 for part in (1, 2, 3, 5, 6, 7)} - set(draws))

    def is_hot(self, temperature, size: int):
        """Whether a mean temperature (relative to the sampler's) of ``size`` parameters is beyond chance.

        That is, four standard deviations above a tenth too hot.
        """
        return temperature > 1.1 + 4.0 * (2.0 / size) ** 0.5

    def shortening(self, temperature, gained, risen, is_diverging, size: int):
        """Factor on the step size after a draw of burn-in over ``size`` parameters: 1 if all is well.

        A chain that slides down to where the posterior is runs hot with every step size, but only a long step makes it
        gain energy. So heat counts only if the total energy grew by half of it; or if U grew by more than ``size``,
        twice what takes a mode's neighborhood to temperature 1: a large friction takes the heat away before it is
        counted, and leaves the chain where it was flung.

        Args:
            temperature: mean kinetic temperature of the draw, relative to the sampler's own.
            gained: by how much the draw raised U + |p|²/2, relative to the sampler's temperature.
            risen: the same of U alone.
            is_diverging: whether the draw left the finite numbers.
            size: P.
        """
        is_unstable = ~((gained < 0.25 * size * (temperature - 1.0)) & (risen < size))  # also where a number is NaN
        hot = jnp.where(self.is_hot(temperature, size) & is_unstable, 0.9, 1.0)
        is_far_too_hot = self.is_hot(0.5 * temperature, size) & is_unstable
        return jnp.where(is_diverging | is_far_too_hot, 0.5, hot)

    def cooling(self, temperature, size: int):
        """Factor on the step size after a stretch of burn-in of a mean ``temperature``, relative to the sampler's.

        1 up to ``MAX_HEAT`` above 1, and where ``size`` numbers may be as hot by chance. Above, it is what would bring
        the heat down to ``MAX_HEAT`` if heat goes as the step's square (that of discretization does; that of noise goes
        as the step, that of noise which control variates left, as its third power), by half at most.
        """
        heat = temperature - 1.0
        is_hot = heat > MAX_HEAT + 4.0 * (2.0 / size) ** 0.5
        return jnp.where(is_hot, jnp.maximum(jnp.sqrt(MAX_HEAT / jnp.maximum(heat, MAX_HEAT)), 0.5), 1.0)

    def tuning(self, accept_prob, num_tuned):
        """Factor on the step size after draw number ``num_tuned`` since a calibration, for a mean acceptance of 0.9.

        A stochastic approximation [Robbins and Monro 1951], of the logarithm.
        """
        return jnp.exp(0.5 * (num_tuned + 1.0) ** -0.6 * (accept_prob - TARGET_ACCEPT_PROB))

    def friction(self, step_size, noise_variance, temperature):
        """The friction under which noise of this variance adds ``MAX_NOISE_HEAT`` to the temperature, 1 at least.

        A direction of variance v gets ε v / (2γ) above the sampler's own ``temperature``, to leading order.
        """
        return jnp.maximum(1.0, 0.5 * step_size * noise_variance / (MAX_NOISE_HEAT * temperature))

    def steadying(self, step_size, noise_variance, temperature):
        """Factor on the step size under which noise of this variance adds ``MAX_KICK`` of a temperature at most.

        A kick adds ε² v to the variance of the momentum, which no friction takes away before it has moved the chain.
        """
        limit = jnp.sqrt(MAX_KICK * temperature / jnp.where(noise_variance > 0, noise_variance, 1.0))
        return jnp.where(noise_variance > 0, jnp.minimum(1.0, limit / step_size), 1.0)

    def optimizer(self, num_gradients: int):
        """Adam with a cosine schedule over ``num_gradients`` steps."""
        import optax

        schedule = optax.cosine_decay_schedule(self.learning_rate, max(1, num_gradients), alpha=0.01)
        return optax.adam(schedule)

    def optimize(
        self, key, position, optimizer_state, potential, value, metric, num_steps, num_gradients, mask, correction=None
    ):
        """``num_steps`` Adam steps on u ↦ U(S u) for the parameters where ``mask`` is 1, the others being held.

        ``potential(position, key)`` is ``(U, aux)``, ``value`` the last such pair; ``correction(position)`` is added
        to its gradient. A step that leaves the finite numbers is skipped.

        Returns:
            ``(position, optimizer_state, value)``.
        """
        optimizer = self.optimizer(num_gradients)

        def step(carry, key):
            position, state, _ = carry
            value, gradient = jax.value_and_grad(potential, has_aux=True)(position, key)
            if correction is not None:
                gradient = gradient + correction(position)
            gradient = mask * metric.scale_gradient(gradient)
            update, new_state = optimizer.update(gradient, state)
            new = position + mask * metric.scale(update)
            good = jnp.all(jnp.isfinite(gradient)) & jnp.all(jnp.isfinite(new))
            return jax.tree.map(lambda a, b: jnp.where(good, a, b), (new, new_state, value), carry), None

        carry = position, optimizer_state, value
        return jax.lax.scan(step, carry, jax.random.split(key, num_steps))[0]


def drawn_to(anchor, prior_gradient):
    """What makes a gradient of U that of a warm start anchored at ``anchor`` [P].

    ``prior_gradient(w)`` is the gradient g(w) of -log p0. Returned is w ↦ r(w) - g(w), with r(w) = g(w) - g(w*) for
    each parameter, or 0 where its sign is not that of w - w*.
    """
    at_anchor = prior_gradient(anchor)

    def correction(position):
        gradient = prior_gradient(position)
        pull = gradient - at_anchor
        return jnp.where(pull * (position - anchor) > 0.0, pull, 0.0) - gradient

    return correction


def largest_curvature(potential, position, direction, key, metric, num_iterations=NUM_POWER_ITERATIONS):
    """Largest |eigenvalue| of Sᵀ ∇²U S at ``position`` by power iteration from ``direction``.

    One key for all products: the curvature of one minibatch and one set of measurement points.

    Returns:
        ``(λ, direction)``.
    """

    def step(direction, _):
        product = _curve(potential, position, direction, key, metric)
        norm = jnp.linalg.norm(product)
        return product / jnp.where(norm > 0, norm, 1.0), norm

    direction, norms = jax.lax.scan(step, direction / jnp.linalg.norm(direction), length=num_iterations)
    return norms[-1], direction


def leading_curvatures(potential, position, basis, key, metric, num_iterations=NUM_SUBSPACE_ITERATIONS):
    """Leading eigenvectors [P, R] and |eigenvalues| [R] of Sᵀ ∇²U S at ``position``; subspace iteration from ``basis``.

    One column is multiplied at a time, so that memory holds a few gradients and two bases.
    """

    def multiply(basis):
        return jax.lax.map(lambda column: _curve(potential, position, column, key, metric), basis.T).T

    basis, _ = jax.lax.scan(
        lambda basis, _: (jnp.linalg.qr(multiply(basis))[0], None), jnp.linalg.qr(basis)[0], length=num_iterations
    )
    projected = basis.T @ multiply(basis)
    values, rotation = jnp.linalg.eigh(0.5 * (projected + projected.T))
    return basis @ rotation, jnp.abs(values)


def noise_variances(gradients):
    """``(tr V, tr V² / tr V)`` of the covariance V of independent gradients [G, P]: the mean is that of v, over the
    directions of V, weighted by v.

    Differences of pairs have covariance 2V and mean zero, and the squared product of two of them the mean 4 tr V².
    """
    return variances_of_differences(differences_of(gradients))


def differences_of(gradients):
    """Rows of covariance V and mean zero [G/2, P], from independent gradients [G, P]."""
    return (gradients[::2] - gradients[1::2]) / jnp.sqrt(2.0)


def variances_of_differences(differences):
    """``noise_variances`` of gradients with these differences."""
    products = differences @ differences.T
    num = len(products)
    trace = jnp.trace(products) / num
    relative = (products / jnp.where(trace > 0, trace, 1.0)) ** 2  # the squares of the products may overflow
    return trace, trace * (jnp.sum(relative) - jnp.trace(relative)) / (num * (num - 1))


def _curve(potential, position, direction, key, metric):
    """Sᵀ ∇²U S d."""
    product = jax.jvp(lambda w: jax.grad(potential)(w, key), (position,), (metric.scale(direction),))[1]
    return metric.scale_gradient(product)
