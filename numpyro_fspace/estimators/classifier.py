"""``fs.Classifier``: classification with networks under a trained Gaussian process, in scikit-learn's protocol."""

from __future__ import annotations

import numpy as np
from scipy.special import expit, softmax
from sklearn.base import ClassifierMixin
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import validate_data

from numpyro_fspace.estimators.base import NetworkEstimator
from numpyro_fspace.estimators.network_model import ClassificationModel
from numpyro_fspace.posterior.decomposition import Decomposition, of_classes

__all__ = ["Classifier"]


class Classifier(ClassifierMixin, NetworkEstimator):
    r"""Bayesian classification with networks whose functions have the distribution of a trained Gaussian process.

    ``fit`` standardizes inputs, trains a Gaussian process with a lengthscale per input by marginal likelihood of the
    classes' indicators on up to 500 rows, and samples the NumPyro model ``estimator.model`` by ``fs.fSGHMC``: one
    function of ``fs.gp_network`` for each class (one for two classes) of unit variance, times an amplitude that is
    learned, under a softmax (``fs.estimators.ClassificationModel``). The amplitude makes the probabilities calibrated:
    where classes overlap it is small.

    Args:
        widths: hidden widths of the network.
        kernel: as for ``fs.Regressor``, and all further settings.
        num_points: how many training rows at most are points at which the network has the process's distribution.
        method: ``"fsghmc"`` or ``"fsgld"``.
        num_warmup: draws of the warm-up, of each chain.
        num_samples: draws that are kept, of each chain.
        num_chains: chains, which run side by side.
        batch_size: rows of a minibatch; None is the full data up to 3000 rows, and 500 beyond.
        random_state: seed, a ``numpy.random.RandomState``, or None.
        progress: whether to show a progress bar.

    Attributes:
        classes_: the labels, in the order of the probabilities.
        posterior_, mcmc_, gp_, x_mean_, x_scale_, n_features_in_: as for ``fs.Regressor``.

    Raises:
        ValueError: in ``fit``, for settings out of range, for a single class, and for data that scikit-learn refuses.
        ImportError: without scikit-learn 1.6 or newer.

    Example:
        >>> import numpy as np, numpyro_fspace as fs
        >>> X = np.random.default_rng(0).normal(size=(60, 2))
        >>> y = np.where(X[:, 0] > 0, "right", "left")
        >>> estimator = fs.Classifier(num_warmup=20, num_samples=20, num_chains=1, random_state=0).fit(X, y)
        >>> estimator.predict_proba(X).shape, estimator.classes_.tolist()
        ((60, 2), ['left', 'right'])
    """

    def fit(self, X, y):
        """Train the process and sample the networks.

        Args:
            X: inputs [N, D].
            y: labels [N].

        Returns:
            The estimator.
        """
        self._check_settings()
        X, y = validate_data(self, X, y, dtype=np.float64, ensure_min_samples=2)
        check_classification_targets(y)
        self.classes_, labels = np.unique(y, return_inverse=True)
        num = len(self.classes_)
        if num < 2:
            raise ValueError(
                f"Classifier needs at least two classes, and y holds only one class, {self.classes_[0]!r}."
            )
        shares = (np.bincount(labels) + 1.0) / (len(labels) + num)
        indicators = np.eye(num)[labels]
        indicators = indicators - indicators.mean(0)
        x, points, key, settings = self._prepare(X, indicators[:, 1:] if num == 2 else indicators)
        offset = np.log(shares[1:] / shares[0]) if num == 2 else np.log(shares)
        settings |= {"variance": 1.0, "num_outputs": len(offset), "offset": offset}
        return self._sample(ClassificationModel(points, **settings), key, x, labels)

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
        best = self.predict_proba(X).argmax(-1)
        return self.classes_[best]

    def decompose(self, X) -> Decomposition:
        """Mutual information (epistemic) and expected entropy (aleatoric) of the classes; see ``fs.decompose``.

        Args:
            X: inputs [N, D].
        """
        return of_classes(self._probabilities(X))

    def sample(self, X, num: int | None = 1, *, noise: bool = True, random_state=None) -> np.ndarray:
        """Draws of labels, or of the classes' probabilities.

        Args:
            X: inputs [N, D].
            num: how many; None is one for each posterior draw, in their order at random.
            noise: whether to draw labels.
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
        f = self._functions(X).astype(float)
        logits = np.asarray(self.model.offset) + self._site("amplitude") * f
        if len(self.classes_) > 2:
            return softmax(logits, -1)
        p = expit(logits)
        return np.concatenate([1.0 - p, p], -1)
