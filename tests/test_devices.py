"""Chains and data spread over devices and processes: the draws of one device, up to rounding."""

import contextlib
import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

import numpyro_fspace as fs

ROOT = Path(__file__).parents[1]
SLURM = ROOT / "docs" / "slurm"
COMMON = """
import json, os, sys, warnings
sys.path.insert(0, "tests")
warnings.simplefilter("ignore")
import jax, numpy as np
from jax.sharding import NamedSharding, PartitionSpec
import numpyro_fspace as fs
from models import X, Y, linear, random_points
from tinygp.kernels import ExpSquared

kernel = fs.fSGHMC(linear(random_points(), prior=fs.GPPrior(ExpSquared(1.0)), batch=4), num_steps=2, refresh_every=1)
X, Y = np.tile(X, (4, 1))[:16], np.tile(Y, 4)[:16]

def run(x, y, **settings):
    mcmc = fs.MCMC(kernel, num_warmup=20, num_samples=10, num_chains=8, chain_method="vectorized",
                   progress_bar=False, **settings)
    mcmc.run(jax.random.key(0), x, y, extra_fields=("rng_key",))
    assert np.asarray(mcmc.last_state.z["w"]).shape[0] == 8  # every process reads all chains
    assert len(mcmc.get_extra_fields()["rng_key"]) == 80
    return np.asarray(mcmc.get_samples(group_by_chain=True)["w"], float)
"""
ONE_PROCESS = """
alone, names = run(X, Y), ("chains", "rows")
def in_parts(shape):
    mesh = jax.make_mesh(shape, names)
    return run(*(jax.device_put(a, NamedSharding(mesh, PartitionSpec("rows"))) for a in (X, Y)), mesh=mesh)

mesh_of_chains = jax.make_mesh((8,), names[:1])
on_disk = [run(X, Y, mesh=mesh_of_chains, checkpoint=sys.argv[1], checkpoint_every=4) for _ in range(2)]
try:
    fs.MCMC(kernel, num_warmup=1, num_samples=1, num_chains=12, chain_method="vectorized", mesh=mesh_of_chains)
except ValueError as error:
    refused = str(error)
draws = {"alone": alone, "both": in_parts((4, 2)), "rows": in_parts((1, 8)), "on disk": on_disk[0], "read": on_disk[1]}
print(json.dumps({"draws": {name: a.tolist() for name, a in draws.items()}, "refused": refused}))
"""
RESULTS = """
new, found = X[:8] + 0.5, {}

def look(x, y, mesh, new):
    many = {} if mesh is None else {"mesh": mesh}
    mcmc = fs.MCMC(kernel, num_warmup=20, num_samples=10, num_chains=8, chain_method="vectorized",
                   progress_bar=False, **many)
    mcmc.run(jax.random.key(0), x, y)
    data, report = fs.to_arviz(mcmc), fs.report(mcmc)
    return {
        "f": fs.predict(mcmc, jax.random.key(1), new)["f"].tolist(),
        "posterior": data["posterior"]["f"].values.tolist(),
        "log_likelihood": data["log_likelihood"]["y"].values.tolist(),
        "observed": data["observed_data"]["y"].values.tolist(),
        "rhat": float(report.functions.rhat.max()),
    }

def parts(mesh, axis, *arrays):
    return [jax.device_put(a, NamedSharding(mesh, PartitionSpec(axis))) for a in arrays]

mesh = jax.make_mesh((4, 2), ("chains", "rows"))
meshes = {  # of the data, and the axis that they are spread over
    "documented": (mesh, "rows"),
    "other names": (jax.make_mesh((8,), ("batch",)), "batch"),
}
found["one device"] = look(X, Y, None, new)
for name, (other, axis) in meshes.items():
    found[name] = look(*parts(other, axis, X, Y), mesh, parts(other, axis, new)[0])
found["no mesh of chains"] = look(*parts(mesh, "rows", X, Y), None, new)
print(json.dumps(found))
"""
FIRST = """
import sys
import jax
import numpyro_fspace
port, number = sys.argv[1:]
jax.distributed.initialize(f"localhost:{port}", 2, int(number))  # importing the package starts no backend
"""
TWO_PROCESSES = """
mesh = jax.make_mesh((4,), ("chains",))
draws = run(X, Y, mesh=mesh)
print(json.dumps({"devices": [jax.local_device_count(), jax.device_count()], "draws": draws.tolist()}))
"""


def free_port():
    """A port that is free now, of those that JAX derives from the number of a Slurm job."""
    for port in range(61440 + os.getpid() % 2000, 65535):
        with socket.socket() as free, contextlib.suppress(OSError):
            free.bind(("localhost", port))
            return port
    raise AssertionError("no port is free")


def popen(argv, *, devices, environment=None):
    environment = (
        os.environ
        | (environment or {})
        | {
            "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        }
    )
    argv = [sys.executable, *map(str, argv)]
    return subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment)


def start(script, *args, devices, first=""):
    return popen(["-c", first + COMMON + script, *args], devices=devices)


def run(*processes):
    """What processes print; none is left running."""
    try:
        ends = [process.communicate(timeout=400) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    for process, (_, err) in zip(processes, ends, strict=True):
        assert process.returncode == 0, err
    return [out for out, _ in ends]


def reports(processes):
    """What each process prints last, read as JSON."""
    return [json.loads(out.splitlines()[-1]) for out in run(*processes)]


@pytest.fixture(scope="module")
def eight_devices(tmp_path_factory):
    """What a process with eight devices prints: its draws by name, and an error."""
    (found,) = reports([start(ONE_PROCESS, tmp_path_factory.mktemp("runs") / "run", devices=8)])
    return found


@pytest.mark.slow
def test_chains_and_data_on_eight_devices(eight_devices):
    """Chains over four and the data in two parts, data in eight, chains over eight with checkpoints, read again."""
    draws = {name: np.array(values) for name, values in eight_devices["draws"].items()}
    assert draws["alone"].std() > 0.1
    for name in ("both", "rows", "on disk"):
        np.testing.assert_allclose(draws[name], draws["alone"], rtol=0.0, atol=1e-3)
    np.testing.assert_array_equal(draws["read"], draws["on disk"])
    assert "8 devices along 'chains' cannot share num_chains=12" in eight_devices["refused"]


@pytest.mark.slow
def test_results_of_data_on_a_mesh():
    """Those of one device, whichever mesh of the same devices the data and the new inputs lie on."""
    (found,) = reports([start(RESULTS, devices=8)])
    expected = {k: np.array(v) for k, v in found.pop("one device").items()}
    assert expected["f"].shape == (80, 8) and expected["f"].std() > 0.1 and len(found) == 3
    for values in found.values():
        for name, value in values.items():
            np.testing.assert_allclose(value, expected[name], rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_chains_of_two_processes(eight_devices):
    """Both processes get all draws, those of one process."""
    port = free_port()
    both = reports([start(TWO_PROCESSES, port, number, devices=2, first=FIRST) for number in range(2)])
    for one in both:
        assert one["devices"] == [2, 4]
        np.testing.assert_allclose(one["draws"], eight_devices["draws"]["alone"], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
def test_the_program_of_the_documentation_under_the_variables_of_slurm(tmp_path):
    """Two tasks of two devices each: one posterior of four chains, which a process without a cluster reads."""
    path = tmp_path / "posterior.npz"
    task = {"SLURM_JOB_ID": str(free_port() - 61440), "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    tasks = [task | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)} for i in range(2)]
    run(*(popen([SLURM / "train.py", path, 5], devices=2, environment=one) for one in tasks))
    sys.path.insert(0, str(SLURM))
    try:
        import train
    finally:
        sys.path.remove(str(SLURM))
    data = fs.datasets.load_diabetes()
    prior = fs.fit_gp(None, data.x_train, data.y_train, num_steps=100).prior
    posterior = fs.Posterior.load(path, train.regression(prior, data.x_train[:100]))
    assert (posterior.num_chains, len(posterior.samples["sigma"])) == (4, 20)
    assert posterior.samples["sigma"].std() > 0
    assert "srun python train.py posterior.npz" in (SLURM / "job.sh").read_text()


def model(y=None):
    raise AssertionError("refused before it is run")


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"mesh": "gpu"}, TypeError, "jax.sharding.Mesh, got str"),
        ({"mesh": Mesh(np.array(jax.devices()[:1]), ("data",))}, ValueError, "one must be 'chains'"),
        ({"num_chains": 1}, ValueError, "for several chains"),
        ({"chain_method": "sequential"}, ValueError, "chain_method='vectorized'"),
    ],
)
def test_meshes_that_do_not_fit(settings, error, text):
    defaults = {"mesh": Mesh(np.array(jax.devices()[:1]), ("chains",)), "num_chains": 2, "chain_method": "vectorized"}
    with pytest.raises(error, match=text):
        fs.MCMC(fs.SGHMC(model), num_warmup=1, num_samples=1, **(defaults | settings))
