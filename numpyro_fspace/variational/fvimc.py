"""``FVIMC``: variational inference and MCMC in function space by turns, linked by bijections of function values."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpyro.distributions as dist
from numpyro.infer import SVI
from tqdm.auto import tqdm

from numpyro_fspace._checks import check_count, check_not_negative, check_positive, renamed_argument
from numpyro_fspace.mcmc.driver import MCMC
from numpyro_fspace.mcmc.kernels import fSGLD
from numpyro_fspace.mcmc.warmup import Warmup
from numpyro_fspace.model.checks import checked_arguments
from numpyro_fspace.model.linearized import function_of, linearize
from numpyro_fspace.model.potential import ModelPotential, check_gradient, check_plates
from numpyro_fspace.posterior.posterior import Posterior
from numpyro_fspace.variational.bijections import Fitted, as_bijections
from numpyro_fspace.variational.divergences import default_gamma
from numpyro_fspace.variational.elbo import FunctionalELBO, Problem
from numpyro_fspace.variational.guides import mean_field
from numpyro_fspace.variational.pushforward import as_normal
from numpyro_fspace.variational.transformation import TStage, compose, fit_transformation, log_density

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, Float, Key

__all__ = ["FVIMC", "FVIMCResult", "MStage", "VStage"]

#: Of Adam, in the V-stages.
LEARNING_RATE = 5e-3


class VStage(NamedTuple):
    """What a V-stage leaves.

    Attributes:
        losses: negative bound at every step [num_updates].
        params: the guide's parameters at its end.
    """

    losses: Float[np.ndarray, " U"]
    params: dict


class MStage(NamedTuple):
    """What an M-stage leaves.

    Attributes:
        potential_energy: -log density (up to a constant) of every draw [S].
        samples: the latent values of the draws, by site.
        x: points [M, D] at which the T-stage reads the functions.
        functions: F_k∘…∘F_1∘f(x) of every draw [S, M, K], before the T-stage's new bijection.
    """

    potential_energy: Float[np.ndarray, " S"]
    samples: dict
    x: Float[Array, "M D"]
    functions: Float[Array, "S M K"]


class FVIMCResult(NamedTuple):
    """What ``FVIMC.run`` found.

    Attributes:
        params: the guide's parameters after the last V-stage.
        bijections: F_1, …, F_k, the last one outermost.
        stages: a ``VStage``, ``MStage`` or ``TStage`` for every stage, in order.
    """

    params: dict
    bijections: tuple[Fitted, ...]
    stages: tuple


class FVIMC:
    r"""Functional variational inference MCMC: V M T V M T … V.

    A V-stage fits q(w) = N(m, S) by a ``fs.FunctionalELBO``; an M-stage samples with fSGLD from a draw of q; a T-stage
    fits a bijection F of function values that carries the law of the V-stage to the draws of the M-stage; and so on,
    for F∘f in place of f. The last V-stage gives the posterior

    .. math:: F_k \circ \dots \circ F_1 \circ Q, \qquad Q = GP\big(f(\cdot; m), J S J^\top\big), \quad k = (K-1)/2,

    .. math:: \log q(y) = \log N\big(F^{-1}(y); f(x; m), J S J^\top\big) + \log |\det \partial F^{-1} / \partial y|,

    and a T-stage maximizes the mean of that over the draws of the M-stage at measurement points (with some white noise
    on both, see ``blur``).

    **One law.** Q is the law of the network *linearized* around m, f_L(x; w) = f(x; m) + J(x; m)(w - m). ``posterior``
    draws F∘f_L and ``log_prob`` is its density. A V-stage fits

    * the same law, if the divergence works by draws (``linearized = False``): both the divergence and the likelihood
      see F∘f_L. (Under ``SVI`` such a divergence leaves the network as it is; here it does not, even for K = 1.)
    * its Gaussian approximation GP(F(f(·; m)), F′J S Jᵀ F′), F linearized at f(·; m) along with f, if the divergence
      needs a Gaussian law. For linear bijections the two are the same, for others to first order in the spread of q.

    M-stages sample the network itself, F∘f, and their target is that of ``fs.fSGLD``: the prior that the model gives
    its weights multiplies, whereas V-stages leave it out. With a wide prior of the weights, or ``fs.model.flat()`` (the
    paper's choice), the stages agree.

    Args:
        model: a NumPyro model with one ``functional_prior`` (use the function that it returns) and continuous latents.
        num_stages: K, V- and M-stages together, odd; 1 is variational inference alone.
        divergence: that of the V-stages, any that ``fs.FunctionalELBO`` takes; None is
            ``fs.variational.RegularizedKL()``.
        guide: ``model -> guide`` with a normal posterior, such as ``fs.variational.guides.mean_field``.
        optimizer: from optax, for the V-stages; started afresh in each, while the guide goes on from its parameters.
        num_updates: steps of a V-stage.
        num_particles: of the V-stages' bound.
        kernel: ``model -> kernel`` for the M-stages; None is ``fs.fSGLD`` without warm start, as the chain is to start
            at a draw of q.
        num_warmup, num_samples: draws of an M-stage, each of the kernel's ``num_steps`` gradient steps.
        bijections: candidates of the T-stages, ``"linear"``, ``"tanh"``, ``"sigmoid"`` or objects of
            ``numpyro_fspace.variational.bijections``; that with the highest likelihood is kept.
        num_transform_steps, transform_learning_rate: of Adam in the T-stages.
        num_points: at most so many distinct measurement points are used by a T-stage, those of several steps where the
            points are random and one step draws fewer. The biases b(x) are networks of the inputs, and with several
            inputs they need many points. A T-stage factorizes a matrix of the side points × outputs.
        blur: τ ≥ 0, white noise in the T-stages, of a share τ of their own mean variances on both Q and the draws; 0 is
            the paper's. Q varies in few directions. With τ = 0 what the draws do in the others decides the scale of F,
            which widens the law of a V-stage where it should narrow it to that of the draws. As both get their share,
            laws that a linear F carries into one another still are.
        gamma: γ > 0; M γ is added to the variances of Q at M points, as by ``fs.variational.RegularizedKL``, here
            relative to Q's mean variance where that is above 1. None is 1e-10 in float64 and 1e-6 in float32.

    Raises:
        ValueError, TypeError: for arguments of the wrong kind or range; and, at ``run`` before anything is fitted, for
            a model without functional prior or with several, discrete latent values, a guide that is not normal.

    Example:
        >>> import jax, jax.numpy as jnp, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tinygp
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
        >>> points = fs.measurement.uniform(-1.0, 1.0, 5)
        >>> def model(x, y=None):
        ...     w = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        ...     f = fs.functional_prior("f", lambda x: w[0] + w[1] * x[:, 0] + w[2] * x[:, 0] ** 2, gp, points)
        ...     with numpyro.plate("data", x.shape[0]):
        ...         numpyro.sample("y", dist.Normal(f(x), 0.1), obs=y)
        >>> x = jnp.linspace(-1.0, 1.0, 10)[:, None]
        >>> fvimc = FVIMC(model, num_stages=3, num_updates=50, num_warmup=20, num_samples=20, num_transform_steps=50)
        >>> result = fvimc.run(jax.random.key(0), x, x[:, 0] ** 2, progress_bar=False)
        >>> [type(stage).__name__ for stage in result.stages]
        ['VStage', 'MStage', 'TStage', 'VStage']
        >>> posterior = fvimc.posterior(jax.random.key(1), num_samples=30)
        >>> f = fs.predict(posterior, jax.random.key(2), x[:2])["f"]
        >>> f.shape, fvimc.log_prob(x[:2], f).shape
        ((30, 2), (30,))

    Reference: M. Wu, J. Xuan, J. Lu (2025), *Bridging the gap between variational inference and stochastic gradient
    MCMC in function space*, section 3 and algorithm 1.
    """

    @renamed_argument("optimiser", "optimizer")
    def __init__(
        self,
        model: Callable,
        *,
        num_stages: int = 5,
        divergence: Callable | None = None,
        guide: Callable = mean_field,
        optimizer=None,
        num_updates: int = 1000,
        num_particles: int = 1,
        kernel: Callable | None = None,
        num_warmup: int = 200,
        num_samples: int = 200,
        bijections: Sequence = ("linear", "tanh"),
        num_transform_steps: int = 1000,
        transform_learning_rate: float = 1e-2,
        num_points: int = 200,
        blur: float = 0.1,
        gamma: float | None = None,
    ):
        if not callable(model):
            raise TypeError(f"model must be a NumPyro model (a callable), got {type(model).__name__}.")
        check_count(num_stages, "num_stages")
        if num_stages % 2 == 0:
            raise ValueError(f"num_stages={num_stages} must be odd: V-stages and M-stages by turns, V at both ends.")
        for name, make in (("guide", guide), ("kernel", kernel)):
            if make is not None and not callable(make):
                raise TypeError(f"{name} must be a function of a model, got {make!r}.")
        counts = {"num_updates": num_updates, "num_warmup": num_warmup, "num_samples": num_samples}
        for name, value in (counts | {"num_transform_steps": num_transform_steps, "num_points": num_points}).items():
            check_count(value, name)
        check_positive(transform_learning_rate, "transform_learning_rate")
        if gamma is not None:
            check_positive(gamma, "gamma")
        check_not_negative(blur, "blur")
        self.model, self.num_stages, self._make_guide = model, num_stages, guide
        self.bound = functools.partial(_StageBound, divergence, num_particles)
        self.bound(())  # refuses a wrong divergence
        self.optimizer = _adam() if optimizer is None else optimizer
        self.kernel = functools.partial(fSGLD, warmup=Warmup(warm_start=0.0)) if kernel is None else kernel
        self.num_updates, self.num_warmup, self.num_samples = num_updates, num_warmup, num_samples
        self.bijections = as_bijections(bijections)
        self.num_transform_steps, self.transform_learning_rate = num_transform_steps, transform_learning_rate
        self.num_points, self.blur, self.gamma = num_points, blur, gamma
        self.guide: Any = None
        self.result: FVIMCResult | None = None
        self._args: tuple = ()
        self._kwargs: dict = {}

    # ---- the stages ------------------------------------------------------------------------------------------

    def run(self, key: Key[Array, ""], *args, progress_bar: bool = True, **kwargs) -> FVIMCResult:
        """All stages.

        Args:
            key: of everything that is drawn.
            *args: the model's arguments.
            progress_bar: whether to show the progress of every stage.
            **kwargs: the model's keyword arguments.

        Returns:
            The guide's parameters, the bijections and the trace of every stage; also kept as ``result``.
        """
        self._args, self._kwargs, self.result = args, kwargs, None
        keys = jax.random.split(key, self.num_stages)
        self.guide = self._make_guide(self.model)
        self._check(keys[0])
        params: Any = None
        bijections: tuple[Fitted, ...] = ()
        stages: list = []
        for i, key_stage in enumerate(keys):
            if i % 2 == 0:
                _announce(f"V-stage {i + 1} of {self.num_stages}", progress_bar)
                stages.append(self._variational(key_stage, params, bijections, progress_bar))
                params = stages[-1].params
                continue
            key_sampling, key_transform = jax.random.split(key_stage)
            _announce(f"M-stage {i + 1} of {self.num_stages}", progress_bar)
            sampled = self._sampling(key_sampling, params, bijections, progress_bar)
            _announce(f"T-stage {(i + 1) // 2} of {self.num_stages // 2}", progress_bar)
            transformed = self._transformation(key_transform, params, bijections, sampled, progress_bar)
            bijections = (*bijections, transformed.fitted)
            stages += [sampled, transformed]
        self.result = result = FVIMCResult(params, bijections, tuple(stages))
        return result

    def _variational(self, key, params, bijections, progress_bar) -> VStage:
        svi = SVI(self.model, self.guide, self.optimizer, loss=self.bound(bijections))
        found = svi.run(
            key, self.num_updates, *self._args, progress_bar=progress_bar, init_params=params, **self._kwargs
        )
        return VStage(np.asarray(found.losses), found.params)

    def _sampling(self, key, params, bijections, progress_bar) -> MStage:
        key_start, key_chain, key_points = jax.random.split(key, 3)
        problem, model = self._problem(params), compose(self.model, bijections)
        ((name, site),) = problem.functions.items()
        mcmc = MCMC(
            self.kernel(model), num_warmup=self.num_warmup, num_samples=self.num_samples, progress_bar=progress_bar
        )
        start = problem.unpack(problem.draw(key_start))
        fields = ("potential_energy",)
        mcmc.run(key_chain, *self._args, init_params=start, extra_fields=fields, **self._kwargs)
        x = _some_points(site["fn"].points, key_points, self.num_points)
        samples = mcmc.get_samples()

        def values(draw):
            return function_of(model, name, self._args, self._kwargs, draw)(x).reshape(len(x), -1)

        functions = jax.jit(lambda draws: jax.lax.map(values, draws, batch_size=64))(samples)
        return MStage(np.asarray(mcmc.get_extra_fields()["potential_energy"]), samples, x, functions)

    def _transformation(self, key, params, bijections, sampled: MStage, progress_bar) -> TStage:
        return fit_transformation(
            key,
            self.bijections,
            self._gaussian(params, sampled.x),
            bijections,
            sampled.x,
            sampled.functions,
            blur=self.blur,
            num_steps=self.num_transform_steps,
            learning_rate=self.transform_learning_rate,
            progress_bar=progress_bar,
        )

    # ---- the posterior ---------------------------------------------------------------------------------------

    def posterior(self, key: Key[Array, ""], num_samples: int = 1000) -> Posterior:
        """Draws of w ~ q of the last V-stage, with the model whose function is F_k∘…∘F_1∘f_L.

        Args:
            key: of the draws.
            num_samples: S.

        Returns:
            A ``fs.Posterior`` for ``fs.predict`` and ``fs.to_arviz``.

        Raises:
            RuntimeError: nothing has been run.
        """
        check_count(num_samples, "num_samples")
        params, bijections, _ = self._found()
        samples = self.guide.sample_posterior(key, params, sample_shape=(num_samples,))
        model = compose(linearize(self.model, self.guide.median(params)), bijections)
        return Posterior(model, jax.tree.map(np.asarray, samples), args=self._args, kwargs=self._kwargs, fit=None)

    def log_prob(self, x: Float[Array, "M D"], f: Float[Array, "... M *K"]) -> Float[Array, ...]:
        r"""log density of function values under the posterior, jointly over the points and outputs.

        Args:
            x: points [M, D].
            f: values [..., M], or [..., M, K] if the model's function gives [M, K].

        Returns:
            log N(F⁻¹(f); f(x; m), J S Jᵀ + M γ c I) + log|det ∂F⁻¹/∂f|, [...], with c = max(1, Q's mean variance at x).

        Raises:
            RuntimeError: nothing has been run.
            ValueError: f has another shape; J S Jᵀ + M γ c I is singular to the precision.
        """
        params, bijections, _ = self._found()
        x, f = jnp.asarray(x), jnp.asarray(f)
        problem = self._problem(params)
        (name,) = problem.functions
        function = function_of(self.model, name, self._args, self._kwargs, problem.center)
        shape = jax.eval_shape(function, x).shape
        if f.shape[f.ndim - len(shape) :] != shape or f.ndim < len(shape):
            raise ValueError(f"log_prob: f has shape {f.shape}, the function's values at x have shape [..., {shape}].")
        gaussian = self._gaussian(params, x)
        values = f.reshape(*f.shape[: f.ndim - len(shape)], len(x), -1)
        return log_density(gaussian, bijections, x, values)

    # ---- parts -----------------------------------------------------------------------------------------------

    def _found(self) -> FVIMCResult:
        if self.result is None:
            raise RuntimeError("FVIMC has nothing to draw from yet: call run first.")
        return self.result

    def _check(self, key):
        """Refuse what no stage could work with. The guide starts where that of ``SVI.run`` with this key does."""
        with checked_arguments(self._args, self._kwargs, model=self.model) as trouble:
            potential = ModelPotential(self.model, self._args, self._kwargs, key=key)
            potential.check_data()
            check_plates(self.model, self._args, self._kwargs)
            if trouble is not None:
                check_gradient(self.model, self._args, self._kwargs)
        names = list(potential.functional_priors)
        if len(names) != 1:
            raise ValueError(
                f"FVIMC transforms the one function under a fs.functional_prior; the model declares {len(names)} "
                f"({names}). Add one, or merge them to one function with several outputs."
            )
        params = None
        if hasattr(self.guide, "get_posterior"):
            svi = SVI(self.model, self.guide, self.optimizer, loss=self.bound(()))
            params = svi.get_params(svi.init(key, *self._args, **self._kwargs))
        if params is None or as_normal(self.guide.get_posterior(params)) is None:
            raise TypeError(
                f"guide made a {type(self.guide).__name__}; FVIMC needs one whose posterior is normal over the flat "
                "latent values: guide=fs.variational.guides.mean_field, or "
                "functools.partial(fs.variational.guides.low_rank, rank=...)."
            )
        self._problem(params)

    def _problem(self, params) -> Problem:
        """The model, the guide at ``params`` and the law Q of the function."""
        return Problem(self.model, self.guide, params, self._args, self._kwargs, jax.random.key(0), True)

    def _gaussian(self, params, x):
        """Q at x, over the flat values [M K], with the jitter M γ."""
        problem = self._problem(params)
        (name,) = problem.functions
        law = problem.law(name)
        mean, root = jax.jit(lambda x: (law.mean(x), law.root(x)))(x)
        root = root.reshape(mean.size, -1)
        size = float(jnp.mean(jnp.sum(root**2, -1)))
        jitter = len(x) * default_gamma(self.gamma, mean.dtype) * max(1.0, size)
        factor = jnp.linalg.cholesky(root @ root.T + jitter * jnp.eye(mean.size, dtype=mean.dtype))
        if not np.all(np.isfinite(factor)):
            raise ValueError(
                f"FVIMC: the covariance of {mean.size} function values is singular to {mean.dtype}. Use fewer points, "
                'a larger gamma, or jax.config.update("jax_enable_x64", True).'
            )
        return dist.MultivariateNormal(mean.ravel(), scale_tril=factor)


class _StageBound(FunctionalELBO):
    """The bound of a V-stage, whose function is F∘f.

    ``FunctionalELBO`` linearizes F∘f as a whole where its divergence needs a Gaussian law; where it works by draws, F
    is applied to the linearized network.
    """

    def __init__(self, divergence, num_particles, bijections):
        super().__init__(divergence, num_particles=num_particles)
        self.bijections = bijections

    def loss_with_mutable_state(self, rng_key, param_map, model, guide, *args, **kwargs):
        if not self.linearized:
            model = linearize(model, guide.median(param_map))
        model = compose(model, self.bijections)
        return super().loss_with_mutable_state(rng_key, param_map, model, guide, *args, **kwargs)


def _some_points(sampler, key, num: int):
    """At most ``num`` distinct points, at random; of as many steps as it takes, where the points are random."""
    key_draws, key_subset = jax.random.split(key)
    first = sampler(key_draws)
    draws = [first]
    if sampler.is_random:
        draws += [sampler(jax.random.fold_in(key_draws, i)) for i in range(1, -(-num // len(first)))]
    x = np.unique(np.concatenate(draws), axis=0)
    return jnp.asarray(x[np.asarray(jax.random.permutation(key_subset, len(x))[:num])])


def _adam():
    import optax

    return optax.adam(LEARNING_RATE)


def _announce(text, progress_bar):
    if progress_bar:
        tqdm.write(text)
