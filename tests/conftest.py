"""Fixtures shared by all tests."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import re
import subprocess
import sys
import time
import zlib
from collections import Counter
from pathlib import Path

if os.environ.get("PYTEST_XDIST_WORKER"):
    # Processes that share the cores gain nothing from threads of their own. With one thread, XLA's pool cannot wait
    # for itself either, as it does in jaxlib 0.10 and 0.11 when two batches of matrices are factorized at once.
    os.environ.setdefault("PJRT_NPROC", "1")
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

#: Without the newer code generator, and in one part, small programs compile faster. XLA ends a process whose XLA_FLAGS
#: it does not know.
QUICK_FLAGS = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def is_nightly(config):
    """Whether ``-m`` asks for the marker ``nightly``."""
    return re.search(r"(?<!not )\bnightly\b", config.getoption("-m") or "") is not None


def are_known(flags):
    """Whether this version of XLA knows them."""
    return not subprocess.run(
        [sys.executable, "-c", "import jax; jax.devices()"], env=os.environ | {"XLA_FLAGS": flags}, capture_output=True
    ).returncode


def keep_programs(config):
    """Keeps compiled programs on disk, for the other worker and for the next run: in pytest's cache if nowhere else."""
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ and hasattr(config, "cache"):
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(config.cache.mkdir("jax"))
    if os.environ.get("JAX_COMPILATION_CACHE_DIR"):
        jax.config.update("jax_compilation_cache_dir", os.environ["JAX_COMPILATION_CACHE_DIR"])
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)  # most compile in a tenth of a second


#: Environment variable: the second since 1970 after which no slow test begins, in all processes of a run.
DEADLINE = "NUMPYRO_FSPACE_TEST_DEADLINE"
NO_TIME = "the minutes of --minutes were over"


def pytest_addoption(parser):
    parser.addoption(
        "--minutes",
        type=float,
        help="skip slow tests that have not begun after so many minutes, and count them at the end; "
        "the order of the files differs from run to run",
    )


def pytest_configure(config):
    """Programs are compiled without optimization, here and in processes of tests: most take longer to compile than run.

    Not for nightly tests, which run long, nor where the environment says otherwise.
    """
    keep_programs(config)
    if config.getoption("--minutes") is not None:
        os.environ.setdefault(DEADLINE, str(time.time() + 60.0 * config.getoption("--minutes")))
    if is_nightly(config):
        return
    if "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        jax.config.update("jax_disable_most_optimizations", True)
    if "XLA_FLAGS" not in os.environ:
        os.environ["XLA_FLAGS"] = QUICK_FLAGS if are_known(QUICK_FLAGS) else ""


def pytest_collection_modifyitems(config, items):
    """The tiers: ``slow`` tests run only where there is an ``-m``, ``nightly`` ones where it names them."""
    left_out = set() if config.getoption("-m") or _names_a_test(config) else {"slow"}
    left_out |= set() if is_nightly(config) else {"nightly"}
    kept, dropped = [], []
    for item in items:
        (dropped if left_out & item.keywords.keys() else kept).append(item)
    if dropped:
        config.hook.pytest_deselected(items=dropped)
        items[:] = kept
    if DEADLINE in os.environ:
        places = {path: random.Random(f"{path} {os.environ[DEADLINE]}").random() for path in {i.path for i in items}}
        items.sort(key=lambda item: places[item.path])


def pytest_runtest_setup(item):
    if "slow" in item.keywords and time.time() > float(os.environ.get(DEADLINE, "inf")):
        pytest.skip(NO_TIME)


def pytest_terminal_summary(terminalreporter):
    """What ``--minutes`` left out, by file."""
    skipped = [report for report in terminalreporter.stats.get("skipped", []) if NO_TIME in str(report.longrepr)]
    if skipped:
        terminalreporter.section(f"{len(skipped)} slow tests not begun: {NO_TIME}")
        for path, number in sorted(Counter(report.nodeid.split("::")[0] for report in skipped).items()):
            terminalreporter.line(f"{number:4d} {path}")


def _names_a_test(config):
    """Whether the command line names single tests (``file::test``), which then run whatever their tier."""
    return any("::" in argument for argument in config.args)


def pytest_collection_finish(session):
    """The collector of garbage need not look at all modules again and again, nor often at JAX's short-lived objects."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000, 50, 100)


#: Megabytes that a process may hold, after a module and within it, before the programs compiled so far are dropped.
MAX_MEMORY, MAX_MEMORY_WITHIN = 1000, 1400


def forget_programs(max_memory):
    """Drops compiled programs if this process holds more than so many megabytes: nothing else ever drops them.

    Every one of them also maps some memory, and a process may have 65 530 such maps.
    """
    statm = Path("/proc/self/statm")
    if statm.exists() and int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") <= max_memory * 1e6:
        return
    jax.clear_caches()
    gc.collect()
    if sys.platform == "linux":
        getattr(ctypes.CDLL(None), "malloc_trim", int)(0)  # to the system, which free() alone does not give it back to


@pytest.fixture(autouse=True, scope="module")
def forget_programs_of_module():
    yield
    forget_programs(MAX_MEMORY)


@pytest.fixture(autouse=True)
def forget_programs_of_test():
    yield
    if Path("/proc/self/statm").exists():
        forget_programs(MAX_MEMORY_WITHIN)


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
