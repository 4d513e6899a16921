"""Warm-up: find weights that fit the data and a stable step size, then freeze.

Its phases are counted in draws (each of ``num_steps`` gradient steps):

1. **Warm start** (the first ``warm_start`` of warm-up; ``optimizer.py``): Adam on the potential, in the
   preconditioner's coordinates, with a learning rate that a cosine takes from ``learning_rate`` to a hundredth of it.
   Positive sites (noise and other scales) stay at their initial values: the joint mode of a wide network and its
   noise interpolates the data with hardly any noise, far from where the posterior is, and so stiff that the chain
   stays there. Weights that the data say nothing of stay where they begin (``anchored``) instead of going to their
   prior's mode. With a dense preconditioner, the default of models of few parameters without a network, a Gaussian is
   fitted to the posterior by Newton's method instead (``newton.py``): its mean is the start, its covariance the first
   preconditioner, and nothing is held.
2. **Calibration** (when burn-in begins, and at its quarter, half and three quarters; ``curvature.py``): the largest
   curvature λ of the potential in the preconditioner's coordinates, by power iteration on products of the Hessian
   with vectors. It gives the sampler's step size. A preconditioner that adapts is renewed from the gradients seen
   since the last calibration (a dense one from Hessians), at the second and third. Once it is fixed the step size can
   only be shortened, by half at most. Where no Metropolis test guards the step, the curvature is measured at six more
   places on the way, and the smallest step is kept. With a test, the step is tuned below what the curvature allows,
   for a mean acceptance of 0.9.
3. **Burn-in** in between (``stability.py``): the sampler itself. A draw at a higher temperature than chance allows
   loses the excess. If it gained energy, the step is too long and is shortened by a tenth; a draw that diverges, or
   exceeds twice what chance allows and gained energy or was flung up the potential, is undone and halves it. A
   temperature that stays too high though no draw gains energy (from the noise of minibatches, most often) shows in
   the mean over a quarter of burn-in: after the third quarter, and after the last, the step of a sampler with a
   momentum is shortened for it.
4. **Friction** meanwhile (``friction.py``), where minibatches or random points make gradients noisy and the kernel
   gives none. The noise's leading directions are found in the third quarter of burn-in, its variance along them is
   measured there and in the last: they get a friction of their own that balances it (``sgmcmc.gradient_noise``), and
   the step is shortened if one kick's noise is too much for any friction. From the middle of burn-in on, all other
   directions get as much friction as keeps those that the rest of the noise acts on below 1.3 times the temperature.
   More would slow down the whole chain.

``adapt.py`` puts the parts together, and ``state.py`` holds what each of them carries from draw to draw.
Everything is frozen when warm-up ends, so the sampling phase is a homogeneous Markov chain.
"""

from numpyro_fspace.mcmc.warmup.settings import Schedule, Warmup

__all__ = ["Schedule", "Warmup"]
