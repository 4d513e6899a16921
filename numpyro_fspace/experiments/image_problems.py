"""Sets of images: training and test images, out-of-distribution images, and the functional prior over the logits."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import NamedTuple

import jax
import numpy as np
import tinygp

from numpyro_fspace import measurement
from numpyro_fspace.datasets import load_images
from numpyro_fspace.priors import GPFit, GPPrior, dirichlet_targets, fit_gp

NUM_CLASSES = 10
#: Out-of-distribution sets of each set: the first is scored, the second only by ``kmnist_auc``.
OOD_SETS = {
    "mnist": ("fashion_mnist", "kmnist"),
    "fashion_mnist": ("mnist", "kmnist"),
    "cifar10": ("svhn",),
    "cifar10_subset": ("svhn",),
}
#: Names of measurement points; see ``measurement_points``.
POINTS = ("train", "kmnist", "random")
#: Number of training images from which measurement points are drawn; they are part of the compiled program.
NUM_POOL = 2000
#: Nugget of the functional prior, relative to the variance of the process.
NUGGET = 0.01
#: Number of out-of-distribution images of a set; number of rotated images, and the angles in degrees.
NUM_OOD = 2000
NUM_ROTATED, ANGLES = 300, tuple(range(0, 181, 15))


class Problem(NamedTuple):
    """Images as rows of standardized pixels, and the trained GP.

    Attributes:
        x, labels: training images [N, D] and classes [N].
        x_test, labels_test: test images and classes.
        ood: out-of-distribution images by the name of their set.
        kmnist: further images of KMNIST, for measurement points; empty if the images have another size.
        rotated: test images rotated by each of ``ANGLES``, one angle after the other; their classes are those of the
            first ``NUM_ROTATED`` test images.
        shape: shape of an image, [H, W, C].
        gp: the GP prior over the logits.
    """

    x: np.ndarray
    labels: np.ndarray
    x_test: np.ndarray
    labels_test: np.ndarray
    ood: dict[str, np.ndarray]
    kmnist: np.ndarray
    rotated: np.ndarray
    shape: tuple[int, ...]
    gp: GPFit


@lru_cache(maxsize=1)
def prepare(
    dataset: str, seed: int, *, num_train: int | None, num_test: int | None, num_gp_points: int, num_gp_steps: int
) -> Problem:
    """Load images, standardize their pixels on the training part, and train the GP; cached for the next method.

    The kernel is the squared exponential with one lengthscale for all pixels. It starts at √D; the root mean square
    distance between images is √(2D).
    """
    data = load_images(dataset)
    random = np.random.default_rng(seed)
    assert data.train_labels is not None and data.test_labels is not None, "sets of this experiment have classes"
    rows = slice(None) if num_train is None else random.permutation(len(data.train))[:num_train]
    train, labels, test = data.train[rows], data.train_labels[rows], data.test[:num_test]
    mean, sd = train.mean((0, 1, 2)), train.std((0, 1, 2))

    def pixels(images):
        return ((images - mean) / sd).reshape(len(images), -1).astype(np.float32)

    x, ood, kmnist = pixels(train), {}, np.zeros((0, 0), np.float32)
    for name in OOD_SETS[dataset]:
        other = load_images(name)
        images = other.test if len(other.test) else other.train
        ood[name] = pixels(images[:NUM_OOD][:num_test])
        if name == "kmnist":
            kmnist = pixels(images[len(ood[name]) :][:NUM_POOL])
    some = random.permutation(len(x))[:num_gp_points]
    targets, variances = dirichlet_targets(labels[some], NUM_CLASSES)
    # A common shift of all logits does not change the probabilities, so the prior can have mean 0.
    gp = fit_gp(
        lambda params: params["variance"] * tinygp.kernels.ExpSquared(scale=params["lengthscale"]),
        x[some],
        targets - targets.mean(),
        params={"variance": np.array(5.0), "lengthscale": np.sqrt(x.shape[1])},
        noise_variance=variances,
        num_steps=num_gp_steps,
        learning_rate=0.1,
    )
    nugget = NUGGET * float(gp.params["variance"])
    prior = GPPrior(gp.prior.kernel, nugget=nugget, num_outputs=NUM_CLASSES)
    return Problem(
        x=x,
        labels=labels,
        x_test=pixels(test),
        labels_test=data.test_labels[:num_test],
        ood=ood,
        kmnist=kmnist,
        rotated=pixels(rotate_images(test[:NUM_ROTATED])),
        shape=data.train.shape[1:],
        gp=replace(gp, prior=prior),
    )


def rotate_images(images) -> np.ndarray:
    """Images rotated counterclockwise by each of ``ANGLES``; empty corners are black."""
    from scipy.ndimage import rotate

    return np.concatenate([rotate(images, angle, axes=(1, 2), reshape=False, order=1) for angle in ANGLES])


def measurement_points(name: str, problem: Problem, num: int, key):
    """The measurement points with the given name, one of ``POINTS``."""
    rows = np.asarray(jax.random.permutation(key, len(problem.x))[:NUM_POOL])
    if name == "train":
        return measurement.subset(problem.x[rows], num)
    if name == "kmnist":
        if not len(problem.kmnist):
            raise ValueError("points='kmnist' needs images of 28 x 28 pixels; choose train or random.")
        return measurement.subset(problem.kmnist, num)
    low, high = problem.x.min(0).min(), problem.x.max(0).max()
    margin = 0.5 * (high - low)
    box = np.full(problem.x.shape[1], low - margin), np.full(problem.x.shape[1], high + margin)
    return measurement.union(measurement.subset(problem.x[rows], num // 2), measurement.uniform(*box, num - num // 2))
