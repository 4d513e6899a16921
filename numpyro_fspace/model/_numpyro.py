"""The private names of NumPyro that the package needs.

Those of effect handlers, distributions and guides are wrapped in functions. Attributes of ``MCMC`` and ``HMC``, which
subclasses in ``mcmc/`` set and read, are listed in ``MEMBERS``. ``MCMC`` reads ``_sample_fn`` of a kernel, which ours
define.
"""

from __future__ import annotations

import numpyro

try:
    from numpyro.infer.util import _unconstrain_params
    from numpyro.primitives import _PYRO_STACK
    from numpyro.util import _is_under_jax_transform
except ImportError as error:
    raise ImportError(
        f"numpyro_fspace reads NumPyro's stack of effect handlers, which it did not find in NumPyro "
        f"{numpyro.__version__} ({error}). Install another version: pip install 'numpyro>=0.22,<0.23'."
    ) from error


#: Private attributes by class.
MEMBERS = {
    "MCMC": (
        "_args",
        "_cache",
        "_collection_params",
        "_get_states_flat",
        "_jit_model_args",
        "_kwargs",
        "_last_state",
        "_set_collection_params",
        "_states",
        "_states_flat",
    ),
    "HMC": ("_init_fn", "_init_strategy", "_target_accept_prob"),
}


def active_handlers() -> tuple:
    """The effect handlers that are active, outermost first."""
    return tuple(_PYRO_STACK)


def is_nested() -> bool:
    """Whether this runs inside ``jit``, ``vmap`` or the like, where values are not known."""
    return _is_under_jax_transform()


def is_unconstraining(handler) -> bool:
    """Whether a handler belongs to ``potential_energy``, with which HMC, NUTS and our kernels evaluate a density."""
    return isinstance(handler, _unconstrain_params)


def plate_rows(plate):
    """The row numbers that a plate has returned to its model."""
    return _attribute(plate, "_indices")


def mask_of(distribution):
    """The mask of a ``MaskedDistribution``."""
    return _attribute(distribution, "_mask")


def flat_to_sites(guide):
    """The function from the flat values of an ``AutoContinuous`` guide to unconstrained values by site."""
    return _attribute(guide, "_unpack_latent")


def parts_of(guide) -> list:
    """The guides in an ``AutoGuideList``."""
    return _attribute(guide, "_guides")


def is_forward_mode(kernel) -> bool:
    """Whether HMC or NUTS differentiates in forward mode, which models with loops of unknown length need."""
    return _attribute(kernel, "_forward_mode_differentiation")


def _attribute(owner, name):
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise AttributeError(
            f"NumPyro {numpyro.__version__} has no {type(owner).__name__}.{name}, which numpyro_fspace needs. Install "
            "another version: pip install 'numpyro>=0.22,<0.23'."
        ) from error
