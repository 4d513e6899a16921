"""Image classification: errors, calibration, and uncertainty about images of other kinds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import jax
import numpy as np
import numpyro
import numpyro.distributions as dist

from numpyro_fspace import metrics
from numpyro_fspace._checks import check_positive
from numpyro_fspace.datasets.images import IMAGE_NAMES, image_sources
from numpyro_fspace.experiments import regression, tables
from numpyro_fspace.experiments.catalog import Experiment, Job
from numpyro_fspace.experiments.figures import with_curves
from numpyro_fspace.experiments.function_posterior import convergence
from numpyro_fspace.experiments.image_problems import ANGLES, NUM_CLASSES, OOD_SETS, POINTS, measurement_points, prepare
from numpyro_fspace.experiments.methods import VARIATIONAL, fit
from numpyro_fspace.experiments.networks import DTYPES, NETWORKS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Number of measurement points of a variational method, which needs the Jacobian there (GFSVI's number).
NUM_VARIATIONAL = 10
#: How several chains are run.
CHAIN_METHODS = ("vectorized", "sequential")


@dataclass(frozen=True)
class Config(regression.Config):
    """Settings of a run.

    Attributes:
        network: ``"mlp"`` (hidden ``widths``), ``"cnn"`` (three convolutions of 16, 32 and 64 channels with
            max-pooling between them, and a layer of 128) or ``"resnet18"`` (with group norm instead of batch norm).
        dtype: type in which the network computes, ``"float32"`` or ``"bfloat16"``.
        points: measurement points: ``"train"`` (training images), ``"kmnist"`` (images that are not scored), or
            ``"random"`` (half training images, half uniform pixels on twice the range of the data).
        num_points: number of measurement points of a gradient step.
        num_train, num_test: maximum numbers of training images and of test (and out-of-distribution) images; None
            means all.
        num_gp_points: number of training images on which the kernel is trained.
        chain_method: ``"vectorized"``, or ``"sequential"``, which suits networks that fill a GPU.
        friction: friction of the Hamiltonian samplers, which counters minibatch noise; None means that warm-up chooses
            it.
    """

    QUICK: ClassVar[Mapping[str, object]] = {
        "widths": (20,),
        "num_chains": 1,
        "num_warmup": 20,
        "num_samples": 10,
        "num_steps": 10,
        "num_updates": 50,
        "num_train": 300,
        "num_test": 100,
        "batch_size": 50,
        "num_points": 10,
        "num_gp_points": 50,
        "num_gp_steps": 10,
    }

    activation: str = "relu"
    num_chains: int = 4
    num_warmup: int = 100
    num_samples: int = 100
    num_steps: int | None = 100
    batch_size: int | None = 125
    num_updates: int = 5000
    num_gp_steps: int = 50
    network: str = "mlp"
    dtype: str = "float32"
    points: str = "train"
    num_points: int = 40
    num_train: int | None = None
    num_test: int | None = None
    num_gp_points: int = 200
    chain_method: str = "vectorized"
    friction: float | None = 50.0

    def __post_init__(self):
        super().__post_init__()
        choices = {"network": NETWORKS, "dtype": DTYPES, "points": POINTS, "chain_method": CHAIN_METHODS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown; choose from {', '.join(known)}.")
        if self.friction is not None:
            check_positive(self.friction, "friction")


def run(job: Job[Config]) -> dict:
    """A method on a set of images.

    The functional prior is a GP over the ten logits, trained on the Dirichlet targets of some training images. Scores
    of the test images are ``error`` (in percent), ``lpd`` (mean log probability under the mixture over draws),
    ``gibbs`` (mean over draws of the log probability), ``ece``, ``brier`` and ``entropy``. Scores of
    out-of-distribution images are ``ood_entropy``, their mean entropy; ``ood_auc``, the AUC of the entropy as a
    detector; ``ood_accuracy``, the accuracy of the best single threshold; and ``kmnist_auc``, the AUC for KMNIST.
    ``curves`` are entropy and accuracy against the angle by which test images are rotated.
    """
    config, key = job.config, jax.random.key(job.seed)
    key_points, key_fit = jax.random.split(jax.random.fold_in(key, 1))
    sizes = {name: getattr(config, name) for name in ("num_train", "num_test", "num_gp_points", "num_gp_steps")}
    problem = prepare(job.dataset, job.seed, **sizes)
    num_points = min(config.num_points, NUM_VARIATIONAL) if job.method in VARIATIONAL else config.num_points
    points = measurement_points(config.points, problem, num_points, key_points)
    where = [problem.x_test, *problem.ood.values(), problem.rotated]
    posterior = fit(
        job.method,
        config,
        problem.gp,
        (problem.x, problem.labels),
        np.concatenate(where),
        points=points,
        key=key_fit,
        build=classifier(problem.shape),
        progress=job.progress,
    )
    assert posterior.f is not None, "all methods of this experiment return draws"
    f = posterior.f.reshape(-1, *posterior.f.shape[2:])
    probs, gibbs = _mixture(f, problem.labels_test)
    seen, *rest = np.split(probs, np.cumsum([len(part) for part in where])[:-1])
    *ood_probs, rotated = rest
    entropy = metrics.entropy(seen)
    ood, *kmnist = map(metrics.entropy, ood_probs)
    rotated = rotated.reshape(len(ANGLES), -1, NUM_CLASSES)
    true = problem.labels_test[: rotated.shape[1]]
    return {
        "lpd": -metrics.nll(seen, problem.labels_test),
        "gibbs": gibbs,
        "error": 100.0 * (1.0 - metrics.accuracy(seen, problem.labels_test)),
        "ece": metrics.ece(seen, problem.labels_test),
        "brier": metrics.brier(seen, problem.labels_test),
        "entropy": float(entropy.mean()),
        "ood_entropy": float(ood.mean()),
        "ood_auc": metrics.ood_auc(entropy, ood),
        "ood_accuracy": metrics.ood_accuracy(entropy, ood),
        "kmnist_auc": metrics.ood_auc(entropy, kmnist[0]) if kmnist else None,
        "num_train": len(problem.x),
        **posterior.cost,
        **convergence(posterior, slice(min(100, len(seen)))),
        **posterior.reported,
        "curves": {
            "angle": np.array(ANGLES, float),
            "entropy": metrics.entropy(rotated).mean(-1),
            "accuracy": (rotated.argmax(-1) == true).mean(-1),
        },
    }


def classifier(shape):
    """The argument ``build`` of ``methods.fit``, for classifiers of images of this shape."""

    def build(config: Config, gp, points, *, functional: bool):
        network = NETWORKS[config.network](shape, NUM_CLASSES, config)
        function = regression.random_functions(config, network, gp.prior, points, functional=functional)

        def model(x, y=None):
            f = function(x.shape[-1])
            with numpyro.plate("data", x.shape[0], subsample_size=config.batch_size):
                xb = numpyro.subsample(x, event_dim=1)
                yb = None if y is None else numpyro.subsample(y, event_dim=0)
                numpyro.sample("y", dist.Categorical(logits=f(xb)), obs=yb)

        return model

    return build


def _mixture(f, labels):
    """Mean probabilities [N, K] over draws [S, N, K] of logits, and the mean log probability over draws.

    The labels are those of the first inputs.
    """
    probs, gibbs = np.zeros(f.shape[1:]), 0.0
    for logits in f:
        log_probs = np.asarray(jax.nn.log_softmax(logits, -1))
        probs += np.exp(log_probs) / len(f)
        gibbs += float(log_probs[np.arange(len(labels)), labels].mean()) / len(f)
    return probs / probs.sum(-1, keepdims=True), gibbs


def picture(records: Sequence[Mapping]) -> Figure:
    """Entropy and accuracy against the angle of rotation: a row for each data set, a line for each method.

    Raises:
        ValueError: no record has curves.
    """
    import matplotlib.pyplot as plt

    records = with_curves(records)
    groups: dict[tuple, list] = {}
    for line, label in zip(records, tables.labels(records), strict=True):
        groups.setdefault((line["dataset"], label), []).append(line["curves"])
    datasets, labels = (list(dict.fromkeys(parts)) for parts in zip(*groups, strict=True))
    size = (8.4, 2.6 * len(datasets) + 0.6)
    figure, axes = plt.subplots(len(datasets), 2, figsize=size, squeeze=False, sharex=True, layout="constrained")
    for (dataset, label), curves in groups.items():
        for ax, name in zip(axes[datasets.index(dataset)], ("entropy", "accuracy"), strict=True):
            values = np.mean([curve[name] for curve in curves], 0)
            ax.plot(curves[0]["angle"], values, color=f"C{labels.index(label)}", label=tables.readable(label))
            ax.set(title=f"{dataset}: {name}", xticks=range(0, 181, 45), xlim=(0, 180))
    for entropy, accuracy in axes:
        entropy.set_ylim(bottom=0.0)
        accuracy.set_ylim(0.0, 1.0)
    for ax in axes[-1]:
        ax.set_xlabel("rotation (degrees)")
    lines = {line.get_label(): line for ax in axes[:, 0] for line in ax.lines}
    figure.legend(lines.values(), lines.keys(), loc="outside lower center", ncols=4, frameon=False)
    return figure


#: Wu, Xuan and Lu, table 4: error in percent, AUC.
_SAMPLERS = {
    "sgld": ((2.73, 0.859), (13.92, 0.633), (49.56, 0.669)),
    "fsgld": ((1.89, 0.960), (11.66, 0.849), (33.57, 0.672)),
    "sghmc": ((2.97, 0.853), (13.72, 0.589), (48.13, 0.639)),
    "fsghmc": ((1.64, 0.931), (11.91, 0.880), (31.99, 0.717)),
}
#: Cinquin and Bamler, table 2, points "random": mean over draws of the log probability, accuracy, ECE, OOD accuracy.
_OPTIMIZED = {
    "gfsvi": ((-0.033, 0.992, 0.002, 0.921), (-0.260, 0.910, 0.020, 0.853)),
    "bbb": ((-0.078, 0.990, 0.021, 0.928), (-0.290, 0.913, 0.010, 0.805)),
}

EXPERIMENT = Experiment(
    summary="Image classification: errors, calibration, and the entropy for images of other kinds.",
    run=run,
    config=Config(),
    methods=("sgld", "sghmc", "fsgld", "fsghmc", "gfsvi", "bbb", "ensemble"),
    defaults=("fsghmc", "sghmc", "ensemble"),
    datasets=tuple(OOD_SETS),
    files=tuple(dict.fromkeys(source.path for name in IMAGE_NAMES for source in image_sources(name).values())),
    minutes=6,
    columns={
        "error": "error, %",
        "lpd": "log probability",
        "gibbs": "mean over draws",
        "ece": "ECE",
        "brier": "Brier",
        "ood_auc": "OOD AUC",
        "ood_accuracy": "OOD accuracy",
        "kmnist_auc": "AUC, KMNIST",
        "temperature": "temperature",
        "seconds": "seconds",
    },
    published={
        **{
            (dataset, method): {"error": error, "ood_auc": auc}
            for method, rows in _SAMPLERS.items()
            for dataset, (error, auc) in zip(("mnist", "fashion_mnist", "cifar10"), rows, strict=True)
        },
        **{
            (dataset, method): {"gibbs": g, "error": round(100 * (1 - a), 2), "ece": e, "ood_accuracy": o}
            for method, rows in _OPTIMIZED.items()
            for dataset, (g, a, e, o) in zip(("mnist", "fashion_mnist"), rows, strict=True)
        },
    },
    source="Wu, Xuan and Lu, table 4 (ResNet-18); Cinquin and Bamler, table 2 (a small convolutional network)",
    picture=picture,
    unused=("noise_sd", "noise_factor", "max_lengthscale"),
)
