"""Warm-up: weights that fit the data and a stable step size, which are then frozen.

Its phases are counted in draws (each of ``num_steps`` gradient steps):

1. **Warm start** (the first ``warm_start`` of warm-up; ``optimizer.py``): Adam on the potential, in the
   preconditioner's coordinates, with a learning rate that decays from ``learning_rate`` to a hundredth.
   Positive sites (noise and other scales) stay at their initial values: the joint mode of a wide network and its
   noise interpolates the data with hardly any noise, far from the posterior mass, and is so stiff that the chain
   stays there. Weights that the data do not determine keep their initial values (``anchored``) instead of going to the
   mode of their prior. With a dense preconditioner, the default of models of few parameters without a network, a
   Gaussian is fitted to the posterior by Newton's method instead (``newton.py``): its mean is the start, its covariance
   the first preconditioner, and no site is held fixed.
2. **Calibration** (when burn-in begins, and at its quarter, half and three quarters;
   ``step_size.py``): the largest curvature λ of the potential in the preconditioner's coordinates, by
   power iteration on products of the Hessian with vectors, exact or by differences of gradients
   (``Plan.curvatures``). It gives the sampler's step size. A preconditioner that adapts is renewed from the gradients
   since the last calibration (a dense one from Hessians), at the second and third; a dense block for some of the
   parameters from their Hessian at the position, at the first three. Once it is fixed, a calibration can
   only shorten the step. Of a sampler without a Metropolis test, the curvature is measured at six more positions of the
   chain, and the smallest step is kept, but no measurement shortens it by more than half. With a test, and of MCLMC,
   the step is tuned to ``target_accept_prob``, below the limit from the curvature.
3. **Burn-in** in between (``step_size.py``): the sampler itself. A draw at a higher temperature than chance
   allows loses the excess. If it gained energy, the step is too long and is shortened by a tenth; a draw that
   diverges, or exceeds twice what chance allows and gained energy or a much higher potential, is undone and halves
   the step. A temperature that stays too high although no draw gains energy (usually from minibatch noise) shows in
   the mean over a quarter of burn-in: after the third quarter, and after the last, the step of a sampler with a
   momentum is shortened for it.
4. **Friction** meanwhile (``friction.py``), where minibatches or random points make gradients noisy and the kernel
   gives none. The leading directions of the noise are estimated in the third quarter of burn-in, and its variance along
   them there and in the last. They get a friction of their own that balances it (``sgmcmc.gradient_noise``), and
   the step is shortened if the noise of one kick is too large for any friction. From the middle of burn-in on, the
   friction of all other directions keeps the excess temperature from the remaining noise below 0.3. A larger friction
   would slow down the whole chain.

``schedule.py`` says which draws the parts precede, ``updates.py`` puts them together, ``state.py`` holds their states.
Everything is frozen when warm-up ends, so the sampling phase is a homogeneous Markov chain.
"""

from numpyro_fspace.mcmc.warmup.schedule import Schedule, Warmup

__all__ = ["Schedule", "Warmup"]
