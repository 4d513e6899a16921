"""Networks with random weights: every weight array becomes a site of the NumPyro model."""

from __future__ import annotations

import dataclasses
import functools
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from numpyro.distributions import constraints
from numpyro.infer import init_to_median

from numpyro_fspace.primitives import note
from numpyro_fspace.validate import check_positive

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["FanIn", "Flat", "fan_in", "flat", "init_to_network", "random_module"]


@dataclasses.dataclass(frozen=True)
class Flat:
    """Marks weights whose prior is Lebesgue measure; made by ``flat``."""


@dataclasses.dataclass(frozen=True)
class FanIn:
    """Marks weights whose prior is normal with variance ``scale²`` / fan-in; made by ``fan_in``."""

    scale: Any


def flat() -> Flat:
    """The papers' prior on weights, p(w) ∝ 1: none at all, so that a functional prior stands alone.

    It is improper. With Lebesgue measure on w the law of f is the functional posterior only if w ↦ f is a
    bijection; real networks have flat directions along which the weights drift away without end, and f is
    free between fixed measurement points. Prefer the default of ``random_module`` unless you replicate. It
    cannot be sampled, so there are no prior predictive draws.

    Returns:
        A value for ``random_module``'s ``prior``, or for one weight in a dict of priors.

    Example:
        >>> flat()
        Flat()

    Reference: M. Wu, J. Xuan, J. Lu (2024), *Functional stochastic gradient MCMC for Bayesian neural
    networks*.
    """
    return Flat()


def fan_in(scale: float = 1.0) -> FanIn:
    """The default prior on weights, w ~ N(0, scale² / fan-in): every layer passes on the size of its input.

    The fan-in of a weight array is the number of inputs of one output: the product of all axes but the last
    (flax, pairs) or but the first (equinox). Biases, one-dimensional weights and embeddings count as fan-in
    1. Weights the network starts at one everywhere, or that are called ``scale`` (norm layers), get
    N(1, scale²).

    Args:
        scale: standard deviation of a weight times the square root of its fan-in; may be a random variable.

    Returns:
        A value for ``random_module``'s ``prior``, or for one weight in a dict of priors.

    Raises:
        ValueError, TypeError: scale is not a positive number.

    Example:
        >>> fan_in(3.0)
        FanIn(scale=3.0)
    """
    check_positive(scale, "scale")
    return FanIn(scale)


def random_module(
    name: str,
    module: Any,
    *,
    input_shape: int | tuple[int, ...],
    prior: dist.Distribution | Mapping | Callable | Flat | FanIn | None = None,
) -> Callable:
    """A network with random weights, f(x; w) with w ~ prior, inside a NumPyro model.

    Every weight array is one ``numpyro.sample`` site, ``"{name}.{path}"`` with the path joined by dots
    (``net.Dense_0.kernel``, ``net.layers.1.weight``). The model targets exactly the prior written here, times
    whatever else the model holds; ``functional_prior`` multiplies it, it does not replace it.

    Four kinds of network are understood:

    * a flax linen module, whose weights need not exist yet;
    * a flax nnx module, already built; state that a call does not change (frozen statistics) stays as it is;
    * an equinox module of a *single* example, already built; it is mapped over the leading axis of x, and its
      inexact JAX arrays are the weights (hold a constant as a NumPy array to keep it one);
    * a pair ``(init, apply)`` of functions ``init(key, input_shape) -> weights`` and ``apply(weights, x)``
      with x [M, *input_shape]. An ``init`` that returns ``(output_shape, weights)``, as stax does, will do.

    Chains start from the network's own initialiser under ``init_to_network``. Each weight array is drawn by a
    key of its own. A module already built no longer knows its initialiser, so its present values are
    shuffled: to start from trained weights use ``numpyro.infer.init_to_value``.

    Args:
        name: prefix of the sites; no "/", which ArviZ refuses.
        module: the network.
        input_shape: shape of ONE input, without batch: ``(D,)``, or D for short.
        prior: None for ``fan_in()``; ``fan_in(scale)``; ``flat()``; a distribution for every weight; a dict
            from every path to one of these; or a function ``(path, shape)`` to one of these. Distributions
            are expanded to the weight's shape.

    Returns:
        f, a function of x [M, *input_shape] to what the network gives, [M, K] say.

    Raises:
        ValueError: for an input_shape the network cannot take, a network with state (batch statistics,
            dropout) or without weights, a dict with missing or unknown paths, a prior that does not fit a
            weight's shape, or a call inside a plate; f raises it for x of another shape.
        TypeError: for a network or a prior of another kind.
        RuntimeError: outside of a model that has a random key.

    Example:
        >>> import flax.linen as nn
        >>> def model(x, y=None):
        ...     net = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(1)])
        ...     f = random_module("net", net, input_shape=(1,))
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x).squeeze(-1), 0.1), obs=y)
    """
    _check_name(name)
    shape = _check_input_shape(input_shape)
    network = _read_network(name, module, shape)
    priors = _prior_of_each(name, network, prior)
    units = network.units() if any(isinstance(p, FanIn) for p in priors.values()) else set()
    weights = {path: _sample(f"{name}.{path}", path, network, priors[path], path in units) for path in network.weights}

    def f(x):
        x = jnp.asarray(x)
        if x.ndim != 1 + len(shape) or x.shape[1:] != shape:
            raise ValueError(_explain_inputs(name, x.shape, shape))
        return network.apply(weights, x)

    note("network", name, f)
    return f


def init_to_network(site: dict | None = None):
    """Start chains from the networks' own initialisers, everything else from its prior median.

    A NumPyro init strategy: ``NUTS(model, init_strategy=fs.init_to_network)``. Sites without a network behind
    them, and weights whose prior does not live on the whole real line, fall back to
    ``numpyro.infer.init_to_median`` (and that to ``init_to_uniform`` where the prior cannot be sampled).

    Args:
        site: a message of NumPyro, or None for the strategy itself.

    Returns:
        The initial value of the site.

    Example:
        >>> init_to_network().func is init_to_network
        True
    """
    if site is None:
        return functools.partial(init_to_network)
    init = site["infer"].get("fspace", {}).get("init") if site["type"] == "sample" else None
    if init is None or site["value"] is not None:
        return init_to_median(site, num_samples=15)
    return init(site["kwargs"]["rng_key"])


def _check_name(name):
    if not isinstance(name, str) or not name or "/" in name:
        raise ValueError(f"random_module: name={name!r} must be a non-empty string without '/', such as 'net'.")


def _check_input_shape(input_shape) -> tuple[int, ...]:
    shape = (input_shape,) if isinstance(input_shape, int | np.integer) else input_shape
    sizes_ok = isinstance(shape, tuple | list) and all(
        isinstance(n, int | np.integer) and not isinstance(n, bool) and n > 0 for n in shape
    )
    if not sizes_ok:
        raise ValueError(
            f"input_shape={input_shape!r} must be the shape of one input without the batch: a tuple of "
            "positive integers such as (D,), or the integer D."
        )
    return tuple(int(n) for n in shape)


def _explain_inputs(name, got, shape):
    sizes = ", ".join(["M", *map(str, shape)])
    cure = f"pass an array [{sizes}]."
    if len(got) == 1 and shape == (1,):
        cure = "pass x[:, None]."
    elif got == shape:
        cure = "this is a single input; pass x[None]."
    return f"random_module({name!r}): x has shape {got} but input_shape={shape} asks for [{sizes}]; {cure}"


def _prior_of_each(name, network: _Network, prior) -> dict:
    """The prior of every weight, by path, still to be expanded."""
    paths = list(network.weights)
    if isinstance(prior, Mapping):
        missing, unknown = [p for p in paths if p not in prior], [p for p in prior if p not in paths]
        if missing or unknown:
            raise ValueError(
                f"random_module({name!r}): prior must give every weight a prior; missing {missing}, unknown "
                f"{unknown}. The weights are {paths}."
            )
        chosen = {path: prior[path] for path in paths}
    elif callable(prior) and not isinstance(prior, dist.Distribution):
        chosen = {path: prior(path, tuple(leaf.shape)) for path, leaf in network.weights.items()}
    else:
        chosen = dict.fromkeys(paths, FanIn(1.0) if prior is None else prior)
    for path, law in chosen.items():
        if not isinstance(law, dist.Distribution | Flat | FanIn):
            raise TypeError(
                f"random_module({name!r}): the prior of {path!r} is a {type(law).__name__}; give a NumPyro "
                "distribution, fs.fan_in(scale) or fs.flat()."
            )
    return chosen


def _sample(site, path, network: _Network, prior, is_unit):
    """Sample one weight array and check that it has the shape the network asks for."""
    shape = tuple(network.weights[path].shape)
    typical = 1 / math.sqrt(1 if is_unit else network.fan_in(path))
    if isinstance(prior, FanIn):
        law = dist.Normal(float(is_unit), prior.scale * typical)
    else:
        law = dist.ImproperUniform(constraints.real, (), shape) if isinstance(prior, Flat) else prior
    hints = {"init": None, "scale": None}
    if isinstance(getattr(law.support, "base_constraint", law.support), type(constraints.real)):
        hints = {"init": functools.partial(network.draw, path), "scale": _length_scale(law, typical)}
    expanded = _expand(site, law, shape)
    try:
        value = numpyro.sample(site, expanded, infer={"fspace": hints})
    except NotImplementedError as error:
        raise NotImplementedError(
            f"The prior of {site!r} cannot be sampled (fs.flat() is improper). Start a chain with "
            "init_strategy=fs.init_to_network, or give a proper prior such as fs.fan_in()."
        ) from error
    except AssertionError as error:
        if str(error):
            raise
        raise RuntimeError(
            f"The site {site!r} needs a random key: call random_module inside a model that runs under MCMC, "
            "Predictive, SVI or numpyro.handlers.seed."
        ) from error
    if jnp.shape(value) != shape:
        raise ValueError(
            f"The site {site!r} has a value of shape {jnp.shape(value)}, but the network needs {shape}. "
            "Call random_module outside of plates, and substitute values of that shape."
        )
    return value


def _expand(site, law, shape):
    if law.support.is_discrete:
        raise ValueError(f"The prior of {site!r} is discrete; weights need a continuous one.")
    batch = shape[: len(shape) - law.event_dim]
    try:
        if law.event_dim > len(shape) or batch + law.event_shape != shape:
            raise ValueError("its event does not match")
        return law.expand(batch).to_event()
    except ValueError as error:
        raise ValueError(
            f"The prior of {site!r} has batch_shape={law.batch_shape} and event_shape={law.event_shape}, "
            f"which do not expand to the weight's shape {shape}: {error}."
        ) from error


def _length_scale(law, typical):
    """The prior's standard deviation if it is normal and known, else the fan-in's guess."""
    while isinstance(law, dist.Independent | dist.ExpandedDistribution | dist.MaskedDistribution):
        law = law.base_dist
    known = isinstance(law, dist.Normal) and not isinstance(law.scale, jax.core.Tracer)
    return law.scale if known else typical


# --- The kinds of network, each read as pure functions of its weights by path ---

_ROWS = 7  # of the inputs a network is tried on: rarely another size of the network


class _StatefulError(ValueError):
    """A network keeps state or draws random numbers when it is called."""

    def __init__(self, what, cure):
        super().__init__(
            f"The network has {what}, which a function of weights and inputs cannot keep. Use LayerNorm or "
            f"GroupNorm in place of BatchNorm and switch dropout off; {cure}"
        )


@dataclasses.dataclass(frozen=True)
class _Network:
    """A network as pure functions of its weights, a dict from path to array.

    Attributes:
        weights: the arrays of a network already built, else their shapes and dtypes.
        apply: (weights, x [M, ...]) to f(x).
        init: key to new weights; None for a network already built.
        outputs_first: whether weight arrays are (out, in, ...) rather than (..., in, out).
        tables: paths of embeddings, whose rows are looked up, not summed.
    """

    weights: dict
    apply: Callable
    init: Callable | None = None
    outputs_first: bool = False
    tables: frozenset = frozenset()

    def draw(self, path, key):
        """The network's own initial value of one weight array, in the dtype of NumPyro's draws."""
        if self.init is None:
            value = self.weights[path]
            value = jax.random.permutation(key, jnp.ravel(value)).reshape(value.shape)
        else:
            value = self.init(key)[path]
        return value.astype(jnp.result_type(float))

    def fan_in(self, path) -> int:
        """How many inputs are summed with these weights; 1 for biases and embeddings."""
        shape = self.weights[path].shape
        if len(shape) < 2 or _last(path) in ("bias", "embedding") or path in self.tables:
            return 1
        return max(1, math.prod(shape[1:] if self.outputs_first else shape[:-1]))

    def units(self) -> set:
        """Paths of the weights that scale by one at the start, as those of norm layers do."""
        named = {path for path in self.weights if _last(path) == "scale"}
        unclear = [path for path in self.weights if path not in named and _last(path) != "bias"]
        values = {path: self.weights[path] for path in unclear}
        if self.init is not None:
            unclear = [path for path in unclear if len(values[path].shape) < 2]
            with jax.ensure_compile_time_eval():  # concrete values, also while the model is traced
                start = self.init(jax.random.key(0)) if unclear else {}
            values = {path: start[path] for path in unclear}
        concrete = {path: value for path, value in values.items() if not isinstance(value, jax.core.Tracer)}
        return named | {path for path, value in concrete.items() if np.all(np.asarray(value) == 1)}


def _last(path):
    return path.rsplit(".", 1)[-1]


def _by_path(tree, drop=0):
    """The leaves of a tree as a dict from path to leaf, and the function from such a dict to a tree.

    The last ``drop`` steps of every path are left out.
    """
    flat_tree, structure = jax.tree_util.tree_flatten_with_path(tree)
    paths = [_join(path[: len(path) - drop]) for path, _ in flat_tree]
    if len(set(paths)) < len(paths):
        raise ValueError(f"two weights have the same path: {sorted(p for p in set(paths) if paths.count(p) > 1)}")
    leaves = dict(zip(paths, (leaf for _, leaf in flat_tree), strict=True))
    return leaves, lambda weights: jax.tree.unflatten(structure, [weights[path] for path in paths])


def _join(path) -> str:
    parts = [next(getattr(k, a) for a in ("key", "idx", "name") if hasattr(k, a)) for k in path]
    return ".".join(str(part) for part in parts).replace("/", ".") or "weight"


def _read_network(name, module, shape) -> _Network:
    """Find out of which kind ``module`` is and try it, abstractly, on inputs of ``shape``."""
    kind, error = _kind_of(name, module), None
    for dtype in (float, int):  # embeddings take integers
        x = jax.ShapeDtypeStruct((_ROWS, *shape), jnp.result_type(dtype))
        try:
            network = kind(module, x)
            outputs = jax.eval_shape(network.apply, network.weights, x)
            break
        except _StatefulError:
            raise
        except Exception as caught:
            error = error or caught
    else:
        raise ValueError(
            f"random_module({name!r}): the network does not take inputs of shape {('M', *shape)}, which "
            f"input_shape={shape} (one input, without batch) asks for. {type(error).__name__}: {error}"
        ) from error
    if not network.weights:
        raise ValueError(f"random_module({name!r}): the network has no weights to give a prior to.")
    for path, leaf in network.weights.items():
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise ValueError(f"random_module({name!r}): the weight {path!r} is {leaf.dtype}, not a real number.")
    wrong = [out.shape for out in jax.tree.leaves(outputs) if out.shape[:1] != (_ROWS,)]
    if wrong:
        raise ValueError(
            f"random_module({name!r}): {_ROWS} inputs of input_shape={shape} give an output of shape "
            f"{wrong[0]}; the network must keep the leading axis M. Map a one-input function by jax.vmap."
        )
    return network


def _kind_of(name, module):
    bases = (("flax.linen", _linen), ("flax.nnx", _nnx), ("equinox", _equinox))
    for library, kind in bases:  # an object of a library exists only if that library is imported
        if library in sys.modules and isinstance(module, sys.modules[library].Module):
            return kind
    if isinstance(module, tuple | list) and len(module) == 2 and all(map(callable, module)):
        return _pair
    hint = " (this is a class; give an instance)" if isinstance(module, type) else ""
    raise TypeError(
        f"random_module({name!r}): module is a {type(module).__name__}{hint}; give a flax linen module, a "
        "flax nnx module, an equinox module, or a pair (init, apply) of functions."
    )


def _linen(module, x) -> _Network:
    from flax.core import meta
    from flax.errors import InvalidRngError

    def init_tree(key):
        return meta.unbox(module.init(key, jnp.zeros((1, *x.shape[1:]), x.dtype)))

    variables = jax.eval_shape(lambda: init_tree(jax.random.key(0)))
    state = sorted(set(variables) - {"params"})
    if state:
        raise _StatefulError(
            f"the linen collection(s) {state}",
            "to freeze statistics give the pair (init, apply) with "
            'apply = lambda w, x: module.apply({"params": w, "batch_stats": stats}, x).',
        )
    weights, rebuild = _by_path(variables.get("params", {}))

    def apply(weights, x):
        try:
            return module.apply({"params": rebuild(weights)}, x)
        except InvalidRngError as error:
            raise _StatefulError(f"a random stream ({error})", "give dropout layers deterministic=True.") from error

    return _Network(weights, apply, lambda key: _by_path(init_tree(key)["params"])[0])


def _nnx(module, x) -> _Network:
    from flax import nnx

    graph, params, rest = nnx.split(module, nnx.Param, ...)
    weights, rebuild = _by_path(params, drop=1)

    def apply(weights, x):
        state = jax.tree.map(lambda leaf: leaf, rest)  # new variables: those of the module stay untouched
        variables = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, nnx.Variable))
        before = [variable.get_value() for variable in variables]
        out = nnx.merge(graph, rebuild(weights), state)(x)
        pairs = zip(variables, before, strict=True)
        changed = sorted({type(v).__name__ for v, old in pairs if v.get_value() is not old})
        if changed:
            raise _StatefulError(f"the nnx state {changed}, which a call changes", "call module.eval() first.")
        return out

    return _Network(weights, apply)


def _equinox(module, x) -> _Network:
    import equinox as eqx

    special = (eqx.nn.StateIndex, eqx.nn.Dropout, eqx.nn.Embedding)
    nodes, _ = jax.tree_util.tree_flatten_with_path(module, is_leaf=lambda node: isinstance(node, special))
    for path, node in nodes:
        if isinstance(node, eqx.nn.StateIndex):
            raise _StatefulError(
                f"the equinox StateIndex {_join(path)!r}",
                "to freeze it give a pair (init, apply) that holds the state.",
            )
        if isinstance(node, eqx.nn.Dropout) and not node.inference and node.p != 0:
            raise _StatefulError(
                f"the active equinox Dropout {_join(path)!r}", "call equinox.nn.inference_mode(module) first."
            )
    tables = frozenset(f"{_join(path)}.weight" for path, node in nodes if isinstance(node, eqx.nn.Embedding))
    arrays, static = eqx.partition(module, eqx.is_inexact_array)
    weights, rebuild = _by_path(arrays)

    def apply(weights, x):
        return jax.vmap(eqx.combine(rebuild(weights), static))(x)

    return _Network(weights, apply, outputs_first=True, tables=tables)


def _pair(module, x) -> _Network:
    init, apply = module

    def init_tree(key):
        made = init(key, x.shape[1:])
        is_stax = isinstance(made, tuple) and len(made) == 2 and _is_shape(made[0])
        return made[1] if is_stax else made

    weights, rebuild = _by_path(jax.eval_shape(lambda: init_tree(jax.random.key(0))))
    return _Network(
        weights,
        lambda weights, x: apply(rebuild(weights), x),
        lambda key: _by_path(init_tree(key))[0],
    )


def _is_shape(made):
    return isinstance(made, tuple) and made != () and all(isinstance(n, int) for n in made)
