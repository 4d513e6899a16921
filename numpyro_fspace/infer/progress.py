"""A bar that says what the chains are doing: step size, potential, temperature, R-hat of the functions."""

from __future__ import annotations

import sys
import time

import numpy as np
from tqdm.auto import tqdm

from numpyro_fspace.convergence import convergence
from numpyro_fspace.infer.chain import KernelState

__all__ = ["Progress", "is_watched"]

#: Seconds between two updates, about; updates of the shortest runs; draws of each chain before R-hat says something.
INTERVAL, MIN_UPDATES, MIN_DRAWS = 0.5, 50, 20


def is_watched() -> bool:
    """Whether anybody sees a bar: a terminal or a notebook, not a log."""
    return sys.stderr.isatty() or "ipykernel" in sys.modules


class Progress:
    """The bar of one run, and how far to go until it moves next.

    Args:
        num_warmup, total: draws of warm-up, and in all.
        done: draws made already.
        shown: False makes no bar.
    """

    def __init__(self, num_warmup: int, total: int, done: int = 0, *, shown: bool = True):
        self.num_warmup, self.total, self.done, self.shown = num_warmup, total, done, shown
        self.size = max(1, total // MIN_UPDATES)
        self.bar = tqdm(total=total, initial=done, disable=not shown)
        self._say_phase()
        self._start = time.monotonic()

    def next_stop(self) -> int:
        """Where the next part ends: soon enough to see the bar move, and to let an interruption through."""
        if not self.shown:
            return self.total
        return min(self.done + self.size, self.num_warmup if self.done < self.num_warmup else self.total)

    def update(self, done: int, state, functions=None):
        """Draws made so far, the last one ``state``; ``functions`` [S, C, P] are values of the functions so far."""
        num, self.done = done - self.done, done
        if not self.shown:
            return
        words = ", ".join(_words(state, functions))  # waits for the draws
        seconds = time.monotonic() - self._start
        self.size = max(1, round(num * min(2.0, INTERVAL / max(seconds, 1e-9))))
        self._say_phase()
        self.bar.set_postfix_str(words, refresh=False)
        self.bar.update(num)
        self._start = time.monotonic()

    def close(self):
        self.bar.close()

    def _say_phase(self):
        self.bar.set_description("sample" if self.done >= self.num_warmup else "warm-up", refresh=False)


def _words(state, functions):
    """What is known of the chains, means over them."""
    if isinstance(state, KernelState):
        yield f"U {_mean(state.potential_energy):.4g}"
        if np.any(state.step_size):  # none yet while the optimiser runs
            yield f"step {_mean(state.step_size):.2g}"
            if state.momentum.size:
                yield f"T {_mean(state.temperature):.2f}"
        if np.sum(state.num_diverging):
            yield f"{int(np.sum(state.num_diverging))} diverged"
    if functions is not None and len(functions) >= MIN_DRAWS:
        draws = np.moveaxis(np.asarray(functions, float), -1, 0).swapaxes(1, 2)  # [P, C, S]
        draws = draws[np.isfinite(draws).all((1, 2)) & (draws.std((1, 2)) > 0)]
        if len(draws):
            yield f"R-hat of f {convergence(draws)[0].max():.2f}"


def _mean(values) -> float:
    return float(np.mean(np.asarray(values)))
