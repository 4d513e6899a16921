"""Runs of a ``Loop``, in memory or on disk, which keep what was drawn if they are interrupted."""

from __future__ import annotations

import operator

import jax
import jax.numpy as jnp
import numpy as np

from numpyro_fspace.mcmc.base import SGMCMCKernel
from numpyro_fspace.mcmc.checkpoint_writer import Checkpoint, plain_fields
from numpyro_fspace.mcmc.loop import started
from numpyro_fspace.mcmc.progress import Interruption, Progress, is_watched
from numpyro_fspace.mcmc.start_checks import check_start, warn_of_another_model
from numpyro_fspace.model._numpyro import is_nested
from numpyro_fspace.model.sharding import CHAINS, gathered, place
from numpyro_fspace.posterior.storage.checkpoint_files import flat


class Run:
    """A run of a ``Loop``, which gives the driver its last state at any moment, and its draws when it ends.

    Args:
        mcmc: the driver. Its numbers of draws, its bar and the arguments of its model are those of the run.
        loop: makes the draws.
    """

    def __init__(self, mcmc, loop):
        self.mcmc, self.loop = mcmc, loop
        self.total, self.num_kept = mcmc.num_warmup + mcmc.num_samples, mcmc.num_samples // loop.thinning
        #: The draw that thinning counts from: the last of all is kept, as by NumPyro.
        self.first = mcmc.num_warmup + mcmc.num_samples % loop.thinning

    def one_by_one(self, begin, starts, arrays):
        """The chains one after another, each from ``begin`` of its entries of ``starts``.

        A run that is interrupted keeps the complete chains, or if there are none, the draws so far of the first.
        """
        whole = []
        try:
            for number in range(self.mcmc.num_chains):
                state, done = begin(*jax.tree.map(operator.itemgetter(number), starts))
                self.in_memory(state, done, arrays)
                whole.append((self.mcmc._states, self.mcmc._last_state))  # where in_memory has put them
        finally:
            if whole:
                draws, last = zip(*whole, strict=True)
                self.mcmc._hold(jax.tree.map(lambda *parts: jnp.concatenate(parts), *draws))
                self.mcmc._last_state = jax.tree.map(lambda *parts: jnp.stack(parts), *last)

    def in_memory(self, state, done: int, arrays):
        """All draws from ``state``, the one after draw number ``done``, held in memory."""
        loop, first = self.loop, self.first
        if is_nested():  # all in one program, of which nothing can be looked at yet
            draws = loop.slots(self.num_kept, state, arrays, {})
            self.mcmc._last_state, draws = loop(state, draws, done, self.total, arrays, inputs={}, first=first)
            self.mcmc._hold(loop.by_chain(draws, self.num_kept))
            return
        is_alone, num_kept, begun = loop.mesh is None or not loop.mesh.is_multi_process, 0, done
        bar = self._bar(done, is_alone)
        inputs = loop.find_inputs(state, arrays) if bar.shown and loop.num_chains > 1 else {}
        draws = loop.slots(self.num_kept, state, arrays, inputs)
        try:
            with Interruption() as interruption:
                while done < self.total:
                    # The first part is one draw, which tells whether chains can move. Processes go at one pace.
                    start, stop = state, bar.next_stop() if is_alone or done == 0 else self.total
                    state, draws = loop(state, draws, done, stop, arrays, inputs=inputs, first=first)
                    if done == 0:
                        self._check_start(start, state)
                    if done == begun and self.mcmc.post_warmup_state is not None:
                        warn_of_another_model(gathered(start), gathered(state))
                    done, self.mcmc._last_state = stop, gathered(state)
                    num_kept = max(0, done - first) // loop.thinning
                    bar.update(done, state, np.asarray(draws[1])[:num_kept] if inputs else None)
                    interruption.hold()
                    interruption.let_through()
        finally:
            bar.close()
            if num_kept:  # of an interrupted run too
                self.mcmc._hold(gathered(loop.by_chain(draws, num_kept)))

    def on_disk(self, state, arrays, description: dict):
        """All draws from ``state``, written in parts to the folder of the checkpoint; continues what it holds."""
        loop, every = self.loop, self.mcmc.checkpoint_every
        slots = loop.slots(max(1, min(every, self.num_kept)), state, arrays, {})
        shapes = jax.eval_shape(lambda draws: flat(plain_fields(loop.by_chain(draws, 1))), slots)
        specs = {k: [str(a.dtype), [loop.num_chains, self.num_kept, *a.shape[2:]]] for k, a in shapes.items()}
        files = Checkpoint(self.mcmc.checkpoint, description | {"arrays": specs})
        saved = files.load(state, started(state))
        if saved is None:  # a start that is refused leaves no files
            first, slots = loop(state, slots, 0, 1, arrays, inputs={}, first=1)
            self._check_start(state, first)
        if saved is None or saved[1] < self.total:
            with files:
                num_kept, done, state = files.load(state, started(state)) or (0, 0, state)
                if loop.mesh is not None:
                    state = place(state, loop.mesh, CHAINS)
                saved = self._write_draws(slots, arrays, files, (num_kept, done, state))
        draws, self.mcmc._last_state = files.draws(), saved[2]
        self.mcmc._hold(draws)

    def _write_draws(self, draws, arrays, files, saved):
        """The rest of the draws after ``saved``, ``(draws kept, draws made, state)``; returns the last such triple."""
        loop, every, (num_kept, done, state) = self.loop, self.mcmc.checkpoint_every, saved
        bar = self._bar(done)
        try:
            with Interruption() as interruption:
                while done < self.total:
                    base = self.first + num_kept * loop.thinning  # the draws from here on have slots
                    limit = base + every * loop.thinning
                    end = min(done + every, self.first) if done < self.first else min(limit, self.total)
                    while done < end and not interruption.is_due:
                        stop = min(bar.next_stop(), end)
                        state, draws = loop(state, draws, done, stop, arrays, inputs={}, first=base)
                        done = stop
                        bar.update(done, state)
                        interruption.hold()
                    self.mcmc._last_state, part = state, None
                    if num := max(0, done - base) // loop.thinning:
                        part = jax.device_get(flat(plain_fields(loop.by_chain(draws, num))))
                    files.save(num_kept + num, done, state, part)
                    num_kept += num
                    interruption.let_through()
        finally:
            bar.close()
            if num_kept:
                self.mcmc._hold(files.draws())  # of an interrupted run too
        return num_kept, done, state

    def _bar(self, done, is_alone=True) -> Progress:
        shown = bool(self.mcmc.progress_bar) and is_alone and is_watched()
        return Progress(self.mcmc.num_warmup, self.total, done, shown=shown)

    def _check_start(self, start, state):
        """Raise an error if a chain could not move away from ``start`` in its first draw."""
        if isinstance(self.loop.kernel, SGMCMCKernel):
            check_start(self.loop.kernel, gathered(start), gathered(state), self.mcmc._args, self.mcmc._kwargs)
