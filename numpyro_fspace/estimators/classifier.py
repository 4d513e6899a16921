"""``fs.Classifier``: classification with networks under a trained Gaussian process, in scikit-learn's protocol."""

from __future__ import annotations

import itertools
from dataclasses import replace

import jax
import numpy as np
from scipy.special import softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets

from numpyro_fspace.estimators.base import MAX_TRAINING, NetworkEstimator, validated
from numpyro_fspace.estimators.gp_kernels import ard_kernel
from numpyro_fspace.estimators.network_model import ClassificationModel
from numpyro_fspace.posterior.uncertainty_decomposition import Decomposition, of_classes
from numpyro_fspace.priors import GPFit, GPPrior, dirichlet_targets

#: What is tried for the variance of the process and for ε, and draws of the logits of each row.
VARIANCES, CONCENTRATIONS, NUM_NORMALS = (1.0, 3.0, 10.0), (0.3, 0.1, 0.03, 0.01, 0.003, 0.001, 0.0003), 50


class Classifier(ClassifierMixin, NetworkEstimator):
    r"""Bayesian classification with networks whose functions have the distribution of a trained Gaussian process.

    ``fit`` standardizes inputs, trains a Gaussian process with a lengthscale per input by marginal likelihood of the
    classes' indicators on up to 500 rows, and samples the NumPyro model ``estimator.model``: a ``fs.gp_network`` with
    an output for each class, and the Gaussian targets of ``fs.dirichlet_targets``. Probabilities are the softmax of the
    functions (``fs.estimators.ClassificationModel``). The concentration of these targets and the variance of the
    process are those with which the exact process best predicts each of up to 500 rows from the others, by the mean log
    probability of their classes: classes that overlap need a larger concentration than others.

    Args:
        widths: hidden widths of the network.
        kernel: ``"squared_exponential"``, ``"matern52"``, or ``"auto"``, the one with the larger marginal likelihood.
        num_points: maximum number of training rows that are points at which the network has the process's distribution.
        method: the sampler, ``"fsghmc"`` (``fs.fSGHMC``) or ``"fsgld"`` (``fs.fSGLD``).
        num_warmup: number of warm-up draws of each chain.
        num_samples: number of draws of each chain that are kept.
        num_chains: number of chains, which run side by side.
        batch_size: rows of a minibatch; None uses all rows in each gradient up to 3000 rows, and 500 beyond.
        random_state: seed, a ``numpy.random.RandomState``, or None.
        progress: whether to show a progress bar.

    Attributes:
        classes_: the labels [K], in the order of the probabilities.
        posterior_, mcmc_, gp_, x_mean_, x_scale_, n_features_in_: as for ``fs.Regressor``.

    Raises:
        TypeError: as for ``fs.Regressor``.
        ValueError: as for ``fs.Regressor``, and in ``fit`` for a single class.
        ImportError: scikit-learn 1.6 or newer is missing.

    Example:
        >>> import numpy as np, numpyro_fspace as fs
        >>> X = np.random.default_rng(0).normal(size=(60, 2))
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> estimator = fs.Classifier(
        ...     num_warmup=20, num_samples=20, num_chains=1, random_state=0
        ... ).fit(X, y)
        >>> estimator.predict_proba(X).shape, estimator.classes_.tolist()
        ((60, 2), ['left', 'right'])
    """

    def _fit(self, X, y):
        X, y = validated(self, X, y, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        num = len(self.classes_)
        if num < 2:
            raise ValueError(
                f"Classifier needs at least two classes, and y holds only one class, {self.classes_[0]!r}."
            )
        indicators = np.eye(num)[labels]
        x, points, key, settings = self._prepare(X, indicators - indicators.mean(0))
        self.gp_, concentration = calibrated_gp(x, labels, settings["kernel"], self.gp_, key)
        settings |= {"variance": float(self.gp_.params["variance"]), "num_outputs": num}
        model = ClassificationModel(points, concentration=concentration, **settings)
        return self._sample(model, key, x, labels, marginalize=False)

    def predict_proba(self, X) -> np.ndarray:
        """Predictive probabilities of the classes [N, K], averaged over the posterior.

        Args:
            X: inputs [N, D].
        """
        return self._probabilities(X).mean(0)

    def predict(self, X) -> np.ndarray:
        """The labels of the largest predictive probabilities, [N].

        Args:
            X: inputs [N, D].
        """
        probabilities = self.predict_proba(X)  # first, because it checks that the estimator is fitted
        return self.classes_[probabilities.argmax(-1)]

    def decompose(self, X) -> Decomposition:
        """Mutual information (epistemic) and expected entropy (aleatoric), [N] in nats; see ``fs.decompose``.

        Args:
            X: inputs [N, D].
        """
        return of_classes(self._probabilities(X))

    def sample(self, X, num: int | None = 1, *, noise: bool = True, random_state=None) -> np.ndarray:
        """Draws of labels, or of the classes' probabilities.

        Args:
            X: inputs [N, D].
            num: number of draws; None means one for each posterior draw, in random order.
            noise: whether to draw labels; if false, the result holds probabilities.
            random_state: seed, a ``numpy.random.RandomState``, or None.

        Returns:
            Labels [num, N], or probabilities [num, N, K].
        """
        probabilities = self._probabilities(X)
        rows, generator = self._random_draws(num, random_state)
        probabilities = probabilities[rows]
        if not noise:
            return probabilities
        below = generator.uniform(size=(*probabilities.shape[:2], 1)) > probabilities.cumsum(-1)
        return self.classes_[np.minimum(below.sum(-1), len(self.classes_) - 1)]

    def _probabilities(self, X):
        """Probabilities [S, N, K] at each draw."""
        return softmax(self._functions(X)["f"], -1)


def calibrated_gp(x, labels, kernel: str, fit: GPFit, key) -> tuple[GPFit, float]:
    """The process with the variance, and the concentration ε of ``fs.dirichlet_targets``, that predict classes best.

    Each of at most 500 rows is predicted from the others, in closed form, and the mean log probability of its class is
    compared on a grid of both.

    Args:
        x: standardized inputs [N, D].
        labels: classes 0 to K - 1, [N].
        kernel: a name in ``KERNELS``.
        fit: a process with the lengthscales.
        key: of the rows.

    Returns:
        The process with K outputs, and ε.
    """
    num = int(labels.max()) + 1
    rows = np.asarray(jax.random.permutation(key, len(x)))[:MAX_TRAINING]
    x, labels = x[rows].astype(float), labels[rows]
    unit = {"variance": 1.0, "lengthscale": fit.params["lengthscale"]}
    with jax.enable_x64(True):
        correlation = np.asarray(ard_kernel(kernel, unit)(x, x))
    normals = np.random.default_rng(0).normal(size=(NUM_NORMALS, len(x), num))

    def score(variance, concentration):
        targets, noise = dirichlet_targets(labels, num, concentration=concentration)
        center = targets.mean()
        mean, spread = np.empty_like(targets), np.empty_like(targets)
        for k in range(num):
            precision = np.linalg.inv(variance * correlation + np.diag(noise[:, k]))
            left_out = 1.0 / np.diagonal(precision)
            mean[:, k] = targets[:, k] - left_out * (precision @ (targets[:, k] - center))
            spread[:, k] = np.maximum(left_out - noise[:, k], 0.0)
        probabilities = softmax(mean + np.sqrt(spread) * normals, -1).mean(0)
        return np.log(np.maximum(probabilities[np.arange(len(x)), labels], 1e-12)).mean()

    variance, concentration = max(itertools.product(VARIANCES, CONCENTRATIONS), key=lambda pair: score(*pair))
    params = fit.params | {"variance": np.asarray(variance)}
    return replace(fit, prior=GPPrior(ard_kernel(kernel, params), num_outputs=num), params=params), concentration
