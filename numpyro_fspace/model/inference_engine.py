"""The engine that runs a model, recognized from NumPyro's stack of effect handlers.

``functional_prior`` adds log P0(f(X_M)) to the model's density. Every engine that evaluates a density must see this
term (our kernels, HMC and NUTS, SVI, ``log_density``). Where NumPyro and ArviZ list observations (``Predictive``,
``log_likelihood``, ``observed_data``) it must be absent, unlike a ``numpyro.factor``. The stack shows which is the
case:

====================================  =====================================  =========================
who runs the model                    sign on the stack                      the site becomes
====================================  =====================================  =========================
our kernels                           ``fresh_draws``                        a sample site, not observed
HMC, NUTS: the potential              ``substitute``, unconstrained values   a sample site
SVI                                   ``replay``                             a sample site, observed
``log_density``, ``log_likelihood``   ``substitute`` of data                 a sample site, not observed
``run_model(points=True)``            ``function_hook``                      a sample site, density 0
``Predictive``                        ``mask(False)``, anywhere              a note in the trace
initialization, ArviZ, plain traces   none of these                          a note in the trace
====================================  =====================================  =========================

A *note* is a site of type ``"functional_prior"``, which NumPyro's engines ignore. ``log_likelihood`` has the same stack
as ``log_density`` and ignores sites that are not observed.
"""

from __future__ import annotations

from typing import NamedTuple

from numpyro import handlers
from numpyro.primitives import plate

from numpyro_fspace.model._numpyro import active_handlers, is_unconstraining
from numpyro_fspace.model.handlers import fresh_draws, function_hook


class Engine(NamedTuple):
    """The properties of the engine on which functions and functional priors depend.

    Attributes:
        is_running: whether any effect handler is active.
        wants_density: whether the engine sums log densities.
        wants_prior: whether the sum includes functional priors; otherwise their log density is 0.
        visits_data: whether the functions are also called at the data (our kernels, HMC, NUTS).
        freezes_points: whether the engine would draw random measurement points once and keep them.
        marks_observed: whether a functional prior must be marked as observed (for SVI's guides and init strategies).
        plates: names of the active plates.
        layers: scopes and function hooks, innermost first.
    """

    is_running: bool
    wants_density: bool
    wants_prior: bool
    visits_data: bool
    freezes_points: bool
    marks_observed: bool
    plates: tuple[str, ...]
    layers: tuple

    def function(self, name: str, fn, *, is_network: bool = False):
        """``fn`` after all active hooks have replaced it; each hook gets the name with the scopes inside the hook."""
        kind = "network" if is_network else "sample"
        for layer in self.layers:
            if isinstance(layer, handlers.scope):
                if kind not in layer.hide_types:
                    name = f"{layer.prefix}{layer.divider}{name}"
            elif layer.replace is None:
                break
            elif layer.networks or not is_network:
                fn = layer.replace(name, fn, dict(layer.values))
        return fn


def current_engine() -> Engine:
    """The engine that is running the model."""
    stack = active_handlers()
    hooks = [one for one in stack if isinstance(one, function_hook)]
    kernel = any(isinstance(one, fresh_draws) for one in stack)
    potential = next((place for place, one in enumerate(stack) if is_unconstraining(one)), None)
    replays = any(isinstance(one, handlers.replay) for one in stack)
    data = [one.data for one in stack if isinstance(one, handlers.substitute) and not is_unconstraining(one)]
    is_masked = any(isinstance(one, handlers.mask) and one.mask is False for one in stack)
    visits_data = kernel or potential is not None
    has_outer_seed = any(isinstance(one, handlers.seed) for one in stack[:potential])
    wants_density = visits_data or replays or any(given is not None for given in data) or any(h.points for h in hooks)
    return Engine(
        is_running=bool(stack),
        wants_density=wants_density and not is_masked,
        wants_prior=all(hook.density for hook in hooks),
        visits_data=visits_data,
        freezes_points=potential is not None and not kernel and not has_outer_seed,
        marks_observed=replays or any(given is None for given in data),
        plates=tuple(one.name for one in stack if isinstance(one, plate)),
        layers=tuple(one for one in reversed(stack) if isinstance(one, handlers.scope | function_hook)),
    )
