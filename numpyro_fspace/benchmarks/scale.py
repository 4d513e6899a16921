"""Time of a sampler against the number of chains and of rows, in memory and on disk; time and memory of a first run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.benchmarks.peers import contenders
from numpyro_fspace.benchmarks.problems import NUM_STEPS, SIZES, clock, compiled_afresh, data, params, sampler, turns
from numpyro_fspace.mcmc import SGHMC, fSGHMC
from numpyro_fspace.model import OnDemand

#: Numbers of vectorized chains in ``bench_chains``.
NUM_CHAINS = (1, 64, 1024, 4096)
#: Numbers of rows of the data sets of ``bench_rows``.
NUM_ROWS = (10**3, 10**5, 10**7)


def bench_chains(repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: seconds per draw of SGHMC (40 gradient steps) by the number of vectorized chains.

    The problems are the 1-100-100-1 network with 20 data and the 2×50 network with 9 inputs and minibatches of 64.
    ``over_one`` is relative to the time of one chain. The time of a draw is computed from the difference between a long
    run and a run of a single draw; the remaining time of the latter is ``start_seconds``. Times are medians
    of three rounds.
    """
    seconds: dict[str, dict] = {}
    starts: dict[str, dict] = {}
    for size in ("1d", "protein64"):
        x, y = data(SIZES[size])
        more = {n: 1 if quick else max(1, min(100, 1000 // n)) for n in (NUM_CHAINS[:2] if quick else NUM_CHAINS)}
        runs = {
            (n, length): sampler(
                SGHMC, SIZES[size]._replace(num_draws=length), x, y, num_chains=n, chain_method="vectorized"
            )
            for n in more
            for length in (1, 1 + more[n])
        }
        wall = turns(runs, repeat, quick=quick, num_turns=3)[1]
        seconds[size] = {str(n): (wall[n, 1 + num] - wall[n, 1]) / num for n, num in more.items()}
        starts[size] = {str(n): wall[n, 1] - seconds[size][str(n)] for n in more}
    return {
        "benchmark": "chains",
        "repeat": repeat,
        "seconds_per_draw": seconds,
        "start_seconds": starts,
        "over_one": {size: {n: value / of["1"] for n, value in of.items()} for size, of in seconds.items()},
        "device": jax.devices()[0].device_kind,
    }


def bench_start(repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: seconds of new processes to import the package and to compile and run fSGHMC.

    The problem is the 1-100-100-1 network with 20 data, 40 random points and two draws. The first process has an empty
    compilation cache of JAX, the second one the cache that the first has filled. Medians of three (one if ``quick``).
    """
    found: dict[str, list] = {"cold": [], "warm": [], "import": []}
    for _ in range(1 if quick else 3):
        with tempfile.TemporaryDirectory() as folder:
            cache = {"JAX_COMPILATION_CACHE_DIR": folder, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
            for name in ("cold", "warm"):
                code = (
                    "import time; t = time.perf_counter(); import numpyro_fspace; t = time.perf_counter() - t; "
                    f"from {__name__} import start; start(t)"
                )
                times = _in_new_process(code, cache)
                found[name].append(times["run"])
                found["import"].append(times["import"])
    return {"benchmark": "start", "repeat": repeat} | {f"{k}_seconds": float(np.median(v)) for k, v in found.items()}


def start(imported: float):
    """The code that ``bench_start`` runs in new processes. It prints the seconds of the import and of a first run."""
    problem = SIZES["1d"]._replace(num_draws=2)
    seconds = clock(sampler(fSGHMC, problem, *data(problem)), jax.random.key(0))[0]
    print(json.dumps({"import": imported, "run": seconds}))


def _in_new_process(code: str, environment):
    """The last line that Python code prints in a new process, parsed as JSON."""
    out = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return json.loads(out.stdout.splitlines()[-1])


def bench_memory(size: str, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: by method, MiB that a first run adds to the peak memory of a process, including compilation.

    Each method of ``bench_steps`` runs in a new process. ``mib_draws`` is the memory of the draws of a run (less for
    posteriors, which makes a hundredth of them). NaN if the system does not report memory.
    """
    problem = SIZES[size]._replace(num_draws=2) if quick else SIZES[size]
    given = f"({size!r}, {problem.num_draws}, {repeat})"
    names = contenders(problem, *data(problem))
    mib = {name: _in_new_process(f"from {__name__} import peak; peak({name!r}, *{given})", {}) for name in names}
    return {
        "benchmark": "memory",
        "size": size,
        "repeat": repeat,
        "mib": mib,
        "mib_draws": 4 * problem.num_draws * sum(leaf.size for leaf in jax.tree.leaves(params(problem))) / 2**20,
        "device": jax.devices()[0].device_kind,
    }


def peak(name: str, size: str, num_draws: int, repeat: int):
    """The code that ``bench_memory`` runs in new processes. It prints the maximum growth of their memory."""
    problem = SIZES[size]._replace(num_draws=num_draws)
    run = contenders(problem, *data(problem))[name]
    before = _memory("VmRSS")
    run(jax.random.key(repeat))
    print(json.dumps(_memory("VmHWM") - before))


def bench_rows(num_rows: int, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record: microseconds of a gradient step of SGHMC on data in memory and on the same data on disk.

    The problem has nine inputs, a 2×50 network, minibatches of 1024 (or half of the rows, if there are fewer) and no
    control variates, because their full gradient grows with the data. The file has just been written, so that it is in
    the system's cache if it fits. The time of a step is computed from the difference between a long run and one with a
    fifth of its draws; the remaining time, in which all data are read once, is ``start_seconds``. ``mib`` is the growth
    of the process's own memory in the run, without the data in memory.
    """
    num_rows = min(num_rows, 10**4) if quick else num_rows
    problem = SIZES["protein1000"]._replace(num_data=num_rows, batch_size=min(1024, num_rows // 2))
    num_draws = {"short": 1, "long": 2} if quick else {"short": 20, "long": 100}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{name}.npy" for name in ("x", "y")]
        for file, values in zip(files, data(problem), strict=True):
            np.save(file, values)
        mapped = [OnDemand(np.load(file, mmap_mode="r")) for file in files]
        loaded = [jnp.asarray(np.load(file)) for file in files]
        runs, mib = {}, {}
        for name, arrays in (("on_disk", mapped), ("in_memory", loaded)):
            before = _memory("RssAnon")
            for length, num in num_draws.items():
                runs[name, length] = sampler(SGHMC, problem._replace(num_draws=num), *arrays)
                with compiled_afresh():
                    runs[name, length](jax.random.key(repeat))
            mib[name] = _memory("RssAnon") - before
        _, wall, cores = turns(runs, repeat, quick=quick)
    num_steps = (num_draws["long"] - num_draws["short"]) * NUM_STEPS
    us, cpu_us = (
        {name: 1e6 * (of[name, "long"] - of[name, "short"]) / num_steps for name in mib} for of in (wall, cores)
    )
    return {
        "benchmark": "rows",
        "num_rows": num_rows,
        "batch_size": problem.batch_size,
        "repeat": repeat,
        "us": us,
        "cpu_us": cpu_us,
        "on_disk_over_in_memory": us["on_disk"] / us["in_memory"],
        "start_seconds": {name: wall[name, "short"] - 1e-6 * us[name] * num_draws["short"] * NUM_STEPS for name in mib},
        "mib": mib,
        "device": jax.devices()[0].device_kind,
    }


def _memory(which: str) -> float:
    """MiB of this process: ``RssAnon`` (without files), ``VmRSS`` (in total) or ``VmHWM`` (peak of the total).

    NaN if the system does not report it.
    """
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return float("nan")
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith(which)), float("nan"))
