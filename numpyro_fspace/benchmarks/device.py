"""Speed on one accelerator: its limits, gradient steps, many chains, networks for images, and predictions.

Each part is one call of ``bench_device``, so that ``fspace bench device --part NAME`` runs it in a process of its own.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import numpyro
import optax
import tinygp
from flax.traverse_util import flatten_dict, unflatten_dict
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from numpyro_fspace import measurement
from numpyro_fspace.benchmarks.peers import peer
from numpyro_fspace.benchmarks.problems import (
    NUM_STEPS,
    SIZES,
    STEP_SIZE,
    data,
    fixed_kernel,
    likelihood,
    network,
    turns,
)
from numpyro_fspace.benchmarks.scale import NUM_CHAINS
from numpyro_fspace.benchmarks.steps import scanned
from numpyro_fspace.experiments.images import Config, classifier
from numpyro_fspace.experiments.networks import DTYPES, NETWORKS
from numpyro_fspace.mcmc import SGHMC, Warmup, fSGHMC
from numpyro_fspace.model import fan_in, random_module
from numpyro_fspace.posterior import Predictive
from numpyro_fspace.priors import GPPrior
from numpyro_fspace.sgmcmc.preconditioners import identity

#: Sizes of the problems whose steps are timed, with the number of draws of a run.
STEPS = {"1d": 50, "boston": 50, "protein64": 50, "mnist": 50, "million": 20}
#: Networks for images: shape of an image, number of training images, draws of a run.
IMAGES = {"mlp": ((28, 28, 1), 60_000, 10), "cnn": ((28, 28, 1), 60_000, 10), "resnet18": ((32, 32, 3), 12_000, 2)}
NUM_CLASSES, BATCH_SIZE, NUM_POINTS, NUM_POOL = 10, 125, 40, 2000
#: Rows and draws of a prediction.
PREDICTION = (100_000, 1000)
NUM_TURNS = 5


def bench_device(part: str, repeat: int = 0, *, quick: bool = False) -> dict:
    """One record with the figures of one part. Times are medians of five rounds without compilation.

    ``card`` has the rates that bound all others: of products of matrices, in TFLOP/s, and of copies in the device's
    memory, in GB/s, counting bytes read and written. ``steps`` has microseconds of a gradient step of SGHMC and fSGHMC
    (as in ``bench_steps``, but under ``jax.lax.scan`` without the driver), BlackJAX's ``sghmc`` and optax's SGD.
    ``chains`` has milliseconds of a step of SGHMC and fSGHMC by the number of vectorized chains, for the 2×50 network
    with nine inputs and minibatches of 64; chains are divided among all devices. ``mlp``, ``cnn`` and ``resnet18`` have
    milliseconds of a step of SGHMC, fSGHMC (with 40 more images) and SGD, and training images per second, for the
    classifiers of ``fspace run images`` in float32 (with JAX's default precision) and bfloat16. ``predict`` has seconds
    of ``fs.Predictive`` for 1000 draws at 100 000 inputs, and of the bare network's passes. ``peak_mib`` is the largest
    memory that the process has had in use on the device.
    """
    start = time.perf_counter()
    found = DEVICE_PARTS[part](repeat, quick)
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use")
    return {
        "benchmark": "device",
        "part": part,
        "repeat": repeat,
        **found,
        "peak_mib": None if peak is None else peak / 2**20,
        "device": device.device_kind,
        "num_devices": jax.device_count(),
        "jax": jax.__version__,
        "seconds": time.perf_counter() - start,
    }


def _medians(runs, repeat, quick):
    """Seconds of the first run of each, and their median seconds in later rounds A B C A B C …"""
    first, wall, _ = turns(runs, repeat, quick=quick, num_turns=NUM_TURNS)
    return first, wall


def _card(repeat, quick):
    size, copied = (256, 10**6) if quick else (8192, 10**9)
    key = jax.random.key(repeat)
    product = jax.jit(jnp.matmul)
    full = jax.jit(lambda a, b: jnp.matmul(a, b, precision="highest"))
    copy = jax.jit(lambda a: a + 1)
    square, line = jax.random.normal(key, (size, size)), jnp.zeros(copied // 4)
    half = square.astype(jnp.bfloat16)
    runs: dict[str, Callable] = {
        "float32": lambda _: product(square, square).block_until_ready(),
        "float32_highest": lambda _: full(square, square).block_until_ready(),
        "bfloat16": lambda _: product(half, half).block_until_ready(),
        "copy": lambda _: copy(line).block_until_ready(),
    }
    seconds = _medians(runs, repeat, quick)[1]
    rates = {name: 2 * size**3 / seconds[name] / 1e12 for name in runs if name != "copy"}
    return {"tflops": rates, "copy_gb_per_second": 2 * line.nbytes / seconds["copy"] / 1e9}


def _steps(repeat, quick):
    us, first = {}, {}
    for size, num_draws in STEPS.items():
        problem = SIZES[size]._replace(num_draws=2 if quick else num_draws)
        x, y = data(problem)
        runs = {"sghmc": scanned(SGHMC, problem, x, y), "fsghmc": scanned(fSGHMC, problem, x, y)}
        runs |= {name: peer(name, problem, x, y) for name in ("blackjax_sghmc", "sgd")}
        first[size], wall = _medians(runs, repeat, quick)
        us[size] = {name: 1e6 * seconds / (problem.num_draws * NUM_STEPS) for name, seconds in wall.items()}
    return {"us": us, "first_seconds": first}


def _chains(repeat, quick):
    problem, num_draws = SIZES["protein64"], 1 if quick else 25
    x, y = data(problem)
    ms: dict[str, dict] = {}
    for name, kernel in {"sghmc": SGHMC, "fsghmc": fSGHMC}.items():
        numbers = NUM_CHAINS[:2] if quick else NUM_CHAINS
        runs = {n: _draws(fixed_kernel(kernel, problem), num_draws, x, y, num_chains=n) for n in numbers}
        wall = _medians(runs, repeat, quick)[1]
        ms[name] = {str(n): 1e3 * seconds / (num_draws * NUM_STEPS) for n, seconds in wall.items()}
    over_one = {name: {n: value / of["1"] for n, value in of.items()} for name, of in ms.items()}
    return {"ms_per_step": ms, "over_one": over_one}


def _images(name, repeat, quick):
    shape, num_data, num_draws = IMAGES[name]
    if quick:
        shape, num_data, num_draws = (8, 8, shape[-1]), 300, 1
    found: dict[str, dict] = {"ms": {}, "images_per_second": {}, "throughput_of_sgd": {}, "first_seconds": {}}
    for dtype in DTYPES[:1] if quick else DTYPES:
        config = Config(network=name, dtype=dtype, widths=(50, 50), batch_size=20 if quick else BATCH_SIZE)
        first, wall = _medians(_classifiers(config, shape, num_data, num_draws), repeat, quick)
        ms = {run: 1e3 * seconds / (num_draws * NUM_STEPS) for run, seconds in wall.items()}
        found["first_seconds"][dtype], found["ms"][dtype] = first, ms
        found["images_per_second"][dtype] = {run: 1e3 * config.batch_size / value for run, value in ms.items()}
        found["throughput_of_sgd"][dtype] = {run: ms["sgd"] / value for run, value in ms.items()}
    return found


def _classifiers(config, shape, num_data, num_draws):
    """Runs by name of SGHMC, fSGHMC and SGD on random images; each draw has ``NUM_STEPS`` gradient steps."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(num_data, int(np.prod(shape)))).astype(np.float32))
    y = jnp.asarray(rng.integers(0, NUM_CLASSES, num_data))
    gp = GPPrior(tinygp.kernels.ExpSquared(2.0 * x.shape[1] ** 0.5), nugget=1e-2, num_outputs=NUM_CLASSES)
    points = measurement.subset(x[:NUM_POOL], NUM_POINTS)
    build = classifier(shape)
    runs = {}
    for name, kernel in {"sghmc": SGHMC, "fsghmc": fSGHMC}.items():
        model = build(config, SimpleNamespace(prior=gp), points, functional=kernel.needs_functional_prior)
        fixed = {"preconditioner": identity(), "warmup": Warmup(warm_start=0.0), "control_variates": False}
        kernel = kernel(model, step_size=STEP_SIZE, num_steps=NUM_STEPS, friction=50.0, **fixed)
        runs[name] = _draws(kernel, num_draws, x, y)
    return runs | {
        "sgd": _sgd(NETWORKS[config.network](shape, NUM_CLASSES, config), config.batch_size, num_draws, x, y)
    }


def _draws(kernel, num_draws, x, y, num_chains=1):
    """``run(key)``: draws by a kernel, each by a call of one compiled program; chains are divided among the devices."""
    key = jax.random.key(0)
    if num_chains > 1:
        key = jax.random.split(key, num_chains)
        if num_chains % jax.device_count() == 0:
            mesh = jax.make_mesh((jax.device_count(),), ("chains",), axis_types=(AxisType.Auto,))
            key = jax.device_put(key, NamedSharding(mesh, PartitionSpec("chains")))
    state = kernel.init(key, 0, None, (x, y), {})
    draw = jax.jit(lambda state, x, y: kernel.sample(state, (x, y), {}))

    def run(key):
        now = state
        for _ in range(num_draws):
            now = draw(now, x, y)
        jax.block_until_ready(now.z)

    return run


def _sgd(net, batch_size, num_draws, x, y):
    """``run(key)``: as many steps of optax's SGD on minibatches of random rows, with a Gaussian prior."""
    optimizer = optax.sgd(STEP_SIZE)

    def loss(weights, x, y):
        errors = optax.softmax_cross_entropy_with_integer_labels(net.apply(weights, x), y)
        return len(y) * jnp.mean(errors) + 0.5 * sum(jnp.sum(w**2) for w in jax.tree.leaves(weights))

    @jax.jit
    def steps(carry, key, x, y):
        def step(carry, key):
            weights, inner = carry
            rows = jax.random.randint(key, (batch_size,), 0, len(x))
            updates, inner = optimizer.update(jax.grad(loss)(weights, x[rows], y[rows]), inner)
            return (optax.apply_updates(weights, updates), inner), None

        return jax.lax.scan(step, carry, jax.random.split(key, NUM_STEPS))[0]

    weights = jax.jit(net.init)(jax.random.key(0), x[:1])
    start = weights, optimizer.init(weights)

    def run(key):
        now = start
        for _ in range(num_draws):
            now = steps(now, key, x, y)
        jax.block_until_ready(now)

    return run


def _predict(repeat, quick):
    num_rows, num_draws = (100, 10) if quick else PREDICTION
    problem = SIZES["protein64"]._replace(num_data=num_rows, num_draws=num_draws)
    x = data(problem)[0]
    net = network(problem)

    def model(x, y=None):
        f = random_module("f", net, input_shape=problem.num_inputs, prior=fan_in(1.0))
        with numpyro.plate("data", len(x)):
            numpyro.sample("y", likelihood(problem, f(x)), obs=y)

    shapes = jax.eval_shape(net.init, jax.random.key(0), x[:1])["params"]
    weights = flatten_dict(shapes, sep=".")
    keys = jax.random.split(jax.random.key(repeat), len(weights))
    draws = {
        path: jax.random.normal(key, (num_draws, *leaf.shape)) / (leaf.shape[0] if leaf.ndim > 1 else 1) ** 0.5
        for key, (path, leaf) in zip(keys, weights.items(), strict=True)
    }
    predictive = Predictive({f"f.{path}": value for path, value in draws.items()}, model=model, inputs=x)
    passes = jax.jit(lambda w: jax.lax.map(lambda one: net.apply({"params": unflatten_dict(one, sep=".")}, x), w))
    runs: dict[str, Callable] = {
        "predict": lambda key: predictive(key, x[:1]),
        "passes": lambda _: np.asarray(passes(draws)),
    }
    first, wall = _medians(runs, repeat, quick)
    return {"predict_seconds": wall, "over_passes": wall["predict"] / wall["passes"], "first_seconds": first}


#: The parts of ``bench_device`` by name.
DEVICE_PARTS: dict[str, Callable] = {
    "card": _card,
    "steps": _steps,
    "chains": _chains,
    **{name: functools.partial(_images, name) for name in IMAGES},
    "predict": _predict,
}
