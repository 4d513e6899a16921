"""``FVIMC``: alternating variational inference and MCMC in function space, linked by bijections of function values."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
from numpyro.infer import SVI, autoguide
from tqdm.auto import tqdm

from numpyro_fspace._checks import check_count, check_not_negative, check_positive, one_line, renamed_argument
from numpyro_fspace.mcmc.driver import MCMC
from numpyro_fspace.mcmc.sgmcmc_kernels import fSGLD
from numpyro_fspace.mcmc.warmup import Warmup
from numpyro_fspace.model.linearized import function_of, linearize
from numpyro_fspace.posterior.posterior import Posterior
from numpyro_fspace.variational.bijections import as_bijections
from numpyro_fspace.variational.elbo import GuidedModel
from numpyro_fspace.variational.fvimc_stages import (
    FVIMCResult,
    MStage,
    StageELBO,
    VStage,
    check_model_and_guide,
    sample_functions,
)
from numpyro_fspace.variational.guides import mean_field
from numpyro_fspace.variational.svi import posterior_of
from numpyro_fspace.variational.transformation import TStage, compose, fit_transformation, gaussian_at, log_density

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from jaxtyping import Array, Float, Key

__all__ = ["FVIMC", "FVIMCResult", "MStage", "TStage", "VStage"]

#: Learning rate of Adam in the V-stages.
LEARNING_RATE = 5e-3


class FVIMC:
    r"""Functional variational inference MCMC, in stages V M T V M T … V.

    A V-stage fits q(w) = N(m, S) by a ``fs.FunctionalELBO``. An M-stage samples with fSGLD from a draw of q. A T-stage
    fits a bijection F of function values that maps the distribution of the V-stage to the draws of the M-stage. The
    next stages do the same with F∘f in place of f. The last V-stage gives the approximate posterior

    .. math:: F_k \circ \dots \circ F_1 \circ Q, \qquad Q = GP\big(f(\cdot; m), J S J^\top\big), \quad k = (K-1)/2,

    .. math:: \log q(y) = \log N\big(F^{-1}(y); f(x; m), J S J^\top\big) + \log |\det \partial F^{-1} / \partial y|,

    and a T-stage maximizes the mean of this log density over the draws of the M-stage at measurement points (with white
    noise added to both, see ``blur``).

    Q is the distribution of the network *linearized* around m, f_L(x; w) = f(x; m) + J(x; m)(w - m). ``posterior``
    draws F∘f_L, and ``log_prob`` is its density. What a V-stage fits depends on its divergence:

    * If the divergence is estimated from draws (``linearized = False``), both the divergence and the likelihood use
      F∘f_L. (Under ``SVI`` such a divergence does not linearize the network; here it does, even for K = 1.)
    * If the divergence needs a Gaussian distribution, it is the approximation GP(F(f(·; m)), F′J S Jᵀ F′), in which F
      is linearized at f(·; m) along with f. It is exact for linear bijections, and accurate to first order in the
      spread of q for others.

    M-stages sample the network itself, F∘f, with the target of ``fs.fSGLD``. That target includes the model's prior of
    the weights, which V-stages leave out. With a wide prior of the weights, or ``fs.model.flat()`` (the paper's
    choice), the two targets nearly agree.

    Args:
        model: a NumPyro model with one ``functional_prior`` (use the function that it returns) and continuous latents.
        num_stages: K, the number of V- and M-stages together, odd; 1 is variational inference alone.
        divergence: divergence of the V-stages, any that ``fs.FunctionalELBO`` takes; None means
            ``fs.variational.RegularizedKL()``.
        guide: ``model -> guide`` with a normal posterior, such as ``fs.variational.guides.mean_field``.
        optimizer: an optax optimizer for the V-stages; None means Adam with learning rate 0.005. Each V-stage starts
            with a new optimizer state and with the parameters of the V-stage before.
        num_updates: optimizer steps of a V-stage.
        num_particles: draws in the bound of the V-stages.
        kernel: ``model -> kernel`` for the M-stages; None means ``fs.fSGLD`` without warm start, because the chain
            starts at a draw of q.
        num_warmup, num_samples: draws of an M-stage, each of the kernel's ``num_steps`` gradient steps.
        bijections: candidates of the T-stages, ``"linear"``, ``"tanh"``, ``"sigmoid"`` or objects of
            ``numpyro_fspace.variational.bijections``; the candidate with the highest likelihood is kept.
        num_transform_steps, transform_learning_rate: steps and learning rate of Adam in the T-stages.
        num_points: maximum number of distinct measurement points of a T-stage. Random points are gathered from
            several draws if one draw has fewer. The biases b(x) are networks of the inputs and need many points if
            there are several inputs. A T-stage factorizes a matrix whose side is points × outputs.
        blur: τ ≥ 0. In a T-stage white noise of τ times their own mean variance is added to Q and to the draws (0 in
            the paper). Q varies in few directions. With τ = 0 the variance of the draws in all others sets the scale of
            F, which makes Q too wide. As both get the same share, a linear F that maps one to the other without noise
            still does so with noise.
        gamma: γ > 0; M γ is added to the variances of Q at M points, as in ``fs.variational.RegularizedKL``, relative
            to the mean variance of Q where that exceeds 1. None means 1e-10 in float64 and 1e-6 in float32.

    Raises:
        ValueError, TypeError: an argument has the wrong type or range; or, in ``run``, the model does not have exactly
            one functional prior, has discrete latent values, the guide is not normal, or the covariance of Q at the
            points of a T-stage is numerically singular.
        FloatingPointError: in ``run``, no bijection gives the draws a finite density.

    Example:
        >>> import jax, numpyro, numpyro.distributions as dist, numpyro_fspace as fs, tinygp
        >>> gp = fs.GPPrior(tinygp.kernels.ExpSquared(0.5), nugget=0.01)
        >>> points = fs.measurement.uniform(-1.0, 1.0, 5)
        >>> def model(x, y=None):
        ...     a, b, c = numpyro.sample("w", dist.Normal(0.0, 3.0).expand([3]).to_event(1))
        ...     f = fs.functional_prior("f", lambda x: (a + b * x + c * x**2)[:, 0], gp, points)
        ...     numpyro.sample("y", dist.Normal(f(x), 0.1).to_event(1), obs=y)
        >>> x = jax.numpy.linspace(-1.0, 1.0, 10)[:, None]
        >>> short = {"num_updates": 50, "num_transform_steps": 50, "num_warmup": 20}
        >>> fvimc = FVIMC(model, num_stages=3, num_samples=20, **short)
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

    __repr__ = one_line

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
            raise ValueError(
                f"num_stages={num_stages} must be odd: V-stages and M-stages alternate, with a V-stage at both ends."
            )
        for name, make in (("guide", guide), ("kernel", kernel)):
            if isinstance(make, autoguide.AutoGuide) or not (make is None or callable(make)):
                raise TypeError(f"{name} must be a function of a model, which makes it, got {make!r}.")
        check_positive(transform_learning_rate, "transform_learning_rate")
        if gamma is not None:
            check_positive(gamma, "gamma")
        check_not_negative(blur, "blur")
        self.model, self.num_stages, self._make_guide = model, num_stages, guide
        self.bound = functools.partial(StageELBO, divergence, num_particles)
        self.bound(())  # raises for a wrong divergence
        if optimizer is None:
            import optax

            optimizer = optax.adam(LEARNING_RATE)
        self.optimizer = optimizer
        self.kernel = functools.partial(fSGLD, warmup=Warmup(warm_start=0.0)) if kernel is None else kernel
        self.num_updates, self.num_warmup, self.num_samples = num_updates, num_warmup, num_samples
        self.bijections = as_bijections(bijections)
        self.num_transform_steps, self.transform_learning_rate = num_transform_steps, transform_learning_rate
        self.num_points, self.blur, self.gamma = num_points, blur, gamma
        for name in ("num_updates", "num_warmup", "num_samples", "num_transform_steps", "num_points"):
            check_count(getattr(self, name), name)
        self.guide: Any = None
        self.result: FVIMCResult | None = None
        self._args: tuple = ()
        self._kwargs: dict = {}

    def run(self, key: Key[Array, ""], *args, progress_bar: bool = True, **kwargs) -> FVIMCResult:
        """Run all stages.

        Args:
            key: for all random numbers of the run.
            *args: the model's arguments.
            progress_bar: whether to show the progress of every stage.
            **kwargs: the model's keyword arguments.

        Returns:
            The guide's parameters, the bijections and the results of every stage; also kept as ``result``.
        """
        self._args, self._kwargs, self.result = args, kwargs, None
        keys = jax.random.split(key, self.num_stages)
        self.guide = self._make_guide(self.model)
        start = SVI(self.model, self.guide, self.optimizer, loss=self.bound(()))
        check_model_and_guide(keys[0], start, args, kwargs)
        params: Any = None
        bijections: tuple = ()
        stages: list = []
        announce: Callable = tqdm.write if progress_bar else lambda text: None
        for i, key_stage in enumerate(keys):
            if i % 2 == 0:
                announce(f"V-stage {i + 1} of {self.num_stages}")
                svi = SVI(self.model, self.guide, self.optimizer, loss=self.bound(bijections))
                settings = {"init_params": params, "progress_bar": progress_bar}
                fitted = svi.run(key_stage, self.num_updates, *args, **settings, **kwargs)
                params = fitted.params
                stages.append(VStage(np.asarray(fitted.losses), params))
                continue
            key_sampling, key_transform = jax.random.split(key_stage)
            announce(f"M-stage {i + 1} of {self.num_stages}")
            guided = self._guided(params)
            sampled = self._sample(key_sampling, guided, bijections, progress_bar)
            announce(f"T-stage {(i + 1) // 2} of {self.num_stages // 2}")
            transformed = fit_transformation(
                key_transform,
                self.bijections,
                self._gaussian(guided, sampled.x),
                sampled.x,
                sampled.functions,
                previous=bijections,
                blur=self.blur,
                num_steps=self.num_transform_steps,
                learning_rate=self.transform_learning_rate,
                progress_bar=progress_bar,
            )
            bijections = (*bijections, transformed.fitted)
            stages += [sampled, transformed]
        self.result = result = FVIMCResult(params, bijections, tuple(stages))
        return result

    def _sample(self, key, guided, bijections, progress_bar) -> MStage:
        model = compose(self.model, bijections)
        mcmc = MCMC(
            self.kernel(model), num_warmup=self.num_warmup, num_samples=self.num_samples, progress_bar=progress_bar
        )
        return sample_functions(key, mcmc, model, guided, self.num_points, args=self._args, kwargs=self._kwargs)

    def posterior(self, key: Key[Array, ""], num_samples: int = 1000) -> Posterior:
        """Draws of w ~ q of the last V-stage, with the model whose function is F_k∘…∘F_1∘f_L.

        Args:
            key: for the draws.
            num_samples: S.

        Returns:
            A ``fs.Posterior`` for ``fs.predict`` and ``fs.to_arviz``; ``fs.save`` cannot write it.

        Raises:
            RuntimeError: ``run`` has not been called.
        """
        check_count(num_samples, "num_samples")
        params, bijections, _ = self._finished()
        samples = self.guide.sample_posterior(key, params, sample_shape=(num_samples,))
        model = compose(linearize(self.model, self.guide.median(params)), bijections)
        return posterior_of(self.guide, samples, model, args=self._args, kwargs=self._kwargs, fit=None)

    def log_prob(self, x: Float[Array, "M D"], f: Float[Array, "... M *K"]) -> Float[Array, ...]:
        r"""Log density of function values under the posterior, jointly over points and outputs.

        Args:
            x: points [M, D].
            f: values [..., M], or [..., M, K] if the model's function gives [M, K].

        Returns:
            log N(F⁻¹(f); f(x; m), J S Jᵀ + M γ c I) + log|det ∂F⁻¹/∂f|, [...], with c = max(1, Q's mean variance at x).

        Raises:
            RuntimeError: ``run`` has not been called.
            ValueError: f has the wrong shape, or J S Jᵀ + M γ c I is numerically singular.
        """
        params, bijections, _ = self._finished()
        x, f = jnp.asarray(x), jnp.asarray(f)
        guided = self._guided(params)
        (name,) = guided.functions
        function = function_of(self.model, name, self._args, self._kwargs, guided.center)
        shape = jax.eval_shape(function, x).shape
        if f.shape[f.ndim - len(shape) :] != shape or f.ndim < len(shape):
            raise ValueError(f"log_prob: f has shape {f.shape}, the function's values at x have shape [..., {shape}].")
        values = f.reshape(*f.shape[: f.ndim - len(shape)], len(x), -1)
        return log_density(self._gaussian(guided, x), bijections, x, values)

    def _finished(self) -> FVIMCResult:
        if self.result is None:
            raise RuntimeError("FVIMC has nothing to draw from yet: call run first.")
        return self.result

    def _guided(self, params) -> GuidedModel:
        """The model under the guide at ``params``."""
        settings = {"args": self._args, "kwargs": self._kwargs, "needs_normal": True}
        return GuidedModel(self.model, self.guide, params, jax.random.key(0), **settings)

    def _gaussian(self, guided, x):
        """Q at x over the flat values [M K]."""
        (name,) = guided.functions
        return gaussian_at(guided.linearized_pushforward(name), x, self.gamma)
