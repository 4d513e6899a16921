"""Fixtures shared by all tests."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import zlib
from pathlib import Path

if os.environ.get("PYTEST_XDIST_WORKER"):
    # Processes that share the cores gain nothing from threads of their own. With one thread, XLA's pool cannot wait
    # for itself either, as it does in jaxlib 0.10 and 0.11 when two batches of matrices are factorized at once.
    os.environ.setdefault("PJRT_NPROC", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

if os.environ.get("JAX_COMPILATION_CACHE_DIR"):  # most programs of the tests compile in less than a second
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


#: Without the newer code generator small programs compile faster. XLA ends a process whose XLA_FLAGS it does not know.
QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false"


def is_nightly(config):
    """Whether ``-m`` names the marker ``nightly``."""
    return "nightly" in (config.getoption("-m") or "")


def are_known(flags):
    """Whether this version of XLA knows them."""
    return not subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
    ).returncode


def pytest_configure(config):
    """Programs are compiled without optimization, here and in processes of tests: most take longer to compile than run.

    Not for nightly tests, which run long, nor where the environment says otherwise.
    """
    if is_nightly(config):
        return
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    if "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = QUICK_FLAGS if are_known(QUICK_FLAGS) else ""


def pytest_collection_modifyitems(config, items):
    """Tests marked ``nightly`` run only when ``-m`` names the marker."""
    if is_nightly(config):
        return
    skip = pytest.mark.skip(reason="long statistical check: run it with `pytest -m nightly`")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(autouse=True, scope="module")
def forget_programs():
    """Every compiled program maps some memory, and a process may have 65 530 such maps: a crash if it wants more."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_text().count("\n") > 25_000:
        jax.clear_caches()
        gc.collect()


@pytest.fixture
def key(request):
    """A key of the test's own, from its name; NUMPYRO_FSPACE_TEST_SEED rotates all of them."""
    seed = int(os.environ.get("NUMPYRO_FSPACE_TEST_SEED", "0"))
    return jax.random.fold_in(jax.random.key(seed), zlib.crc32(request.node.name.encode()))


@pytest.fixture
def x64():
    """Float64 inside the test."""
    with jax.enable_x64(True):
        yield


@pytest.fixture
def data_dir() -> Path:
    """Directory of the real data files, named by NUMPYRO_FSPACE_DATA."""
    name = os.environ.get("NUMPYRO_FSPACE_DATA")
    if not name:
        pytest.skip("NUMPYRO_FSPACE_DATA does not name a directory of data files")
    if not Path(name).is_dir():
        pytest.skip(f"NUMPYRO_FSPACE_DATA={name} is not a directory")
    return Path(name)
