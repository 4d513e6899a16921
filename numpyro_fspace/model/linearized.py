"""Models with functions linearized in their weights: f_L(x; w) = f(x; m) + J(x; m) (w - m)."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from numpyro import handlers

from numpyro_fspace._checks import renamed_argument
from numpyro_fspace.model.handlers import function_hook
from numpyro_fspace.model.programs.jaxpr_analysis import depends_on
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.sites import is_functional_prior


def function_of(model, name: str, args, kwargs, values: dict):
    """The function that ``model`` declares as ``functional_prior(name, …)`` or network, given its latent ``values``.

    It can be called inside a running model: the inner run is hidden from the outer one.
    """
    masked = handlers.mask(model, mask=False)
    sites = run_model(masked, args, kwargs, key=jax.random.key(0), substitute=values, isolated=True)
    fn = sites[name]["fn"]
    return fn.fn if is_functional_prior(sites[name]) else fn


@renamed_argument("centre", "center")
def linearize(model, center: dict):
    r"""``model`` with every network, and every function under a functional prior, linearized in the weights.

    .. math:: f_L(x; w) = f(x; m) + J(x; m) (w - m)

    With w ~ N(m, S) the function is a Gaussian process, GP(f(·; m), J S Jᵀ). This is the posterior that
    ``fs.FunctionalELBO`` fits, so predictions should use it.

    Args:
        model: a NumPyro model with networks of ``fs.random_module`` or functional priors.
        center: m, a value for every latent site, such as ``guide.median(params)``.

    Returns:
        A NumPyro model with the same sites. Pass it to ``fs.predict`` with draws of the guide.

    Raises:
        KeyError: ``center`` lacks a latent site that the function needs.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tinygp
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.1)
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal())
        ...     f = fs.functional_prior("f", lambda x: jax.numpy.tanh(w * x[:, 0]), gp, x)
        ...     numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)
        >>> x = jax.numpy.ones((1, 1))
        >>> draws = {"w": jax.numpy.array([0.0, 5.0])}
        >>> linear = fs.variational.linearize(model, {"w": jax.numpy.array(0.0)})
        >>> fs.predict(draws, jax.random.key(0), x, model=linear)["f"][:, 0].tolist()
        [0.0, 5.0]

    Reference: T. Cinquin, R. Bamler (2024), *Regularized KL-divergence for well-defined function-space
    variational inference in Bayesian neural networks*, section 3.
    """

    @functools.wraps(model)
    def linear_model(*args, **kwargs):
        def replace(name, fn, values):
            # Inner runs do not see what outer handlers substitute or condition on.
            inner = handlers.substitute(model, data=dict(hook.params))
            fixed = {site: value for site, value in hook.observed.items() if site in center}
            known = {site: value for site, value in values.items() if site in center}
            start = {site: jnp.asarray(center[site], jnp.result_type(value)) for site, value in known.items()}
            step = {site: value - start[site] for site, value in known.items()}

            def linear_fn(x):
                def at(weights):
                    return function_of(inner, name, args, kwargs, fixed | weights)(x)

                missing = values.keys() - known.keys()  # these include new observations, which no function needs
                missing = sorted(missing & depends_on(at, values)) if missing else []
                if missing:
                    raise KeyError(f"linearize: center has no value for the sites {missing}.")
                value, slope = jax.jvp(at, (start,), (step,))
                return jax.tree.map(jnp.add, value, slope)

            return linear_fn

        hook = function_hook(replace, networks=True)
        with hook:
            return model(*args, **kwargs)

    return linear_model
