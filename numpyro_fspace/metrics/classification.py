"""Scores of predicted class probabilities, and of uncertainty as a detector of out-of-distribution inputs."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from numpyro_fspace._checks import check_count, one_line
from numpyro_fspace.metrics.checks import as_probs, as_probs_and_labels, as_vector

if TYPE_CHECKING:
    from jaxtyping import ArrayLike, Float, Int


class Reliability(NamedTuple):
    """Confidence and accuracy in bins of confidence; NaN for empty bins.

    Attributes:
        confidence: mean of the highest probability in each bin, ``[B]``.
        accuracy: fraction of correct predictions in each bin, ``[B]``.
        count: number of points in each bin, ``[B]``.
    """

    confidence: Float[np.ndarray, " B"]
    accuracy: Float[np.ndarray, " B"]
    count: Int[np.ndarray, " B"]  # type: ignore[assignment]  # hides tuple.count

    def __repr__(self) -> str:
        return one_line(self)


def accuracy(probs: Float[ArrayLike, "N K"], labels: Int[ArrayLike, " N"]) -> float:
    """Fraction of points whose most probable class is the label; the first of several tied classes is used.

    Args:
        probs: predicted probabilities, averaged over draws, ``[N, K]``.
        labels: true classes, integers from 0 to K - 1, ``[N]``.

    Returns:
        The fraction; higher is better.

    Raises:
        ValueError: if the rows of ``probs`` do not sum to one (within 0.001), shapes do not agree, or a label is out of
            range.

    Example:
        >>> accuracy([[0.9, 0.1], [0.4, 0.6]], [0, 0])
        0.5
    """
    probs, labels = as_probs_and_labels(probs, labels)
    return float(np.mean(probs.argmax(axis=1) == labels))


def nll(probs: Float[ArrayLike, "N K"], labels: Int[ArrayLike, " N"]) -> float:
    r"""Mean negative log probability of the label, :math:`-\frac1N \sum_i \log p_{i y_i}`.

    Args:
        probs: predicted probabilities, averaged over draws, ``[N, K]``.
        labels: true classes, ``[N]``.

    Returns:
        The score in nats; lower is better. It is infinite if a label has probability zero (nothing is clipped).

    Raises:
        ValueError: as for :func:`accuracy`.

    Example:
        >>> round(nll([[0.5, 0.5]], [1]), 4)
        0.6931
    """
    probs, labels = as_probs_and_labels(probs, labels)
    with np.errstate(divide="ignore"):
        return float(-np.mean(np.log(probs[np.arange(len(labels)), labels])))


def brier(probs: Float[ArrayLike, "N K"], labels: Int[ArrayLike, " N"]) -> float:
    r"""Brier score over all classes, :math:`\frac1N \sum_i \sum_k (p_{ik} - [y_i = k])^2`, between 0 and 2.

    With two classes this is twice the score of the second column alone.

    Args:
        probs: predicted probabilities, averaged over draws, ``[N, K]``.
        labels: true classes, ``[N]``.

    Returns:
        The score; lower is better.

    Raises:
        ValueError: as for :func:`accuracy`.

    Example:
        >>> brier([[0.5, 0.5]], [1])
        0.5
    """
    probs, labels = as_probs_and_labels(probs, labels)
    return float(np.mean(np.sum((probs - np.eye(probs.shape[1])[labels]) ** 2, axis=1)))


def reliability_curve(probs: Float[ArrayLike, "N K"], labels: Int[ArrayLike, " N"], num_bins: int = 15) -> Reliability:
    """Accuracy in bins of confidence (the highest probability), which have equal width.

    A bin contains its upper edge but not its lower one.

    Args:
        probs: predicted probabilities, averaged over draws, ``[N, K]``.
        labels: true classes, ``[N]``.
        num_bins: number of bins of (0, 1].

    Returns:
        A :class:`Reliability` of arrays ``[num_bins]``.

    Raises:
        ValueError, TypeError: as for :func:`accuracy`, or if ``num_bins`` is no integer or below 1.

    Example:
        >>> reliability_curve([[0.9, 0.1], [0.4, 0.6]], [0, 0], num_bins=2).accuracy
        array([nan, 0.5])
    """
    probs, labels = as_probs_and_labels(probs, labels)
    check_count(num_bins, "num_bins")
    confidence = probs.max(axis=1)
    edges = np.linspace(0, 1, num_bins + 1)
    bins = np.clip(np.searchsorted(edges, confidence, side="left") - 1, 0, num_bins - 1)
    count = np.bincount(bins, minlength=num_bins)
    correct = probs.argmax(axis=1) == labels
    with np.errstate(invalid="ignore"):  # 0 / 0 in an empty bin
        return Reliability(
            np.bincount(bins, confidence, num_bins) / count,
            np.bincount(bins, correct, num_bins) / count,
            count,
        )


def ece(probs: Float[ArrayLike, "N K"], labels: Int[ArrayLike, " N"], num_bins: int = 15) -> float:
    r"""Expected calibration error :math:`\sum_b \frac{n_b}{N} |\mathrm{accuracy}_b - \mathrm{confidence}_b|`.

    Args:
        probs: predicted probabilities, averaged over draws, ``[N, K]``.
        labels: true classes, ``[N]``.
        num_bins: number of bins, as in :func:`reliability_curve`. The error depends on it.

    Returns:
        The error; lower is better.

    Raises:
        ValueError: as for :func:`reliability_curve`.

    Example:
        >>> round(ece([[0.9, 0.1], [0.4, 0.6]], [0, 0]), 6)
        0.35

    Reference: C. Guo et al. (2017), *On calibration of modern neural networks*.
    """
    curve = reliability_curve(probs, labels, num_bins)
    gap = np.nan_to_num(np.abs(curve.accuracy - curve.confidence))
    return float(curve.count @ gap / curve.count.sum())


def entropy(probs: Float[ArrayLike, "*B K"]) -> Float[np.ndarray, "*B"]:
    r"""Entropy :math:`-\sum_k p_k \log p_k` over the last axis, in nats, with :math:`0 \log 0 = 0`.

    The entropy of probabilities averaged over draws is the total uncertainty, a usual score for :func:`ood_auc`.

    Args:
        probs: probabilities, ``[..., K]``.

    Returns:
        Entropies, ``[...]``, between 0 and log K.

    Raises:
        ValueError: if ``probs`` are negative or do not sum to one over the last axis.

    Example:
        >>> entropy([[1.0, 0.0], [0.5, 0.5]]).round(4)
        array([0.    , 0.6931])
    """
    probs = as_probs(probs)
    return -np.sum(probs * np.log(np.where(probs > 0, probs, 1.0)), axis=-1) + 0.0  # + 0.0: no negative zero


def ood_auc(score_in: Float[ArrayLike, " N"], score_out: Float[ArrayLike, " M"]) -> float:
    """Area under the ROC curve of an uncertainty score that should be *higher* on out-of-distribution inputs.

    It is the probability that a random out-of-distribution input has a higher score than a random in-distribution input
    (a tie counts one half).

    Args:
        score_in: scores of in-distribution inputs, ``[N]``.
        score_out: scores of out-of-distribution inputs, ``[M]``.

    Returns:
        The area: 1 for perfect separation, 0.5 for chance.

    Raises:
        ValueError: if a score is empty, not a vector or not finite.

    Example:
        >>> ood_auc([0.0, 1.0], [1.0, 2.0])
        0.875
    """
    inside = np.sort(as_vector(score_in, "score_in"))
    outside = as_vector(score_out, "score_out")
    below = np.searchsorted(inside, outside, side="left")
    not_above = np.searchsorted(inside, outside, side="right")
    return float(np.mean(below + not_above) / (2 * len(inside)))


def ood_accuracy(score_in: Float[ArrayLike, " N"], score_out: Float[ArrayLike, " M"]) -> float:
    """Accuracy of the best single threshold on a score as a detector, on equal numbers of inputs of both kinds.

    This is the training accuracy of a decision tree of depth one. The side of the threshold is chosen too, so the
    accuracy is at least 0.5, and with few inputs it exceeds 0.5 by chance.

    Args:
        score_in: scores of in-distribution inputs, ``[N]``.
        score_out: scores of out-of-distribution inputs, ``[M]``; the first min(N, M) of each are used.

    Returns:
        The accuracy; 1 for perfect separation.

    Raises:
        ValueError: if a score is empty, not a vector or not finite.

    Example:
        >>> ood_accuracy([0.0, 1.0, 2.0, 3.0], [2.5, 4.0, 5.0, 6.0])
        0.875

    Reference: K. Osawa et al. (2019), *Practical deep learning with Bayesian principles*.
    """
    inside, outside = as_vector(score_in, "score_in"), as_vector(score_out, "score_out")
    num = min(len(inside), len(outside))
    scores = np.concatenate([inside[:num], outside[:num]])
    order = np.argsort(scores, kind="stable")
    is_out = np.repeat([-1, 1], num)[order]
    # Among the k lowest scores, the number outside minus the number inside. A threshold cannot separate equal scores.
    excess = np.concatenate([[0], np.cumsum(is_out)])
    cuts = np.concatenate([[True], np.diff(scores[order]) > 0, [True]])
    return float(0.5 + np.abs(excess[cuts]).max() / (2 * num))
