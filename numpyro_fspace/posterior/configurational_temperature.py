r"""The configurational temperature: whether draws are as wide as their target distribution.

For every density proportional to exp(-U/T) on all of R^P, and every matrix S, integration by parts gives

.. math:: \frac{E |S^\top \nabla U|^2}{E \operatorname{tr} S^\top \nabla^2 U S} = T,

whatever the shape of U. A direction of curvature λ whose variance is too large by some factor adds λ times that factor
to the numerator and λ to the denominator. So a step that is too long, the noise of minibatches and that of random
measurement points raise it, where R-hat and the kinetic temperature say nothing.

Reference: H. H. Rugh (1997), *Dynamical approach to temperature*.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax.flatten_util import ravel_pytree
from numpyro.distributions import biject_to

from numpyro_fspace._xla import flatten, taken
from numpyro_fspace.model.data.arguments import split_arrays
from numpyro_fspace.model.run_model import run_model
from numpyro_fspace.model.site_transforms import has_dynamic_support
from numpyro_fspace.posterior.arrays import like, plain

#: Draws at which the gradient is taken: the most, as many as the share should afford, and the fewest.
MAX_DRAWS, MIN_DRAWS, FEWEST_DRAWS = 256, 20, 8
#: Share of the gradient steps of the run that ``MIN_DRAWS`` draws may cost, where the given share affords fewer.
LARGEST_SHARE = 0.1
#: Every fourth draw gets the curvature on all data. If the data make at least four minibatches, every draw gets the
#: curvature on one minibatch.
PER_CURVATURE = 4
#: Sets of measurement points whose mean stands for the expectation, where they are random.
NUM_SETS = 4
#: Numbers in all gradients together.
MAX_NUMBERS = 2**25
#: How far finite differences go, relative to the posterior's standard deviation.
REACH = 0.3
#: Blocks of draws for the standard error.
NUM_BLOCKS = 16
#: Gradients of one call of the compiled program.
NUM_AT_ONCE = 16
#: Of a single chain: steps of the power iteration for the largest curvature, and draws at which the Hessian is taken.
NUM_TURNS, NUM_HESSIANS = 4, 4


class ConfigurationalTemperature(NamedTuple):
    """Temperatures relative to the sampler's, 1 for a distribution that is sampled correctly, with standard errors.

    Attributes:
        mean: over all directions, each weighted by its curvature in the preconditioner's coordinates.
        leading: in the direction along which the gradient varies most. It is found in one half of the chains and
            evaluated in the other. With one chain, whose gradients may remember those of its first half for long, it is
            a direction of the largest curvature.
        mean_error, leading_error: relative standard errors.
        num_draws: the number of draws that these come from.
    """

    mean: float
    leading: float
    mean_error: float
    leading_error: float
    num_draws: int

    def __str__(self) -> str:
        return f"{self.mean:.2f} (where the data say most {self.leading:.2f})"


def configurational_temperature(kernel, state, draws, args, kwargs, *, key, share) -> ConfigurationalTemperature | None:
    """The configurational temperature of draws of one of our kernels, by gradients of all data.

    Curvatures are finite differences of gradients over a part of the posterior's width, so that they include the kinks
    of a ReLU network. A minibatch estimates them without bias. Where measurement points are random, two independent
    means over a few sets of them are multiplied, so that their noise does not count.

    Args:
        kernel: the kernel.
        state: that of its chains, [C] each, with the preconditioner.
        draws: of the latent sites, [C, S, …]; they may lie on disk.
        args, kwargs: the model's arguments, with the targets.
        key: draws measurement points and directions.
        share: the share of the run's gradient steps that this may cost; it limits the number of draws. If it affords
            fewer than ``MIN_DRAWS``, these may cost up to ``LARGEST_SHARE``.

    Returns:
        None if there are, or the share affords, fewer than ``FEWEST_DRAWS`` draws, or if the model draws random numbers
        of its own.
    """
    plan = kernel._plan_of(state, args, kwargs)
    num_chains, num_kept = next(iter(draws.values())).shape[:2]
    num, is_cut = _affordable(plan, kernel.num_steps, state, share)
    num = min(num, num_chains * num_kept)
    if num < FEWEST_DRAWS or plan.has_own_noise or not set(plan.params) <= set(draws):
        return None
    chains = _even(num_chains, num)
    places = _even(num_kept, num // len(chains))
    number, place = np.repeat(np.arange(len(chains)), len(places)), np.tile(places, len(chains))
    chain = chains[number]
    some = taken({k: draws[k] for k in plan.params}, chain, place)
    gradients = _Gradients(kernel, state, some, chain, arguments=(args, kwargs), key=key, is_cut=is_cut)
    every, here = np.arange(len(chain)), np.zeros((len(chain), gradients.size))
    first = gradients.at(every, here, gradients.keys[0])
    second = gradients.at(every, here, gradients.keys[1]) if plan.has_random_points else first  # at other points
    good = np.isfinite(first).all(axis=1) & np.isfinite(second).all(axis=1)
    if good.sum() < max(FEWEST_DRAWS, 0.9 * len(good)):
        return None
    first, second = np.where(good[:, None], first, 0.0), np.where(good[:, None], second, 0.0)
    # Two nearly independent halves of the draws: two sets of chains or, with one chain, its early and late draws.
    fold = number % 2 if len(chains) > 1 else (place > np.median(place)).astype(int)
    halves = [np.flatnonzero(good & (fold != half)) for half in (0, 1)]
    if len(chains) > 1:
        directions = np.stack([_leading((first + second)[half]) for half in halves])
    else:
        directions = _of_largest_curvature(gradients, halves)
    leading = directions[fold]  # [n, P]
    squares = np.stack([(first * second).sum(1), (first * leading).sum(1) * (second * leading).sum(1)])
    rows = every if is_cut else every[::PER_CURVATURE][: len(every) // PER_CURVATURE]
    probes = np.random.default_rng(0).choice([-1.0, 1.0], (len(rows), first.shape[1])), leading[rows]
    products = [
        gradients.hessian_times(rows, vectors, _reach(along[good].mean()))
        for vectors, along in zip(probes, squares, strict=True)
    ]
    curvatures = np.stack([(d * v).sum(1) for d, v in zip(products, probes, strict=True)])
    is_known = good[rows] & np.isfinite(curvatures).all(axis=0)
    block = _blocks(number, place, num_kept)
    results = [
        _ratio(s[good], c[is_known], block[good], block[rows][is_known])
        for s, c in zip(squares, curvatures, strict=True)
    ]
    (mean, mean_error), (lead, lead_error) = results
    temperature, num_draws = kernel.temperature, int(good.sum())
    return ConfigurationalTemperature(mean / temperature, lead / temperature, mean_error, lead_error, num_draws)


def _affordable(plan, num_steps: int, state, share: float) -> tuple[int, bool]:
    """How many draws a share of the run's gradient steps affords, and whether one minibatch gives each a curvature."""
    num_gradients, size = int(np.sum(state.i)) * num_steps, state.scale.shape[-1]
    is_cut = plan.batches >= PER_CURVATURE
    gradient = plan.batches + NUM_SETS if plan.has_random_points else plan.batches
    cost = (2 if plan.has_random_points else 1) * gradient + (4 if is_cut else gradient)
    most = max(share * num_gradients / cost, min(MIN_DRAWS, LARGEST_SHARE * num_gradients / cost))
    return int(min(MAX_DRAWS, MAX_NUMBERS // size, most)), is_cut


class _Gradients:
    """Gradients of U in the preconditioner's coordinates at draws, and products with the Hessians there.

    Args:
        kernel, state: the kernel, and the state of its chains.
        draws: of the latent sites, [n, …].
        chain: the number of each draw's chain [n].
        arguments: ``(args, kwargs)`` of the model.
        key: draws minibatches and measurement points.
        is_cut: whether products with the Hessian take a minibatch each.
    """

    def __init__(self, kernel, state, draws, chain, *, arguments, key, is_cut: bool):
        self.kernel, self.state, self.draws, self.chain, self.key = kernel, state, draws, chain, key
        self.arrays, self.static, self.join = split_arrays(arguments)
        self.is_cut, self.size = is_cut, state.scale.shape[-1]
        self.keys = plain(jax.random.split(key, (2, len(chain))))

    def at(self, rows, offsets, keys, is_whole: bool = True):
        """Gradients at draws plus offsets [n, P], by a program for ``NUM_AT_ONCE`` of them."""
        settings = {"kernel": self.kernel, "join": self.join, "like_key": self.key, "is_whole": is_whole}
        name = "configurational temperature", self.kernel._settings(), is_whole
        gradients_at = partial(_gradients_at, **settings)
        program, found = self.kernel._compiled(gradients_at, self.static, *name), []
        for start in range(0, len(rows), NUM_AT_ONCE):
            part = np.minimum(np.arange(start, start + NUM_AT_ONCE), len(rows) - 1)
            which = rows[part]
            given = {k: v[which] for k, v in self.draws.items()}
            points = given, offsets[part].astype(self.state.scale.dtype), self.chain[which], keys[part]
            gradients = program(points, self.state.scale, self.state.warmup.learned, self.arrays)
            found.append(np.asarray(gradients, np.float64))
        return np.concatenate(found)[: len(rows)]

    def hessian_times(self, rows, vectors, reach):
        """The products of the Hessians at draws with vectors [n, P], by central differences."""
        offsets = np.concatenate([reach * vectors, -reach * vectors])
        keys = np.concatenate([self.keys[0][rows]] * 2)
        above, below = np.split(self.at(np.tile(rows, 2), offsets, keys, not self.is_cut), 2)
        return (above - below) / (2 * reach)


def _gradients_at(points, scale, learned, arrays, *, kernel, join, like_key, is_whole):
    """The gradients of ``_Gradients.at``; a program that the kernel keeps, so that it holds no draws."""
    args, kwargs = join(arrays)
    model = kernel._model_potential(args, kwargs)
    preconditioner = kernel.preconditioner.chosen(model.parameters())

    def one(given):
        draw, offset, chain, key = given  # a key by its numbers
        position, unravel = flatten(unconstrained(model, draw))
        metric = preconditioner.build(scale[chain], jax.tree.map(lambda a: a[chain], learned))
        z = unravel(position + metric.scale(offset))
        gradient = _gradient(model, z, like(key, like_key), is_whole)
        return metric.scale_gradient(ravel_pytree(gradient)[0])

    return jax.lax.map(one, points)


def _of_largest_curvature(gradients: _Gradients, halves):
    """Unit vectors [2, P] of the largest curvature averaged over some draws of each half, by power iteration."""
    few = [half[_even(len(half), NUM_HESSIANS)] for half in halves]
    which = np.repeat([0, 1], [len(rows) for rows in few])
    directions = np.stack([_unit(np.random.default_rng(half).choice([-1.0, 1.0], gradients.size)) for half in (0, 1)])
    largest = 1.0  # curvature so far
    for _ in range(NUM_TURNS):
        turned = gradients.hessian_times(np.concatenate(few), directions[which], _reach(largest))
        means = [turned[which == half].mean(axis=0) for half in (0, 1)]
        largest = max(largest, *(float(np.linalg.norm(mean)) for mean in means))
        directions = np.stack([_unit(mean) for mean in means])
    return directions


def _even(num: int, most: int):
    """At most ``most`` evenly spaced numbers below ``num``, the last of each stretch."""
    most = min(num, most)
    return (np.arange(1, most + 1) * num) // most - 1


def _gradient(model, z, key, is_whole):
    """The gradient of U on all data, averaged over a few sets of random measurement points; or an estimate of it."""
    if not (model.is_random and is_whole):
        return jax.grad(lambda z: model(z, key)[0])(z)
    total = model.data_gradient(z, key)
    if model.functional_priors:
        keys = jax.random.split(key, NUM_SETS if model.has_random_points else 1)
        priors = jax.lax.map(lambda key: jax.grad(lambda z: model(z, key)[1])(z), keys)
        total = jax.tree.map(lambda a, b: a - b.mean(axis=0), total, priors)
    return total


def unconstrained(model, draw):
    """Unconstrained values of latent sites. All are needed if the supports of some depend on others."""
    sites = model.trace
    if any(has_dynamic_support(sites[k]) for k in model.latents):
        settings = {"key": jax.random.key(0), "substitute": draw, "full_plates": False}
        sites = run_model(model.model, model.args, model.kwargs, **settings)
    return {k: biject_to(sites[k]["fn"].support).inv(draw[k]) for k in model.latents if k in draw}


def _leading(gradients):
    """The unit vector along which gradients [n, P] are largest."""
    _, vectors = np.linalg.eigh(gradients @ gradients.T)
    return _unit(vectors[:, -1] @ gradients)


def _unit(vector):
    return vector / max(np.linalg.norm(vector), 1e-30)


def _reach(square):
    """The length of finite differences along a vector whose products with gradients have this mean square.

    For a unit vector this is the curvature.
    """
    return REACH / np.sqrt(max(abs(square), 1e-30))


def _blocks(number, place, num_kept):
    """The number of each draw's block, given those of its chain and its place in it.

    Blocks, parts of a chain or several chains, are nearly independent.
    """
    num_chains = number.max() + 1
    parts = -(-NUM_BLOCKS // num_chains)
    if parts == 1:
        return number * NUM_BLOCKS // num_chains
    return number * parts + place * parts // num_kept


def _ratio(squares, curvatures, block, block_of_curvature):
    """Mean square over mean curvature, and its relative standard error, by blocks or by draws, whichever is larger."""
    if not curvatures.size or not curvatures.mean() > 0:
        return float("nan"), float("nan")
    ratio = squares.mean() / curvatures.mean()
    by_draw = (
        squares.var() / squares.mean() ** 2 / squares.size + curvatures.var() / curvatures.mean() ** 2 / curvatures.size
    )
    without = np.array(
        [squares[block != b].mean() / curvatures[block_of_curvature != b].mean() for b in np.unique(block)]
    )
    by_block = (len(without) - 1) * without.var() / ratio**2
    return float(ratio), float(np.sqrt(max(by_draw, by_block)))
