r"""Gradient noise as part of a thermostat: more friction along the directions in which gradients are noisy.

A kick by a gradient with noise covariance V adds ε²V to the covariance of the momentum. Langevin dynamics with a
friction matrix Γ leaves N(0, T I) invariant if its own noise *and that of the gradients* add up to 2ΓT per unit of time
(the fluctuation–dissipation relation). Along an eigenvector q of V with variance v, a thermostat that acts before every
k steps therefore has

.. math:: \gamma_q = \max(\gamma,\; g\, \varepsilon v / 2T), \qquad
          p_q \leftarrow c p_q + \sqrt{T (1 - c^2) - a k \varepsilon^2 v}\; \xi_q, \qquad
          c = e^{-\gamma_q k \varepsilon}, \quad a = c + (1 - c)^2 \tfrac{4 k^2 - 1}{12 k^2}.

The factor a is 1 for little friction. With more friction, a kick moves the chain less before the next refresh than the
refresh itself does, and a falls to between a quarter and a third. If the variances are known, the relative error of
the variance in a direction of curvature λ is (ε²λ/4) / (1 - ε²λ/4) / g; a relative error δ of v changes it by δ/g.

References: T. Chen, E. Fox, C. Guestrin (2014), *Stochastic gradient Hamiltonian Monte Carlo* (the estimate B̂);
X. Shang, Z. Zhu, B. Leimkuhler, A. Storkey (2015), *Covariance-controlled adaptive Langevin thermostat for large-scale
Bayesian sampling*.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace._xla import matmul

#: g: friction along a direction of the noise, over the friction that would balance this noise alone.
FRICTION_RATIO = 16.0


class GradientNoise(NamedTuple):
    """The noise of gradients at flat positions [P], as far as it is known.

    Attributes:
        basis: orthonormal directions of the noise, in the preconditioner's coordinates, as rows [R, P].
        variances: v of the gradient along them, [R].
    """

    basis: jax.Array
    variances: jax.Array

    def friction(self, step_size, friction, temperature):
        """γ along each direction, [R]."""
        return jnp.maximum(friction, self._least_friction(step_size, temperature))

    def damped(self, rows, step_size, friction, temperature):
        """Rows [G, P] of gradients, scaled along the directions by √(γ / γ_q).

        With friction γ in every direction they then raise the temperature as the given rows do with γ_q.
        """
        factor = jnp.sqrt(friction / self.friction(step_size, friction, temperature))
        return rows + matmul((factor - 1.0) * matmul(rows, self.basis.T), self.basis)

    def correction(self, momentum, noise, step_size, friction, temperature, num_kicks):
        """What to add to the result of ``ornstein_uhlenbeck`` to account for the noise of the next ``num_kicks`` kicks.

        The arguments are those of ``ornstein_uhlenbeck``: ``friction`` is ``num_kicks`` times γ, or infinite for a
        fresh momentum.
        """
        kicks = num_kicks * step_size**2 * self.variances
        decay = jnp.where(jnp.isinf(friction), jnp.inf, friction * step_size)
        along = jnp.maximum(decay, num_kicks * step_size * self._least_friction(step_size, temperature))
        keep = jnp.exp(-along)
        share = keep + (1.0 - keep) ** 2 * (4 * num_kicks**2 - 1) / (12 * num_kicks**2)
        fresh = jnp.sqrt(jnp.maximum(-temperature * jnp.expm1(-2.0 * along) - share * kicks, 0.0))
        keep -= jnp.exp(-decay)
        fresh -= jnp.sqrt(-temperature * jnp.expm1(-2.0 * decay))
        return matmul(keep * matmul(self.basis, momentum) + fresh * matmul(self.basis, noise), self.basis)

    def _least_friction(self, step_size, temperature):
        """``FRICTION_RATIO`` times the friction that balances the noise along each direction, [R]."""
        return FRICTION_RATIO * 0.5 * step_size * self.variances / temperature
