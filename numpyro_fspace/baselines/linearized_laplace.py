"""Linearized Laplace: a mode of the model's density, and the Gaussian law of the weights around it."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.distributions import transforms
from numpyro.distributions.util import scale_and_mask
from scipy.linalg import solve_triangular

from numpyro_fspace._checks import check_count, renamed_argument
from numpyro_fspace.baselines.functions import declared_functions, run_with_outputs
from numpyro_fspace.baselines.mode import check_model, check_optimizer, find_modes
from numpyro_fspace.model.functions import depends_on
from numpyro_fspace.model.linearized import linearize
from numpyro_fspace.model.networks import init_to_network
from numpyro_fspace.model.site_transforms import base_transform
from numpyro_fspace.model.sites import active_functional_priors, observed_sites
from numpyro_fspace.posterior.posterior import Posterior

__all__ = ["laplace"]

#: Largest side of a matrix that is factorized (3 GiB in float64), and its number of entries.
MAX_SIDE = 20_000
MAX_ENTRIES = MAX_SIDE**2
#: Numbers of a Jacobian held at once, 64 MiB in float32.
CHUNK = 2**24


@renamed_argument("optimiser", "optimizer")
def laplace(
    model,
    key,
    *args: Any,
    num_updates: int = 5000,
    optimizer=None,
    init_strategy=init_to_network,
    num_samples: int = 1000,
    **kwargs: Any,
) -> Posterior:
    r"""The linearized Laplace approximation, with the generalized Gauss-Newton matrix of all weights.

    .. math:: f_L(x; w) = f(x; m) + J(x; m)(w - m), \qquad
              w \sim N\Big(m, \big(\Sigma_0^{-1} + J^\top \Lambda J
              + \textstyle\sum_j \text{scale}_j J_M^\top K_M^{-1} J_M\big)^{-1}\Big)

    m is a mode of the model's density, found by an optax optimizer; Λ = -∇² log p(y | f) is the curvature of the
    likelihood in the values of the functions at all data (its negative eigenvalues, which likelihoods that are not
    log-concave have, count as 0); Σ0⁻¹ = -∇² log p0(m) is that of the weights' own prior, diagonal; the last term is
    that of the functional priors, if the model has any, at their fixed measurement points. Where f is linear and the
    noise is Gaussian and known, this is the posterior.

    The latent values that no function depends on (the noise) stay at the mode: their draws are constant. As a mode, the
    noise of a wide network may be far too small; give it a prior that says so, or fix it. Fix a scale of the
    weights' prior too: the joint mode of a sampled scale and its weights is where both are zero.

    The matrix that is factorized, in float64, has side P, the number of weights, or that of the functions' values
    N·K + M·K, if that is smaller. Minibatch plates serve the optimizer only; the curvature is that of all data. A
    function's value at an input must depend on that input alone.

    Args:
        model: a NumPyro model whose functions come from ``fs.random_module`` or are declared by
            ``fs.functional_prior``; the functional priors, if any, Gaussian and at fixed points.
        key: of the start, the minibatches and the draws.
        *args: the model's arguments.
        num_updates: gradient steps to the mode; 0 takes the start for it.
        optimizer: an optax optimizer; None is Adam, its learning rate decayed from 0.01 by a cosine.
        init_strategy: where the optimizer starts, a NumPyro init strategy; networks start from their own initializer.
        num_samples: S.
        **kwargs: the model's keyword arguments.

    Returns:
        A :class:`~numpyro_fspace.Posterior` of S independent draws; its model is linearized around m.

    Raises:
        ValueError: for a model that the samplers refuse, or that declares no function; random measurement points;
            weights that are constrained, or whose prior is flat, heavy-tailed or not independent; a likelihood that
            sees weights other than through the functions or couples the rows of the data; more than 20 000 weights,
            unless there are at most 20 000 values of functions and values · weights ≤ 4·10⁸.
        TypeError: for a functional prior that is not Gaussian, or an argument of the wrong kind.
        RuntimeError: the optimizer left the finite numbers.

    Example:
        >>> import flax.linen as nn, jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs
        >>> from numpyro_fspace.baselines import laplace
        >>> def model(x, y=None):
        ...     f = fs.random_module("net", nn.Sequential([nn.Dense(10), nn.tanh, nn.Dense(1)]), input_shape=1)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> posterior = laplace(model, jax.random.key(0), x, x[:, 0] ** 2, num_updates=100, num_samples=50)
        >>> fs.predict(posterior, jax.random.key(1), x)["net"].shape
        (50, 10, 1)

    Reference: A. Immer, M. Korzepa, M. Bauer (2021), *Improving predictions of Bayesian neural nets via local
    linearization*.
    """
    check_count(num_updates, "num_updates", 0)
    check_count(num_samples, "num_samples")
    check_optimizer(optimizer)
    latents = check_model(model, args, kwargs, init_strategy)
    key_mode, key_draws = jax.random.split(key)

    def find(num_updates):
        settings = {"num_updates": num_updates, "optimizer": optimizer, "init_strategy": init_strategy}
        modes = find_modes(model, key_mode[None], args, kwargs, **settings)
        return {name: modes[name][0] for name in latents}

    problem = _Problem(model, args, kwargs, find(0))
    if num_updates:
        problem.check()  # before the long computation
        problem = _Problem(model, args, kwargs, find(num_updates))
    precision = problem.prior_precision()
    scale = 1.0 / np.sqrt(precision)
    num_weights, num_values = len(precision), problem.num_values
    whitened = (rows * scale for rows in problem.curvature_rows())
    color, size = _dual(np.concatenate(list(whitened))) if num_values < num_weights else _primal(whitened, num_weights)
    noise = np.asarray(jax.random.normal(key_draws, (num_samples, size)), np.float64)
    weights = problem.mode + scale * color(noise)
    fit = {"center": jax.tree.map(np.asarray, problem.center)}
    return Posterior(linearize(model, problem.center), problem.draws(weights), args=args, kwargs=kwargs, fit=fit)


def _primal(rows, num_weights):
    """``(color, size)``: noise [S, size] to draws [S, P] of N(0, (I + BᵀB)⁻¹), B given in parts of its rows."""
    gram = np.eye(num_weights)
    for part in rows:
        gram += part.T @ part
    root = np.linalg.cholesky(gram)
    return lambda noise: _solve_lower(root, noise.T, transposed=True).T, num_weights


def _dual(b):
    """The same by a matrix of the size of B's rows: z - Bᵀ (I + B Bᵀ)⁻¹ (B z + e) for z, e ~ N(0, I)."""
    num_values, num_weights = b.shape
    root = np.linalg.cholesky(np.eye(num_values) + b @ b.T)

    def color(noise):
        z, e = noise[:, :num_weights], noise[:, num_weights:]
        residual = _solve_lower(root, (z @ b.T + e).T)
        return z - _solve_lower(root, residual, transposed=True).T @ b

    return color, num_weights + num_values


def _solve_lower(root, right, *, transposed=False):
    return solve_triangular(root, right, lower=True, trans=int(transposed))


def _root(blocks):
    """R with R Rᵀ = H for symmetric H [..., K, K], its negative eigenvalues taken for 0."""
    values, vectors = np.linalg.eigh(0.5 * (blocks + np.swapaxes(blocks, -1, -2)))
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]


class _Problem:
    """A model at its mode: weights, functions, and the parts of the posterior precision."""

    def __init__(self, model, args, kwargs, values):
        self.model, self.args, self.kwargs = model, args, kwargs
        trace, self.calls = self._run(values)
        self.sites, self.center = {k: trace[k] for k in values}, values
        self.priors = active_functional_priors(trace)
        self._check_priors()
        outputs = [value for _, _, value in self.calls]
        if not outputs:
            raise ValueError(
                "laplace: the model's likelihood calls no declared function. Make the network by fs.random_module, or "
                'declare it: f = fs.functional_prior("f", f, prior, points), and use what is returned.'
            )
        names = sorted({name for name, _, _ in self.calls} | set(self.priors))
        used = set().union(*(depends_on(lambda v, n=n: self._evaluate(n, v), self.center) for n in names))
        self.weights = {k: jnp.asarray(self.center[k]) for k in self.sites if k in used}
        self._check_weights(outputs)
        mode, self.unravel = ravel_pytree(self.weights)
        self.flat, self.mode = mode, np.asarray(mode, np.float64)
        # A call counts if the likelihood depends on what it returns.
        seen = depends_on(
            lambda o: self._loss([o[str(i)] for i in range(len(outputs))], self.center),
            {str(i): value for i, value in enumerate(outputs)},
        )
        self.kept = [i for i in range(len(outputs)) if str(i) in seen]
        if not self.kept:
            raise ValueError("laplace: the likelihood depends on no function of the model.")
        self._check_size(outputs)

    # ---- the model, run ------------------------------------------------------------------------

    def _run(self, values, outputs=None):
        return run_with_outputs(self.model, self.args, self.kwargs, values, outputs)

    def _evaluate(self, name, values):
        """The function ``name`` wherever the model needs it."""
        f = declared_functions(self.model, self.args, self.kwargs, values)[name]
        places = [x for n, x, _ in self.calls if n == name]
        places += [self.priors[name]["fn"].x] if name in self.priors else []
        return [f(x) for x in places]

    def _loss(self, outputs, values):
        """-log p(y | f) for the functions' values at their calls."""
        trace, _ = self._run(values, outputs)
        sites = observed_sites(trace, factors=True, weights=True)
        return -sum(scale_and_mask(s["fn"].log_prob(s["value"]), s["scale"]).sum() for s in sites.values())

    def _jacobian(self, names, rows):
        """J [n, K, P] of functions, their outputs side by side, at one row of inputs for each of them."""

        def values(flat, row):
            functions = declared_functions(self.model, self.args, self.kwargs, self.center | self.unravel(flat))
            return jnp.concatenate([jnp.ravel(functions[n](x[None])) for n, x in zip(names, row, strict=True)])

        return jax.vmap(lambda row: jax.jacrev(values)(self.flat, row))(rows)

    # ---- parts of the precision ----------------------------------------------------------------

    def prior_precision(self, *, at_mode=True):
        """Diagonal of Σ0⁻¹, [P]; where the mode is still to be found only flat priors are refused."""

        def gradient(flat):
            def loss(flat):
                trace, _ = self._run(self.center | self.unravel(flat))
                sites = [trace[k] for k in self.weights]
                return -sum(scale_and_mask(s["fn"].log_prob(s["value"]), s["scale"]).sum() for s in sites)

            return jax.grad(loss)(flat)

        def curve(direction):
            return np.asarray(jax.jvp(gradient, (self.flat,), (direction,))[1], np.float64)

        signs = jax.random.rademacher(jax.random.key(0), self.flat.shape, self.flat.dtype)
        diagonal = curve(jnp.ones_like(self.flat))
        if not np.allclose(curve(signs), diagonal * np.asarray(signs), rtol=1e-3, atol=1e-3 * np.abs(diagonal).max()):
            raise ValueError("laplace: the prior of the weights couples them; give each one a prior of its own.")
        bad = ~(diagonal > 0) if at_mode else diagonal == 0
        if np.any(bad):
            names = [k for k, v in self.unravel(jnp.asarray(bad, self.flat.dtype)).items() if jnp.any(v > 0)]
            raise ValueError(
                f"laplace: the prior of the sites {names} has no positive curvature at the mode: it is flat or "
                "heavy-tailed. Give the weights a normal prior such as fs.fan_in()."
            )
        return diagonal

    def curvature_rows(self):
        """Parts [r, P] of the rows of A, AᵀA = Jᵀ Λ J and the functional priors' share, in float64."""
        names, inputs = [self.calls[i][0] for i in self.kept], [self.calls[i][1] for i in self.kept]
        roots = self._likelihood_roots()
        for part, jacobian in self._jacobian_parts(names, inputs, roots.shape[-1]):
            rows = np.einsum("nkj,nkp->njp", roots[part], jacobian, optimize=True)
            yield rows.reshape(-1, rows.shape[-1])
        for name, site in self.priors.items():
            root = self._prior_root(name, site)
            parts = [part for _, part in self._jacobian_parts([name], [site["fn"].x], len(root) // len(site["fn"].x))]
            yield root.T @ np.concatenate(parts).reshape(len(root), -1)

    def _jacobian_parts(self, names, inputs, num_outputs):
        """Slices of the rows and the Jacobian [n, K, P] there, small enough to be held."""
        jacobian = jax.jit(lambda rows: self._jacobian(names, rows))
        num_rows = len(inputs[0])
        step = max(1, min(num_rows, CHUNK // (num_outputs * self.flat.size)))
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            yield part, np.asarray(jacobian([jnp.asarray(x)[part] for x in inputs]), np.float64)

    def _likelihood_roots(self):
        """R [N, K, K] with R Rᵀ = Λ, row by row of the data."""
        outputs = [value for _, _, value in self.calls]
        kept = [outputs[i] for i in self.kept]
        flat = jnp.concatenate([value.reshape(len(value), -1) for value in kept], 1)
        ends = np.cumsum([value[0].size for value in kept])[:-1]

        def loss(flat):
            new = dict(zip(self.kept, jnp.split(flat, ends, 1), strict=True))
            return self._loss([new.get(i, value) for i, value in enumerate(outputs)], self.center)

        @jax.jit
        def curve(direction):
            return jax.jvp(jax.grad(loss), (flat,), (direction,))[1]

        units = jnp.eye(flat.shape[1], dtype=flat.dtype)
        blocks = np.stack([np.asarray(curve(jnp.broadcast_to(u, flat.shape)), np.float64) for u in units], -1)
        probe = jax.random.normal(jax.random.key(0), flat.shape, flat.dtype)
        product = np.einsum("nij,nj->ni", blocks, np.asarray(probe, np.float64))
        if not np.allclose(curve(probe), product, rtol=1e-3, atol=1e-3 * np.abs(product).max()):
            raise ValueError("laplace: the likelihood couples the rows of the data; it must be a product over them.")
        return _root(blocks)

    def _prior_root(self, name, site):
        """R [M·K, M·K] with R Rᵀ = -∇² log P0(f), times the strength of a functional prior."""
        law, strength = site["fn"], 1.0 if site["scale"] is None else float(site["scale"])
        values = np.asarray(self._evaluate(name, self.center)[-1], np.float64)
        with jax.enable_x64(True):
            hessian = jax.jit(jax.hessian(lambda f: -law.prior.log_prob(law.x, f.reshape(values.shape))))
            here, elsewhere = (np.asarray(hessian(jnp.asarray(f))) for f in (values.ravel(), values.ravel() + 1.0))
        if not np.allclose(here, elsewhere, rtol=1e-3, atol=1e-3 * np.abs(here).max()):
            raise TypeError(
                f"laplace: functional_prior({name!r}) has the prior {type(law.prior).__name__}, which is not Gaussian. "
                "Use fs.GPPrior."
            )
        return math.sqrt(strength * float(law.scale)) * _root(here)

    def draws(self, weights) -> dict:
        """Draws by site from flat weights [S, P]; the other sites stay at the mode."""
        flat = jnp.asarray(weights, self.flat.dtype)
        fixed = {k: np.broadcast_to(v, (len(flat), *np.shape(v))) for k, v in self.center.items()}
        return fixed | jax.tree.map(np.asarray, jax.vmap(self.unravel)(flat))

    # ---- checks --------------------------------------------------------------------------------

    def check(self):
        """Refuse priors and likelihoods without the curvature that is needed."""
        self.prior_precision(at_mode=False)
        self._likelihood_roots()
        for name, site in self.priors.items():
            self._prior_root(name, site)

    def _check_priors(self):
        for name, site in self.priors.items():
            if site["fn"].points.is_random:
                raise ValueError(
                    f"laplace: the measurement points of functional_prior({name!r}) are random. Freeze them: "
                    "points=fs.measurement.fixed(points(jax.random.key(0)))."
                )

    def _check_weights(self, outputs):
        if not self.weights:
            raise ValueError("laplace: the model's functions depend on no latent site: there are no weights to infer.")
        transform = transforms.IdentityTransform
        bad = [k for k in self.weights if not isinstance(base_transform(self.sites[k]), transform)]
        if bad:
            raise ValueError(f"laplace: the functions depend on {bad}, which are not real-valued; reparametrize.")
        direct = depends_on(lambda values: self._loss(outputs, values), self.center) & set(self.weights)
        if direct:
            raise ValueError(
                f"laplace: the likelihood sees the weights {sorted(direct)} other than through declared functions. Use "
                "the function that fs.random_module or fs.functional_prior returns."
            )

    def _check_size(self, outputs):
        kept = [outputs[i] for i in self.kept]
        if len({len(value) for value in kept}) > 1:
            raise ValueError(
                "laplace: the likelihood uses functions at different numbers of inputs: "
                f"{[np.shape(value) for value in kept]}. Call them at the same rows."
            )
        num_points = sum(np.size(self._evaluate(name, self.center)[-1]) for name in self.priors)
        self.num_values, num_weights = sum(value.size for value in kept) + num_points, self.flat.size
        fits = num_weights <= MAX_SIDE or (self.num_values <= MAX_SIDE and self.num_values * num_weights <= MAX_ENTRIES)
        if not fits:
            raise ValueError(
                f"laplace: {num_weights} weights and {self.num_values} values of functions are too many: at most "
                f"{MAX_SIDE} weights, or {MAX_SIDE} values with values times weights at most {MAX_ENTRIES}. Take a "
                "smaller network, fewer data, or fs.variational.guides.low_rank."
            )
