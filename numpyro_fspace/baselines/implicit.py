"""``implicit_process``: a random function that is a Gaussian combination of draws of an implicit process."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro import handlers
from numpyro.primitives import Messenger

from numpyro_fspace._checks import check_count
from numpyro_fspace.model.inference_engine import current_engine
from numpyro_fspace.model.networks.random_module import check_name
from numpyro_fspace.model.sites import note


def implicit_process(name: str, draw, num_functions: int, key):
    r"""A random function with the mean and the covariance of S draws of a process, inside a NumPyro model.

    .. math:: f(x) = m(x) + \tfrac{1}{\sqrt S} \sum_{s=1}^{S} a_s \big(f_s(x) - m(x)\big), \qquad
              m = \tfrac{1}{S} \sum_s f_s, \quad a \sim N(0, I_S)

    Given the draws f_s, f is a Gaussian process with their empirical mean and covariance (with divisor S): the
    variational implicit process, a Gaussian approximation of the implicit process. The coefficients a are the latent
    site ``"{name}.coefficients"`` and can be inferred by any engine. The paper uses ``SVI(model,
    AutoMultivariateNormal(model), optimizer, RenyiELBO(alpha=0.5))``; ``Trace_ELBO()`` is the limit α → 1. Under SVI
    parameters of the process, ``numpyro.param`` sites in ``draw`` or in the model, are learned too.

    Args:
        name: name of the function, under which ``fs.predict`` returns it.
        draw: ``draw(key, x [M, D])`` returns the values at x, [M] or [M, K], of the function drawn by ``key``;
            ``fs.model.random_function`` makes such a ``draw``. The outputs of one function share its coefficient.
        num_functions: S, at least 2.
        key: random key of the S functions, the same at each call: create it outside of the model, or from a constant.

    Returns:
        f, a function of x [M, D] to [M] or [M, K], affine in the coefficients.

    Raises:
        ValueError, TypeError: an argument has the wrong type, or the call is inside a plate; or, when f is called,
            ``draw`` does not return a value for each row of x.

    Example:
        >>> import flax.linen as nn, jax, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, optax
        >>> from numpyro.infer import SVI, RenyiELBO
        >>> from numpyro.infer.autoguide import AutoMultivariateNormal
        >>> from numpyro_fspace.baselines import implicit_process
        >>> def model(x, y=None):
        ...     scale = numpyro.param("scale", 1.0, constraint=dist.constraints.positive)
        ...     net = nn.Sequential([nn.Dense(10), nn.tanh, nn.Dense(1)])
        ...     draw = fs.model.random_function(net, input_shape=1, prior=fs.fan_in(scale))
        ...     f = implicit_process("f", draw, 20, jax.random.key(0))
        ...     numpyro.sample("y", dist.Normal(f(x)[:, 0], 0.1).to_event(1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> y = x[:, 0] ** 2
        >>> loss = RenyiELBO(alpha=0.5, num_particles=4)
        >>> svi = SVI(model, AutoMultivariateNormal(model), optax.adam(0.01), loss)
        >>> params = svi.run(jax.random.key(1), 50, x, y, progress_bar=False).params
        >>> posterior = fs.svi_posterior(svi, params, jax.random.key(2), x, y, num_samples=5)
        >>> fs.predict(posterior, jax.random.key(3), x)["f"].shape
        (5, 10, 1)

    Reference: C. Ma, Y. Li, J. M. Hernández-Lobato (2019), *Variational implicit processes*, section 3.
    """
    check_name(name, "implicit_process")
    if not callable(draw):
        raise TypeError(f"implicit_process({name!r}): draw must be a function (key, x) -> values, got {draw!r}.")
    check_count(num_functions, "num_functions", 2)
    keys = jax.random.split(key, num_functions)
    coefficients = numpyro.sample(f"{name}.coefficients", dist.Normal().expand([num_functions]).to_event(1))
    if jnp.shape(coefficients) != (num_functions,):
        raise ValueError(f"implicit_process({name!r}): call it outside of plates.")
    params: dict = {}

    def f(x):
        x = jnp.asarray(x)
        if not params:  # taken at the first call, because f may later be called outside of the model's handlers
            found = _Parameters()
            with handlers.block(hide_fn=lambda site: site["type"] != "param"), found:
                draw(keys[0], x)
            params.update(found.values)
        given = handlers.block(handlers.substitute(draw, data=params))
        functions = jax.vmap(lambda key: given(key, x))(keys)
        if functions.shape[1:2] != (len(x),):
            raise ValueError(
                f"implicit_process({name!r}): draw(key, x) must return one value, or K values, for each of the "
                f"{len(x)} rows of x; got shape {functions.shape[1:]}."
            )
        mean = functions.mean(0)
        return mean + jnp.tensordot(coefficients, functions - mean, 1, precision="highest") / num_functions**0.5

    f = current_engine().function(name, f, is_network=True)
    note("network", name, f, ("coefficients",))
    return f


class _Parameters(Messenger):
    """The values of ``numpyro.param`` sites by the names in the program, which ``scope`` changes for outer handlers."""

    def __init__(self):
        super().__init__()
        self.values: dict = {}

    def process_message(self, msg):
        if msg["type"] == "param":
            msg["own_name"] = msg["name"]

    def postprocess_message(self, msg):
        if msg["type"] == "param":
            self.values[msg["own_name"]] = msg["value"]
