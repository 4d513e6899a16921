"""The NumPyro models of the estimators: a network with the distribution of a trained Gaussian process, and data."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, asdict, dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np
import numpyro
import numpyro.distributions as dist
from flax import linen as nn

from numpyro_fspace._checks import one_line
from numpyro_fspace.estimators.gp_kernels import ard_kernel
from numpyro_fspace.model import gp_network
from numpyro_fspace.priors import GPPrior, dirichlet_targets

#: Standard deviation of log σ around log σ₀, and most points of the noise's function.
LOG_NOISE_SD, NUM_NOISE_POINTS = 0.3, 100


@dataclass(frozen=True, eq=False, repr=False)
class NetworkModel:
    """What the models of regression and classification share: a network with a Gaussian process's distribution.

    Attributes:
        points: standardized inputs [M, D], where the network has the process's distribution.
        kernel: a name in ``KERNELS``.
        variance: variance of the process.
        lengthscale: its lengthscales [D].
        widths: hidden widths of the network.
        num_outputs: K, the number of functions.
        batch_size: rows of a minibatch; None means all rows.
    """

    points: np.ndarray
    _: KW_ONLY
    kernel: str
    variance: float
    lengthscale: np.ndarray
    widths: tuple[int, ...] = (50, 50)
    num_outputs: int = 1
    batch_size: int | None = None

    __repr__ = one_line

    @property
    def prior(self) -> GPPrior:
        """The Gaussian process of the functions."""
        return self._process(self.kernel, self.variance, self.lengthscale)

    def _process(self, kernel, variance, lengthscale, constant: float = 0.0) -> GPPrior:
        """The process of a named kernel, plus a constant of this standard deviation."""
        from tinygp import kernels

        found = ard_kernel(kernel, {"variance": variance, "lengthscale": np.asarray(lengthscale)})
        found = found + kernels.Constant(constant**2) if constant else found
        return GPPrior(found, num_outputs=self.num_outputs if self.num_outputs > 1 else None)

    def function(self):
        """The random function f: standardized inputs [N, D] to values [N, K]."""
        return gp_network("f", self.network(), self.prior, self.points)

    def network(self):
        """A network with K outputs."""
        hidden = [part for width in self.widths for part in (nn.Dense(width), nn.tanh)]
        return nn.Sequential([*hidden, nn.Dense(self.num_outputs)])

    def rows(self, num: int):
        """The plate of the data."""
        size = None if self.batch_size is None or num <= self.batch_size else self.batch_size
        return numpyro.plate("data", num, subsample_size=size)

    def __call__(self, x, y=None):
        """The model of standardized inputs and targets."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """All settings as numbers, strings and lists, from which ``from_dict`` makes the same model."""
        return {k: v.tolist() if isinstance(v, np.ndarray) else v for k, v in asdict(self).items()}

    @classmethod
    def from_dict(cls, settings: dict[str, Any]):
        """The model of ``to_dict``; every list but ``widths`` is an array."""
        given = {"points": np.asarray(settings["points"], np.float32), "widths": tuple(settings["widths"])}
        arrays = {k: np.asarray(v) for k, v in settings.items() if isinstance(v, list)}
        return cls(**settings | arrays | given)


@dataclass(frozen=True, eq=False, repr=False)
class RegressionModel(NetworkModel):
    r"""The NumPyro model of ``fs.Regressor``, on standardized inputs and targets.

    .. math:: f \sim \text{gp\_network}, \qquad \log \sigma \sim N(\log \sigma_0, 0.3^2), \qquad
              y \sim N(f(x), \sigma^2)

    σ₀ is the noise of the trained Gaussian process. Each of several targets has its own output of the network and its
    own noise. If the noise varies with the inputs, a second function g takes the place of σ. Its process has a squared
    exponential kernel plus the constant 0.3². Because g is smoother than f, at most 100 of the points are used for it:

    .. math:: g \sim \text{gp\_network}, \qquad y \sim N\big(f(x),\, \sigma_0^2 e^{2 g(x)}\big) .

    If all rows are used in each gradient, ``fs.fSGHMC`` integrates out the last layer of f, unless that has too many
    weights (``marginalize`` of ``fs.SGHMC``). It samples that of g.

    Attributes:
        points: standardized inputs [M, D] at which f has the distribution of its Gaussian process.
        kernel, variance, lengthscale: of this process: ``"squared_exponential"`` or ``"matern52"``, a number, [D].
        widths, num_outputs: hidden widths of the network, and the number K of targets.
        batch_size: rows of a minibatch; None means all rows.
        noise: σ₀.
        log_noise_variance: variance of the process of g; None means constant noise.
        log_noise_lengthscale: lengthscales of the process of g, [D].

    Example:
        >>> import jax, numpy as np, numpyro
        >>> from numpyro_fspace.estimators import RegressionModel
        >>> x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
        >>> process = {"kernel": "matern52", "variance": 1.0, "lengthscale": np.ones(1)}
        >>> model = RegressionModel(x, **process, noise=0.1)
        >>> numpyro.infer.Predictive(model, num_samples=3)(jax.random.key(0), x)["y"].shape
        (3, 8)
    """

    _: KW_ONLY
    noise: float
    log_noise_variance: float | None = None
    log_noise_lengthscale: np.ndarray | None = None

    @property
    def has_varying_noise(self) -> bool:
        """Whether the noise is a function of the inputs."""
        return self.log_noise_variance is not None

    @property
    def log_noise_prior(self) -> GPPrior:
        """The Gaussian process of g."""
        given = self.log_noise_variance, self.log_noise_lengthscale
        return self._process("squared_exponential", *given, constant=LOG_NOISE_SD)

    def __call__(self, x, y=None):
        """The model of standardized inputs x [N, D] and targets y [N] or [N, K]."""
        f, sd = self.function(), self._noise()
        several = self.num_outputs > 1
        with self.rows(x.shape[0]):
            xb = numpyro.subsample(x, event_dim=1)
            yb = None if y is None else numpyro.subsample(y, event_dim=int(several))
            law = dist.Normal(f(xb), sd(xb))
            law = law.to_event(1) if several else dist.Normal(law.loc.squeeze(-1), law.scale.squeeze(-1))
            numpyro.sample("y", law, obs=yb)

    def _noise(self):
        """The random standard deviation of the noise, a function of standardized inputs."""
        if self.has_varying_noise:
            some = self.points[:: -(-len(self.points) // NUM_NOISE_POINTS)]
            g = gp_network("log_noise", self.network(), self.log_noise_prior, some)
            return lambda x: self.noise * jnp.exp(g(x))
        center = dist.LogNormal(math.log(self.noise), LOG_NOISE_SD)
        sigma = numpyro.sample(
            "sigma", center.expand([self.num_outputs]).to_event(1) if self.num_outputs > 1 else center
        )
        return lambda x: jnp.broadcast_to(sigma, (len(x), self.num_outputs))


@dataclass(frozen=True, eq=False, repr=False)
class ClassificationModel(NetworkModel):
    r"""The NumPyro model of ``fs.Classifier``, on standardized inputs and classes 0 to K - 1.

    .. math:: f_k \sim \text{gp\_network}, \qquad \tilde y_k \sim N(c + f_k(x), s_k^2), \qquad
              p(y = k \mid f) = \mathrm{softmax}(f(x))_k

    ỹ [K] and s² [K] are those of ``fs.dirichlet_targets`` for the class of a row, and c is the mean of ỹ over all
    classes. With y the model has the observed site ``"targets"``, ỹ; without y the site ``"y"``, a class drawn from the
    softmax.

    Attributes:
        points, kernel, variance, lengthscale, widths, num_outputs, batch_size: as for ``RegressionModel``.
        concentration: ε of ``fs.dirichlet_targets``. The smaller it is, the more certain the classes can be.

    Example:
        >>> import jax, numpy as np, numpyro
        >>> from numpyro_fspace.estimators import ClassificationModel
        >>> x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
        >>> process = {"kernel": "matern52", "variance": 3.0, "lengthscale": np.ones(1)}
        >>> model = ClassificationModel(x, **process, concentration=0.01, num_outputs=2)
        >>> numpyro.infer.Predictive(model, num_samples=3)(jax.random.key(0), x)["y"].shape
        (3, 8)
    """

    _: KW_ONLY
    concentration: float

    def __call__(self, x, y=None):
        """The model of standardized inputs x [N, D] and classes y [N]."""
        f = self.function()
        with self.rows(x.shape[0]):
            xb = numpyro.subsample(x, event_dim=1)
            logits = f(xb)
            if y is None:
                numpyro.sample("y", dist.Categorical(logits=logits))
                return
            targets, variances = (jnp.asarray(a, logits.dtype) for a in self.targets())
            labels = numpyro.subsample(y, event_dim=0)
            law = dist.Normal(targets.mean() + logits, jnp.sqrt(variances[labels])).to_event(1)
            numpyro.sample("targets", law, obs=targets[labels])

    def targets(self) -> tuple[np.ndarray, np.ndarray]:
        """ỹ and s² by class, [K, K] each."""
        num = self.num_outputs
        return dirichlet_targets(np.arange(num), num, concentration=self.concentration)
