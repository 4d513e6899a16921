"""How well the covariance of a network under ``gp_network`` matches that of its Gaussian process."""

from __future__ import annotations

import numpy as np


def compare(features, parts, num_points, num_same, taus) -> np.ndarray:
    """``(share, error at the points, error between them)`` of each tolerance.

    Args:
        features: Ψ at A places, of S draws of the hidden weights, [S, A, H]. The first ``num_points`` places are the
            points, the next ``num_same`` some of them again, and the others lie between them.
        parts: covariances [J, A, A] of the parts of the process, and their shares [J] of its variance.
        num_points, num_same: see ``features``.
        taus: the tolerances.

    The results are those of the part of the process that the network follows worst: of a trend with a small season the
    season.

    Given the features Ψ at the points, the network's covariance is that of its last layer, I - GΨ + G(K + τ²I)Gᵀ with
    G = Ψᵀ(ΨΨᵀ + τ²I)⁻¹. For a part with the share s of the variance, the terms without K are divided by s. All
    tolerances share the eigenvectors of ΨᵀΨ, or of ΨΨᵀ where this is smaller.
    """
    total = np.zeros((len(parts[1]), len(taus), 3))
    for psi in features:
        at, there = psi[:num_points], psi[num_points:]
        is_dual = num_points < psi.shape[1]
        values, vectors = np.linalg.eigh(at @ at.T if is_dual else at.T @ at)
        values = np.maximum(values, 0.0)
        turned, basis = (there @ at.T @ vectors, vectors) if is_dual else (there @ vectors, at @ vectors)
        blocks = [slice(0, num_same), slice(num_same, None)]
        own = [there[block] @ there[block].T for block in blocks]
        weight = np.ones_like(values) if is_dual else values
        for j, (covariance, part) in enumerate(zip(*parts, strict=True)):
            given = covariance[:num_points, :num_points]
            projected = basis.T @ given @ basis
            wanted = [covariance[num_points:, num_points:][block, block] for block in blocks]
            for i, tau in enumerate(taus):
                shrink = 1.0 / (values + tau**2)
                inner = np.outer(shrink, shrink) * projected + np.diag(weight * (tau**2 * shrink**2 - shrink)) / part
                scores = [np.sum(shrink * np.diagonal(projected) * (values if is_dual else 1.0)) / np.trace(given)]
                for block, mine, right in zip(blocks, own, wanted, strict=True):
                    scores.append(_relative(mine / part + turned[block] @ inner @ turned[block].T - right, right) ** 2)
                total[j, i] += scores
    mean = total / len(features)
    return np.concatenate([mean[..., :1].min(0), np.sqrt(mean[..., 1:].max(0))], -1)


def missing_variance(features, parts, num_points, num_same, tau) -> float:
    """The variance between the points, given the values at them, that a network lacks, in units of the process's.

    Of a sum of kernels this is that of its roughest summand, which is a lower bound. The arguments are those of
    ``compare``.
    """
    first = num_points + num_same
    if features.shape[1] == first:
        return 0.0
    own = np.mean([_given_points(psi @ psi.T, num_points, first, tau) for psi in features])
    rest = [share * _given_points(k, num_points, first, tau / np.sqrt(share)) for k, share in zip(*parts, strict=True)]
    return float(max(rest) - own)


def _given_points(covariance, num_points, first, tau) -> float:
    """The mean variance at the places from number ``first`` on, given values at the points with noise tau."""
    cross = covariance[first:, :num_points]
    known = covariance[:num_points, :num_points] + tau**2 * np.eye(num_points)
    explained = np.sum(cross * np.linalg.solve(known, cross.T).T, -1)
    return np.mean(np.diagonal(covariance)[first:] - explained)


def _relative(wrong, wanted):
    return np.linalg.norm(wrong) / np.linalg.norm(wanted) if wanted.size else 0.0
