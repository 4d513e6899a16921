"""Finding data files: a data directory, the user's cache, or a checked download into that cache."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import logging
import os
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

DATA_ENV = "NUMPYRO_FSPACE_DATA"
TIMEOUT = 30.0
#: Limit of the time of a download, as a multiple of the timeout for a silent server.
PATIENCE = 20
#: Limit of the total size in bytes of the public files of a data file; the largest have 182 million.
MAX_BYTES = 2**28
#: Bytes that are read at a time.
BLOCK = 2**16

T = TypeVar("T")

logger = logging.getLogger(__name__)


class DataNotFoundError(FileNotFoundError):
    """A data file is not on disk and could not be downloaded; the message says what to do."""


class ChecksumError(OSError):
    """Downloaded bytes are not the expected ones; nothing was kept."""


@dataclass(frozen=True)
class Source:
    """A data file and the public files it is made from.

    Args:
        path: place of the file in a data directory, such as ``"uci/yacht.npz"``.
        urls: the public files, downloaded in this order; none where there is no public copy.
        sha256: SHA-256 (hexadecimal) of the public files' bytes, joined in this order.
        build: makes the content of the file from that of the public files; joins them by default.
        package: an installed package that ships the public file, and the file's path in it, which saves the download.
    """

    path: str
    urls: tuple[str, ...]
    sha256: str
    build: Callable[[Sequence[bytes]], bytes] = b"".join
    package: tuple[str, str] | None = None


def cache_dir() -> Path:
    """Directory of downloaded files: ``numpyro_fspace`` in the user's cache.

    That is ``$XDG_CACHE_HOME`` where set, else ``%LOCALAPPDATA%`` on Windows and ``~/.cache`` elsewhere.
    """
    local = os.environ.get("LOCALAPPDATA") if os.name == "nt" else None
    return Path(os.environ.get("XDG_CACHE_HOME") or local or "~/.cache").expanduser() / "numpyro_fspace"


def find(source: Source, data_dir: str | os.PathLike[str] | None = None, *, timeout: float = TIMEOUT) -> Path:
    """Path of a data file, downloaded into the user's cache when it is nowhere on disk.

    Args:
        source: the wanted file.
        data_dir: the only directory to look in, without any download. With None: the directory that the
            environment variable ``NUMPYRO_FSPACE_DATA`` names, then the user's cache, then an installed package that
            ships the file, then the download.
        timeout: seconds that the download waits for a silent server; it may take 20 times as many altogether.

    Returns:
        The path of an existing file.

    Raises:
        DataNotFoundError: if the file is not there and could not be downloaded, or ``data_dir`` or
            ``NUMPYRO_FSPACE_DATA`` is not a directory.
        ChecksumError: if the downloaded files are not the expected ones.
    """
    places = _places(data_dir)
    for place in places:
        path = place / source.path
        if path.is_file():
            return path
    if data_dir is not None:
        raise DataNotFoundError(_not_found(source, places, "nothing is downloaded when data_dir is given"))
    shipped = _shipped(source)
    if shipped is not None:
        return shipped
    if not source.urls:
        raise DataNotFoundError(_not_found(source, places, "it cannot be downloaded"))
    try:
        parts = _downloaded(source.urls, timeout)
    except (OSError, http.client.HTTPException) as error:
        reason = f"the download of {source.urls[0]} failed ({type(error).__name__}: {error})"
        raise DataNotFoundError(_not_found(source, places, reason)) from error
    _verify(source, parts)
    path = cache_dir() / source.path
    try:
        _write(path, source.build(parts))
    except OSError as error:
        reason = f"what was downloaded could not be saved ({type(error).__name__}: {error})"
        raise DataNotFoundError(_not_found(source, places, reason)) from error
    logger.info("downloaded %s", path)
    return path


def _shipped(source: Source) -> Path | None:
    """The public file in an installed package, which is not imported; None without it, or if it has other content."""
    if source.package is None:
        return None
    name, inside = source.package
    spec = importlib.util.find_spec(name)
    for folder in (spec and spec.submodule_search_locations) or ():
        path = Path(folder) / inside
        if path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == source.sha256:
            return path
    return None


def _places(data_dir: str | os.PathLike[str] | None) -> list[Path]:
    """Directories to look in; one that was named must exist."""
    if data_dir is not None:
        return [_directory("data_dir", data_dir)]
    named = os.environ.get(DATA_ENV)
    return [_directory(DATA_ENV, named), cache_dir()] if named else [cache_dir()]


def _directory(name: str, value: str | os.PathLike[str]) -> Path:
    path = Path(value).expanduser()
    if not os.fspath(value) or not path.is_dir():
        raise DataNotFoundError(f"{name} is {str(value)!r}, which is not a directory; correct or unset it.")
    return path


def load(
    source: Source, data_dir: str | os.PathLike[str] | None, read: Callable[[Path], T], *, is_published: bool = False
) -> T:
    """The result of ``read(path)`` for a data file that ``find`` locates.

    Args:
        source: the wanted file.
        data_dir: the only directory to search, if given.
        read: raises any error if the file is not as expected.
        is_published: whether the file must have the published bytes. A text file has no checksum of its own, and a
            truncated table is still a table.

    Raises:
        ValueError: for a damaged file; names it, what is wrong and the cure.
        DataNotFoundError, ChecksumError: as ``find``.
    """
    path = find(source, data_dir)
    try:
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if is_published else source.sha256
        if digest != source.sha256:
            raise ValueError(f"it has SHA-256 {digest}, the published one has {source.sha256}")
        return read(path)
    except (PermissionError, FileNotFoundError):
        raise
    except Exception as error:  # libraries raise many kinds for a damaged file
        cure = "remove it to have it downloaded again" if source.urls else "remove it and save another copy"
        raise ValueError(f"{path} is damaged ({error or type(error).__name__}); {cure}.") from error


def _downloaded(urls: Sequence[str], timeout: float) -> list[bytes]:
    """Contents of public files.

    They are read in a thread that is abandoned at the time limit, because a server that sends its header byte by byte
    is never silent and never finishes.
    """
    result: list = []
    ends = time.monotonic() + PATIENCE * timeout
    thread = threading.Thread(target=_download, args=(urls, timeout, ends, result), daemon=True)
    thread.start()
    thread.join(PATIENCE * timeout)
    if not result:
        raise TimeoutError(f"more than {PATIENCE * timeout:g} seconds")
    if isinstance(result[0], BaseException):
        raise result[0]
    return result[0]


def _download(urls: Sequence[str], timeout: float, ends: float, result: list):
    """Append the contents of public files, or the error, to ``result``; they pass through an unnamed file."""
    try:
        with tempfile.TemporaryFile() as stream:
            sizes: list[int] = []
            for url in urls:
                logger.info("downloading %s", url)
                with urllib.request.urlopen(url, timeout=timeout) as response:
                    left = getattr(response, "length", None)  # None where the server does not say how much comes
                    while left != 0 and (block := response.read1(min(BLOCK, left or BLOCK))):
                        stream.write(block)
                        left = None if left is None else left - len(block)
                        if stream.tell() + (left or 0) > MAX_BYTES:
                            raise OSError(f"more than {MAX_BYTES} bytes")
                        if time.monotonic() > ends:
                            raise TimeoutError(f"more than {PATIENCE * timeout:g} seconds")
                    if left:
                        raise http.client.IncompleteRead(b"", left)
                sizes.append(stream.tell() - sum(sizes))
            stream.seek(0)
            result.append([stream.read(size) for size in sizes])
    except BaseException as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()  # an answer too, whose connection is open
        result.append(error)


def _verify(source: Source, parts: Sequence[bytes]) -> None:
    """Compare the SHA-256 of the joined parts with the expected one."""
    digest = hashlib.sha256(b"".join(parts)).hexdigest()
    if digest != source.sha256:
        raise ChecksumError(
            f"{source.path}: what was downloaded from {source.urls[0]}{_and_more(source)} has SHA-256 "
            f"{digest}, expected {source.sha256}; nothing was kept. Try again: a proxy or a login page may "
            "have answered in place of the server."
        )


def _write(path: Path, content: bytes) -> None:
    """Write a file whole or not at all: a temporary file in the same directory is renamed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".part")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _and_more(source: Source) -> str:
    return f" and {len(source.urls) - 1} files beside it" if len(source.urls) > 1 else ""


def _not_found(source: Source, places: Sequence[Path], reason: str) -> str:
    """An error that names the file, where it was searched for, and the cure."""
    target = cache_dir() / source.path
    if not source.urls:
        by_hand = f"save a copy of it as {target}"
    elif len(source.urls) == 1 and source.build is Source.build:
        by_hand = f"download {source.urls[0]} and save it as {target}"
    else:
        by_hand = (
            f"make the same call, without data_dir, on a machine with network access and copy the file it "
            f"makes in its cache to {target} (it is made from {source.urls[0]}{_and_more(source)})"
        )
    return (
        f"{source.path} was not found in {' or '.join(map(str, places))}, and {reason}. Either set "
        f"{DATA_ENV} to a directory that holds {source.path}, or {by_hand}."
    )
