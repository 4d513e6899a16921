"""Images: files read and built as published, and an experiment whose answer is known."""

import gzip
import hashlib
import io
import json
import os
import tarfile

import jax
import numpy as np
import pytest

from numpyro_fspace import datasets, metrics
from numpyro_fspace.__main__ import main
from numpyro_fspace.datasets import files, images
from numpyro_fspace.datasets.files import DataNotFoundError, Source
from numpyro_fspace.experiments import image_problems as problems
from numpyro_fspace.experiments import images as experiment
from numpyro_fspace.experiments.catalog import find
from numpyro_fspace.experiments.methods import sampler
from numpyro_fspace.experiments.networks import NETWORKS

NUM_CLASSES = 10


def idx(array: np.ndarray) -> bytes:
    """A gzipped idx file of bytes."""
    header = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return gzip.compress(header + array.astype(np.uint8).tobytes(), 1)


def blocks(labels, random) -> np.ndarray:
    """Noisy images [N, 28, 28] with a bright block whose place tells the class."""
    pixels = random.integers(0, 60, (len(labels), 28, 28))
    for image, label in zip(pixels, labels, strict=True):
        row, column = divmod(int(label), 4)
        image[8 * row + 1 : 8 * row + 8, 7 * column : 7 * column + 7] += 190
    return pixels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A data directory with small sets under the names of the real ones."""
    random = np.random.default_rng(0)
    for name, sizes in (("mnist", (300, 100)), ("fashion_mnist", (20, 100)), ("kmnist", (0, 200))):
        place = tmp_path / "image" / name
        place.mkdir(parents=True)
        for part, size in zip(("train", "t10k"), sizes, strict=True):
            if not size:
                continue
            labels = np.arange(size) % NUM_CLASSES
            pixels = blocks(labels, random) if name == "mnist" else random.integers(0, 256, (size, 28, 28))
            (place / f"{part}-images-idx3-ubyte.gz").write_bytes(idx(pixels))
            (place / f"{part}-labels-idx1-ubyte.gz").write_bytes(idx(labels))
    monkeypatch.setenv(files.DATA_ENV, str(tmp_path))
    return tmp_path


# Files


def test_idx_images_and_labels(folder):
    data = datasets.load_images("mnist")
    assert repr(data) == "Images('mnist', 300 training and 100 test images of 28x28x1)"
    np.testing.assert_array_equal(data.train, datasets.load_images("mnist", data_dir=folder).train)
    assert data.train.dtype == np.uint8
    np.testing.assert_array_equal(data.test_labels, np.arange(100) % NUM_CLASSES)
    places = data.train[:, [1, 1, 9], [0, 7, 0], 0].argmax(1)  # corners of the blocks of classes 0, 1 and 4
    np.testing.assert_array_equal(places[data.train_labels == 1], 1)
    np.testing.assert_array_equal(places[data.train_labels == 4], 2)


def test_parts_that_are_not_published(folder):
    data = datasets.load_images("kmnist")
    assert data.train.shape == (0, 28, 28, 1)
    assert data.train_labels is None
    assert len(data.test) == len(data.test_labels) == 200


@pytest.mark.parametrize(
    "content",
    [
        b"no gzip",
        gzip.compress(b""),
        gzip.compress(b"\0\0\x08\x01\0\0\0\x05abc"),
        idx(np.zeros(3))[:-9],
        idx(np.zeros(3))[:10] + b"\xff" + idx(np.zeros(3))[11:],  # a block of a type that there is not
    ],
    ids=["no gzip", "empty", "too short", "cut off", "damaged"],  # of their own: gzip writes the time into its header
)
def test_broken_idx_files_are_refused(content):
    with pytest.raises(ValueError, match=r"this is no .*idx file"):
        images.read_idx(content)


def test_labels_of_another_number_are_refused(folder):
    (folder / "image/mnist/train-labels-idx1-ubyte.gz").write_bytes(idx(np.zeros(299)))
    with pytest.raises(ValueError, match=r"train-labels.* is damaged .*300 images of part 'train' have 299 labels"):
        datasets.load_images("mnist")


@pytest.mark.parametrize(
    ("file", "array", "text"),
    [
        ("t10k-labels-idx1-ubyte.gz", np.full(100, 10), "label 10, and there are 10 classes"),
        ("t10k-labels-idx1-ubyte.gz", np.zeros((100, 28, 28)), r"labels have the shape \[100, 28, 28\]"),
        ("t10k-images-idx3-ubyte.gz", np.zeros((100, 28, 27)), r"images have the shape \[100, 28, 27\]"),
        ("train-images-idx3-ubyte.gz", np.zeros((0, 28, 28)), r"images have the shape \[0, 28, 28\]"),
        ("train-images-idx3-ubyte.gz", np.zeros(300), r"images have the shape \[300\]"),
    ],
)
def test_images_and_labels_that_cannot_be(folder, file, array, text):
    (folder / "image/mnist" / file).write_bytes(idx(array))
    with pytest.raises(ValueError, match=rf"{file} is damaged \(.*{text}.*\); remove it"):
        datasets.load_images("mnist")


@pytest.mark.parametrize(
    ("images", "labels", "text"),
    [
        (np.zeros((5, 32, 32, 3), np.uint8), np.zeros(4, np.uint8), "labels has shape"),
        (np.zeros((5, 32, 32, 3), np.float32), np.zeros(5, np.uint8), "images has dtype float32, not uint8"),
        (np.zeros((5, 3, 32, 32), np.uint8), np.zeros(5, np.uint8), "images has shape"),
        (np.zeros((5, 32, 32, 3), np.uint8), np.full(5, 77, np.uint8), "label 77"),
        (np.zeros((5, 32, 32, 3), np.uint8), None, "holds no labels"),
    ],
)
def test_a_subset_that_cannot_be(folder, images, labels, text):
    (folder / "image" / "cifar10").mkdir()
    arrays = {"images": images} | ({} if labels is None else {"labels": labels})
    for name in ("cifar10_train12k", "cifar10_test5k"):
        np.savez(folder / "image" / "cifar10" / f"{name}.npz", **arrays)
    with pytest.raises(ValueError, match=rf"train12k\.npz is damaged \(.*{text}.*\); remove it and save another copy"):
        datasets.load_images("cifar10_subset")


@pytest.mark.parametrize("name", ["cifar", "", None])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match="known are mnist, fashion_mnist, kmnist, cifar10, cifar10_subset, svhn"):
        datasets.load_images(name)


def test_the_subset_is_no_download(folder, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with pytest.raises(DataNotFoundError, match=r"cifar10_train12k\.npz was not found .* it cannot be downloaded"):
        datasets.load_images("cifar10_subset")


def test_cifar10_is_built_from_its_archive(monkeypatch, tmp_path):
    """Records hold the label and then red, green and blue; batches come in order."""
    random = np.random.default_rng(1)
    pixels, labels = random.integers(0, 256, (6, 32, 32, 3), np.uint8), np.array([3, 1, 4, 1, 5, 9], np.uint8)
    records = np.concatenate([labels[:, None], pixels.transpose(0, 3, 1, 2).reshape(6, -1)], 1)
    names = ["data_batch_2.bin", "test_batch.bin", "data_batch_1.bin"]
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        for i, name in enumerate(names):
            content = records[2 * i : 2 * i + 2].tobytes()
            member = tarfile.TarInfo(f"cifar-10-batches-bin/{name}")
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    web = tmp_path / "archive"
    web.write_bytes(stream.getvalue())
    source = Source("image/cifar10/cifar10.npz", (web.as_uri(),), hashlib.sha256(web.read_bytes()).hexdigest())
    source = Source(source.path, source.urls, source.sha256, images.build_cifar10)
    monkeypatch.delenv(files.DATA_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(images, "image_sources", lambda name: {"": source})
    data = datasets.load_images("cifar10")
    np.testing.assert_array_equal(data.train, pixels[[4, 5, 0, 1]])
    np.testing.assert_array_equal(data.train_labels, labels[[4, 5, 0, 1]])
    np.testing.assert_array_equal(data.test, pixels[[2, 3]])
    np.testing.assert_array_equal(data.test_labels, labels[[2, 3]])


def test_svhn_is_built_from_its_matlab_file():
    from scipy.io import savemat

    pixels = np.random.default_rng(2).integers(0, 256, (32, 32, 3, 810), np.uint8)
    stream = io.BytesIO()
    savemat(stream, {"X": pixels, "y": np.zeros((810, 1))})
    with np.load(io.BytesIO(images.build_svhn([stream.getvalue()]))) as file:
        assert file["images"].shape == (800, 32, 32, 3)
        np.testing.assert_array_equal(file["images"][799], pixels[..., 799])


@pytest.mark.parametrize("name", images.IMAGE_NAMES)
def test_sources_have_checksums(name):
    for source in images.image_sources(name).values():
        assert source.path.startswith("image/")
        if name == "cifar10_subset":
            assert not source.urls
        else:
            (url,) = source.urls
            assert url.startswith("http") and len(source.sha256) == 64


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist", "kmnist", "cifar10_subset", "svhn"])
def test_real_images(name):
    if not os.environ.get(files.DATA_ENV):
        pytest.skip(f"{files.DATA_ENV} is not set")
    for source in images.image_sources(name).values():
        path = files.find(source)
        if source.build is Source.build and source.sha256:
            assert hashlib.sha256(path.read_bytes()).hexdigest() == source.sha256
    data = datasets.load_images(name)
    sizes = {"kmnist": (0, 10_000), "cifar10_subset": (12_000, 5_000), "svhn": (800, 0)}
    assert (len(data.train), len(data.test)) == sizes.get(name, (60_000, 10_000))
    some = data.train if len(data.train) else data.test
    assert some.min() == 0 and some.max() == 255
    if name != "svhn":
        np.testing.assert_array_equal(np.unique(data.test_labels), np.arange(NUM_CLASSES))


# Parts of the experiment


def test_ood_accuracy_by_hand():
    assert metrics.ood_accuracy([0.0, 1.0, 2.0, 3.0], [2.5, 4.0, 5.0, 6.0]) == 7 / 8
    assert metrics.ood_accuracy([5.0, 6.0], [1.0, 2.0]) == 1.0  # either side may be out of distribution
    assert metrics.ood_accuracy([1.0, 1.0], [1.0, 1.0]) == 0.5  # equal scores stay together


def test_ood_accuracy_is_the_best_of_all():
    random = np.random.default_rng(3)
    inside, outside = random.integers(0, 9, 40), random.integers(3, 12, 50)
    cuts = np.arange(-1, 13) + 0.5
    right = [np.mean([*(inside < cut), *(outside[:40] > cut)]) for cut in cuts]
    best = max(max(right), 1.0 - min(right))
    assert metrics.ood_accuracy(inside, outside) == pytest.approx(best)


def test_turned_images():
    random = np.random.default_rng(4)
    pixels = random.integers(0, 256, (2, 28, 28, 1), np.uint8)
    rotated = problems.rotate_images(pixels).reshape(len(problems.ANGLES), 2, 28, 28, 1)
    np.testing.assert_array_equal(rotated[problems.ANGLES.index(0)], pixels)
    np.testing.assert_array_equal(rotated[problems.ANGLES.index(180)], pixels[:, ::-1, ::-1])
    np.testing.assert_array_equal(rotated[problems.ANGLES.index(90)], np.rot90(pixels, axes=(1, 2)))


def test_mixture_averages_probabilities():
    f = np.log(np.array([[[0.9, 0.1], [0.5, 0.5]], [[0.1, 0.9], [0.5, 0.5]]], np.float32))
    probs, gibbs = experiment._mixture(f, np.array([0]))
    np.testing.assert_allclose(probs, 0.5, rtol=1e-6)
    np.testing.assert_allclose(gibbs, 0.5 * np.log(0.9 * 0.1), rtol=1e-6)


@pytest.mark.parametrize(
    ("network", "shape", "num_weights"),
    [("mlp", (28, 28, 1), 42_310), ("cnn", (28, 28, 1), 426_122), ("resnet18", (32, 32, 3), 11_173_962)],
)
def test_networks(network, shape, num_weights):
    """Counts of weights, by hand; that of ResNet-18 is the usual one for 32×32 images."""
    net = NETWORKS[network](shape, NUM_CLASSES, experiment.Config(network=network))
    x = jax.ShapeDtypeStruct((2, int(np.prod(shape))), np.float32)
    variables = jax.eval_shape(net.init, jax.random.key(0), x)
    assert set(variables) == {"params"}
    assert sum(np.prod(leaf.shape) for leaf in jax.tree.leaves(variables)) == num_weights
    assert jax.eval_shape(net.apply, variables, x).shape == (2, NUM_CLASSES)


@pytest.mark.parametrize("settings", [{"network": "vgg"}, {"points": "noise"}, {"chain_method": "parallel"}])
def test_unknown_settings(settings):
    with pytest.raises(ValueError, match="is unknown; choose from"):
        experiment.Config(**settings)


@pytest.mark.parametrize(("method", "expected"), [("fsghmc", 7.0), ("sghmc", 7.0), ("sgld", 0.0)])
def test_friction_is_that_of_the_hamiltonian_samplers(method, expected):
    kernel = sampler(method, lambda: None, experiment.Config(friction=7.0))
    assert kernel.friction == expected


@pytest.mark.parametrize("config", [experiment.Config, type(find("bandit").config)])
def test_friction_is_positive(config):
    with pytest.raises(ValueError, match=r"friction=-1.0 must be positive"):
        config(friction=-1.0)


def test_kmnist_points_need_images_of_its_size():
    problem = problems.Problem(*[np.zeros((1, 3))] * 4, {"svhn": np.zeros((1, 3))}, np.zeros((0, 0)), *[None] * 3)
    with pytest.raises(ValueError, match="choose train or random"):
        problems.measurement_points("kmnist", problem, 5, jax.random.key(0))


def test_kmnist_points_are_not_the_images_that_are_scored(folder):
    problem = problems.prepare("mnist", 0, num_train=50, num_test=60, num_gp_points=50, num_gp_steps=1)
    points = problems.measurement_points("kmnist", problem, 40, jax.random.key(0))(jax.random.key(1))
    assert len(problem.ood["kmnist"]) == 60 and len(problem.kmnist) == 140
    distances = np.abs(points[:, None] - problem.ood["kmnist"]).max(-1)
    assert points.shape == (40, 784) and distances.min() > 0.0


# Runs


def quick(capsys, method, *argv):
    assert main(["run", "images", "--quick", "--method", method, *argv]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning", "ignore::UserWarning")  # 20 draws of warm-up are few
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("fsghmc", "points=kmnist"),
        ("fsghmc", "exact=True points=kmnist chain_method=sequential num_chains=2"),
        ("gfsvi", "points=random"),
        ("ensemble", ""),
    ],
)
def test_blocks_are_told_apart(folder, capsys, method, settings):
    """Linearly separable classes are learned (chance is 90 % of errors), noise is out of distribution."""
    line = quick(capsys, method, *(["--set", *settings.split()] if settings else []))
    assert line["error"] <= 5.0
    assert line["gibbs"] <= line["lpd"] < 0.0
    assert line["num_train"] == 300
    assert line["num_diverging"] == 0
    curves = line["curves"]
    assert len(curves["angle"]) == len(curves["entropy"]) == len(curves["accuracy"]) == 13
    assert curves["accuracy"][0] >= 0.95
    assert curves["accuracy"][6] < 0.5  # rotated by 90 degrees, most blocks lie where another class has its own
    assert (line.get("temperature") is not None) == (method == "fsghmc")


def test_picture_has_a_line_for_each_method_and_a_row_for_each_set():
    import matplotlib

    matplotlib.use("agg")
    curves = {"angle": [0, 180], "entropy": [0.1, 1.0], "accuracy": [1.0, 0.5]}
    records = [
        {"experiment": "images", "dataset": dataset, "method": method, "curves": curves}
        for dataset in ("mnist", "fashion_mnist")
        for method in ("fsghmc", "sghmc", "ensemble")
    ]
    figure = find("images").picture(records)
    assert [len(ax.lines) for ax in figure.axes] == [3] * 4
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["fSGHMC", "SGHMC", "ensemble"]
    matplotlib.pyplot.close(figure)
    with pytest.raises(ValueError, match="no record holds curves"):
        find("images").picture([{"method": "gp"}])
