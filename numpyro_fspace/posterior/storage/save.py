"""``save``: a posterior in one file, which ``Posterior.load`` reads."""

from __future__ import annotations

import os
from pathlib import Path

from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace.posterior.posterior import Posterior, as_posterior
from numpyro_fspace.posterior.storage.model_check import log_densities
from numpyro_fspace.posterior.storage.posterior_file import write_archive


def save(source: NumPyroMCMC | Posterior, path: str | Path, *, arguments: bool = True) -> None:
    """Write a posterior to one file, which ``fs.Posterior.load(path, model)`` reads, in another process too.

    The file holds the draws, their statistics such as ``diverging``, and the arguments that the model was fitted to. It
    holds neither the model, which is code, nor the state of a sampler (``fs.MCMC(..., checkpoint=folder)`` keeps that).
    The model's log density at two draws is kept, so that ``load`` can warn of another model. The file is written as a
    whole or not at all. A file of ``save`` is replaced; any other file is left alone.

    Args:
        source: an ``MCMC`` object that has run, or a ``fs.Posterior``.
        path: the path of the file, by convention with the ending ``.npz``.
        arguments: whether to keep the arguments. They may be arrays, numbers, strings, None, keys, and tuples, lists
            and dicts of these. If the file does not hold the arguments, give them to ``load``.

    Raises:
        TypeError: ``source`` is of another type, or an argument is one that a file cannot hold.
        ValueError: ``source`` has no draws or is a posterior of ``fs.FVIMC``, or ``path`` does not name a file.
        FileExistsError: the file exists and was not written by ``save``.
        OSError: the file cannot be written.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist
        >>> import numpyro_fspace as fs, pathlib, tempfile
        >>> def model(x, y=None):
        ...     slope = numpyro.sample("slope", dist.Normal())
        ...     numpyro.sample("y", dist.Normal(slope * x, 0.1), obs=y)
        >>> posterior = fs.Posterior(model, {"slope": jnp.ones(5)}, args=(jnp.ones(3),))
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "posterior.npz"
        >>> fs.save(posterior, path)
        >>> loaded = fs.Posterior.load(path, model)
        >>> fs.predict(loaded, jax.random.key(0), jnp.ones(4))["y"].shape
        (5, 4)
    """
    if not isinstance(source, NumPyroMCMC | Posterior):
        cure = " Make one of them: fs.Posterior(model, draws, args=(x, y))." if isinstance(source, dict) else ""
        raise TypeError(f"save needs an MCMC object that has run or a fs.Posterior, got {type(source).__name__}.{cure}")
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"save: path must be the name of a file, got {path!r}.")
    found = as_posterior(source, functions=True)
    if found.fit is None:
        raise ValueError(
            "save: the functions of this posterior (of fs.FVIMC) are transformed by networks that a file does not "
            "hold. Save draws of its functions, fs.predict(...), with numpy.savez."
        )
    values = {name: getattr(found, name) for name in ("samples", "stats", "fit", "functions_at")}
    values |= {"args": list(found.args) if arguments else [], "kwargs": found.kwargs if arguments else {}}
    values["log_densities"] = log_densities(found)
    about = {"num_chains": found.num_chains, "has_arguments": arguments}
    try:
        write_archive(path, about, values)
    except TypeError as error:
        raise TypeError(
            f"save: {error} Pass arguments=False, and give load the arguments: fs.Posterior.load(path, model, x, y)."
        ) from error
