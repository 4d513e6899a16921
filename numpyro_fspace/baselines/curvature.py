"""The curvature of a model's log density at a mode, in the terms of the posterior precision of its weights."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.distributions import transforms
from numpyro.distributions.util import scale_and_mask

from numpyro_fspace.model.linearized import function_of
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on, sources
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import base_transform
from numpyro_fspace.model.sites import active_functional_priors, observed_sites

#: Maximum side of a matrix that is factorized (3 GiB in float64), and maximum number of entries.
MAX_SIDE = 20_000
MAX_ENTRIES = MAX_SIDE**2
#: Maximum number of entries of a Jacobian in memory, 64 MiB in float32.
CHUNK = 2**24


class CurvedModel:
    """A model at a mode: its weights, its functions, and the terms of the posterior precision."""

    def __init__(self, model, args, kwargs, values):
        self.model, self.args, self.kwargs = model, args, kwargs
        trace, self.calls = self._run(values)
        self.sites, self.center = {k: trace[k] for k in values}, values
        self.priors = active_functional_priors(trace)
        self._check_priors()
        outputs = [value for _, _, value in self.calls]
        if not outputs:
            raise ValueError(
                "laplace: the model's likelihood calls no declared function. Create the network by fs.random_module, "
                'or declare it: f = fs.functional_prior("f", f, prior, points), and use the function that this returns.'
            )
        names = sorted({name for name, _, _ in self.calls} | set(self.priors))
        used = set().union(*(depends_on(lambda v, n=n: self._evaluate(n, v), self.center) for n in names))
        self.weights = {k: jnp.asarray(self.center[k]) for k in self.sites if k in used}
        self._check_weights(outputs)
        mode, self.unravel = ravel_pytree(self.weights)
        self.flat, self.mode = mode, np.asarray(mode, np.float64)
        # Calls whose values do not enter the likelihood are ignored.
        seen = depends_on(
            lambda o: self._loss([o[str(i)] for i in range(len(outputs))], self.center),
            {str(i): value for i, value in enumerate(outputs)},
        )
        self.kept = [i for i in range(len(outputs)) if str(i) in seen]
        if not self.kept:
            raise ValueError("laplace: the likelihood depends on no function of the model.")
        self._check_size(outputs)

    def _run(self, values, outputs=None):
        """``(trace, calls)`` of a run, where ``calls`` lists the calls of declared functions as (name, x, value).

        If ``outputs`` are given, the calls return these in order instead of the functions' values. A function under a
        functional prior calls its network. Both calls are listed, the network first, whose output is then replaced.
        """
        calls = []

        def record(name, fn, _):
            def recorded(x):
                value = fn(x)
                calls.append((name, x, value))
                return value if outputs is None else outputs[len(calls) - 1].reshape(value.shape)

            return recorded

        settings = {"hook": record, "networks": True, "points": True}
        trace = run_model(self.model, self.args, self.kwargs, key=jax.random.key(0), substitute=values, **settings)
        return trace, calls

    def _evaluate(self, name, values):
        """Values of the function ``name`` at all inputs at which the model calls it."""
        f = function_of(self.model, name, self.args, self.kwargs, values)
        places = [x for n, x, _ in self.calls if n == name]
        places += [self.priors[name]["fn"].x] if name in self.priors else []
        return [f(x) for x in places]

    def _loss(self, outputs, values):
        """-log p(y | f) as a function of the values that the calls return."""
        trace, _ = self._run(values, outputs)
        sites = observed_sites(trace, factors=True, weights=True)
        return -sum(scale_and_mask(s["fn"].log_prob(s["value"]), s["scale"]).sum() for s in sites.values())

    def prior_precision(self, *, at_mode=True):
        """Diagonal of Σ0⁻¹, [P]. Before the mode is known (``at_mode=False``) only flat priors are refused."""

        def loss(flat):
            trace, _ = self._run(self.center | self.unravel(flat))
            sites = [trace[k] for k in self.weights]
            return -sum(scale_and_mask(s["fn"].log_prob(s["value"]), s["scale"]).sum() for s in sites)

        def curve(direction):
            return np.asarray(jax.jvp(jax.grad(loss), (self.flat,), (direction,))[1], np.float64)

        probe = jax.random.normal(jax.random.key(0), self.flat.shape, self.flat.dtype)
        diagonal = curve(jnp.ones_like(self.flat))  # the sums of the rows, if the prior couples the weights
        size = np.abs(np.asarray(jax.grad(loss)(self.flat), np.float64))  # curvatures that cancel are rounded like this
        size = np.divide(size, np.abs(self.mode), out=np.zeros_like(size), where=self.mode != 0)
        slack = 1e-3 * np.abs(diagonal) + 1e-4 * size
        if np.any(np.abs(curve(probe) - diagonal * np.asarray(probe)) > slack):
            raise ValueError("laplace: the prior of the weights couples them; give each weight its own prior.")
        bad = ~(diagonal > 0) if at_mode else diagonal == 0
        if np.any(bad):
            names = [k for k, v in self.unravel(jnp.asarray(bad, self.flat.dtype)).items() if jnp.any(v > 0)]
            raise ValueError(
                f"laplace: the prior of the sites {names} has no positive curvature at the mode: it is flat or "
                "heavy-tailed. Give the weights a normal prior such as fs.fan_in()."
            )
        return diagonal

    def curvature_rows(self):
        """The rows of A in parts [r, P] in float64; AᵀA is Jᵀ Λ J plus the terms of the functional priors."""
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
        """Slices of rows and their Jacobians [n, K, P] with at most ``CHUNK`` entries, of all functions' outputs."""

        def values(flat, row):
            weights = self.center | self.unravel(flat)
            functions = [function_of(self.model, name, self.args, self.kwargs, weights) for name in names]
            return jnp.concatenate([jnp.ravel(f(x[None])) for f, x in zip(functions, row, strict=True)])

        jacobian = jax.jit(jax.vmap(lambda row: jax.jacrev(values)(self.flat, row)))
        num_rows = len(inputs[0])
        step = max(1, min(num_rows, CHUNK // (num_outputs * self.flat.size)))
        for start in range(0, num_rows, step):
            part = slice(start, start + step)
            yield part, np.asarray(jacobian([jnp.asarray(x)[part] for x in inputs]), np.float64)

    def _likelihood_roots(self):
        """R [N, K, K] with R Rᵀ = Λ, one block for each row of the data."""
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
        """R [M·K, M·K] with R Rᵀ = -∇² log P0(f), times the scale of the functional prior."""
        fn, scale = site["fn"], 1.0 if site["scale"] is None else float(site["scale"])
        values = np.asarray(self._evaluate(name, self.center)[-1], np.float64)
        with jax.enable_x64(True):
            hessian = jax.jit(jax.hessian(lambda f: -fn.prior.log_prob(fn.x, f.reshape(values.shape))))
            here, elsewhere = (np.asarray(hessian(jnp.asarray(f))) for f in (values.ravel(), values.ravel() + 1.0))
        if not np.allclose(here, elsewhere, rtol=1e-3, atol=1e-3 * np.abs(here).max()):
            raise TypeError(
                f"laplace: functional_prior({name!r}) has the prior {type(fn.prior).__name__}, which is not Gaussian. "
                "Use fs.GPPrior."
            )
        return math.sqrt(scale * float(fn.scale)) * _root(here)

    def draws(self, weights) -> dict:
        """Draws by site from flat weights [S, P]; the other sites stay at the mode."""
        flat = jnp.asarray(weights, self.flat.dtype)
        fixed = {k: np.broadcast_to(v, (len(flat), *np.shape(v))) for k, v in self.center.items()}
        return fixed | jax.tree.map(np.asarray, jax.vmap(self.unravel)(flat))

    def check(self):
        """Raise for priors and likelihoods whose curvature cannot be used."""
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
        self._check_rest(outputs)
        direct = depends_on(lambda values: self._loss(outputs, values), self.center) & set(self.weights)
        if direct:
            raise ValueError(
                f"laplace: the likelihood depends on the weights {sorted(direct)} other than through declared "
                "functions. Use the function that fs.random_module or fs.functional_prior returns."
            )

    def _check_rest(self, outputs):
        """Refuse latent values between the functions and the data, whose curvature would be left out."""
        rest = sorted(self.center.keys() - self.weights.keys())

        def log_priors(given):
            trace, _ = self._run(self.center | given["weights"] | given["rest"], given["outputs"])
            return {k: trace[k]["fn"].log_prob(trace[k]["value"]) for k in rest}

        values = {"weights": self.weights, "outputs": outputs, "rest": {k: self.center[k] for k in rest}}
        follow = {k for k, used in sources(log_priors, values).items() if used & {"weights", "outputs"}}
        known = {k: v for k, v in self.center.items() if k in follow}
        seen = depends_on(lambda given: self._loss(outputs, self.center | given), known) if known else ()
        if seen:
            raise ValueError(
                f"laplace: the priors of {sorted(seen)} depend on the functions, and the likelihood on these latent "
                "values: what the data say of the functions by them would be left out. Integrate them out in the model "
                "(a normal value with normal noise is one likelihood with both variances), or sample the model."
            )

    def _check_size(self, outputs):
        kept = [outputs[i] for i in self.kept]
        if len({len(value) for value in kept}) > 1:
            raise ValueError(
                "laplace: the likelihood uses functions at different numbers of inputs: "
                f"{[np.shape(value) for value in kept]}. Call all of them at the same rows."
            )
        num_points = sum(np.size(self._evaluate(name, self.center)[-1]) for name in self.priors)
        self.num_values, num_weights = sum(value.size for value in kept) + num_points, self.flat.size
        fits = num_weights <= MAX_SIDE or (self.num_values <= MAX_SIDE and self.num_values * num_weights <= MAX_ENTRIES)
        if not fits:
            raise ValueError(
                f"laplace: {num_weights} weights and {self.num_values} values of functions are too many: at most "
                f"{MAX_SIDE} weights, or {MAX_SIDE} values with values times weights at most {MAX_ENTRIES}. Use a "
                "smaller network, fewer data, or fs.variational.guides.low_rank."
            )


def _root(blocks):
    """R with R Rᵀ = H for symmetric H [..., K, K], whose negative eigenvalues are set to 0."""
    values, vectors = np.linalg.eigh(0.5 * (blocks + np.swapaxes(blocks, -1, -2)))
    return vectors * np.sqrt(np.maximum(values, 0.0))[..., None, :]
