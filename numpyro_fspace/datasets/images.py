"""Image classification, and out-of-distribution images for it."""

from __future__ import annotations

import functools
import gzip
import io
import math
import tarfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from numpyro_fspace.datasets.files import Source, load
from numpyro_fspace.datasets.split import npz, read_npz

if TYPE_CHECKING:
    import os
    from pathlib import Path

    from jaxtyping import Int, UInt8

MNIST_URL = "https://ossci-datasets.s3.amazonaws.com/mnist"
FASHION_URL = (
    "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/"
    "b2617bb6d3ffa2e429640350f613e3291e10b141/data/fashion"
)
KMNIST_URL = "http://codh.rois.ac.jp/kmnist/dataset/kmnist"
CIFAR10_URL = "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz"
SVHN_URL = "http://ufldl.stanford.edu/housenumbers/train_32x32.mat"

#: SHA-256 of the idx files, by data set, part ("train" or "t10k") and kind.
_IDX = {
    "mnist": (
        MNIST_URL,
        {
            ("train", "images"): "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609",
            ("train", "labels"): "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c",
            ("t10k", "images"): "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6",
            ("t10k", "labels"): "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6",
        },
    ),
    "fashion_mnist": (
        FASHION_URL,
        {
            ("train", "images"): "3aede38d61863908ad78613f6a32ed271626dd12800ba2636569512369268a84",
            ("train", "labels"): "a04f17134ac03560a47e3764e11b92fc97de4d1bfaf8ba1a3aa29af54cc90845",
            ("t10k", "images"): "346e55b948d973a97e58d2351dde16a484bd415d4595297633bb08f03db6a073",
            ("t10k", "labels"): "67da17c76eaffca5446c3361aaab5c3cd6d1c2608764d35dfb1850b086bf8dd5",
        },
    ),
    "kmnist": (
        KMNIST_URL,
        {
            ("t10k", "images"): "edd7a857845ad6bb1d0ba43fe7e794d164fe2dce499a1694695a792adfac43c5",
            ("t10k", "labels"): "20bb9a0ef54c7db3efc55a92eef5582c109615df22683c380526788f98e42a1c",
        },
    ),
}

#: The names that ``load_images`` takes.
IMAGE_NAMES = (*_IDX, "cifar10", "cifar10_subset", "svhn")

#: Images of SVHN's training part that are kept.
NUM_SVHN = 800
#: Classes of every set with labels.
NUM_CLASSES = 10
#: Bytes of a record of CIFAR-10: the label, and 32 × 32 pixels, color by color.
CIFAR10_RECORD = 1 + 3 * 32 * 32


@dataclass(frozen=True, eq=False, repr=False)
class Images:
    """Images and their classes, as published: integers from 0 to 255 (uint8), the top row first, colors last.

    Args:
        name: name of the data set.
        train: training images ``[N, H, W, C]``; N is 0 if there are none.
        train_labels: their classes ``[N]``, from 0; None if there are no labels.
        test: test images ``[T, H, W, C]``; T is 0 if there are none.
        test_labels: their classes ``[T]``, from 0; None if there are no labels.
    """

    name: str
    train: UInt8[np.ndarray, "N H W C"]
    train_labels: Int[np.ndarray, " N"] | None
    test: UInt8[np.ndarray, "T H W C"]
    test_labels: Int[np.ndarray, " T"] | None

    def __repr__(self) -> str:
        size = "x".join(map(str, self.train.shape[1:]))
        return f"Images({self.name!r}, {len(self.train)} training and {len(self.test)} test images of {size})"


def load_images(name: str, *, data_dir: str | os.PathLike[str] | None = None) -> Images:
    """A set of images, unscaled.

    =================== ============ ======= ========= ===============================================================
    name                training     test    size      what
    =================== ============ ======= ========= ===============================================================
    ``mnist``           60 000       10 000  28×28×1   digits
    ``fashion_mnist``   60 000       10 000  28×28×1   clothes
    ``kmnist``          0            10 000  28×28×1   cursive Japanese characters; the test part alone
    ``cifar10``         50 000       10 000  32×32×3   things and animals
    ``cifar10_subset``  12 000       5 000   32×32×3   a **subset** of ``cifar10``: 1200 and 500 of each class
    ``svhn``            800          0       32×32×3   the **first 800** training images of house numbers, unlabeled
    =================== ============ ======= ========= ===============================================================

    Downloaded files come under the terms of their sources: Fashion-MNIST MIT, KMNIST CC BY-SA 4.0, SVHN
    non-commercial use. ``cifar10_subset`` cannot be downloaded.

    Args:
        name: one of the above.
        data_dir: directory that holds ``image/<name>/...``; None looks in ``NUMPYRO_FSPACE_DATA`` and the user's
            cache, and downloads the public files otherwise.

    Returns:
        The :class:`Images`.

    Raises:
        ValueError: if the name is unknown, or a file is damaged.
        DataNotFoundError: if a file is not on disk and could not be downloaded.
        ChecksumError: if the downloaded data are not the expected ones.

    Example:
        >>> from numpyro_fspace.datasets import load_images
        >>> load_images("mnist")  # doctest: +SKIP
        Images('mnist', 60000 training and 10000 test images of 28x28x1)

    References: Y. LeCun, C. Cortes, C. Burges, *MNIST*; H. Xiao, K. Rasul, R. Vollgraf (2017), *Fashion-MNIST*;
    T. Clanuwat et al. (2018), *KMNIST*; A. Krizhevsky (2009), *CIFAR-10*; Y. Netzer et al. (2011), *SVHN*.
    """
    if name not in IMAGE_NAMES:
        raise ValueError(f"name={name!r} is not a known set of images; known are {', '.join(IMAGE_NAMES)}.")
    parts: dict = {}
    for place, source in image_sources(name).items():
        parts |= load(source, data_dir, functools.partial(_read, name, place, parts))
    test = "t10k" if ("t10k", "images") in parts else "test"
    some = next(parts[key] for key in parts if key[1] == "images")

    def part(which):
        """Its images, with an axis of colors, and their classes; no images where there are none."""
        images, labels = parts.get((which, "images"), some[:0]), parts.get((which, "labels"))
        images = images[..., None] if images.ndim == 3 else images
        return images, None if labels is None else labels.astype(int)

    return Images(name, *part("train"), *part(test))


def _read(name: str, place, others: dict, path: Path) -> dict:
    """The arrays in a file of a set, by part and kind; ``others`` are those of its other files."""
    if name in _IDX:
        kind = place[1]
        array = read_idx(path.read_bytes())
        size = (28, 28) if kind == "images" else ()
        if array.shape[1:] != size or not len(array):
            raise ValueError(f"its {kind} have the shape {list(array.shape)}, not {['N', *size]}")
        found = {place: array}
    else:
        prefixes = ("train_", "test_") if name == "cifar10" else ("",)
        kinds = {"images": (32, 32, 3)} if name == "svhn" else {"images": (32, 32, 3), "labels": ()}
        shapes = {
            prefix + kind: ("uint8", (f"{prefix}N", *size)) for prefix in prefixes for kind, size in kinds.items()
        }
        arrays = zip(shapes, read_npz(path, **shapes), strict=True)
        found = {(place, key) if place else tuple(key.split("_")): array for key, array in arrays}
    for (part, kind), array in found.items():
        num = len((others | found)[part, "images"])
        if len(array) != num:
            raise ValueError(f"the {num} images of part {part!r} have {len(array)} labels")
        if kind == "labels" and array.max() >= NUM_CLASSES:
            raise ValueError(f"it has the label {array.max()}, and there are {NUM_CLASSES} classes")
    return found


def image_sources(name: str) -> dict:
    """The files of a set, by what they hold: (part, kind) of an idx file, the part of an npz file, "" if it has all."""
    if name in _IDX:
        url, digests = _IDX[name]
        files = {key: f"{key[0]}-{key[1]}-idx{3 if key[1] == 'images' else 1}-ubyte.gz" for key in digests}
        return {key: Source(f"image/{name}/{file}", (f"{url}/{file}",), digests[key]) for key, file in files.items()}
    if name == "cifar10":
        digest = "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd"
        return {"": Source("image/cifar10/cifar10.npz", (CIFAR10_URL,), digest, build_cifar10)}
    if name == "cifar10_subset":
        parts = {"train": "cifar10_train12k", "test": "cifar10_test5k"}
        return {part: Source(f"image/cifar10/{file}.npz", (), "") for part, file in parts.items()}
    digest = "435e94d69a87fde4fd4d7f3dd208dfc32cb6ae8af2240d066de1df7508d083b8"
    return {"train": Source(f"image/svhn/svhn_train_first{NUM_SVHN}.npz", (SVHN_URL,), digest, build_svhn)}


def read_idx(content: bytes) -> UInt8[np.ndarray, ...]:
    """The array of a gzipped idx file of bytes.

    Raises:
        ValueError: if the content is something else.
    """
    try:
        raw = gzip.decompress(content)
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"this is no gzipped idx file ({error})") from None
    rank = raw[3] if raw[:3] == b"\x00\x00\x08" else 0
    shape = tuple(np.frombuffer(raw, ">u4", rank, 4)) if len(raw) >= 4 + 4 * rank else ()
    if not rank or len(raw) != 4 + 4 * rank + math.prod(map(int, shape)):
        raise ValueError("this is no idx file of bytes")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * rank).reshape(shape)


def build_cifar10(parts: Sequence[bytes]) -> bytes:
    """Content of an npz file with ``train_images``, ``train_labels``, ``test_images``, ``test_labels``.

    Args:
        parts: the archive of the binary version.
    """
    records: dict[str, list] = {"train": [], "test": []}
    with tarfile.open(fileobj=io.BytesIO(parts[0])) as archive:
        members = sorted((member for member in archive if member.name.endswith("_batch.bin")), key=lambda m: m.name)
        batches = sorted((member for member in archive if "data_batch_" in member.name), key=lambda m: m.name)
        for part, chosen in (("train", batches), ("test", members)):
            for member in chosen:
                stream = archive.extractfile(member)
                assert stream is not None, "a file of the archive"
                records[part].append(np.frombuffer(stream.read(), np.uint8).reshape(-1, CIFAR10_RECORD))
    arrays = {}
    for part, found in records.items():
        rows = np.concatenate(found)
        arrays[f"{part}_images"] = rows[:, 1:].reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1)
        arrays[f"{part}_labels"] = rows[:, 0]
    return npz(**arrays)


def build_svhn(parts: Sequence[bytes]) -> bytes:
    """Content of an npz file with the first images of SVHN's Matlab file, ``images``."""
    from scipy.io import loadmat

    pixels = loadmat(io.BytesIO(parts[0]), variable_names=["X"])["X"]
    return npz(images=pixels[..., :NUM_SVHN].transpose(3, 0, 1, 2))
