"""Chains on all devices of a job. Every process runs this program; process 0 writes the posterior."""

import sys

import jax
import numpyro
import numpyro.distributions as dist
from flax import linen as nn

import numpyro_fspace as fs


def regression(prior, points):
    """A network with the distribution of the process at the points, for minibatches of 100 rows."""

    def model(x, y=None):
        network = nn.Sequential([nn.Dense(50), nn.tanh, nn.Dense(50), nn.tanh, nn.Dense(1)])
        f = fs.gp_network("f", network, prior, points)
        sigma = numpyro.sample("sigma", dist.HalfNormal(1.0))
        with numpyro.plate("data", x.shape[0], subsample_size=100):
            xb = numpyro.subsample(x, event_dim=1)
            yb = None if y is None else numpyro.subsample(y, event_dim=0)
            numpyro.sample("y", dist.Normal(f(xb).squeeze(-1), sigma), obs=yb)

    return model


def main(path, num_draws=500):
    jax.distributed.initialize()  # reads the variables of Slurm; nothing may have used a device before
    data = fs.datasets.load_diabetes()
    prior = fs.fit_gp(None, data.x_train, data.y_train, num_steps=100).prior
    kernel = fs.fSGHMC(regression(prior, data.x_train[:100]))
    num_chains = jax.device_count()  # of all processes
    mesh = jax.make_mesh((num_chains,), ("chains",))
    settings = {"num_chains": num_chains, "chain_method": "vectorized", "mesh": mesh, "progress_bar": False}
    mcmc = fs.MCMC(kernel, num_warmup=num_draws, num_samples=num_draws, **settings)
    mcmc.run(jax.random.key(0), data.x_train, data.y_train)
    if jax.process_index() == 0:  # every process has all draws
        fs.save(mcmc, path)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
