"""``Posterior``: draws of a model's latent values with the model that they belong to, whatever made them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import MCMC as NumPyroMCMC

from numpyro_fspace.infer.checkpoint import Checkpoint, join_chains, plain
from numpyro_fspace.infer.mcmc import MCMC
from numpyro_fspace.infer.trouble import warn_of_trouble

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

__all__ = ["Posterior", "as_posterior"]


@dataclass(frozen=True, eq=False)
class Posterior:
    """Draws of the latent values of a model, and what ``fs.predict`` and ``fs.to_arviz`` need beside them.

    Attributes:
        model: the NumPyro model, with the functions of this posterior (linearised ones, say).
        samples: draws by site, [S, …], chains one after the other.
        num_chains: in how many chains; 1 for independent draws.
        args, kwargs: the arguments that the model was fitted to.
        stats: fields of the draws, [S, …] each, such as ``diverging``.
    """

    model: Callable
    samples: dict
    num_chains: int = 1
    args: tuple = ()
    kwargs: dict = field(default_factory=dict)
    stats: dict = field(default_factory=dict)

    @classmethod
    def from_checkpoint(cls, folder: str | Path, model: Callable, /, *args, **kwargs) -> Posterior:
        """The draws that ``fs.MCMC(..., checkpoint=folder)`` has written so far, without loading them.

        The arrays lie on disk, and of them is loaded what is touched: ``fs.predict`` reads them in batches. While a run
        of several chains goes on they are no single block yet, and are copied into memory.

        Args:
            folder: that of the checkpoint.
            model: the model of the run.
            args, kwargs: the arguments it was fitted to.

        Raises:
            ValueError: if the folder holds no draws of a run, or damaged ones.

        Example:
            >>> import numpyro_fspace as fs  # doctest: +SKIP
            >>> posterior = fs.Posterior.from_checkpoint("runs/diabetes", model, x, y)  # doctest: +SKIP
            >>> f = fs.predict(posterior, jax.random.key(0), x_new)["f"]  # doctest: +SKIP
        """
        files = Checkpoint.open(folder)
        if files.run.get("kept") == "functions":
            raise ValueError(
                f"{str(folder)!r} holds functions in place of weights (functions_at=...), which a model cannot use: "
                "call the same run again and read get_samples()."
            )
        stats = files.draws()
        samples = stats.pop(files.run["sample_field"])
        flat = jax.tree.map(join_chains, (samples, _arrays(stats)))
        return cls(model, flat[0], files.run["num_chains"], args, kwargs, flat[1])

    def __post_init__(self):
        sizes = {k: jnp.shape(v)[0] if jnp.ndim(v) else None for k, v in self.samples.items()}
        if len(set(sizes.values())) != 1 or None in sizes.values():
            raise ValueError(f"Every array of draws must have the same leading axis [S, …], got {sizes}.")
        if 0 in sizes.values():
            raise ValueError("samples holds no draws: every array of it has a leading axis of length 0.")


def as_posterior(source, model: Callable | None = None) -> Posterior:
    """The posterior behind an ``MCMC`` object (NumPyro's has not warned of trouble yet), draws or a ``Posterior``."""
    if isinstance(source, Posterior):
        return source if model is None else replace(source, model=model)
    if isinstance(source, NumPyroMCMC):
        if source.last_state is None or np.max(getattr(source.last_state, "i", np.inf)) <= source.num_warmup:
            raise ValueError("The MCMC object has no draws yet (warm-up makes none): call run first.")
        if getattr(source, "functions_at", None) is not None:
            raise ValueError(
                "This run kept functions in place of weights (functions_at=...); their draws are get_samples(). Run "
                "without functions_at for what needs weights."
            )
        if not isinstance(source, MCMC):  # which has said so when it ran
            warn_of_trouble(source)
        stats = _arrays(source.get_extra_fields())
        model, samples = source.sampler.model if model is None else model, source.get_samples()
        latents = getattr(source.last_state, source.sampler.sample_field)
        missing = sorted(set(latents) - set(samples)) if isinstance(latents, dict) else []
        if missing:
            raise ValueError(
                f"This run did not keep the draws of {missing} (extra_fields='~...'), without which they would come "
                "from the prior. If that is meant, pass the draws and the model: predict(mcmc.get_samples(), ..., "
                "model=model)."
            )
        return Posterior(model, samples, source.num_chains, source._args, source._kwargs, stats)
    if not isinstance(source, dict):
        raise TypeError(
            f"source must be an MCMC object, a Posterior or a dict of posterior draws, got {type(source).__name__}."
        )
    if model is None:
        raise TypeError("A dict of draws needs the model: pass model=.")
    return Posterior(model, source)


def _arrays(fields: dict) -> dict:
    return {k: plain(v) for k, v in fields.items() if not isinstance(v, dict | tuple)}
