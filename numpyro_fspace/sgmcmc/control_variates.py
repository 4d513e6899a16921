r"""Control variates: minibatch gradients without most of the minibatch's noise.

With D̃(w, key) the minibatch estimate of the data's potential D(w), and a *center* c at which ∇D(c) is known,

.. math:: \nabla \tilde U(w) - \nabla \tilde D(c) + \nabla D(c), \qquad \text{same minibatch in both estimates,}

has the mean of ∇Ũ(w) for every c. The variance from the minibatch falls as ‖w - c‖². Any sampler of ``fs.sgmcmc`` runs
on the potential that ``with_control_variate`` makes, whose gradient this is. A center fixed at the mode is the control
variate of Baker et al.; one that is renewed every so many steps is variance-reduced (SVRG) Langevin dynamics.

References: J. Baker, P. Fearnhead, E. Fox, C. Nemeth (2019), *Control variates for stochastic gradient MCMC*;
A. Dubey et al. (2016), *Variance reduction in stochastic gradient Langevin dynamics*.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from numpyro_fspace.sgmcmc.shared import dot

__all__ = ["ControlVariate", "with_control_variate"]


class ControlVariate(NamedTuple):
    """A position where the gradient of all data is known.

    Attributes:
        center: c, a position.
        gradient: ∇D(c) of all data, shaped like the position.
    """

    center: Any
    gradient: Any


def with_control_variate(potential_fn, data_potential_fn, control: ControlVariate):
    """The potential Ũ(w, key) - ⟨∇D̃(c, key) - ∇D(c), w - c⟩, whose gradient is the corrected one.

    Args:
        potential_fn: Ũ, ``(position, key) -> U`` or ``(U, aux)``.
        data_potential_fn: D̃, ``(position, key) -> D``: the part that the minibatch estimates, for the same minibatch
            at the same key. It may hold other terms that do not depend on the minibatch: they cancel.
        control: the center, and the mean of ∇D̃ there.

    Returns:
        A potential in the form of ``potential_fn``. It costs a second gradient.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from numpyro_fspace.sgmcmc.control_variates import (
        ...     ControlVariate,
        ...     with_control_variate,
        ... )
        >>> y = jnp.arange(8.0)
        >>> def batch(w, key):
        ...     return 4 * jnp.sum((jax.random.choice(key, y, (2,)) - w) ** 2)
        >>> center = jnp.zeros(())
        >>> full = jax.grad(lambda w: jnp.sum((y - w) ** 2))(center)
        >>> potential = with_control_variate(batch, batch, ControlVariate(center, full))
        >>> gradient = jax.grad(potential)(jnp.float32(3.5), jax.random.key(0))
        >>> print(gradient)  # exact, as all data have the same Hessian
        0.0
    """

    def potential(position, key):
        noise = jax.tree.map(jnp.subtract, jax.grad(data_potential_fn)(control.center, key), control.gradient)
        moved = jax.tree.map(jnp.subtract, position, control.center)
        correction = dot(noise, moved)
        value = potential_fn(position, key)
        return (value[0] - correction, *value[1:]) if isinstance(value, tuple) else value - correction

    return potential
